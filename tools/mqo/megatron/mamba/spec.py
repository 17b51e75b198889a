"""The layer of Mamba-2 whose linear layers have quantization sites."""

from typing import Any


def mamba_layer(config: Any) -> Any:
    """Return upstream's ModuleSpec of a Mamba-2 layer with local linear layers and a local norm.

    Upstream's own has Transformer Engine's, with the norm in the first linear layer. `config` is
    the TransformerConfig of the model.
    """
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    local = LocalSpecProvider()
    projections = MambaMixerSubmodules(
        in_proj=local.column_parallel_linear(), out_proj=local.row_parallel_linear()
    )
    submodules = MambaLayerSubmodules(
        norm=local.layer_norm(rms_norm=config.normalization == "RMSNorm"),
        mixer=ModuleSpec(module=MambaMixer, submodules=projections),
        mamba_bda=get_bias_dropout_add,
    )
    return ModuleSpec(module=MambaLayer, submodules=submodules)
