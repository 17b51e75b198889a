"""The distributed optimizer cannot resume where Adam is torch's, nor a model that is fp32.

Two models of two weights each: the state of the first one, after 3 steps, is loaded into the other.
Ends with exit code 1 if a part of that fails. The CPU stands for a GPU.
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
    """The name of a tensor's type, the same for CUDA and the CPU."""

    __hash__ = str.__hash__

    def __eq__(self, other):
        return self.replace(".cuda", "") == other.replace(".cuda", "")


class CpuForCuda(torch.overrides.TorchFunctionMode):
    """Puts on the CPU what is asked for on CUDA."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        """Call torch's function with another device."""
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        result = function(*args, **kwargs)
        return TypeName(result) if isinstance(result, str) else result


class Weights(MegatronModule):
    """Two weights."""

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
    made = get_megatron_optimizer(adam, [model])
    return model, getattr(made, "chained_optimizers", [made])[0]


def step(model, optimizer):
    """Take a step, and return what Adam counts for each weight."""
    for weight in model.parameters():
        weight.main_grad.fill_(1)
    optimizer.step()
    return [int(state["step"]) for state in optimizer.optimizer.state.values()]


def resume(dtype):
    """Yield each part of a resume, and what came of it: an error is one, too."""
    old_model, old = build(dtype)
    for _ in range(3):
        step(old_model, old)
    model, new = build(dtype)
    shards, moments = model.module.sharded_state_dict(), old.get_parameter_state_dp_zero()
    for part, action, *given in (
        ("a state to load into", new.sharded_state_dict, shards, True, "dp_zero_gather_scatter"),
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
        for part, found in resume(dtype):
            told = isinstance(found, Exception | list)
            print(f"{dtype}: {part}:", repr(found) if told else "done")
            wrong |= told and found != [4, 4]
sys.exit(wrong)
