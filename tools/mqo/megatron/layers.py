"""Name the layers of a model, so that the quantizers' records can name their GEMMs."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.nn import Module, Parameter

from mqo.megatron import linear
from mqo.megatron.transformer_engine import releases
from mqo.quant.formats import ATTENTION, LINEAR
from mqo.quant.labels import LABEL, SHARDS, Layer, is_exempt
from mqo.quant.tensor_amax import Shards

# {side along which a linear layer is split: the operands of which ranks have shards}. The others
# are whole on every rank: under sequence parallelism they are gathered before the GEMM.
_SHARDED = {linear.COLUMN: ("weight", "grad"), linear.ROW: ("weight", "x")}
_OF_ATTENTION = ("query", "key", "probs", "value")
# Kinds of layers without a site: a lookup does not compute a GEMM, a router must not be quantized,
# and other modules with a matrix multiply it with their own code.
EMBEDDING, ROUTER, OTHER = "embedding", "router", "other"


class FoundLayer(NamedTuple):
    """A layer of this rank, its module, and the owner of its label: the module or its weight."""

    layer: Layer
    module: Module
    owner: Parameter | Module


def label_layers(model: Module, prefix: str = "") -> int:
    """Set `mqo_layer` on each 2-D weight and each DotProductAttention; return how many were set.

    A name is the submodule's path from the unwrapped model, with `prefix` and a dot before it if
    given: `decoder.layers.0.mlp.linear_fc1`. Transformer layers are numbered over all pipeline
    stages, and experts over all expert-parallel ranks.

    A tied weight belongs to two layers. It is named after the output layer, because a lookup is not
    a GEMM. Exempt layers get no name.
    """
    return len(find_layers(model, prefix))


def find_layers(model: Module, prefix: str = "") -> list[FoundLayer]:
    """Label the layers of `model` as `label_layers` does, and return them."""
    labels: dict[int, _Claim] = {}
    # In ascending strength, so that the strongest claim stays.
    for claim in sorted(_claims(model), key=lambda claim: claim.strength):
        labels[id(claim.owner)] = claim
    layers = []
    for claim in labels.values():
        name = ".".join(part for part in (prefix, claim.name) if part)
        setattr(claim.owner, LABEL, name)
        setattr(claim.owner, SHARDS, shards_of(claim.module))
        frozen = isinstance(claim.owner, Parameter) and not claim.owner.requires_grad
        kind = _kind(claim)
        sited = kind == ATTENTION or (kind == LINEAR and linear.has_sites(claim.module))
        layer = Layer(name, kind, type(claim.module).__name__, frozen, sited)
        layers.append(FoundLayer(layer, claim.module, claim.owner))
    return layers


def shards_of(module: Module) -> Shards | None:
    """Return the operands that are sharded over the ranks of a layer; None for one rank."""
    group, side = linear.group(module), linear.side(module)
    is_attention = any(cls.__name__ == "DotProductAttention" for cls in type(module).__mro__)
    operands = _SHARDED[side] if side else _OF_ATTENTION if is_attention else ()
    if group is None or not operands or group.size() == 1:
        return None
    return Shards(operands, group)


def other_weights(model: Module) -> list[Layer]:
    """Return each unlabeled matrix that is not the `weight` of a layer, as a layer OTHER.

    Examples are grouped experts, the gate of shared experts, and convolutions.
    """
    layers = []
    for path, module in _own_modules(model):
        for name, weight in module.named_parameters(recurse=False):
            if weight.dim() >= 2 and not hasattr(weight, LABEL):
                where = f"{_global_name(model, path)}.{name}".removeprefix(".")
                frozen = not weight.requires_grad
                layers.append(Layer(where, OTHER, type(module).__name__, frozen, sited=False))
    return layers


_EMBEDDING, _LAYER, _OUTPUT = range(3)


class _Claim(NamedTuple):
    """A candidate for the name of a weight or an attention module, the `owner` of the label."""

    strength: int
    owner: Parameter | Module
    name: str
    module: Module


def _kind(claim: _Claim) -> str:
    if isinstance(claim.owner, Module):
        return ATTENTION
    if claim.strength == _EMBEDDING:
        return EMBEDDING
    return ROUTER if _is_a(claim.module, "Router") else LINEAR


def _own_modules(model: Module) -> Iterator[tuple[str, Module]]:
    """Yield the named modules that are not exempt."""
    for path, module in model.named_modules():
        if not is_exempt(module):
            yield path, module


def _is_a(module: Module, *names: str) -> bool:
    """Return whether the name of a class of `module` is in `names`."""
    return any(cls.__name__ in names for cls in type(module).__mro__)


def _has_attention_sites(module: Module) -> bool:
    """Return whether it is upstream's attention, not Transformer Engine's of the same name."""
    return any(
        cls.__name__ == "DotProductAttention" and cls.__module__.partition(".")[0] != releases.NAME
        for cls in type(module).__mro__
    )


def _claims(model: Module) -> Iterator[_Claim]:
    module: Any
    for path, module in _own_modules(model):
        name = _global_name(model, path)
        for i, (own, weight) in enumerate(linear.weights(module)):
            label = name if own == "weight" else _part_name(model, path, module, i)
            yield _Claim(_strength(module, name), weight, label, module)
        if _has_attention_sites(module):
            yield _Claim(_LAYER, module, name, module)
        tied = _tied_weight(module)
        if tied is not None:
            head = f"{name}.output_layer".removeprefix(".")
            yield _Claim(_OUTPUT, tied, head, module.output_layer)


def _part_name(model: Module, path: str, module: Module, index: int) -> str:
    """Return the name of one of several layers in a module of Transformer Engine.

    A grouped expert has the same name as an expert outside a group.
    """
    name = _global_name(model, path)
    if not linear.is_grouped(module):
        return f"{name}.fc{index + 1}"
    experts, _, own = path.rpartition(".")
    routed = model.get_submodule(experts.rpartition(".")[0])
    indices = getattr(routed, "local_expert_indices", None)
    if indices is None:
        return f"{name}.{index}"
    return f"{_global_name(model, experts)}.local_experts.{indices[index]}.{own}"


def _strength(module: Module, name: str) -> int:
    if name.endswith("output_layer"):
        return _OUTPUT
    return _EMBEDDING if "Embedding" in type(module).__name__ else _LAYER


def _tied_weight(model: Module) -> Parameter | None:
    """Return the embedding's weight if an output layer without a weight gets it at each call."""
    if not getattr(model, "share_embeddings_and_output_weights", False):
        return None
    head = getattr(model, "output_layer", None)
    if head is None or getattr(head, "weight", None) is not None:
        return None
    try:
        return model.get_parameter("embedding.word_embeddings.weight")
    except AttributeError:
        return None


def _global_name(model: Module, path: str) -> str:
    """Return `path` without wrappers, with layers and experts numbered over the whole model."""
    parts = path.split(".")
    names = list(parts)
    for i in range(1, len(parts)):
        if parts[i - 1] == "layers":
            layer: Any = model.get_submodule(".".join(parts[: i + 1]))
            if hasattr(layer, "layer_number"):
                # Megatron counts from 1 over all stages, a path from 0 within its stage.
                names[i] = str(layer.layer_number - 1)
        elif parts[i - 1] == "local_experts":
            # The layer with the router has the global indices of this rank's experts.
            routed = model.get_submodule(".".join(parts[: max(0, i - 2)]))
            if indices := getattr(routed, "local_expert_indices", None):
                names[i] = str(indices[int(parts[i])])
    # DDP and Float16Module keep the wrapped module as `module`.
    while names and names[0] == "module":
        names.pop(0)
    return ".".join(names)
