"""Read the guard's inputs from upstream's arguments and from a running model."""

from argparse import Namespace
from collections.abc import Callable, Collection, Iterable

from torch import Tensor
from torch.nn import Parameter

from mqo.megatron.layers import FoundLayer
from mqo.megatron.run import engine
from mqo.megatron.transformer_engine.releases import NAME as ENGINE
from mqo.megatron.traps import Setup


def read_setup(args: Namespace) -> Setup:
    """Return the Setup in upstream's arguments; one that a release lacks has its default."""
    shards = ("gtp_weight_remat_size", "expert_gtp_weight_remat_size")
    grouped = bool(getattr(args, "num_experts", None) and getattr(args, "moe_grouped_gemm", False))
    implementation = getattr(args, "transformer_impl", None) or "local"
    return Setup(
        transformer_impl=implementation,
        attention_variant=getattr(args, "experimental_attention_variant", None),
        deferred_embedding_wgrad=bool(getattr(args, "defer_embedding_wgrad_compute", False)),
        weight_shards=max(getattr(args, name, None) or 1 for name in shards),
        cuda_graphs=_captures(args),
        grouped_experts=grouped and not _groups_with_sites(implementation),
        engine_faults=engine.faults(args) if implementation == ENGINE else (),
    )


def _captures(args: Namespace) -> bool:
    """Return whether CUDA graphs are enabled; older releases have one switch per kind."""
    switches = ("enable_cuda_graph", "external_cuda_graph")
    selected = getattr(args, "cuda_graph_impl", None) not in (None, "none")
    return selected or any(getattr(args, name, False) for name in switches)


def _groups_with_sites(implementation: str) -> bool:
    """Return whether grouped experts have sites: in patched source, or in Transformer Engine."""
    if implementation == ENGINE:
        return True
    try:
        from megatron.core.models import backends
    except ImportError:
        return False
    return implementation == "local" and hasattr(backends, "experts_class")


def read_chunk_tokens(args: Namespace) -> int:
    """Return the tokens of a micro-batch in one of a rank's two context chunks; 0 without them."""
    ranks = getattr(args, "context_parallel_size", None) or 1
    return args.seq_length // (2 * ranks) * args.micro_batch_size if ranks > 1 else 0


class Usage:
    """Records which layers run, until it is closed.

    A layer ran if its module was called, or if its weight got a gradient, as weights do that are
    multiplied outside of their module.
    """

    def __init__(self, layers: Iterable[FoundLayer], kinds: Collection[str]) -> None:
        self.names: set[str] = set()
        self._hooks = []
        for layer, module, owner in layers:
            if layer.kind not in kinds:
                continue
            self._hooks.append(module.register_forward_hook(self._note(layer.name)))
            if isinstance(owner, Parameter) and owner.requires_grad:
                self._hooks.append(owner.register_hook(self._note(layer.name)))

    def _note(self, name: str) -> Callable[..., Tensor | None]:
        def note(*args: object) -> Tensor | None:
            del args
            self.names.add(name)
            return None  # keeps the output, or the gradient

        return note

    def close(self) -> set[str]:
        """Remove the hooks, and return the names of the layers that ran."""
        for hook in self._hooks:
            hook.remove()
        return self.names
