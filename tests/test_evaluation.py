"""`mqo eval` and `mqo generate` on a real run's checkpoint: one process each."""

import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from mqo.data.pair import Pairs, State
from mqo.errors import CheckpointError
from mqo.launch import evaluation
from mqo.launch.config import resolve
from mqo.launch.evaluation import AS_TRAINED, Place
from mqo.project import Project

pytest.importorskip("torch")
from . import real_runs
from .real_runs import TINY, losses

PROJECT = Project.here()
if not (PROJECT.tree / "megatron/core").exists():
    pytest.skip("the tree is not vendored: run `mqo setup`", allow_module_level=True)

WINDOW, WINDOWS = 64, 8  # of TINY, and of the one document that is held out
MODE = "FA_linear_mxfp8"
SIZES = (*TINY, "--micro-batch-size", "4", "--lr", "2e-3")
EVALUATED_ONCE = ("--eval-interval", "100", "--eval-iters", str(WINDOWS // 8))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Ten documents in which a token follows from the one before, more or less; one is held out."""
    prefix = tmp_path_factory.mktemp("data") / "steps"
    rng = np.random.default_rng(0)
    lengths = np.full(10, WINDOW * WINDOWS + 20, dtype=np.int32)
    # Training passes over padding, whose id is a low one.
    ids = (100 + rng.integers(1, 4, lengths.sum()).cumsum() % 500).astype(np.uint16)
    with Pairs(prefix, ("text",), "of a test", 2) as pairs:
        pairs.add("text", ids.tobytes(), lengths.tobytes())
        pairs.save(State())
        pairs.finish()
    return prefix.with_name("steps_text_document")


@pytest.fixture(scope="module")
def run(checkout_with, data, tmp_path_factory):
    """A run with options of its own; its only validation is of every held-out window."""
    cell = resolve(
        "llama32-1b",
        "wikipedia",
        MODE,
        "smoke",
        extra_flags=(*SIZES, *EVALUATED_ONCE),
        tokenizer=PROJECT.data / "wikipedia/tokenizer",
        data_prefix=data,
        exclude=("output_layer",),
        block=16,
    )
    return real_runs.run(checkout_with(runs=tmp_path_factory.mktemp("runs")), cell)


@pytest.fixture(scope="module")
def place(run):
    return Place.of(run.root)


@pytest.fixture(scope="module")
def generate(vendored, place):
    """A function that gives the token ids behind two prompts for each sampling, two at a time."""

    def ids(sampling):
        prompts = ("The river", "In a town of 1990")
        found = evaluation.generate(vendored, place, MODE, prompts, sampling)
        return [row["tokens"] for row in found["texts"]]

    def run(*samplings):
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(ids, samplings))

    return run


def test_the_loss_is_what_training_validated_to(vendored, run, place):
    own, plain = evaluation.evaluate(
        vendored, [place], [AS_TRAINED, "bf16"], evaluation.text(tokens=WINDOW * WINDOWS)
    )
    _, ((_, validated),) = losses(run)
    assert (own.mode, own.types) == (MODE, {"fprop": "mxfp8", "qk": "mxfp8", "pv": "none"})
    assert (own.tokens, own.window, own.iteration) == (WINDOW * WINDOWS, WINDOW, 6)
    assert own.text == ("steps_text_document, validation split",)
    # The same losses of the same tokens: training sums them in fp32, and in another order.
    assert own.loss == pytest.approx(validated, rel=1e-6)
    assert plain.types == dict.fromkeys(own.types, "none")
    assert plain.loss != pytest.approx(validated, rel=1e-6)


def test_a_cache_changes_no_token_and_a_seed_decides_what_is_drawn(generate):
    drawn = {"tokens": 24, "temperature": 1.0, "top_k": 40, "top_p": 0.95, "seed": 7}
    greedy, whole, seven, again = generate(
        evaluation.sampling(tokens=24),
        evaluation.sampling(tokens=24, cache=False),
        evaluation.sampling(**drawn),
        evaluation.sampling(**drawn, cache=False),
    )
    assert greedy == whole
    assert [len(ids) for ids in greedy] == [24, 24]
    assert seven == again
    assert seven != greedy


def test_a_damaged_checkpoint_is_refused(vendored, place, tmp_path):
    copy = shutil.copytree(place.folder, tmp_path / "copy")
    weights = max(copy.rglob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"is damaged: .*distcp"):
        evaluation.evaluate(vendored, [Place.of(copy)], [AS_TRAINED], ())


def test_a_text_is_read_with_the_runs_tokenizer(vendored, place, tmp_path):
    file = tmp_path / "a text.txt"
    file.write_text("The miller grinds the barley at dawn. " * 40)
    # Of the iteration alone, without the run around it.
    alone = shutil.copytree(place.folder, tmp_path / "alone")
    (found,) = evaluation.evaluate(
        vendored, [Place.of(alone / "iter_0000006")], [MODE], evaluation.text(file=file, tokens=100)
    )
    assert (found.text, found.tokens) == (("a text.txt",), 100)
    assert 0 < found.loss < 12
    assert found.checkpoint == "iter_0000006"
