"""States of users' quantizers: they are constant within a step, and notes decide the next one."""

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mqo.quant.backend import fake_quantize
from mqo.quant.model import quantize_model
from mqo.quant.plugin_calls import call
from mqo.quant.plugin_context import CallSite, QuantizerError
from mqo.quant.plugin_decorators import end_step, quantizer
from mqo.quant.plugin_file import load_quantizers
from mqo.quant.plugin_source import declared
from mqo.quant.plugin_states import PluginStates, initial
from mqo.quant.plugins import PLUGINS
from mqo.quant.spec import QuantSpec
from torch import nn
from torch.utils.checkpoint import checkpoint

OPERAND = ("fprop", "layers.0", "x")
OTHER = ("fprop", "layers.1", "x")
CPU = torch.device("cpu")
STATE = {"amax": 4.0, "counts": [1.0, 2.0]}
NO_OPTIONS = {"mine": {}}


@pytest.fixture
def seen():
    """The contexts of the calls of the quantizer `mine`, and the arguments of its @end_step.

    It notes the amax and, as counts, the first two values of x; the notes become the state.
    """
    calls, ends = [], []

    @quantizer("mine", state=STATE)
    def mine(x, context):
        calls.append(context)
        context.note("amax", x.abs().max())
        context.note("counts", x[0, :2])
        return x * context.state["amax"]

    @end_step("mine")
    def end(state, notes, step, options):
        ends.append((state, notes, step, options))
        return state | notes

    return calls, ends


def rounded(states, x, operand=OPERAND):
    return call(
        torch.tensor([x]), QuantSpec("mine"), -1, None, None, CallSite(operand, 0, states)
    ).value()


def rounded_once(update, state=STATE):
    """The states of a quantizer that noted nothing of [1.0, 2.0]; `update` ends its steps."""
    quantizer("mine", state=state)(lambda x, context: x)
    end_step("mine")(update)
    states = PluginStates()
    rounded(states, [1.0, 2.0])
    return states


def values(state):
    return {name: value.tolist() for name, value in state.items()}


def state_of(states, operand=OPERAND):
    return values(states.state_of(PLUGINS["mine"], operand, CPU))


# -- within a step ---------------------------------------------------------------------------------


def test_a_function_cannot_change_the_state():
    @quantizer("mine", state=STATE)
    def mine(x, context):
        context.state["counts"].add_(1)
        dict.update(context.state, amax=torch.zeros(()))
        return x

    @end_step("mine")
    def end(state, notes, step, options):
        return state

    states = PluginStates()
    for _ in range(2):
        rounded(states, [1.0, 2.0])
        assert state_of(states) == STATE
        states.end_step(1, NO_OPTIONS)
    rounded(states, [1.0, 2.0])
    assert state_of(states) == STATE and values(initial(PLUGINS["mine"])) == STATE


# -- notes -----------------------------------------------------------------------------------------


def test_the_notes_of_a_step_are_the_largest_of_each_element(seen):
    states = PluginStates()
    for x in ([1.0, 9.0], [-20.0, 3.0], [2.0, 4.0]):
        rounded(states, x)
    rounded(states, [0.0, 0.0], OTHER)
    states.end_step(1, NO_OPTIONS)
    assert state_of(states) == {"amax": 20.0, "counts": [2.0, 9.0]}
    assert state_of(states, OTHER) == {"amax": 0.0, "counts": [0.0, 0.0]}


@given(st.data())
def test_the_order_of_notes_does_not_matter(data):
    quantizer("mine", state=STATE)(lambda x, context: x)
    end_step("mine")(lambda state, notes, step, options: state | notes)
    pairs = st.lists(st.floats(width=32), min_size=2, max_size=2)
    noted = [torch.tensor(pair) for pair in data.draw(st.lists(pairs, min_size=1, max_size=5))]
    results = []
    for order in (noted, data.draw(st.permutations(noted))):
        states = PluginStates()
        for value in order:
            states.note(PLUGINS["mine"], OPERAND, [("counts", value)])
        states.end_step(1, NO_OPTIONS)
        results.append(states.state_of(PLUGINS["mine"], OPERAND, CPU)["counts"])
    torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)


def test_notes_of_pieces_on_threads_count():
    @quantizer("mine", state={"amax": 1.0}, independent_rows=True)
    def mine(x, context):
        context.note("amax", x.abs().max())
        return x

    end_step("mine")(lambda state, notes, step, options: notes)
    states = PluginStates()
    x = torch.arange(3000.0).repeat(72, 1).T
    call(x, QuantSpec("mine"), -1, None, None, CallSite(OPERAND, 0, states))
    states.end_step(1, NO_OPTIONS)
    assert state_of(states) == {"amax": 2999.0}


def test_a_noted_tensor_may_change_afterwards():
    @quantizer("mine", state={"counts": [1.0, 2.0]})
    def mine(x, context):
        context.note("counts", x[0, :2])
        return x.zero_()

    end_step("mine")(lambda state, notes, step, options: notes)
    states = PluginStates()
    rounded(states, [5.0, 6.0])
    states.end_step(1, NO_OPTIONS)
    assert state_of(states) == {"counts": [5.0, 6.0]}


@pytest.mark.parametrize(
    ("value", "text"), [(torch.ones(1025), "1025"), (torch.ones(0), "0 values"), ("a", "Error")]
)
def test_a_wrong_note_is_refused(value, text):
    quantizer("mine", state={"amax": 1.0})(lambda x, context: context.note("amax", value))
    end_step("mine")(lambda state, notes, step, options: state)
    with pytest.raises(QuantizerError, match=rf"mine .*{text}"):
        fake_quantize(torch.ones(1, 2), "mine")


def test_notes_with_other_shapes_are_refused():
    quantizer("mine", state={"amax": 1.0})(lambda x, context: context.note("amax", x) or x)
    end_step("mine")(lambda state, notes, step, options: state)
    states = PluginStates()
    rounded(states, [1.0, 2.0])
    with pytest.raises(ValueError, match=r"amax .*\[1, 2\].*\[1, 3\]"):
        rounded(states, [1.0, 2.0, 3.0])


def test_a_note_without_a_state_is_refused():
    quantizer("mine")(lambda x, context: context.note("amax", 1.0))
    with pytest.raises(QuantizerError, match="a quantizer with a state"):
        fake_quantize(torch.ones(1, 2), "mine")


# -- the end of a step -----------------------------------------------------------------------------


def test_the_function_gets_state_notes_step_and_options(seen):
    _, ends = seen
    states = PluginStates()
    rounded(states, [1.0, 2.0])
    rounded(states, [3.0, 4.0], OTHER)
    rounded(states, [5.0, 6.0])
    states.end_step(7, {"mine": {"gain": 2.0}})
    (state, notes, step, options), (other, *_) = ends
    assert (values(state), step, options) == (STATE, 7, {"gain": 2.0})
    assert values(notes) == {"amax": 6.0, "counts": [5.0, 6.0]}
    assert values(other) == STATE
    assert {value.dtype for value in (*state.values(), *notes.values())} == {torch.float32}
    states.end_step(8, {"mine": {"gain": 2.0}})
    assert len(ends) == 2  # nothing was rounded since


def test_an_operand_that_noted_nothing_ends_its_step_too():
    def update(state, notes, step, options):
        return {"amax": state["amax"] + len(notes) + 1}

    states = rounded_once(update, {"amax": 1.0})
    states.end_step(1, NO_OPTIONS)
    assert state_of(states) == {"amax": 2.0}


WRONG = {
    "nothing": None,
    "no table": torch.ones(()),
    "a missing name": {"amax": torch.ones(())},
    "another name": {"amax": torch.ones(()), "count": torch.ones(2)},
    "one more name": {"amax": torch.ones(()), "counts": torch.ones(2), "more": torch.ones(())},
    "another shape": {"amax": torch.ones(1), "counts": torch.ones(2)},
    "another dtype": {"amax": torch.ones((), dtype=torch.float64), "counts": torch.ones(2)},
    "a number": {"amax": 1.0, "counts": torch.ones(2)},
}


@pytest.mark.parametrize("result", WRONG.values(), ids=WRONG)
def test_a_wrong_result_is_refused(result):
    states = rounded_once(lambda state, notes, step, options: result)
    with pytest.raises(ValueError, match=r"@end_step\('mine'\)"):
        states.end_step(1, NO_OPTIONS)
    assert states.state_dict() == {}


def test_an_error_names_the_quantizer_and_the_operand():
    states = rounded_once(lambda state, notes, step, options: notes["amax"])
    with pytest.raises(ValueError, match=r"'mine'.* fprop layers\.0 x: KeyError: 'amax'"):
        states.end_step(1, NO_OPTIONS)


def test_the_next_state_is_a_copy():
    kept = torch.ones(())
    states = rounded_once(lambda state, notes, step, options: {"amax": kept}, {"amax": 1.0})
    states.end_step(1, NO_OPTIONS)
    kept.zero_()
    assert state_of(states) == {"amax": 1.0}


@pytest.mark.parametrize("name", ["none", "mxfp4", "plain"])
def test_an_end_without_a_quantizer_that_has_a_state_is_refused(name):
    quantizer("plain")(lambda x, context: x)
    with pytest.raises(ValueError, match=f"'{name}' with a state"):
        end_step(name)(lambda state, notes, step, options: state)


def test_a_state_without_an_end_is_refused(seen):
    quantizer("mine", state=STATE)(lambda x, context: x)  # defined again, without the end
    with pytest.raises(QuantizerError, match=r"@end_step\('mine'\)"):
        fake_quantize(torch.ones(1, 2), "mine")


# -- saving and loading ----------------------------------------------------------------------------


@pytest.mark.parametrize("layer", ["", "a", "layers.0.up", "a/b//c", "/", "mine/x"])
def test_saved_states_are_loaded_again(seen, layer):
    states = PluginStates()
    operand = ("fprop", layer, "x")
    rounded(states, [torch.inf, torch.nan], operand)
    rounded(states, [1 / 3, -0.0])
    states.end_step(1, NO_OPTIONS)
    saved = states.state_dict()
    assert saved.keys() >= {f"mine/fprop/{layer}/x/amax", f"mine/fprop/{layer}/x/counts"}
    assert {value.dtype for value in saved.values()} == {torch.float32}
    again = PluginStates()
    again.load_state_dict(saved)
    assert again.state_dict().keys() == saved.keys()
    for name, value in again.state_dict().items():
        torch.testing.assert_close(value, saved[name], rtol=0, atol=0, equal_nan=True)
    assert state_of(again) == state_of(states)


@pytest.mark.parametrize(
    "change",
    [
        {"mine/fprop/a/x/amax": torch.ones(1)},
        {"mine/fprop/a/x/counts": torch.ones(3)},
        {"mine/fprop/a/x/more": torch.ones(())},
        {"mine/fprop/b/x/amax": torch.ones(())},  # without its counts
        {"mine/x/amax": torch.ones(())},
        {"amax": torch.ones(())},
        {"": torch.ones(())},
    ],
)
def test_wrong_states_are_refused_and_change_nothing(seen, change):
    states = PluginStates()
    rounded(states, [1.0, 2.0])
    states.end_step(1, NO_OPTIONS)
    before = state_of(states)
    good = {"mine/fprop/a/x/amax": torch.ones(()), "mine/fprop/a/x/counts": torch.ones(2)}
    with pytest.raises(ValueError, match="state"):
        states.load_state_dict(good | change)
    assert state_of(states) == before


# -- declarations ----------------------------------------------------------------------------------

FILE = """
from mqo.quant import end_step, quantizer

@quantizer("mine", state={state})
def mine(x, context):
    return x

@end_step("mine")
def end(state, notes, step, options):
    return state
"""


@pytest.mark.parametrize("text", ["{'a': 1}", "{'a': -2.5, 'b_2': [1, 2.0]}", "{'a': [0.0]}", "{}"])
def test_a_file_declares_the_state_that_it_registers(tmp_path, text):
    path = tmp_path / "mine.py"
    end = "@end_step" if text != "{}" else "# "
    path.write_text(FILE.format(state=text).replace("@end_step", end))
    assert load_quantizers(path) == ["mine"]
    assert declared(path) == PLUGINS
    assert declared(path)["mine"].function is None


@pytest.mark.parametrize(
    "state",
    [
        "[1.0]",
        "{'A': 1.0}",
        "{'a/b': 1.0}",
        "{1: 1.0}",
        "{'a': []}",
        "{'a': [[1.0]]}",
        "{'a': True}",
        "{'a': 'x'}",
        "{'a': None}",
        "{'a': 1e999}",
        "{'a': [1.0, -1e999]}",
        f"{{'a': {[1.0] * 1025}}}",
    ],
)
def test_a_wrong_state_is_refused(tmp_path, state):
    path = tmp_path / "mine.py"
    path.write_text(FILE.format(state=state))
    with pytest.raises(ValueError, match="state"):
        declared(path)
    with pytest.raises(QuantizerError, match="state"):
        load_quantizers(path)
    assert PLUGINS == {}


# -- ranks -----------------------------------------------------------------------------------------


def test_two_ranks_have_all_states(equal_on_two_ranks):
    equal_on_two_ranks("plugin_state_ranks.py")


# -- models ----------------------------------------------------------------------------------------

WIDE = 8


@pytest.fixture
def delayed():
    """(site, layer, operand, state, number of completed steps) of the calls of `delayed`.

    It scales by the amax of earlier steps.
    """
    calls = []

    @quantizer("delayed", state={"amax": 4.0})
    def delayed(x, context):
        amax = context.state["amax"]
        names = (context.site, context.layer, context.operand)
        calls.append((*names, amax.item(), context.step))
        context.note("amax", x.abs().max())
        return (x / amax * 7).round().clamp(-7, 7) * amax / 7

    @end_step("delayed")
    def end(state, notes, step, options):
        return {"amax": (state["amax"] + notes["amax"]) / 2}

    return calls


def build(**options):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE))
    return model, quantize_model(model, "delayed", **options)


def batch(step, part=0):
    return torch.randn(4, WIDE, generator=torch.Generator().manual_seed(10 * step + part))


def train(model, first=0, last=4, optimizer=None, parts=1, between=lambda step: None, run=None):
    """The losses of steps; `between` is called after each, and `run` instead of the model."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(first, last):
        for part in range(parts):
            loss = (run or model)(batch(step, part)).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        between(step)
    return losses


def states_by_step(calls):
    """{(site, layer, operand): the states in the order of its calls}."""
    states = {}
    for *operand, amax, _ in calls:
        states.setdefault(tuple(operand), []).append(amax)
    return states


def test_states_change_after_each_step_and_not_between_micro_batches(delayed):
    model, shared = build()
    train(model, parts=2)
    assert shared.step == 4
    by_operand = states_by_step(delayed)
    assert len(by_operand) == 10  # the first layer has no gradient of its input
    for amaxes in by_operand.values():
        assert amaxes[0::2] == amaxes[1::2] and amaxes[0] == 4.0
        assert len(set(amaxes)) == 4
    assert {step for *_, step in delayed} == {0, 1, 2, 3}


@pytest.mark.parametrize("cache_weights", [False, True])
def test_an_evaluation_between_steps_changes_nothing(delayed, cache_weights):
    def evaluate(model):
        with torch.no_grad():
            model.eval()(100 * batch(9))
        model.train()

    model, shared = build(cache_weights=cache_weights)
    other, plain = build()
    assert train(model, between=lambda step: evaluate(model)) == train(other)
    assert shared.state_dict() == plain.state_dict()


def test_an_evaluation_after_a_step_rounds_with_the_states_after_it(delayed):
    model, shared = build()
    train(model, last=1)
    delayed.clear()
    with torch.no_grad():
        model.eval()(batch(1))
    saved = shared.state_dict()
    amax = {operand: saved[f"delayed/fprop/0/{operand}/amax"] for operand in ("x", "weight")}
    used = {call[2]: call[3] for call in delayed if call[:2] == ("fprop", "0")}
    assert used == amax


def test_an_evaluation_before_the_backward_pass_does_not_drop_its_notes(delayed):
    model, shared = build()
    other, plain = build()
    for chosen in (model, other):
        optimizer = torch.optim.SGD(chosen.parameters(), lr=0.1)
        loss = chosen(batch(0)).square().sum()
        if chosen is model:
            with torch.no_grad():
                model.eval()(batch(1))
            model.train()
        loss.backward()
        optimizer.step()
        shown = (shared if chosen is model else plain).state_dict()
        assert {key.split("/")[1] for key in shown} == {"fprop", "dgrad", "wgrad"}
    assert shared.states.state_dict() == plain.states.state_dict()


def test_notes_of_a_quantizer_that_was_replaced_are_dropped(delayed):
    model, shared = build()
    train(model, last=1)

    @quantizer("delayed")
    def without_state(x, context):
        return x

    model(batch(1))
    assert shared.state_dict() == {}


def test_a_program_may_set_the_steps(delayed):
    """Without a step of an optimizer, as one of a training that is resumed."""
    model, shared = build()
    shared.set_step(100)
    model(batch(0)).sum().backward()
    assert shared.state_dict() == {}
    shared.set_step(101)
    model(batch(0))
    amax = (4.0 + batch(0).abs().max()) / 2
    assert shared.state_dict()["delayed/fprop/0/x/amax"] == amax


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_states_of_its_own(delayed, copied):
    losses = train(build()[0], last=6)
    model, shared = build()
    train(model, last=3)
    model(batch(3))
    twin = copied(model)
    before = shared.state_dict()
    assert twin[0].quantization.state_dict() == before != {}
    assert train(twin, first=3, last=6) == losses[3:]
    # `shared.state_dict` would count the steps of the other optimizer.
    assert shared.states.state_dict() == before != twin[0].quantization.state_dict()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputed_pass_rounds_with_the_same_states(delayed, use_reentrant):
    model, shared = build()
    other, plain = build()

    def run(x):
        return checkpoint(model, x.requires_grad_(), use_reentrant=use_reentrant)

    losses = train(other, parts=2, run=lambda x: other(x.requires_grad_()))
    assert train(model, parts=2, run=run) == losses
    assert shared.state_dict() == plain.state_dict()


def test_a_resumed_training_has_the_same_losses(delayed):
    losses = train(build()[0], last=6)
    saved = {}

    def save(step):
        if step == 2:
            saved["step"] = first.step
            half(batch(3))  # the pass after a step computes its states
            saved["weights"], saved["states"] = half.state_dict(), first.state_dict()

    half, first = build()
    assert train(half, last=3, between=save) == losses[:3]
    for states, equal in ((saved["states"], True), ({}, False)):
        rest, second = build()
        rest.load_state_dict(saved["weights"])
        second.load_state_dict(states)
        second.set_step(saved["step"])
        resumed = train(rest, 3, 6, between=lambda step, shared=second: shared.set_step(step + 1))
        assert (resumed == losses[3:]) is equal


def test_a_training_may_return_to_saved_states(delayed):
    """Notes of the steps since then do not count."""
    model, shared = build()

    def count(step):
        shared.set_step(step + 1)

    losses = train(model, last=2, between=count)
    model_state, states = copy.deepcopy(model.state_dict()), shared.state_dict()
    losses += train(model, first=2, last=4, between=count)
    model(100 * batch(9))
    shared.set_step(2)
    model.load_state_dict(model_state)
    shared.load_state_dict(states)
    assert train(model, first=2, last=4, between=count) == losses[2:]


def test_loaded_states_apply_to_cached_weights(delayed):
    model, shared = build(cache_weights=True)
    model.eval()
    with torch.no_grad():
        before = model(batch(0))
        shared.load_state_dict({"delayed/fprop/0/weight/amax": torch.tensor(0.1)})
        assert not model(batch(0)).equal(before)
