import sys
from argparse import Namespace

import pytest
import torch
from mqo.megatron.coverage import SiteCoverage
from mqo.megatron.run import guard, resumed_types
from mqo.megatron.run.checkpoints import CheckpointError
from mqo.megatron.run.guard import (
    GuardError,
    after_step,
    before_model,
    before_step,
    before_validation,
)
from mqo.megatron.run.resumed_types import note_checkpoint
from mqo.megatron.run.setup import read_chunk_tokens
from mqo.quant import config, gemms
from mqo.quant.gemms import gemm_operands
from mqo.quant.labels import Layer
from mqo.quant.measurement import merge
from mqo.quant.own_formats import own_formats
from mqo.quant.progress import PROGRESS, set_step
from mqo.quant.quantization import PROCESS
from mqo.quant.record import RECORDER, QuantRecord
from torch import nn

ARGS = Namespace(curr_iteration=0)


def test_sites_that_were_asked_for_and_never_ran_end_the_run_and_all_are_named(run):
    run(qk="mxfp8", dgrad="mxfp4")
    with pytest.raises(GuardError, match=r"iteration 3\).*never ran") as caught:
        after_step(3)
    assert str(caught.value) == (
        "the run does not quantize as its mode requires (iteration 3): "
        "dgrad: its type is mxfp4, but its quantizer never ran; "
        "qk: its type is mxfp8, but its quantizer never ran"
    )


ROUNDED = '[operands]\n"dgrad.grad" = { rounding = "stochastic" }\n'
RULES = '[[rules]]\nlayers = "linear:a"\nquant_type = "none"\n'
RULES += '[[rules]]\nlayers = "b"\nquant_type = "mxfp4"\n'


def test_a_run_is_held_to_the_rules_of_its_layers(run, quantized):
    run(fprop="mxfp8", rest=RULES)
    quantized("fprop", "mxfp8", "x", "weight", layer="c")
    quantized("fprop", "mxfp4", "x", "weight", layer="b")
    after_step(1)


@pytest.mark.parametrize(
    ("layer", "ran", "due"),
    [("a", "mxfp8", "none"), ("b", "mxfp8", "mxfp4"), ("c", "mxfp4", "mxfp8")],
)
def test_a_layer_beside_its_rule_ends_the_run(run, quantized, layer, ran, due):
    run(fprop="mxfp8", rest=RULES)
    quantized("fprop", ran, "x", "weight", layer=layer)
    with pytest.raises(GuardError, match=rf"fprop: .* {due}, .* {layer} .* {ran}"):
        after_step(1)


def test_a_run_is_held_to_the_rows_of_its_operands(run, quantized):
    rest = '[operands]\n"wgrad.x" = { quant_type = "none" }\n'
    run(wgrad="fp8_tensor", rest=rest)
    quantized("wgrad", "fp8_tensor_e5m2", "grad")
    after_step(1)


@pytest.mark.parametrize(
    ("operand", "ran"), [("grad", "fp8_tensor_e4m3"), ("x", "fp8_tensor_e5m2")]
)
def test_an_operand_beside_its_row_ends_the_run(run, quantized, operand, ran):
    run(wgrad="fp8_tensor", rest='[operands]\n"wgrad.x" = { quant_type = "none" }\n')
    quantized("wgrad", ran, operand)
    with pytest.raises(GuardError, match=f"wgrad: .* {ran}"):
        after_step(1)


def test_only_the_first_step_is_checked(run, quantized):
    run()
    after_step(1)
    quantized("pv", "hifp8", "probs", "value")
    after_step(2)


def test_the_quantizers_learn_of_every_step_even_without_a_run_folder(run):
    for iteration in (1, 2):
        after_step(iteration)
        assert PROGRESS.step == iteration


def test_without_a_run_folder_nothing_is_checked(run, quantized, monkeypatch):
    monkeypatch.setattr(guard, "gather", lambda: pytest.fail("a collective was started"))
    quantized("pv", "hifp8", "probs", "value")
    after_step(1)


def test_a_process_group_is_asked_for_the_records_of_all_ranks(run, quantized, other_rank):
    run(fprop="mxfp8", qk="mxfp4")
    quantized("fprop", "mxfp8", "x", "weight")
    ours = RECORDER.entries()
    RECORDER.reset()
    quantized("qk", "mxfp4", "query", "key")
    theirs = RECORDER.entries()
    other_rank(lambda here: ours)
    assert guard.gather() == merge([theirs, ours])
    after_step(1)


# -- before the first step ---------------------------------------------------------------------


def test_the_quantizers_learn_the_step_that_a_checkpoint_was_at(run):
    before_step([], Namespace(curr_iteration=7))
    assert PROGRESS.step == 7


def test_an_exclude_that_matches_no_layer_ends_the_run_before_its_first_step(run):
    run(exclude=("proj",))
    before_step([nn.ModuleDict({"proj": nn.Linear(4, 4)})], ARGS)
    run(exclude=("pro",))
    guard._labeled = None
    with pytest.raises(GuardError, match=r"before the first step.*'pro' .*proj"):
        before_step([nn.ModuleDict({"proj": nn.Linear(4, 4)})], ARGS)


def test_the_model_is_inspected_once(run, monkeypatch):
    run(exclude=("proj",))
    model = [nn.ModuleDict({"proj": nn.Linear(4, 4)})]
    before_step(model, ARGS)
    monkeypatch.setattr(guard, "inspect", lambda *facts: pytest.fail("inspected again"))
    before_step(model, ARGS)


def test_a_layer_of_another_rank_is_matched_too(run, other_rank):
    run(exclude=("output_layer",))
    theirs = [Layer("output_layer", "linear", "ColumnParallelLinear", False)]
    other_rank(lambda here: theirs if here else None)
    before_step([nn.ModuleDict({"proj": nn.Linear(4, 4)})], ARGS)


def test_without_a_run_folder_no_model_is_inspected(run, monkeypatch):
    monkeypatch.setattr(guard, "inspect", lambda *facts: pytest.fail("inspected"))
    before_step([nn.ModuleDict({"proj": nn.Linear(4, 4)})], ARGS)


# -- one step of a small model -----------------------------------------------------------------


class ColumnParallelLinear(nn.Module):
    """A linear layer that calls the fprop site, or passes it by."""

    bypass = False

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32))

    def forward(self, x):
        if self.bypass:
            return x @ self.weight.t()
        q = gemm_operands("fprop", "mxfp8", self.weight)
        return q.lhs(x) @ q.rhs(self.weight).t()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = ColumnParallelLinear(), ColumnParallelLinear()
        self.spare = None

    def forward(self, x):
        return self.second(self.first(x))


def one_step(net, step=None):
    before_step([net], ARGS)
    (step or net)(torch.ones(4, 32)).sum().backward()
    after_step(1)


def test_a_step_in_which_every_layer_quantizes_goes_on(run, capsys):
    run(fprop="mxfp8")
    one_step(Net())
    assert capsys.readouterr().out == ""


def test_a_layer_that_bypasses_its_site_ends_the_run(run):
    run(fprop="mxfp8")
    net = Net()
    net.second.bypass = True
    with pytest.raises(GuardError, match=r"iteration 1\): fprop: second .*bypassed"):
        one_step(net)


def test_a_weight_that_is_multiplied_beside_its_module_ends_the_run(run):
    run(fprop="mxfp8")
    net = Net()
    with pytest.raises(GuardError, match=r"fprop: second .*bypassed"):
        one_step(net, lambda x: net.first(x) @ net.second.weight)


def test_a_bypass_that_is_excluded_goes_on(run):
    run(fprop="mxfp8", exclude=("second",))
    net = Net()
    net.second.bypass = True
    one_step(net)


def test_a_layer_that_is_never_used_is_said(run, capsys):
    run(fprop="mxfp8")
    net = Net()
    net.spare = ColumnParallelLinear()
    one_step(net)
    assert capsys.readouterr().out == (
        "mqo: not used in the first step, so its type is not checked: spare\n"
    )


def test_the_hooks_are_gone_after_the_first_step_and_none_without_a_type(run):
    def hooks(net):
        return [*net.first._forward_hooks, *(net.first.weight._backward_hooks or ())]

    run()
    net = Net()
    before_step([net], ARGS)
    assert hooks(net) == []
    run(fprop="mxfp8")
    guard._labeled = None
    before_step([net], ARGS)
    assert len(hooks(net)) == 2
    net(torch.ones(4, 32)).sum().backward()
    after_step(1)
    assert hooks(net) == []


# -- types that change -------------------------------------------------------------------------

SWITCH = 'fprop = "mxfp8 until 2, then none"'


def steps(net, first, last):
    """The steps `first` to `last`, from 0, of a training of 4."""
    for done in range(first, last + 1):
        before_step([net], Namespace(curr_iteration=done, train_iters=4))
        net(torch.ones(4, 32)).sum().backward()
        after_step(done + 1)


def test_a_schedule_is_what_the_guard_asks_for_also_at_the_end(run):
    run(fprop="mxfp8", schedule=SWITCH)
    steps(Net(), 0, 3)
    assert {record.calls for record in RECORDER.entries()} == {2}
    guard.check_all(guard.gather())


def test_a_run_that_is_resumed_after_its_last_type_is_held_to_none(run):
    run(fprop="mxfp8", schedule=SWITCH)
    steps(Net(), 2, 3)
    assert RECORDER.entries() == []


def test_the_first_step_of_a_later_type_is_checked_too(run):
    run(fprop="none", schedule='fprop = "none until 0.5, then mxfp8"')
    net = Net()
    net.second.bypass = True
    steps(net, 0, 1)
    with pytest.raises(GuardError, match=r"iteration 3\): fprop: second .*bypassed"):
        steps(net, 2, 2)


def test_a_schedule_that_begins_otherwise_than_the_source_ends_the_run(run):
    run(fprop="mxfp4", schedule=SWITCH)
    with pytest.raises(GuardError, match=r"fprop begins with mxfp8.* mxfp4"):
        steps(Net(), 0, 0)


def test_a_resumed_run_says_which_types_are_not_the_checkpoints(run, capsys):
    run(fprop="mxfp8", wgrad="mxfp4", schedule='fprop = "mxfp8 until 0.5, then none"')
    note_checkpoint(Namespace(mqo_types={"fprop": "mxfp8 until 1, then none", "wgrad": "mxfp4"}))
    args = Namespace(curr_iteration=0, train_iters=4)
    before_step([Net()], args)
    assert args.mqo_types == {"fprop": "mxfp8 until 2, then none", "wgrad": "mxfp4"}
    assert (
        "mqo: fprop was mxfp8 until 1, then none in the run that wrote the checkpoint, "
        "and is mxfp8 until 2, then none\n"
    ) in capsys.readouterr().out


def test_a_resumed_run_says_which_operands_are_not_the_checkpoints(run, capsys):
    rest = '[operands]\n"fprop.weight" = { tile = "square" }\n'
    run(fprop="nvfp4", rest=rest)
    before = {"fprop.x": "rounding stochastic", "fprop.weight": "tile square"}
    note_checkpoint(Namespace(mqo_types={"fprop": "nvfp4"}, mqo_operands=before))
    args = Namespace(curr_iteration=0, train_iters=4)
    before_step([Net()], args)
    assert args.mqo_operands == {"fprop.weight": "tile square"}
    said = capsys.readouterr().out
    assert "mqo: fprop.x was rounding stochastic in the run that wrote the checkpoint" in said
    assert "fprop.weight" not in said


@pytest.fixture
def said(run):
    """A function that returns what each of some runs says of the checkpoint of the run before."""

    def texts(*runs, **arguments):
        found = []
        for options in runs:
            run(**{"fprop": "mxfp8"} | options)
            args = Namespace(train_iters=4, **{name: next(v) for name, v in arguments.items()})
            found.append(resumed_types.keep_types(args, config.current()))
            note_checkpoint(args)
        return found

    return texts


def test_a_resumed_run_says_that_its_rules_are_in_another_order(said):
    one = '[[rules]]\nlayers = "fprop:a"\nquant_type = "none"\n'
    two = '[[rules]]\nlayers = "fprop:*"\nquant_type = "mxfp4"\n'
    first, second = said({"rest": one + two}, {"rest": two + one})
    assert first == []
    assert any(text.startswith("rules ") for text in second)


@pytest.mark.parametrize("name", ["exclude", "include"])
def test_a_resumed_run_says_that_its_patterns_changed(said, name):
    changed = f"{name} was none in the run that wrote the checkpoint, and is a"
    assert said({}, {name: ["a"]}, {name: ["a"]}) == [[], [changed], []]


def test_a_resumed_run_says_that_its_tokenizer_is_another_one(said):
    paths = iter(("a/tokenizer", "a/tokenizer", "b/tokenizer"))
    *before, (text,) = said({}, {}, {}, tokenizer_model=paths)
    assert before == [[], []]
    assert text.startswith("the tokenizer was a/tokenizer ")


def plugin_rows(digest="abcdef0123", options=""):
    """A custom quantizer, whose file no guard runs."""
    declared = "declared = { options = { gain = 2.0, kind = 'a' } }"
    return f"[plugins.mine]\ndigest = '{digest}'\n{declared}\noptions = {{ {options} }}\n"


def own(*rows, kind="mine"):
    """Options of runs with a quantizer or format of the user."""
    return [{"fprop": kind, "rest": rest} for rest in rows]


@pytest.mark.parametrize(
    ("other", "parts"),
    [
        (plugin_rows("0123456789"), ("version abcdef", "version 012345")),
        (plugin_rows(options="gain = 3.0"), ("gain 3.0",)),
        (plugin_rows(options="kind = 'b'"), ("kind b",)),
    ],
)
def test_another_version_and_other_options_of_a_quantizer_are_said(said, other, parts):
    """And of an equal one nothing."""
    _, (one,), (two,), same = said(*own(plugin_rows(), other, plugin_rows(), plugin_rows()))
    for text in (one, two):
        assert text.startswith("mine was ") and all(part in text for part in parts)
    assert same == []


def test_a_quantizer_that_only_one_of_the_runs_has_is_said_as_a_type(said):
    (mine,), without = own(plugin_rows()), {"fprop": "mxfp8"}
    _, (gone,), (new,) = said(mine, without, mine)
    assert gone.startswith("fprop was mine ") and gone.endswith("mxfp8")
    assert new.startswith("fprop was mxfp8 ") and new.endswith("mine")


def test_checkpoints_name_only_quantizers_that_a_run_uses(run):
    kept = []
    for kind, rest in (("mxfp8", ""), ("mxfp8", plugin_rows()), ("mine", plugin_rows())):
        run(fprop=kind, rest=rest)
        kept.append(Namespace(train_iters=4))
        resumed_types.keep_types(kept[-1], config.current())
    assert [hasattr(args, "mqo_plugins") for args in kept] == [False, False, True]
    assert kept[2].mqo_plugins == {"mine": "version abcdef"}


def format_rows(block):
    """[formats] with a format of a user."""
    row = {"element": "e2m3", "scale": "e8m0", "block": block}
    (own,) = own_formats({"formats": {"own6": row}}, "a file").values()
    text = f'element = "e2m3", scale = "e8m0", block = {block}'
    return f"[formats]\nown6 = {{ row = {{ {text} }}, digest = '{own.row.digest}' }}\n"


def test_a_training_goes_on_only_with_the_row_of_its_checkpoint(said):
    wide, narrow = own(format_rows(32), format_rows(16), kind="own6")
    *_, same, (text,) = said(wide, wide, {"fprop": "mxfp8"})
    assert same == [] and text.startswith("fprop was own6")
    with pytest.raises(CheckpointError, match=r"own6 was .* and is "):
        said(wide, narrow)


def test_finetuning_may_change_a_row(run):
    for block, args in ((32, Namespace()), (16, Namespace(finetune=True))):
        run(fprop="own6", rest=format_rows(block))
        resumed_types.keep_types(args, config.current())
        note_checkpoint(args)
    assert args.mqo_formats["own6"] == config.current().formats["own6"].digest


def test_a_checkpoint_that_says_nothing_of_types_is_no_matter(run, capsys):
    run(fprop="mxfp8")
    note_checkpoint(Namespace())
    one_step(Net())
    assert "checkpoint" not in capsys.readouterr().out


# -- traps -------------------------------------------------------------------------------------


def test_a_frozen_layer_ends_the_run_before_its_first_step(run):
    run(fprop="mxfp8")
    net = Net()
    net.first.weight.requires_grad_(False)
    with pytest.raises(GuardError, match=r"before the first step.*first .*--freeze-all-layers"):
        before_step([net], ARGS)


@pytest.mark.parametrize(
    ("argument", "value", "flag"),
    [
        ("transformer_impl", "transformer_engine", "--transformer-impl local"),
        ("defer_embedding_wgrad_compute", True, "--defer-embedding-wgrad-compute"),
        ("gtp_weight_remat_size", 2, "--tensor-parallel-num-weight-shards"),
        ("expert_gtp_weight_remat_size", 2, "--tensor-parallel-num-weight-shards"),
        ("cuda_graph_impl", "local", "--cuda-graph-impl"),
        ("enable_cuda_graph", True, "--cuda-graph-impl"),
    ],
)
def test_an_argument_that_is_a_trap_ends_the_run_before_its_first_step(run, argument, value, flag):
    run(wgrad="mxfp8")
    args = Namespace(curr_iteration=0, **{argument: value})
    with pytest.raises(GuardError, match=rf"before the model.*{flag}"):
        before_model(args)
    # A training program that is not ours builds its model first.
    with pytest.raises(GuardError, match=rf"before the first step.*{flag}"):
        before_step([Net()], args)


def test_grouped_experts_without_sites_end_the_run_before_the_model(run, monkeypatch):
    run(fprop="mxfp8")
    before_model(Namespace(num_experts=8, moe_grouped_gemm=True))
    monkeypatch.setitem(sys.modules, "megatron.core.models", None)
    with pytest.raises(GuardError, match=r"before the model.*--moe-grouped-gemm: "):
        before_model(Namespace(num_experts=8, moe_grouped_gemm=True))
    before_model(Namespace(num_experts=None, moe_grouped_gemm=True))


def test_arguments_are_no_matter_without_a_run_folder_or_a_type(run):
    args = Namespace(transformer_impl="transformer_engine")
    before_model(args)
    run(qk="none")
    before_model(args)


def test_another_attention_ends_the_run_before_its_first_step(run):
    run(qk="mxfp8")
    args = Namespace(curr_iteration=0, experimental_attention_variant="dsa")
    with pytest.raises(GuardError, match="--experimental-attention-variant dsa"):
        before_step([Net()], args)


def test_a_bypass_on_another_rank_ends_this_one_too(run, other_rank):
    run(fprop="mxfp8")
    theirs = SiteCoverage(missed=frozenset({("fprop", "decoder.layers.9.proj")}))
    other_rank(lambda here: theirs if isinstance(here, SiteCoverage) else None)
    with pytest.raises(GuardError, match=r"decoder\.layers\.9\.proj .*bypassed"):
        one_step(Net())


# -- blocks that a layout cuts -----------------------------------------------------------------


@pytest.mark.parametrize(("quant_type", "refused"), [("mxfp8", True), ("hifp8", False)])
def test_a_shard_that_cuts_a_block_ends_the_run_before_its_first_step(run, quant_type, refused):
    run(dgrad=quant_type)
    net = Net()
    net.first.output_size, net.first.output_size_per_partition = 96, 48
    if not refused:
        before_step([net], ARGS)
        return
    with pytest.raises(GuardError, match=r"before the first step.* 48 .* 96 .*first"):
        before_step([net], ARGS)


def test_two_quantizers_of_one_gemm_end_the_run(run):
    run(fprop="mxfp8", qk="none")
    guard.check_alone([])
    with pytest.raises(GuardError, match=r"1 layers.*fc1, .*fprop as mxfp8: .*-quantization bf16"):
        guard.check_alone(["decoder.layers.0.mlp.linear_fc1"])
    run(fprop="none")
    guard.check_alone(["decoder.layers.0.mlp.linear_fc1"])


def test_a_type_that_a_schedule_brings_later_cuts_as_well(run):
    run(schedule='fprop = "hifp8 until 0.5, then mxfp4"', fprop="hifp8", wgrad="hifp8")
    assert config.current().blocks() == {"fprop": 32}


def test_a_chunk_of_the_context_that_cuts_a_block_ends_the_run(run):
    run(wgrad="mxfp4")
    args = Namespace(curr_iteration=0, context_parallel_size=2, seq_length=64, micro_batch_size=1)
    with pytest.raises(GuardError, match=" 16 tokens"):
        before_step([Net()], args)
    assert read_chunk_tokens(ARGS) == 0


# -- quantizers without effect -----------------------------------------------------------------


@pytest.fixture
def identity(monkeypatch):
    """What stands in the quantizer's place, and changes nothing."""
    monkeypatch.setattr(gemms, "fake_quantize", lambda x, *args, **kwargs: x.clone())


def test_an_identity_in_the_quantizers_place_ends_the_run(run, identity):
    run(fprop="mxfp8")
    with pytest.raises(GuardError, match=r"iteration 1\): fprop: .* mxfp8, .*changed no"):
        one_step(Net())


def test_it_ends_the_run_at_its_first_measured_step(run, identity):
    run(fprop="mxfp8", record="every = 2")
    net = Net()
    PROCESS.begin_step(1)
    RECORDER.end_step()
    before_step([net], Namespace(curr_iteration=2))
    net(torch.ones(4, 32)).sum().backward()
    after_step(3)
    before_step([net], Namespace(curr_iteration=3))
    net(torch.ones(4, 32)).sum().backward()
    with pytest.raises(GuardError, match=r"iteration 4\).*changed no"):
        after_step(4)


def test_what_is_never_measured_is_not_judged(run, identity):
    run(fprop="mxfp8", record="every = 0")
    one_step(Net())
    guard.check_all(guard.gather())


def test_noise_on_another_rank_is_enough(run, identity, other_rank):
    run(fprop="mxfp8")
    theirs = [QuantRecord("fprop", "third", "x", "mxfp8", 1, 1, 1.0, 0.1)]

    @other_rank
    def reply(here):
        is_records = isinstance(here, list) and here and isinstance(here[0], QuantRecord)
        return theirs if is_records else None

    one_step(Net())


def test_at_the_end_all_that_was_measured_counts(run):
    run(fprop="mxfp8", schedule='fprop = "mxfp8 until 9, then none"')
    idle = [QuantRecord("fprop", "a", op, "mxfp8", 2, 2, 1.0, 0.0) for op in ("x", "weight")]
    with pytest.raises(GuardError, match=r"at the end.*fprop: .* mxfp8, .*changed no"):
        guard.check_all(idle)


# -- the final validation of a training that ended before ------------------------------------------

LAST = Namespace(iteration=4, train_iters=4, curr_iteration=0)
MODES = {
    "fprop": {"fprop": "mxfp8"},
    "all GEMMs": dict.fromkeys(("fprop", "dgrad", "wgrad"), "mxfp8"),
    "a recipe's types": {"fprop": "mxfp8", "dgrad": "mxfp4", "wgrad": "mxfp4", "rest": ROUNDED},
    "a schedule": {"fprop": "none", "schedule": 'fprop = "none until 0.5, then mxfp8"'},
    "a schedule that ended": {"fprop": "mxfp8", "schedule": SWITCH},
}


def validate(net, args=LAST, iteration=4):
    before_validation([net], args, iteration)
    with torch.no_grad():
        net(torch.ones(4, 32))


@pytest.mark.parametrize("asked", MODES.values(), ids=MODES)
def test_a_validation_without_a_step_is_held_to_the_forward_types(run, asked):
    run(**asked)
    validate(Net())
    guard.check_all(guard.gather())
    assert guard.steps_begun() == 0


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({}, "fprop: .* none, .* first .* mxfp8"),
        ({"fprop": "none", "schedule": 'fprop = "none until 4, then mxfp8"'}, "second .*bypassed"),
        ({"fprop": "mxfp8", "wgrad": "mxfp8"}, "second .*bypassed"),
    ],
)
def test_a_validation_that_bypasses_a_site_ends_the_run(run, asked, text):
    run(**asked)
    net = Net()
    net.second.bypass = True
    with pytest.raises(GuardError, match=text):
        validate(net)
        guard.check_all(guard.gather())


def test_a_process_that_trained_nothing_though_steps_were_left_is_held_to_all_sites(run):
    """As by a trainer that calls no hook."""
    run(fprop="mxfp8")
    before_model(Namespace(iteration=2, train_iters=4))
    with pytest.raises(GuardError, match=r"fprop: .* mxfp8, .*never ran"):
        guard.check_all(guard.gather())


def test_a_training_that_ended_before_may_end_without_a_validation(run):
    run(fprop="mxfp8", dgrad="mxfp8")
    before_model(Namespace(iteration=4, train_iters=4))
    guard.check_all(guard.gather())


def test_a_validation_draws_as_after_the_last_step(run, monkeypatch):
    """As one that follows the last step in the same process; a second one continues its draws."""
    monkeypatch.setattr(guard, "data_rank", lambda: (1, 2))
    run(fprop="mxfp8")
    steps(Net(), 0, 2)
    before_step([Net()], Namespace(curr_iteration=3, train_iters=4))
    after_step(4)
    before_validation([Net()], LAST, 4)  # does nothing: steps came before
    whole = PROGRESS.step, PROGRESS.total, PROCESS.micro_batches.replica
    began = PROGRESS.began
    set_step(0)
    monkeypatch.setattr(guard, "_began", False)
    before_validation([Net()], LAST, 4)
    assert (PROGRESS.step, PROGRESS.total, PROCESS.micro_batches.replica) == whole == (4, 4, (1, 2))
    assert PROGRESS.began == began + 2
    before_validation([Net()], LAST, 4)
    assert PROGRESS.began == began + 2


def test_a_validation_of_another_types_checkpoint_ends_the_run(run):
    run(fprop="mxfp8")
    note_checkpoint(Namespace(mqo_types={"fprop": "mxfp4"}))
    with pytest.raises(CheckpointError, match=r"fprop .* mxfp4 .* mxfp8"):
        validate(Net(), Namespace(train_iters=4))
