"""The program as its reader runs it, on a small checkpoint; and what it refuses."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
from mqo.launch import convert
from mqo.project import Project

from .... import forking
from ....small_llama import small_llama

pytestmark = pytest.mark.slow

torch = pytest.importorskip("torch")
pytest.importorskip("modelopt")
PROGRAM = Project.here().tree / "examples/export/ptq_and_trtllm_export/text_generation_ptq.py"


@pytest.fixture(scope="module")
def program():
    """The program as a module; it puts the tree's folders on the path."""
    spec = importlib.util.spec_from_file_location("text_generation_ptq", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        yield module


def run(*words):
    command = [sys.executable, "-W", "ignore", PROGRAM, *words]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = forking.run(command, env=env)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def place(vendored, tmp_path_factory):
    """A Hugging Face folder with a tokenizer of 256 bytes, and texts."""
    import tokenizers
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("ptq")
    own = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 256}
    own |= {"max_position_embeddings": 64, "tie_word_embeddings": True}
    small_llama(**own).save_pretrained(folder / "hf")
    alphabet = {letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}
    own = tokenizers.Tokenizer(tokenizers.models.BPE(alphabet, []))
    own.pre_tokenizer = ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=own).save_pretrained(folder / "hf")
    (folder / "texts.txt").write_text("\n\n".join(f"Number {i} of many." for i in range(60)))
    return folder


@pytest.fixture(scope="module")
def quantized(place):
    """What the program printed, and the folder with what it wrote."""
    data = ["--calib-dataset", place / "texts.txt", "--calib-size", 8, "--calib-length", 32]
    code, out, err = run(
        "--load", place / "hf", *data, "--export-quant-cfg", "fp8", "--prompts", "One|Two",
        "--save", place / "saved", "--export-dir", place / "out", "--export-format", "hf",
    )  # fmt: skip
    assert code == 0, err[-4000:]
    return out, place


def test_it_shows_generations_and_writes_both(quantized):
    out, place = quantized
    for title in ("-- before", "-- after, as fp8"):
        behind = out[out.index(title) :]
        assert "'One' -> " in behind and "'Two' -> " in behind
    assert (place / "saved/iter_0000001/modelopt_state").is_dir()
    assert (place / "saved" / convert.TRACKER).read_text().strip() == "1"
    found = json.loads((place / "out/hf_quant_config.json").read_text())
    assert found["quantization"]["quant_algo"] == "FP8"
    assert (place / "out/tokenizer.json").exists()
    assert {path.name for path in place.iterdir()} == {"hf", "texts.txt", "saved", "out"}


def test_it_says_who_reads_the_export(quantized):
    out, _ = quantized
    note = next(line for line in out.splitlines() if line.startswith("note: "))
    assert "vLLM" in note and "not run here" in note and "--dequantized" in note


@pytest.mark.heavy
def test_a_dequantized_export_needs_transformers_alone(quantized, tmp_path):
    """The saved model, exported by a second call: no scales, and no configuration of any."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = quantized[1]
    code, out, err = run(
        "--load", place / "saved", "--tokenizer-model", place / "hf", "--prompts", "One",
        "--export-dir", tmp_path / "plain", "--export-format", "hf", "--dequantized",
    )  # fmt: skip
    assert code == 0, err[-4000:]
    assert "note:" not in out
    names = {"config.json", "generation_config.json", "model.safetensors"}
    names |= {"tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in (tmp_path / "plain").iterdir()} == names
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", output_loading_info=True)
    assert not info["unexpected_keys"] and not info["mismatched_keys"]
    assert len(AutoTokenizer.from_pretrained(tmp_path / "plain")) == model.config.vocab_size
    name = "model.layers.0.self_attn.o_proj.weight"
    packed, weight = load_file(place / "out/model.safetensors"), model.state_dict()[name]
    value = packed[name].float() * packed[f"{name}_scale"]
    torch.testing.assert_close(weight.float(), value, rtol=1e-5, atol=1e-7)
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--save", "new", "--export-format", "hf"], "--export-format is hf, --export-dir missing"),
        ([], "Expected: --save, --export-dir"),
        (["--save", "hf"], "^hf already exists"),
        (["--save", "new", "--dequantized"], "--export-format hf with --dequantized"),
        (["--save", "new", "--tokenizer-model", "."], r"^\. .*tokenizer\.json"),
    ],
)
def test_what_does_not_go_together_is_found_first(program, place, monkeypatch, words, message):
    monkeypatch.chdir(place)
    args = program.parse_args(["--load", "hf", "--export-quant-cfg", "fp8", *words])
    with pytest.raises(program.PtqError, match=message):
        program.quantize(args, place)


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    code, _, err = run("--load", tmp_path, "--save", tmp_path / "new", "--export-quant-cfg", "fp8")
    assert code == 2
    assert str(tmp_path) in err and "Traceback" not in err


def test_a_target_appears_whole_or_not_at_all(program, vendored, tmp_path):
    with pytest.raises(ValueError), program.staged(tmp_path / "new") as folder:
        (folder / "weights").touch()
        raise ValueError("out of luck")
    with (
        pytest.raises(program.PtqError, match=r"The disk of .* is full"),
        program.staged(tmp_path / "new"),
        Path("/dev/full").open("w") as file,
    ):
        file.write("weights")
    assert list(tmp_path.iterdir()) == []
    with program.staged(tmp_path / "new") as folder:
        (folder / "weights").touch(mode=0o600)
    mode = (tmp_path / "new").stat().st_mode
    assert (tmp_path / "new/weights").stat().st_mode & 0o666 == mode & 0o666
