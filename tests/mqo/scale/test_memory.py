"""What is computed of a GPU's memory, against what upstream's own model keeps and holds."""

import json
import sys
from pathlib import Path

import pytest
from mqo.matrix import tables
from mqo.scale.devices import GIB
from mqo.scale.layout import Layout
from mqo.scale.memory import (
    BF16,
    SCORE_KEPT,
    Arithmetic,
    layer_packed,
    layer_values,
    stage_memory,
)

from ... import forking
from .arithmetic import of_mode

STANDARD = tables.trainings()["standard"]
MODES = {name: of_mode(mode) for name, mode in tables.modes().items()}


@pytest.fixture(scope="module")
def counted(vendored):
    """{case: values a token that autograd holds of a layer of a small model}."""
    pytest.importorskip("torch")
    program = Path(__file__).with_name("count_kept.py")
    done = forking.run([sys.executable, "-W", "ignore", program, vendored.root])
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


# Those of count_kept.py.
SMALL = {"hidden_size": 256, "ffn_hidden_size": 512, "num_attention_heads": 4, "num_layers": 2}
GROUPED = tables.models()["llama32-1b"].model_copy(update=SMALL | {"num_query_groups": 2})
WIDE = GROUPED.model_copy(update={"head_dim": 128, "qk_norm": True, "qkv_bias": True})
RELU = GROUPED.model_copy(update={"activation": "squared_relu"})
LATENTS = {"kv_lora_rank": 64, "qk_head_dim": 64, "qk_pos_emb_head_dim": 32, "v_head_dim": 64}
PUBLISHED = tables.models()["deepseek2_lite"]
LATENT = PUBLISHED.model_copy(
    update=SMALL | {"mla": PUBLISHED.mla.model_copy(update=LATENTS), "moe": None}
)
FEW = {"dense_layers": 0, "num_experts": 4, "topk": 2, "expert_ffn_size": 96}
EXPERTS = LATENT.model_copy(update={"moe": PUBLISHED.moe.model_copy(update=FEW)})
SCORES = SCORE_KEPT // BF16 * 4 * 256  # heads x keys, for each token
CASES = {
    "grouped": (GROUPED, "fused", 0),
    "grouped, PV in chunks": (GROUPED, "chunked", 0),
    "grouped, PV in chunks, backward": (GROUPED, "chunked", 0),
    "grouped, PV": (GROUPED, "unfused", SCORES),
    "grouped, PV, core_attn": (GROUPED, "core_attn", 0),
    "grouped, wide": (WIDE, "fused", 0),
    "grouped, wide, PV in chunks": (WIDE, "chunked", 0),
    "grouped, ReLU": (RELU, "fused", 0),
    "latent": (LATENT, "fused", 0),
    "latent, PV in chunks": (LATENT, "chunked", 0),
    "latent, PV": (LATENT, "unfused", SCORES),
    "latent, PV, core_attn": (LATENT, "core_attn", 0),
    "latent, experts": (EXPERTS, "fused", 0),
}


@pytest.mark.parametrize("case", CASES)
def test_a_layer_keeps_what_autograd_holds_of_it(counted, case):
    """Within 1 %: what the formula leaves out are single numbers a token.

    On the CPU a norm computes in fp32 and keeps two copies in that, where CUDA's keeps its input.
    """
    model, attention, scores = CASES[case]
    norms = 2 * model.hidden_size + (model.mla.kv_lora_rank if model.mla else 0)
    norms += model.qk_norm * (4 + 2) * model.head_size
    expected = layer_values(model, model.blocks[0], attention) + scores + 3 * norms
    assert counted[case] == pytest.approx(expected, rel=0.01)


def test_a_mamba_layer_keeps_what_autograd_holds_of_it(counted):
    sizes = tables.Mamba(num_heads=16, head_dim=32, num_groups=4, state_dim=64)
    model = GROUPED.model_copy(update={"mamba": sizes, "pattern": "M*"})
    expected = layer_values(model, "M", "fused") + 3 * model.hidden_size
    assert counted["mamba"] == pytest.approx(expected, rel=0.01)


def test_a_recomputed_layer_keeps_its_input_alone(counted):
    assert counted["grouped, full"] == pytest.approx(GROUPED.hidden_size, rel=0.01)


PACKED = [f"grouped, {kind}" for kind in tables.quant_types()]
OTHERS = (
    "latent",
    "latent, PV in chunks",
    "latent, PV",
    "grouped, PV, core_attn",
    "latent, PV, core_attn",
)
PACKED += [f"{name}, mxfp4" for name in (*OTHERS, "latent, experts")]


@pytest.mark.parametrize("case", PACKED)
def test_packed_inputs_free_what_autograd_no_longer_holds(counted, case):
    """Within 1 % of what is freed, which is less than what is kept."""
    name, _, kind = case.rpartition(", ")
    model, attention, _ = CASES[name]
    less = BF16 * (counted[name] - counted[case])
    assert layer_packed(model, model.blocks[0], attention, kind) == pytest.approx(less, rel=0.01)
    assert layer_packed(model, model.blocks[0], attention, "none") == 0


@pytest.mark.parametrize("kind", tables.quant_types())
def test_a_stage_packs_the_inputs_of_its_layers_and_of_the_head(counted, kind):
    mode = MODES[f"linear_{kind}"]
    found = stage_memory(GROUPED, STANDARD, mode, Layout(1), 0).packed / STANDARD.sequence
    layer, head = (
        BF16 * (counted[f"grouped{end}"] - counted[f"grouped, {kind}{end}"])
        for end in ("", ", head")
    )
    assert found == pytest.approx(2 * layer + head, rel=0.01)
    # Recomputed layers keep their inputs, which are no linear layers'.
    full = stage_memory(GROUPED, STANDARD, mode, Layout(1, recompute="full"), 0)
    assert full.packed / STANDARD.sequence == pytest.approx(head, rel=0.01)


def memory(layout, mode="bf16", model="llama31-8b", stage=0):
    return stage_memory(tables.models()[model], STANDARD, MODES[mode], layout, stage)


def test_states_are_shared_out_and_weights_are_not():
    count = tables.models()["llama31-8b"].parameters
    for gpus in (8, 64):
        found = memory(Layout(gpus))
        assert (found.weights, found.gradients) == (2 * count, 4 * count)
        assert found.optimizer == 12 * count // gpus


def test_states_of_experts_are_shared_out_by_those_who_hold_them():
    few, all_eight = (memory(Layout(8, expert=e), model="deepseek2_lite") for e in (1, 8))
    # 64 experts of 26 layers, of which each rank holds a part and its states all the same.
    experts = 26 * 64 * 3 * 2048 * 1408
    assert few.weights - all_eight.weights == 2 * (experts - experts // 8)
    assert few.optimizer == all_eight.optimizer


def test_scores_are_there_where_attention_is_unfused_and_go_with_the_square():
    def scores(attention, recompute):
        layout = Layout(8, tensor=2, recompute=recompute)
        model = tables.models()["llama31-8b"]
        return stage_memory(model, STANDARD, Arithmetic(attention=attention), layout, 0).scores

    one = 16 * 8192**2  # heads of a rank
    assert scores("unfused", "core_attn") == 8 * one
    assert scores("unfused", "none") == (32 * 4 + 4) * one
    assert scores("chunked", "none") == scores("fused", "none") == 0


def test_chunks_work_with_buffers_of_one_size_and_gradients_of_keys_and_values():
    layout = Layout(8, tensor=2)
    more = memory(layout, "pv_mxfp8").working - memory(layout).working
    keys = 8192 * 2 * 4 * 128  # of a rank's groups, and their values
    assert more == 2**25 * (3 * 2 + 3 * 4) + keys * (2 + 4)


def test_typed_products_of_attentions_backward_pass_round_their_operands():
    def working(*sites, attention="chunked"):
        arithmetic = Arithmetic(attention=attention, backward=frozenset(sites))
        model, layout = tables.models()["llama31-8b"], Layout(8, tensor=2)
        return stage_memory(model, STANDARD, arithmetic, layout, 0).working

    plain, queries, keys = working(), 2 * 8192 * 16 * 128, 2 * 8192 * 4 * 128  # bytes of a rank's
    assert working("qk_recompute", "dv", "dp", "dq", "dk") == plain + 4 * queries + keys
    assert working("dv", "dp") == plain + 2 * queries
    assert working("dq") == plain + keys


def test_a_first_stage_holds_more_micro_batches_and_the_last_one_the_logits():
    layout = Layout(64, pipeline=4)
    stages = [memory(layout, stage=stage) for stage in range(4)]
    assert [stage.logits > 0 for stage in stages] == [False, False, False, True]
    assert stages[0].activations == 4 * stages[2].activations // 2
    packed = [memory(layout, "linear_mxfp8", stage=stage).packed for stage in range(4)]
    assert packed[0] == 4 * packed[2] // 2
    # With as many ranks of data that a step has one micro-batch a rank, there is one in flight.
    short = STANDARD.model_copy(update={"global_batch": 16})
    one = stage_memory(tables.models()["llama31-8b"], short, MODES["bf16"], layout, 0)
    assert one.activations == stages[0].activations // 4


@pytest.mark.parametrize("name", tables.script_models())
@pytest.mark.parametrize("mode", ["bf16", "qk_pv_mxfp8"])
def test_a_hybrid_model_needs_what_the_gpt_of_its_layers_needs(name, mode):
    gpt = tables.models()[name]
    hybrid = gpt.model_copy(update={"pattern": "".join(gpt.blocks)})
    stages = next(n for n in (4, 3) if gpt.num_layers % n == 0)
    for recompute in ("none", "core_attn", "full"):
        layout = Layout(12, pipeline=stages, recompute=recompute)
        for stage in range(stages):
            sizes = (STANDARD, MODES[mode], layout, stage)
            one, other = (stage_memory(model, *sizes) for model in (gpt, hybrid))
            if recompute == "full":  # twice the inputs, and the parts of a block one by one
                assert one.activations < other.activations <= 2 * one.activations
                assert one.working > other.working
            else:
                assert one == other


def test_layers_that_are_no_blocks_of_a_gpt_are_counted_one_by_one():
    gpt = tables.models()["llama32-1b"]
    hybrid = gpt.model_copy(update={"pattern": "-**-*|--*", "num_layers": 5})
    sizes = (STANDARD, MODES["bf16"], Layout(8, pipeline=2))
    stages = [stage_memory(hybrid, *sizes, stage) for stage in (0, 1)]
    tokens = STANDARD.sequence
    attention, mlp = (layer_values(gpt, part, "fused") for part in "*-")
    assert attention + mlp == layer_values(gpt, "*-", "fused")
    # Two micro-batches in flight at the first stage, and the last one has the last norm.
    assert stages[0].activations == 2 * BF16 * tokens * (3 * attention + 2 * mlp)
    last = 2 * gpt.hidden_size
    assert stages[1].activations == BF16 * tokens * (attention + 2 * mlp + last)


def test_the_total_is_all_but_what_flags_would_change():
    found = memory(Layout(8, tensor=2), "linear_mxfp8")
    assert found.packed > 0
    assert memory(Layout(8, tensor=2)).packed == memory(Layout(8, tensor=2), "qk_mxfp8").packed == 0
    # A bf16 copy of all linear layers: all weights but the lookup and the norms.
    lookup, norms = 128256 * 4096, 65 * 4096
    assert found.cache == tables.models()["llama31-8b"].parameters - lookup - norms
    parts = (found.weights, found.gradients, found.optimizer, found.activations, found.logits)
    assert found.total == sum(parts) + found.working + 3 * GIB


def test_a_model_in_fp32_is_its_own_main_weights():
    model = tables.models()["llama31-8b"]
    layout = Layout(8, tensor=2)
    half, single = (
        stage_memory(model, STANDARD, of_mode(tables.modes()["mxfp8"], dtype), layout, 0, dtype)
        for dtype in ("fp16", "fp32")
    )
    assert half == memory(layout, "mxfp8")
    assert (single.weights, single.gradients) == (2 * half.weights, half.gradients)
    assert single.optimizer == half.optimizer * 2 // 3
    assert (single.activations, single.scores) == (2 * half.activations, 2 * half.scores)
    # Twice what is freed, and codes of the same size.
    assert single.packed > 2 * half.packed


def test_states_that_are_not_shared_out_are_on_every_gpu():
    count = tables.models()["llama31-8b"].parameters
    assert memory(Layout(8, sharded=False)).optimizer == 12 * count
    experts = memory(Layout(8, expert=8, sharded=False), model="deepseek2_lite")
    assert experts.optimizer == 6 * experts.weights


def test_context_parallel_ranks_share_tokens_and_states():
    two, one = memory(Layout(8, context=2), "pv_mxfp8"), memory(Layout(8), "pv_mxfp8")
    assert 2 * two.activations == one.activations
    assert 2 * two.scores == one.scores
    assert 2 * two.logits == one.logits
    assert two.optimizer == one.optimizer
