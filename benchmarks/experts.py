"""Time the experts of one rank, forward and backward: grouped GEMMs or one expert at a time.

    PYTHONPATH=Megatron-LM .venv/bin/python benchmarks/experts.py [--tokens 24576] [--experts 8]

By default, the experts of deepseek2_lite at EP 8 in bfloat16, with the same number of tokens each.
Runs on a CUDA device if there is one, else on the CPU. A type applies to all three GEMMs. Both
ways take turns, and the minimum time of each is printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from unittest.mock import patch

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import TransformerConfig
from mqo.megatron import experts as grouped_experts
from mqo.megatron.layers import label_layers
from timing import best, options

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    """Measure, and print one row per type."""
    parser = options(__doc__, tokens=24576, experts=8, hidden=2048, width=1408, repeats=5)
    parser.add_argument("--types", nargs="+", default=["none", "mxfp8", "nvfp4"])
    given = parser.parse_args()
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    print("| type | one by one, ms | grouped, ms | grouped / one by one |\n|---|---|---|---|")
    for quant_type in given.types:
        one_by_one, grouped = measured(given, quant_type)
        row = (f"{1e3 * one_by_one:.1f}", f"{1e3 * grouped:.1f}", f"{grouped / one_by_one:.2f}x")
        print(f"| {quant_type} | {' | '.join(row)} |", flush=True)
    torch.distributed.destroy_process_group()


def measured(given: argparse.Namespace, quant_type: str) -> list[float]:
    """Return the minimum seconds of experts one by one, and grouped."""
    real = grouped_experts.gemm_operands

    def typed(site: str, _: str, owner: object) -> object:
        return real(site, quant_type, owner)

    with (
        patch.object(grouped_experts, "gemm_operands", typed),
        patch.object(layers, "gemm_operands", typed),
    ):
        runs = {name: step(given, name == "grouped") for name in ("one by one", "grouped")}
        return list(best(runs, given.repeats).values())


def step(given: argparse.Namespace, grouped: bool) -> Callable[[], object]:
    """Return a function that runs the experts forward and backward."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=given.hidden,
        num_attention_heads=16,
        num_moe_experts=given.experts,
        moe_ffn_hidden_size=given.width,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
    )
    make = LocalSpecProvider().grouped_mlp_modules(grouped)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = make(given.experts, config, pg_collection=groups).to(DEVICE, torch.bfloat16)
    label_layers(model, "experts")
    counts = torch.full((given.experts,), given.tokens // given.experts)
    shape = (int(counts.sum()), given.hidden)
    options = {"device": DEVICE, "dtype": torch.bfloat16}
    hidden = torch.randn(shape, **options, requires_grad=True)
    probs, grad = torch.rand(len(hidden), device=DEVICE), torch.randn(shape, **options)

    def run() -> None:
        model(hidden, counts, probs)[0].backward(grad)

    return run


if __name__ == "__main__":
    main()
