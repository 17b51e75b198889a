"""`mqo eval`, its tasks, and `mqo generate` on a real run's checkpoint: one process each."""

import importlib.util
import json
import math
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from mqo.errors import CheckpointError
from mqo.launch import convert, evaluation, tasks
from mqo.launch.config import resolve
from mqo.launch.forward_pass import AS_TRAINED, SavedModel

pytest.importorskip("torch")
from . import real_runs
from .real_runs import TINY, losses
from .vendored_tree import PROJECT

pytestmark = pytest.mark.slow


WINDOW, WINDOWS = 64, 8  # of TINY, and of the one document that is held out
LENGTH = WINDOW * WINDOWS + 20
MODE = "FA_linear_mxfp8"
SIZES = (*TINY, "--micro-batch-size", "4", "--lr", "2e-3")
TOKENIZER = PROJECT.data / "wikipedia/tokenizer"
EVALUATED_ONCE = ("--eval-interval", "100", "--eval-iters", str(WINDOWS // 8))


def indexed(path, documents):
    """The prefix of an index of these token ids."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{path}.bin", dtype=np.uint16)
    for ids in documents:
        builder.add_document(ids, [len(ids)])
    builder.finalize(f"{path}.idx")
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Ten documents in which a token follows from the one before, more or less; one is held out."""
    rng = np.random.default_rng(0)
    # Training passes over padding, whose id is a low one.
    ids = 100 + rng.integers(1, 4, 10 * LENGTH).cumsum() % 500
    return indexed(tmp_path_factory.mktemp("data") / "steps", np.split(ids, 10))


@pytest.fixture(scope="module")
def run(checkout_with, data, tmp_path_factory):
    """A run with options of its own; its only validation is of every held-out window."""
    cell = resolve(
        "llama32-1b",
        "wikipedia",
        MODE,
        "smoke",
        extra_flags=(*SIZES, *EVALUATED_ONCE),
        tokenizer=TOKENIZER,
        data_prefix=data,
        exclude=("output_layer",),
        block=16,
    )
    return real_runs.run(checkout_with(runs=tmp_path_factory.mktemp("runs")), cell)


@pytest.fixture(scope="module")
def place(run):
    return SavedModel.find(run.root)


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
    assert own.text == ("steps, validation split",)
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
        evaluation.evaluate(vendored, [SavedModel.find(copy)], [AS_TRAINED], evaluation.text())


def test_a_text_is_read_with_the_runs_tokenizer(vendored, place, tmp_path):
    file = tmp_path / "a text.txt"
    file.write_text("The miller grinds the barley at dawn. " * 40)
    # Of the iteration alone, without the run around it.
    alone = shutil.copytree(place.folder, tmp_path / "alone")
    (found,) = evaluation.evaluate(
        vendored,
        [SavedModel.find(alone / "iter_0000006")],
        [MODE],
        evaluation.text(file=file, tokens=100),
    )
    assert (found.text, found.tokens) == (("a text.txt",), 100)
    assert 0 < found.loss < 12
    assert found.checkpoint == "iter_0000006"
    other = (alone / "iter_0000006").rename(alone / "a model")
    with pytest.raises(CheckpointError, match="a model has the files of an iteration"):
        evaluation.evaluate(vendored, [SavedModel.find(other)], [MODE], evaluation.text())


# -- tasks -----------------------------------------------------------------------------------------

harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="no lm-eval: python tests/get_packages.py"
)
SAID = (
    ("The river flows through the", (" town", " of the", " 1990")),
    ("In the summer of", (" 1990", " river", " a")),
    ("She was born in", (" the north of the town", " and", " London")),
)


@pytest.fixture(scope="module")
def tokenizer():
    """The run's tokenizer, as its own library has it."""
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(TOKENIZER)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, place, vendored):
    """Tasks in files of their own: how likely an answer is, a choice, and an answer to be written.

    What is to be written is what `mqo generate` does.
    """
    made = tmp_path_factory.mktemp("tasks of a test")
    prompts = [question for question, _ in SAID]
    found = evaluation.generate(vendored, place, MODE, prompts, evaluation.sampling(tokens=6))
    rows = [
        {"question": question, "options": options, "written": row["text"]}
        for (question, options), row in zip(SAID, found["texts"], strict=True)
    ]
    (made / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(made / "rows.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "target_delimiter": "",
    }
    greedy = {"until": ["\0"], "max_gen_toks": 6, "do_sample": False}
    kinds = {
        "likely": {"output_type": "loglikelihood", "doc_to_target": "{{options[0]}}"},
        "choice": {"output_type": "multiple_choice", "doc_to_target": 0}
        | {"doc_to_choice": "options"},
        "written": {"output_type": "generate_until", "doc_to_target": "written"}
        | {"generation_kwargs": greedy},
    }
    for name, kind in kinds.items():
        (made / f"{name}.yaml").write_text(json.dumps({"task": name} | common | kind))
    return made


@pytest.fixture
def score(vendored, place, tmp_path, monkeypatch):
    """A function that gives {(mode, task, metric): score} of the run."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hugging face"))
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")  # what scores.py sets, for the harness itself

    def run(names, modes, data=(), file=None, **options):
        request = tasks.options(names, evaluation.text(data, file), **options)
        found = tasks.evaluate(vendored, [place], modes, request)
        return {(one.mode, one.task, one.metric): one for one in found}

    return run


@pytest.fixture(scope="module")
def text(data, tokenizer):
    """What is held out, as text."""
    ids = np.fromfile(data.with_suffix(".bin"), dtype=np.uint16)[-LENGTH:]
    return tokenizer.decode(ids)


@harness
def test_bits_of_a_text_are_its_loss_in_each_mode(
    vendored, place, score, text, tokenizer, tmp_path
):
    ids = tokenizer.encode(text)[: WINDOWS * WINDOW]
    text, end = tokenizer.decode(ids), [tokenizer.eos_token_id]
    assert (len(ids), tokenizer.encode(text)) == (WINDOWS * WINDOW, ids)
    document = indexed(tmp_path / "document", [np.array(ids + end)])
    # The end of a document stands before each text in the harness. Full windows begin where the
    # last one ended in both; of others the harness lets the last one see more.
    stream = indexed(tmp_path / "stream", [np.array(end + ids)])
    found = score(tasks.HELD_OUT, [MODE, "bf16"], [document])
    losses = evaluation.evaluate(vendored, [place], [MODE, "bf16"], evaluation.text([stream]))
    for loss in losses:
        assert loss.tokens == len(ids)
        bits = found[loss.mode, tasks.HELD_OUT, "bits_per_byte"]
        # The same losses of the same windows in fp32, by another function of torch's.
        nats = loss.loss * loss.tokens
        assert bits.value == pytest.approx(nats / math.log(2) / len(text.encode()), rel=1e-6)
        assert (bits.types, bits.documents) == (loss.types, 1)
    assert losses[0].loss != pytest.approx(losses[1].loss, rel=1e-6)


@harness
def test_what_was_held_out_is_read_as_text(score, text, tokenizer, tmp_path):
    again = indexed(tmp_path / "again", [np.array(tokenizer.encode(text))])
    own, other = score(tasks.HELD_OUT, [MODE]), score(tasks.HELD_OUT, [MODE], [again])
    assert {key: one.value for key, one in own.items()} == {k: v.value for k, v in other.items()}
    assert {one.documents for one in own.values()} == {1}


@harness
def test_unquantized_scores_are_those_of_the_harness_on_the_converted_model(
    vendored, place, score, folder, tokenizer, tmp_path
):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("modelopt")
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from megatron.inference.tasks import registry

    names = ["likely", "choice", tasks.HELD_OUT]
    file = tmp_path / "a text.txt"
    file.write_text("The miller grinds the barley at dawn. " * 20)
    found = score(",".join(names), ["bf16"], (), file, folder=folder)
    convert.megatron_to_hf(vendored.root, place.folder, tmp_path / "model")
    options = {"dtype": "float32", "attn_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", **options)
    loaded = registry.load(names, folder, lambda: [file.read_text()])
    for task in loaded["tasks"].values():
        task.set_config("num_fewshot", 0)
    theirs = lm_eval.evaluate(lm=HFLM(pretrained=model, tokenizer=tokenizer), task_dict=loaded)
    values = {
        ("bf16", task, key.partition(",")[0]): value
        for task, row in theirs["results"].items()
        for key, value in row.items()
        if key.endswith(",none") and "_stderr" not in key
    }
    assert {metric for _, _, metric in values} >= {"perplexity", "acc", "bits_per_byte"}
    # fp32 on both sides; docs/convert.md has logits that differ by 2e-5 at most.
    assert {key: one.value for key, one in found.items()} == pytest.approx(values, rel=1e-5)
    (quantized,) = (
        one for key, one in score("likely", [MODE], folder=folder).items() if "perplexity" in key
    )
    assert quantized.value != pytest.approx(values["bf16", "likely", "perplexity"], rel=1e-5)


@harness
def test_an_answer_is_what_the_model_generates(score, folder):
    found = score("written", [MODE], folder=folder)
    assert found[MODE, "written", "exact_match"].value == 1


@harness
def test_a_task_without_its_data_is_named_with_what_gets_it(score):
    with pytest.raises(CheckpointError, match="wikitext is not on this disk") as error:
        score("wikitext", ["bf16"])
    assert "datasets.load_dataset('EleutherAI/wikitext_document_level'" in error.value.help
