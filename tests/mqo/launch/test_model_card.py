"""The model card: facts of the run folder, and nothing where there are none."""

import json
from pathlib import Path

import pytest
from mqo.launch import model_card
from mqo.launch.config import resolve
from mqo.launch.hf_config import config_of
from mqo.launch.libraries import LibraryQuantization
from mqo.launch.model_card import Training
from mqo.runs import RunFolder

ARGS = {
    "num_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "consumed_train_samples": 12,
    "seq_length": 256,
    "mqo_types": {"fprop": "mxfp4 until 2, then mxfp8", "dgrad": "none", "qk": "mxfp8"},
}
METRICS = [
    ("lm loss", 2, 8.25),
    ("lm loss", 3, 8.125),
    ("lm loss validation", 3, 8.0),
    ("lm loss", 4, 7.5),  # behind the checkpoint
]


def cell(quantization="FA_linear_mxfp8", **rest):
    return resolve("llama32-1b", "wikipedia", quantization, "smoke", **rest)


@pytest.fixture
def run(tmp_path):
    made = RunFolder(tmp_path / "run")
    (made.source / "megatron/core").mkdir(parents=True)
    info = "MAJOR = 0\nMINOR = 19\nPATCH = 2\n"
    (made.source / "megatron/core/package_info.py").write_text(info)
    made.config.write_text(cell().model_dump_json())
    facts = {"commit": "abc123+", "packages": {"torch": "2.13.0", "mqo": "0.1.0"}}
    facts |= {"python": "3.11.9", "cores": 2}
    made.environment.write_text(json.dumps(facts | {"inputs": {"files": {}, "iteration": None}}))
    keys = ("name", "iteration", "value")
    rows = [json.dumps(dict(zip(keys, row, strict=True))) for row in METRICS]
    made.metrics.write_text("".join(f"{row}\n" for row in rows))
    made.quant_config.write_text('# A comment.\n[asked]\nqk = "mxfp8"\n')
    return made


@pytest.fixture
def folder(tmp_path):
    """A converted model, its weights six zeros."""
    np = pytest.importorskip("numpy")
    from safetensors.numpy import save_file

    made = tmp_path / "model"
    made.mkdir()
    save_file({"a": np.zeros((2, 2)), "b": np.zeros(2)}, made / "model.safetensors")
    config = config_of(cell().experiment.model, "bf16", 256)
    (made / "config.json").write_text(json.dumps(config))
    return made


def rows(folder, training):
    return dict(model_card.card_fields(folder, "title", training)["rows"])


def test_the_card_says_how_the_model_was_trained(folder, run):
    found = rows(folder, Training(ARGS, "3", run))
    assert "Llama-3.2-1B" in found["model"]
    assert "FA_linear_mxfp8" in found["mode"]
    assert found["quantized GEMMs"] == "fprop mxfp4 until 2, then mxfp8, qk mxfp8"
    assert found["optimizer steps"] == "3"
    assert found["tokens seen"].startswith("3,072,")
    assert found["training loss"] == "8.1250 nats per token at step 3"
    assert found["validation loss"] == "8.0000 nats per token at step 3"
    assert found["trained with"] == "megatron-core 0.19.2, torch 2.13.0, mqo 0.1.0"
    assert found["commit of mqo"].startswith("abc123 with")


def test_the_sample_is_not_taken_for_the_published_dataset(folder, run, tmp_path):
    assert "sample" in rows(folder, Training(ARGS, "3", run))["dataset"]
    own = cell(data_prefix=tmp_path / "secret/corpus", tokenizer=tmp_path)
    run.config.write_text(own.model_dump_json())
    found = rows(folder, Training(ARGS, "3", run))["dataset"]
    assert "own data" in found and "secret" not in found and "wikimedia" not in found


def test_the_page_holds_the_facts_and_leaves_the_license_open(folder, run):
    model_card.write(folder, "little", Training(ARGS, "3", run))
    text = (folder / "README.md").read_text()
    header, _, body = text.removeprefix("---\n").partition("\n---\n")
    fields = [line for line in header.splitlines() if not line.startswith("#")]
    assert fields == ["library_name: transformers", "pipeline_tag: text-generation"]
    assert "# little\n" in body and "6 weights in bfloat16" in body
    assert "emulated" in body and "# license" in header
    assert '    [asked]\n    qk = "mxfp8"\n' in body and "# A comment" not in body
    assert "no tokenizer" in body
    assert str(run.root.parent) not in text
    (folder / "tokenizer_config.json").touch()
    model_card.write(folder, "little", Training(ARGS, "3", run))
    assert "pipeline(" in (folder / "README.md").read_text()


def test_the_page_of_packed_weights_says_how_to_load_those(folder, run, tmp_path):
    (folder / "tokenizer_config.json").touch()
    (tmp_path / "packed").mkdir()
    training, packed = Training(ARGS, "3", run), "7 in nvfp4.\n\n    load them"
    model_card.write(folder, "little", training, packed, into=tmp_path / "packed")
    text = (tmp_path / "packed/README.md").read_text()
    assert "packed here: 7 in nvfp4.\n\n    load them\n\n## How" in text
    assert "6 weights" in text and "pipeline(" not in text
    assert not (folder / "README.md").exists()


def test_nothing_is_made_up_without_a_run(folder):
    training = Training(ARGS, "3")
    found = rows(folder, training)
    assert found.keys() == {
        *("size", "quantized GEMMs", "training dtype", "optimizer steps", "tokens seen"),
        "converted with",
    }
    model_card.write(folder, "little", training)
    text = (folder / "README.md").read_text()
    assert "The run folder was missing" in text and "quant.toml" not in text


def test_imported_weights_have_no_training(folder):
    bare = {k: ARGS[k] for k in ("num_layers", "hidden_size", "num_attention_heads")}
    found = rows(folder, Training(bare | {"consumed_train_samples": 0}, "release"))
    assert found.keys() == {"size", "training dtype", "converted with"}
    notes = model_card.card_fields(folder, "t", Training(bare, "release"))["notes"]
    assert any("imported" in note for note in notes)


def test_an_unquantized_run_does_not_speak_of_emulation(folder, run):
    run.config.write_text(cell("bf16").model_dump_json())
    plain = ARGS | {"mqo_types": dict.fromkeys(("fprop", "qk"), "none")}
    card = model_card.card_fields(folder, "t", Training(plain, "3", run))
    assert dict(card["rows"])["mode"].startswith("bf16 (unquantized),")
    assert dict(card["rows"])["quantized GEMMs"] == "none"
    assert card["notes"] == []


def test_what_a_library_quantized_is_told(folder, run):
    library = LibraryQuantization(library="Transformer Engine", format="fp8 hybrid")
    run.config.write_text(cell("bf16").with_library(library).model_dump_json())
    plain = ARGS | {"mqo_types": dict.fromkeys(("fprop", "qk"), "none")}
    card = model_card.card_fields(folder, "t", Training(plain, "3", run))
    said = "fp8 hybrid by Transformer Engine"
    assert dict(card["rows"])["mode"].startswith(said)
    assert dict(card["rows"])["quantized GEMMs"] == f"linear layers {said}"
    assert any(said in note for note in card["notes"])


def test_a_checkpoint_says_what_modelopt_quantized(folder):
    card = model_card.card_fields(
        folder, "t", Training(ARGS | {"mqo_modelopt_format": "int8"}, "3")
    )
    assert dict(card["rows"])["quantized GEMMs"].endswith("linear layers int8 by ModelOpt")


def test_a_changed_model_and_own_data_are_told(folder, run):
    flags = ("--num-layers", "6", "--qk-layernorm")
    made = resolve(
        "llama32-1b", None, "bf16", "smoke", extra_flags=flags, data_prefix=Path("/d/mine")
    )
    run.config.write_text(made.model_dump_json())
    found = rows(folder, Training(ARGS, "3", run))
    assert found["model"].startswith("llama32-1b*")
    assert "--num-layers 6" in found["model"] and "--qk-layernorm" in found["model"]
    assert "own data" in found["dataset"] and "mine" in found["dataset"]


def test_a_training_that_began_with_other_weights_says_so(folder, run):
    facts = json.loads(run.environment.read_text())
    facts["inputs"]["iteration"] = "release"
    run.environment.write_text(json.dumps(facts))
    notes = model_card.card_fields(folder, "t", Training(ARGS, "3", run))["notes"]
    assert any("another checkpoint" in note for note in notes)


def test_a_run_of_another_release_gives_what_the_checkpoint_says(folder, run):
    run.config.write_text('{"schema": 9}')
    found = rows(folder, Training(ARGS, "3", run))
    assert "model" not in found and found["optimizer steps"] == "3"
