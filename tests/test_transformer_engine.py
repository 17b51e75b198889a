"""The launcher and upstream's trainer with Transformer Engine's real Python code, on a CPU."""

import pytest
from mqo import process
from mqo.errors import RunError
from mqo.launch import evaluation
from mqo.launch import run as run_module
from mqo.launch.config import resolve
from mqo.launch.forward_pass import SavedModel
from mqo.recipes import recipe as recipes

pytest.importorskip("torch")
from . import real_runs
from .get_packages import ENGINE_WHEELS, ENGINES, ROOT
from .real_runs import SAVED, SAVED_HALFWAY, SHORT_STEPS, continued, losses, stats_of
from .vendored_tree import PROJECT as PROJECT

NEWEST, *_, OLDEST = ENGINE_WHEELS
if not (ENGINES / NEWEST).exists():
    pytest.skip(f"no {ENGINES}: python tests/get_packages.py", allow_module_level=True)

PROGRAM = ROOT / "tests/mqo/megatron/transformer_engine/pretrain.py"
ENGINE = ("--transformer-impl", "transformer_engine")
SIZES = f"{SAVED_HALFWAY} {SHORT_STEPS} --eval-iters 1".split()
OWN = PROJECT.root / "tools/mqo/quant/recipes/four_over_six.py"
CLOSE = 1e-5


@pytest.fixture(scope="module")
def train(tmp_path_factory, checkout_with):
    """A function that trains a cell, each one once, with the engine's layers or local ones."""
    project = checkout_with(runs=tmp_path_factory.mktemp("runs of the engine"))
    done = {}

    def run(mode, version=NEWEST, *, flags=(), model="llama32-1b", recipe=None, **rest):
        key = (mode, version, flags, model, recipe, *sorted(rest.items()))
        if key not in done:
            rest |= {"recipe": recipes.read(recipe)} if recipe else {}
            words = (*SIZES, *(ENGINE if version else ()), *flags)
            cell = resolve(model, "wikipedia", mode, "smoke", extra_flags=words, **rest)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(process, "spawn", with_engine(process.spawn))
                patch.setenv("MQO_TEST_ENGINE", version or "")
                if version:  # whose stand-in only the training imports
                    patch.setattr(run_module, "check_run", lambda *args: [])
                done[key] = real_runs.run(project, cell)
        return done[key]

    return run


def with_engine(spawn):
    def started(command, **options):
        words = [str(word) for word in command]
        place = next((n for n, w in enumerate(words) if w.endswith("/pretrain_gpt.py")), None)
        if place is not None and ENGINE[1] in words:
            words.insert(place, str(PROGRAM))
        return spawn(words, **options)

    return started


def operands(run):
    """Which operands of which layers were quantized, and as what."""
    return {(row["site"], row["layer"], row["operand"], row["quant_type"]) for row in stats_of(run)}


def assert_same(ours, theirs, close=CLOSE):
    assert operands(ours) == operands(theirs)
    for own, other in zip(losses(ours), losses(theirs), strict=True):
        assert [loss for _, loss in own] == pytest.approx([loss for _, loss in other], abs=close)


CELLS = {
    "a mode": ("linear_mxfp8", {"gemms": "all"}),
    "a mode of attention": ("FA_linear_mxfp4", {"gemms": "all"}),
    "a recipe": ("bf16", {"recipe": "nvfp4"}),
    "a custom quantizer": ("linear_four_over_six", {"gemms": "all", "plugins": (OWN,)}),
}


@pytest.mark.parametrize(
    "cell",
    ["a recipe", *(pytest.param(n, marks=pytest.mark.slow) for n in CELLS if n != "a recipe")],
)
def test_a_run_is_that_of_local_layers(train, cell):
    mode, rest = CELLS[cell]
    ours = train(mode, **rest)
    theirs = train(mode, None, **rest | {"cache_weights": True})
    # Local layers apply the scale of a tensor to the product: sums of other bits move codes.
    assert_same(ours, theirs, CLOSE if "mxfp" in mode else 1e-3)
    assert losses(ours)[0][0] == pytest.approx(losses(theirs)[0][0], abs=CLOSE)
    assert "transformer_engine.RMSNorm" in ours.implementation.read_text()


@pytest.mark.slow
def test_an_older_release_trains_as_the_newest(train):
    mode, rest = CELLS["a recipe"]
    assert_same(train(mode, OLDEST, **rest), train(mode, **rest))


@pytest.mark.slow
def test_latent_attention_and_experts(train):
    cell = {"model": "deepseek2_lite", "gemms": "all"}
    flags = ("--moe-layer-freq", "[0]+[1]")
    ours = train("linear_mxfp8", flags=flags, **cell)
    theirs = train("linear_mxfp8", None, flags=flags, cache_weights=True, **cell)
    # Upstream draws the weights of latents otherwise; contract.py has both with the same ones.
    assert operands(ours) == operands(theirs)
    assert losses(ours)[0][-1][1] == pytest.approx(losses(theirs)[0][-1][1], abs=0.05)


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(train, tmp_path):
    mode, rest = CELLS["a recipe"]
    whole = train(mode, **rest)
    folder = continued(whole.checkpoints, SAVED, tmp_path)
    assert losses(train(mode, checkpoint=folder, **rest))[0] == losses(whole)[0][SAVED:]


# Upstream's layers of the engine expect a state of each, which local ones do not save.
LENIENT = ("--dist-ckpt-strictness", "ignore_all")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then", "flags"), [(None, NEWEST, LENIENT), (NEWEST, None, ())], ids=["to", "from"]
)
def test_checkpoints_of_both_kinds_of_layers_are_one_anothers(train, tmp_path, first, then, flags):
    mode, rest = CELLS["a mode"]
    rest = rest | {"cache_weights": True}
    folder = continued(train(mode, first, **rest).checkpoints, SAVED, tmp_path)
    run = train(mode, then, checkpoint=folder, flags=flags, **rest)
    whole = losses(train(mode, None, **rest))[0]
    assert losses(run)[0] == [(n, pytest.approx(loss, abs=CLOSE)) for n, loss in whole[SAVED:]]


@pytest.mark.slow
def test_a_checkpoint_is_evaluated_with_local_layers(train, vendored):
    mode, rest = CELLS["a mode"]
    saved = SavedModel.find(train(mode, **rest).checkpoints)
    (found,) = evaluation.evaluate(vendored, [saved], [mode], evaluation.text(tokens=64 * 8))
    assert found.loss == pytest.approx(8.3, abs=0.1)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--fp8-recipe", "tensorwise"), "--fp8-quantizer-factory mqo.megatron"),
        (("--first-last-layers-bf16",), "--first-last-layers-bf16"),
    ],
)
def test_what_would_leave_layers_unquantized_ends_a_run_before_its_model(train, flags, text):
    with pytest.raises(RunError, match=rf"before the model.*{text}"):
        train("linear_mxfp8", flags=flags)
