"""With apex and without Transformer Engine, local layers get a norm that does not support them.

The class is chosen once, by what is installed, for RMSNorm, too. The specification for RMSNorm
changes the choice for all later models.

Mocks replace apex, since the bug is in the choice of classes; nothing is computed. Exits with 1 if
a wrong norm is chosen. It needs no GPU.
"""

import sys
from unittest.mock import MagicMock

for name in ("", ".contrib.layer_norm.layer_norm", ".normalization.fused_layer_norm"):
    sys.modules[f"apex{name}"] = MagicMock()
sys.modules["transformer_engine"] = None  # importing it raises ImportError

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
SIZES = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4}


def local_layer(normalization):
    """Return the specification of a layer; before 0.11 it does not depend on the norm."""
    try:
        return get_gpt_layer_local_spec(normalization=normalization)
    except TypeError:
        return get_gpt_layer_local_spec()


before = local_layer("LayerNorm").submodules.input_layernorm.__name__
config = TransformerConfig(**SIZES, normalization="RMSNorm", use_cpu_initialization=True)
try:
    TransformerBlock(config, local_layer("RMSNorm"))
    ended = "was built"
except AssertionError as error:
    ended = f"AssertionError: {error}"
after = local_layer("LayerNorm").submodules.input_layernorm.__name__
print(f"a model with RMSNorm: {ended}")
print(f"LayerNorm before that model: {before}; after it: {after}")
sys.exit(ended != "was built" or before != after)
