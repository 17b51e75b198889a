"""A model on one process, of which upstream's groups consist: for programs that do not train."""

from argparse import Namespace

from megatron.core import mpu, tensor_parallel
from megatron.core.rerun_state_machine import initialize_rerun_state_machine
from megatron.run import modelopt
from megatron.run.ranks import with_group
from megatron.training import global_vars
from torch import nn


def build(args: Namespace) -> nn.Module:
    """Build the model of upstream's arguments, which become the global ones; it is not wrapped.

    Its weights are random. It has what ModelOpt made of the checkpoint that `args` name.
    """
    from pretrain_gpt import bare_model

    global_vars.set_global_variables(args, build_tokenizer=False)
    with_group()
    mpu.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    initialize_rerun_state_machine()
    return bare_model(lambda chunks: modelopt.restore(chunks, args))
