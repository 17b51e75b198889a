"""Read the guard's inputs from upstream's arguments and from a running model."""

from argparse import Namespace
from collections.abc import Callable, Collection, Iterable

from torch import Tensor
from torch.nn import Parameter

from mqo.megatron.layers import FoundLayer


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
