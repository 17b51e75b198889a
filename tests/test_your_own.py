"""A model, a text and a format of a user, from training to transformers, by documented commands."""

import json
import re
import shutil

import pytest

from .real_runs import launched
from .vendored_tree import PROJECT

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 4096,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
FORMAT = '[formats.int4_g32]\nelement = "int4"\nscale = "fp32"\nblock = 32\n'
TEXT = "The miller grinds the barley at dawn, and sells {} sacks of it.\n\n"
TRAIN = ["--shrink", "1,1", "--text", "pages.txt", "--training-config", "tiny", "--runs", "runs"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the user's files, and two runs: unquantized, and in the user's format."""
    folder = tmp_path_factory.mktemp("your own")
    (folder / "little-qwen").mkdir()
    (folder / "little-qwen/config.json").write_text(json.dumps(CONFIG))
    (folder / "formats.toml").write_text(FORMAT)
    (folder / "pages.txt").write_text("".join(TEXT.format(n) for n in range(4_000)))
    for words in (["bf16"], ["linear_int4_g32", "--gemms", "all", "--formats", "formats.toml"]):
        mqo(
            folder, "train", f"saved/{words[0]}", "--model", "little-qwen", *TRAIN, "--mode", *words
        )
    yield folder
    for made in (PROJECT.own_data / "text").glob("pages-*"):
        shutil.rmtree(made, ignore_errors=True)


def mqo(folder, *words):
    """Run a command as a user does, and return its output."""
    done = launched("-m", "mqo", *words, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_of(folder, mode):
    (run,) = (folder / "runs").glob(f"*_little-qwen_pages_{mode}*")
    return run


def test_the_gap_of_the_format_is_compared(folder):
    compared = json.loads(mqo(folder, "compare", *sorted((folder / "runs").iterdir()), "--json"))
    base, own = compared["sides"]
    assert base["label"].startswith("bf16")
    assert re.match("linear_int4_g32 [0-9a-f]{6}, all GEMMs", own["label"])
    assert own["gap"]["mean"] == own["loss"] / base["loss"] - 1
    assert own["differs"]["quantization.types.fprop"] == ["none", "int4_g32"]


def test_transformers_computes_the_logits_of_the_trained_model(folder):
    run = run_of(folder, "linear_int4_g32")
    mqo(folder, "convert", "megatron-to-hf", run, "hf")
    (folder / "short.txt").write_text((folder / "pages.txt").read_text()[:4_000])
    table = json.loads(mqo(folder, "eval", run, "--mode", "bf16", "--text", "short.txt", "--json"))
    (loss,) = table["losses"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf")
    assert type(model).__name__ == "Qwen3ForCausalLM"
    ids = torch.tensor(tokenizer((folder / "short.txt").read_text()).input_ids)
    total = 0.0
    for start in range(0, len(ids) - 1, loss["window"]):
        part = ids[start : start + loss["window"] + 1]
        with torch.no_grad():
            logits = model(part[None, :-1]).logits[0]
        total += torch.nn.functional.cross_entropy(logits, part[1:], reduction="sum").item()
    assert loss["tokens"] == len(ids) - 1
    assert total / len(ids[1:]) == pytest.approx(loss["loss"], abs=1e-4)


def test_a_training_starts_from_the_converted_weights(folder):
    if not (folder / "hf").exists():
        mqo(folder, "convert", "megatron-to-hf", run_of(folder, "bf16"), "hf")
    words = ("--text", "pages.txt", "--training-config", "tiny", "--recipe", "nvfp4")
    mqo(folder, "train", "--from", "hf", *words, "--runs", "tuned")
    (tuned,) = (folder / "tuned").iterdir()
    rows = map(json.loads, (tuned / "metrics.jsonl").read_text().splitlines())
    first = next(row["value"] for row in rows if row["name"] == "lm loss")
    assert first < 7.5  # that of random weights is 8.3
    for made in (PROJECT.own_data / "weights").glob("hf-*"):
        shutil.rmtree(made, ignore_errors=True)
