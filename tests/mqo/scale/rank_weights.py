"""The weights of single ranks of large jobs: upstream's model, built on the meta device.

    python tests/mqo/scale/rank_weights.py Megatron-LM JOBS > FACTS

The file JOBS is a JSON list of {"world": processes, "rank": which of them, "flags": [Megatron's]};
FACTS has a row a job: "dense" and "expert" weights of that rank, and upstream's own estimates in
bytes, of weights with optimizer ("static_bytes") and of activations ("activation_bytes"). No
process talks to another: the group is torch's fake one, so that one machine can be rank 5 of 64.

The first argument names the tree. test_weights.py judges.
"""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.testing._internal.distributed.fake_pg import FakeStore


def main() -> None:
    """Read the jobs, write a row for each."""
    with contextlib.redirect_stdout(sys.stderr):  # upstream prints its arguments
        take_over()
        rows = [row(**job) for job in json.loads(Path(sys.argv[2]).read_text())]
    print(json.dumps(rows))


def take_over() -> None:
    """Put meta for the device, and hide GPUs, before megatron is imported."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    sys.path.insert(0, str(Path(sys.argv[1]).resolve()))
    import preflight  # noqa: F401  (checks where megatron comes from)
    from mqo.megatron import device

    meta = torch.device("meta")
    device.accelerator.current_device = lambda: meta
    device.accelerator_type = lambda: "meta"
    device.accelerator_device = lambda *address: meta


def row(world: int, rank: int, flags: list[str]) -> dict[str, float]:
    """Return the facts of one rank of a job."""
    from megatron.training import theoretical_memory_usage as upstream
    from megatron.training.vocab_utils import calculate_padded_vocab_size

    args = read_arguments(world, rank, flags)
    from megatron.inference.gpt.model_provider import model_provider
    from megatron.inference.gpt.releases import bare_model

    with rank_of(args), torch.device("meta"):
        model = bare_model(args, model_provider)
    counts = {"dense": 0, "expert": 0}
    for parameter in model.parameters():
        # Upstream marks what is reduced over the expert groups.
        counts["dense" if getattr(parameter, "allreduce", True) else "expert"] += parameter.numel()
    args.padded_vocab_size = calculate_padded_vocab_size(
        args.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size
    )
    micro_batches = args.global_batch_size // args.micro_batch_size // args.data_parallel_size
    return counts | {
        "static_bytes": upstream.compute_weight_and_optimizer_memory(args),
        "activation_bytes": upstream.compute_activation_memory(args, micro_batches),
    }


def read_arguments(world: int, rank: int, flags: list[str]) -> Any:
    """Return upstream's arguments, checked by it for that many processes."""
    from megatron.training import arguments, global_vars

    os.environ |= {"WORLD_SIZE": str(world), "RANK": str(rank)}
    sys.argv[1:] = flags
    args = arguments.parse_args()
    arguments.validate_args(args)
    global_vars.set_args(args)
    return args


@contextlib.contextmanager
def rank_of(args: Any) -> Any:
    """Make this process the rank, with all of upstream's groups."""
    from megatron.core import mpu, tensor_parallel

    store = FakeStore()
    torch.distributed.init_process_group(
        "fake", store=store, rank=args.rank, world_size=args.world_size
    )
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    try:
        yield
    finally:
        mpu.destroy_model_parallel()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
