"""A model on one process, of which upstream's groups consist: for programs that do not train."""

from __future__ import annotations

from argparse import Namespace

from megatron.core import mpu, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import initialize_rerun_state_machine
from megatron.run import modelopt
from megatron.run.ranks import with_group
from megatron.training import global_vars
from torch import nn


def build(args: Namespace) -> nn.Module:
    """The model that upstream's arguments describe, which become the global ones; not wrapped.

    Its weights are random. It has what ModelOpt made of the checkpoint that `args` name.
    """
    from pretrain_gpt import model_config

    global_vars.set_global_variables(args, build_tokenizer=False)
    with_group()
    mpu.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    initialize_rerun_state_machine()
    config = model_config()
    config.pre_wrap_hooks.append(lambda chunks: modelopt.restore(chunks, args))
    config.finalize()
    builder = config.get_builder_cls()(config)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    (model,) = builder.build_distributed_models(groups, wrap_with_ddp=False)
    return model
