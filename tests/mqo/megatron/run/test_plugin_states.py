"""States of users' quantizers in a training: its steps, its checkpoints, and damaged ones."""

import json
from argparse import Namespace

import pytest
import torch
from mqo.megatron.run import plugin_states
from mqo.megatron.run.checkpoints import CheckpointError
from mqo.megatron.run.plugin_states import begin_step, end_step, load_states
from mqo.megatron.run.resumed_types import note_checkpoint
from mqo.megatron.run.saved_args import checked_arguments
from mqo.quant.gemms import gemm_operands
from mqo.quant.labels import LABEL
from mqo.quant.quantization import PROCESS

FILE = """
from mqo.quant import end_step, quantizer

@quantizer("delayed", options={"weight": 0.5}, state={"amax": 4.0, "parts": [1.0, 2.0]})
def delayed(x, context):
    context.note("amax", x.abs().max())
    return x + context.state["amax"]

@end_step("delayed")
def end(state, notes, step, options):
    weight = options["weight"]
    return state | {"amax": weight * notes["amax"] + (1 - weight) * state["amax"]}

@quantizer("plain")
def plain(x, context):
    return x.round()
"""
NAME = "delayed/fprop/decoder.layers.0/x/"
AMAX, PARTS = f"{NAME}amax", f"{NAME}parts"


@pytest.fixture(autouse=True)
def no_state_left(monkeypatch):
    monkeypatch.setattr(plugin_states, "_args", None)
    yield
    PROCESS.states.is_fixed = False
    PROCESS.states.load_state_dict({})
    PROCESS.states.begin_step()


@pytest.fixture
def start(run):
    """A function that starts a run with a type and the quantizers of the file."""

    def start(kind="delayed", options="", **rest):
        rows = (
            '[plugins.delayed]\nfile = "mine.py"\n'
            "declared = { options = { weight = 0.5 }, "
            "state = { amax = 4.0, parts = [1.0, 2.0] } }\n"
            f'{options}\n[plugins.plain]\nfile = "mine.py"\n'
        )
        folder = run(fprop=kind, rest=rows, **rest)
        (folder / "mine.py").write_text(FILE)
        return folder

    return start


def rounded(x, layer="decoder.layers.0", kind="delayed"):
    module = torch.nn.Linear(2, 2)
    setattr(module, LABEL, layer)
    return gemm_operands("fprop", kind, module).lhs(torch.tensor(x))


def saved(**values):
    return Namespace(mqo_states={AMAX: "4.0", PARTS: "[1.0, 2.0]"} | values)


# -- the steps of a training -----------------------------------------------------------------------


def test_checkpoints_contain_the_states_after_a_step(start):
    start()
    args = Namespace()
    begin_step(args)
    assert rounded([1.0, 8.0]).tolist() == [5.0, 12.0]
    assert vars(args) == {}
    end_step(1)
    assert args.mqo_states == {AMAX: "6.0", PARTS: "[1.0, 2.0]"}
    begin_step(args)
    assert rounded([1.0, 0.0]).tolist() == [7.0, 6.0]
    rounded([3.0, 3.0], "decoder.layers.1")
    end_step(2)
    assert args.mqo_states[AMAX] == "3.5"
    assert args.mqo_states["delayed/fprop/decoder.layers.1/x/amax"] == "3.5"
    assert checked_arguments(args) is args


def test_the_options_of_a_run_reach_the_end_of_a_step(start):
    start(options="options = { weight = 1.0 }")
    args = Namespace()
    begin_step(args)
    rounded([1.0, 8.0])
    end_step(1)
    assert args.mqo_states[AMAX] == "8.0"


def test_notes_of_a_validation_do_not_count(start):
    start()
    args = Namespace()
    rounded([100.0, 100.0])
    begin_step(args)
    rounded([1.0, 8.0])
    end_step(1)
    rounded([100.0, 100.0])
    begin_step(args)
    rounded([1.0, 8.0])
    end_step(2)
    assert args.mqo_states[AMAX] == "7.0"


def test_a_validation_does_not_keep_cached_weights_from_noting(start, monkeypatch):
    start(record="every = 1\n[quantizer]\ncache_weights = true")
    module = torch.nn.Linear(2, 2)
    setattr(module, LABEL, "a")

    def step(number, validates):
        begin_step(Namespace())
        if validates:
            gemm_operands("fprop", "delayed", module).rhs(module.weight)
            begin_step(Namespace())
        gemm_operands("fprop", "delayed", module).rhs(module.weight)
        end_step(number)
        return PROCESS.states.state_dict()["delayed/fprop/a/weight/amax"].item()

    states = [step(number, validates=number > 1) for number in (1, 2, 3)]
    assert len(set(states)) == 3


def test_a_run_without_a_state_is_no_collective_and_saves_nothing(start, monkeypatch):
    start("plain")
    monkeypatch.setattr(PROCESS.states, "end_step", lambda *args: pytest.fail("a collective"))
    args = Namespace()
    begin_step(args)
    rounded([1.2, 2.0], kind="plain")
    end_step(1)
    assert vars(args) == {}


def test_a_resumed_training_saves_the_states_that_it_loaded(start):
    start()
    load_states(saved(**{AMAX: "0.25"}))
    assert rounded([1.0, 2.0]).tolist() == [1.25, 2.25]
    args = Namespace()
    begin_step(args)
    assert args.mqo_states == {AMAX: "0.25", PARTS: "[1.0, 2.0]"}


def test_the_patched_trainer_takes_the_states_of_a_checkpoint(start):
    start()
    note_checkpoint(saved(**{AMAX: "Infinity", PARTS: "[NaN, -0.1]"}))
    values = PROCESS.states.state_dict()
    assert values[AMAX] == torch.inf
    assert values[PARTS][0].isnan() and values[PARTS][1] == torch.tensor(-0.1)
    note_checkpoint(Namespace())
    assert PROCESS.states.state_dict() == {}


def test_any_float_is_saved_exactly(start):
    start()
    load_states(Namespace())
    values = torch.tensor([1 / 3, 1e-45])
    PROCESS.states.load_state_dict({AMAX: torch.tensor(3e38), PARTS: values})
    args = Namespace()
    begin_step(args)
    load_states(Namespace())
    load_states(args)
    assert PROCESS.states.state_dict()[PARTS].equal(values)


# -- an evaluation ---------------------------------------------------------------------------------


def test_the_states_of_an_evaluation_stay(start):
    start()
    load_states(saved(**{AMAX: "0.5"}), is_fixed=True)
    rounded([100.0, 100.0])
    PROCESS.end_states(1)
    assert rounded([1.0, 2.0]).tolist() == [1.5, 2.5]
    load_states(saved(**{AMAX: "0.5"}))
    rounded([1.0, 2.0])
    PROCESS.end_states(1)
    assert PROCESS.states.state_dict()[AMAX] == 1.25


@pytest.mark.parametrize("kind", ["plain", "mxfp8"])
def test_states_of_quantizers_that_the_run_lacks_are_left_out(run, kind):
    """As in an evaluation with another mode, which does not run the file."""
    run(fprop="mxfp8")
    load_states(saved())
    assert PROCESS.states.state_dict() == {}


# -- damaged checkpoints ---------------------------------------------------------------------------

DAMAGED = {
    "no JSON": {AMAX: "four"},
    "no text of JSON": {AMAX: ""},
    "no number": {AMAX: '"4.0"'},
    "a list for a number": {AMAX: "[4.0]"},
    "a number for a list": {PARTS: "1.0"},
    "a short list": {PARTS: "[1.0]"},
    "a long list": {PARTS: "[1.0, 2.0, 3.0]"},
    "a list of lists": {PARTS: "[[1.0, 2.0]]"},
    "a ragged list": {PARTS: "[1.0, [2.0]]"},
    "a text in a list": {PARTS: '[1.0, "2.0"]'},
    "a table": {AMAX: '{"a": 1}'},
    "null": {AMAX: "null"},
    "null in a list": {PARTS: "[1.0, null]"},
    "beyond floats": {AMAX: "1" + "0" * 400},
    "beyond integers": {AMAX: "1" + "0" * 5000},
    "too deep": {AMAX: "[" * 100_000},
    "another name": {f"{NAME}other": "1.0"},
    "an incomplete state": {"delayed/fprop/b/x/amax": "1.0"},
    "a short name": {"delayed/x/amax": "1.0"},
    "no name": {"": "1.0"},
}


@pytest.mark.parametrize("change", DAMAGED.values(), ids=DAMAGED)
@pytest.mark.parametrize("load", [load_states, note_checkpoint])
def test_damaged_states_are_refused(start, change, load):
    start()
    with pytest.raises(CheckpointError, match="CHECKPOINT") as caught:
        load(saved(**change))
    assert len(str(caught.value)) < 1_000 and "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [None, [], "text", {AMAX: 4.0}, {AMAX: [1.0]}, {1: "4.0"}])
def test_states_of_another_kind_are_refused(start, value):
    start()
    with pytest.raises(CheckpointError, match="mqo_states"):
        note_checkpoint(Namespace(mqo_states=value))


def test_states_of_another_version_of_a_quantizer_are_refused(start):
    folder = start()
    text = FILE.replace("[1.0, 2.0]", "[1.0]")
    (folder / "mine.py").write_text(text)
    toml = (folder / "quant.toml").read_text()
    (folder / "quant.toml").write_text(toml.replace("[1.0, 2.0]", "[1.0]"))
    with pytest.raises(CheckpointError, match=r"delayed fprop decoder\.layers\.0 x"):
        load_states(saved())
    load_states(Namespace(mqo_states={AMAX: "4.0", PARTS: json.dumps([1.0])}))
