"""The distributed optimizer cannot resume with torch's Adam, nor with a model in fp32.

The code takes the step count from the parameter group, but torch's Adam keeps one with each
parameter; if the run continues, it counts two steps instead of one. In fp32 the main weights are
the model's parameters, and are written to without torch.no_grad.

Trains a model of two weights for 3 steps, and loads its state into a second one. Exits with 1 if
any part of that fails. The CPU replaces a GPU.
"""

import sys

import torch

sys.modules["transformer_engine"] = sys.modules["apex"] = None  # as if they were not installed

import torch.distributed as dist
from megatron.core import distributed, parallel_state
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class TypeName(str):
    """The name of a tensor's type, equal for CUDA and the CPU."""

    __hash__ = str.__hash__

    def __eq__(self, other):
        return self.replace(".cuda", "") == other.replace(".cuda", "")


class CpuForCuda(torch.overrides.TorchFunctionMode):
    """Creates tensors on the CPU that are requested on CUDA."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        """Call torch's function with the CPU as device."""
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        result = function(*args, **kwargs)
        return TypeName(result) if isinstance(result, str) else result


class Weights(MegatronModule):
    """A model with two weights."""

    def __init__(self, config, dtype):
        super().__init__(config)
        self.first = torch.nn.Parameter(torch.ones(4, dtype=dtype))
        self.second = torch.nn.Parameter(torch.ones(4, dtype=dtype))


def build(dtype):
    """Return a model and its optimizer."""
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    data_parallel = distributed.DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = distributed.DistributedDataParallel(config, data_parallel, Weights(config, dtype))
    adam = OptimizerConfig(
        optimizer="adam",
        lr=0.1,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
        clip_grad=0.0,
    )
    optimizer = get_megatron_optimizer(adam, [model])
    return model, getattr(optimizer, "chained_optimizers", [optimizer])[0]


def step(model, optimizer):
    """Take a step, and return Adam's step count of each weight."""
    for weight in model.parameters():
        weight.main_grad.fill_(1)
    optimizer.step()
    return [int(state["step"]) for state in optimizer.optimizer.state.values()]


def resume(dtype):
    """Yield each part of a resume, with its result or its exception."""
    old_model, old = build(dtype)
    for _ in range(3):
        step(old_model, old)
    model, new = build(dtype)
    shards, moments = model.module.sharded_state_dict(), old.get_parameter_state_dp_zero()
    for part, action, *given in (
        (
            "a state to load a checkpoint into",
            new.sharded_state_dict,
            shards,
            True,
            "dp_zero_gather_scatter",
        ),
        ("the saved state", new.load_state_dict, old.state_dict()),
        ("the saved moments", new.load_parameter_state_from_dp_zero, moments),
        ("the counts after one more step", step, model, new),
    ):
        try:
            yield part, action(*given)
        except Exception as error:
            yield part, error


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
torch.cuda.current_device = lambda: "cpu"
wrong = False
with CpuForCuda():
    for dtype in (torch.bfloat16, torch.float32):
        for part, result in resume(dtype):
            shown = isinstance(result, Exception | list)
            print(f"{dtype}: {part}:", repr(result) if shown else "done")
            wrong |= shown and result != [4, 4]
sys.exit(wrong)
