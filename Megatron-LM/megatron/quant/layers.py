"""Names the layers of a model, so that the quantiser's records can say which GEMM they are of."""

from collections.abc import Iterator

from torch.nn import Module, Parameter

LABEL = "mqo_layer"


def label_layers(model: Module, prefix: str = "") -> int:
    """Set `mqo_layer` on each 2-D weight and each DotProductAttention; return how many were set.

    A name is the submodule's path from the unwrapped model, with `prefix` and a dot before it if
    given: `decoder.layers.0.mlp.linear_fc1`. Transformer layers are numbered over all pipeline
    stages; experts are numbered within their rank, as their paths are.

    A tied weight has two homes: it is named after the output layer, since a lookup is no GEMM.
    """
    labels: dict[int, tuple[Parameter | Module, str]] = {}
    # Weakest claim first, so that the strongest stays.
    for _, owner, name in sorted(_claims(model), key=lambda claim: claim[0]):
        labels[id(owner)] = (owner, ".".join(part for part in (prefix, name) if part))
    for owner, name in labels.values():
        setattr(owner, LABEL, name)
    return len(labels)


_EMBEDDING, _LAYER, _OUTPUT = range(3)


def _claims(model: Module) -> Iterator[tuple[int, Parameter | Module, str]]:
    """Yield (strength, what to label, name) for every place that would name a weight."""
    for path, module in model.named_modules():
        name = _global_name(model, path)
        weight = getattr(module, "weight", None)
        if isinstance(weight, Parameter) and weight.dim() == 2:
            yield _strength(module, name), weight, name
        if any(cls.__name__ == "DotProductAttention" for cls in type(module).__mro__):
            yield _LAYER, module, name
        tied = _tied_weight(module)
        if tied is not None:
            yield _OUTPUT, tied, f"{name}.output_layer".removeprefix(".")


def _strength(module: Module, name: str) -> int:
    if name.endswith("output_layer"):
        return _OUTPUT
    return _EMBEDDING if "Embedding" in type(module).__name__ else _LAYER


def _tied_weight(model: Module) -> Parameter | None:
    """Return the embedding's weight where a weightless output layer is handed it at each call."""
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
    """Return `path` without its wrappers, its layers numbered as in the whole model."""
    parts = path.split(".")
    names = list(parts)
    for i in range(1, len(parts)):
        if parts[i - 1] == "layers":
            layer = model.get_submodule(".".join(parts[: i + 1]))
            if hasattr(layer, "layer_number"):
                # Megatron counts from 1 over all stages, a path from 0 within its own.
                names[i] = str(layer.layer_number - 1)
    # DDP and Float16Module hold what they wrap as `module`.
    while names and names[0] == "module":
        names.pop(0)
    return ".".join(names)
