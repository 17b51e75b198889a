"""Choose the norms of local layers by what the model needs, not by the installed packages.

Upstream uses apex's norm whenever apex imports, although it computes only LayerNorm, and
Transformer Engine's as the last norm of a model whose layers are all local.
"""

from typing import Any

import torch


class LayerNormOnly(torch.nn.Module):
    """Base class of a norm that computes only LayerNorm; for other kinds it builds torch's norm.

    The patch `local_norms` makes it the base of upstream's FusedLayerNorm.
    """

    def __new__(cls, config: Any, *args: object, **kwargs: object) -> Any:
        """Return an instance for LayerNorm, else upstream's WrappedTorchNorm."""
        if config.normalization == "LayerNorm":
            return super().__new__(cls)
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        return WrappedTorchNorm(config, *args, **kwargs)


def final_norm(layer_spec: Any, default: Any) -> Any:
    """Return the norm after the last layer: the norm of the layers if that is local.

    Args:
        layer_spec: upstream's ModuleSpec of a transformer layer.
        default: upstream's choice, for layers whose norm is fused into their linear layers.
    """
    from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    of_layers = getattr(getattr(layer_spec, "submodules", None), "input_layernorm", None)
    return of_layers if of_layers in (FusedLayerNorm, WrappedTorchNorm) else default


def stack_norm(layers: Any, default: Any) -> Any:
    """Return the norm after the last layer of a HybridModel, as `final_norm` does.

    Args:
        layers: upstream's submodules of a stack, with a ModuleSpec for each kind of layer.
        default: upstream's choice.
    """
    # 0.18 has no layers with MLA.
    specs = (getattr(layers, kind, None) for kind in ("attention_layer", "mla_layer"))
    return next((norm for spec in specs if (norm := final_norm(spec, None))), default)
