"""The planned layouts: they fit, they divide, and the launcher takes them."""

import shlex

import pytest
from mqo.errors import LayoutError
from mqo.launch import cli
from mqo.launch.layout import check_layout
from mqo.matrix import tables
from mqo.scale.layout import Layout
from mqo.scale.plan import LIMIT, cell_of, groups, plan, worst_stage

GPUS = (8, 64)
CELLS = [(m, q, n) for m in tables.models() for q in tables.modes() for n in GPUS]


@pytest.mark.parametrize(("model", "mode", "gpus"), CELLS)
def test_a_plan_fits_and_divides(model, mode, gpus):
    made = plan(model, mode, gpus)
    layout, cell = made.layout, made.cell
    check_layout(cell)
    assert made.memory.total <= LIMIT
    assert layout.data * layout.tensor * layout.pipeline == gpus
    assert made.micro_batches * layout.data * cell.training.micro_batch == 128
    assert cell.model.num_attention_heads % layout.tensor == 0
    assert (cell.model.num_query_groups or 1) % layout.tensor == 0 or cell.model.mla
    assert cell.model.num_layers % layout.pipeline == 0
    assert cell.model.moe is None or cell.model.moe.num_experts % layout.expert == 0


@pytest.mark.parametrize("model", tables.models())
def test_a_mode_without_pv_needs_no_recomputation(model):
    assert plan(model, "FA_linear_mxfp8", 8).layout.recompute == "none"
    assert plan(model, "mxfp8", 8).layout.recompute == "core_attn"


def test_eight_billion_weights_do_not_fit_one_gpu_each():
    alone = Layout(8)
    assert worst_stage(cell_of("llama31-8b", "bf16", alone), alone)[1].total > LIMIT
    assert plan("llama31-8b", "bf16", 8).layout.tensor == 2


def test_a_model_that_fits_nowhere_is_refused_with_what_helps():
    with pytest.raises(LayoutError, match=r"deepseek2_lite in mode bf16 fits 2 GPUs.*more GPUs"):
        plan("deepseek2_lite", "bf16", 2)


def test_modes_of_equal_numbers_stand_together():
    named = [[made.mode.name for made in plans] for plans in groups("llama31-8b", 8)]
    assert sorted(name for names in named for name in names) == sorted(tables.modes())
    first = next(names for names in named if "bf16" in names)
    assert {"FA_mxfp8", "qk_hifp8"} < set(first)
    assert not {"linear_mxfp8", "pv_mxfp4", "mxfp8"} & set(first)
    assert len(named) == 4


def test_a_plans_command_is_the_documented_one():
    made = plan("llama31-8b", "FA_linear_mxfp8", 64)
    words = shlex.split(made.command())
    assert words[:2] == ["sbatch", "--nodes=8"]
    assert "script/llama31-8b/pretrain_llama31-8b_wikipedia_FA_linear_mxfp8.sh" in words
    assert words[words.index("--") + 1 :] == list(made.layout.flags())
    # Understood, and the same cell, but for the node's number and what Slurm knows.
    own = words[words.index("CHECKPOINTS") : words.index("--")]
    args = ["--model", "llama31-8b", "--dataset", "wikipedia", "--quantization", made.cell.mode]
    cell = cli.cell_from(cli.parser().parse_intermixed_args([*args, *own]), [])
    assert cell.model == made.cell.model
