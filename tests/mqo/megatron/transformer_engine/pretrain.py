"""Run as a program: pretrain_gpt.py of a run's source, with Transformer Engine on a CPU.

python pretrain.py PATH_OF_PRETRAIN_GPT ARGUMENT..., with MQO_TEST_ENGINE
"""

import runpy
import sys
from pathlib import Path

program = sys.argv[1]
source = Path(program).parent
sys.path[:0] = [str(p) for p in (source / ".mqo_runtime", source, Path(__file__).parents[4])]
import tests.mqo.megatron.transformer_engine.installed  # noqa: E402, F401

# Compiled kernels, with which upstream has its own of torch.
sys.modules["transformer_engine.pytorch.optimizers"] = None
del sys.argv[0]
from megatron.core.extensions import transformer_engine_spec_provider as provider  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402

# Its own attention is CUDA's alone.
provider.TESpecProvider.core_attention = lambda self: DotProductAttention
runpy.run_path(program, run_name="__main__")
