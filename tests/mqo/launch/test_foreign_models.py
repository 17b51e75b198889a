"""Models and tokenizers from elsewhere, given to conversions: a sentence, and nothing written."""

import json
import os

import pytest
from mqo.errors import ConvertError
from mqo.launch import convert
from mqo.launch.hf_tokenizer import FILES
from mqo.megatron.run import isolated

from ..odd_files import device, pipe
from .test_convert import ARGS, checkpoint, hf, record, tree, write_tokenizer  # noqa: F401

NESTED = 3_000_000
SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
SIZES += ("vocab_size", "num_key_value_heads")


@pytest.fixture
def refusal(tree, tmp_path):  # noqa: F811
    """A function that converts one way and returns the sentence of the refusal."""

    def run(way, *words, **options):
        with pytest.raises(ConvertError) as caught:
            way(tree, *words, tmp_path / "target", **options)
        assert not (tmp_path / "target").exists()
        assert str(caught.value).isprintable()
        return str(caught.value)

    return run


def edit(folder, **keys):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))


# -- what is copied with a model -------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("target", ["{}/secret", "../secret"])
def test_no_file_of_a_tokenizer_leads_out_of_its_folder(
    checkpoint,  # noqa: F811
    refusal,
    tmp_path,
    name,
    target,
):
    folder = write_tokenizer(tmp_path / "foreign", 250)
    secret = folder / name if (folder / name).exists() else tmp_path / "none"
    (tmp_path / "secret").write_text(secret.read_text() if secret.exists() else "secret")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(target.format(tmp_path))
    assert name in refusal(convert.megatron_to_hf, checkpoint, tokenizer=folder)


@pytest.mark.parametrize("make", [pipe, device, os.mkdir])
@pytest.mark.parametrize("name", ["merges.txt", "chat_template.jinja", "special_tokens_map.json"])
def test_only_regular_files_of_a_tokenizer_are_copied(
    checkpoint,  # noqa: F811
    refusal,
    tmp_path,
    name,
    make,
):
    folder = write_tokenizer(tmp_path / "foreign", 250)
    make(folder / name)
    assert name in refusal(convert.megatron_to_hf, checkpoint, tokenizer=folder)


def test_a_snapshot_of_the_cache_is_copied_with_its_blobs(tree, checkpoint, tmp_path):  # noqa: F811
    plain = write_tokenizer(tmp_path / "plain", 250)
    snapshot = tmp_path / "models--a--b/snapshots/abcd"
    blobs = tmp_path / "models--a--b/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in plain.iterdir():
        path.rename(blobs / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    (snapshot / "code.py").write_text("code")
    convert.megatron_to_hf(tree, checkpoint, tmp_path / "target", tokenizer=snapshot)
    copied = tmp_path / "target/tokenizer.json"
    assert copied.read_bytes() == (blobs / "tokenizer.json").read_bytes()
    assert not copied.is_symlink() and not (tmp_path / "target/code.py").exists()


# -- tokenizers that take a library down -----------------------------------------------------------


def nested(folder):
    path = folder / "tokenizer.json"
    path.write_text('{"model": {"vocab": {"a": 1}}, "x":' + "[" * NESTED + "]" * NESTED + "}")


def test_a_tokenizer_nested_without_end_is_refused(checkpoint, refusal, tmp_path):  # noqa: F811
    folder = write_tokenizer(tmp_path / "foreign", 250)
    nested(folder)
    assert "foreign" in refusal(convert.megatron_to_hf, checkpoint, tokenizer=folder)


# -- sizes and kinds of models ---------------------------------------------------------------------


@pytest.mark.parametrize("size", [-1, 0, 10**9, 10**30])
@pytest.mark.parametrize("key", SIZES)
def test_an_absurd_size_of_a_model_is_refused(hf, refusal, key, size):  # noqa: F811
    edit(hf, **{key: size})
    refusal(convert.hf_to_megatron, hf)


@pytest.mark.parametrize("size", [-1, 0, 10**9])
@pytest.mark.parametrize("name", ["num_layers", "hidden_size", "padded_vocab_size"])
def test_an_absurd_size_of_a_checkpoint_is_refused(checkpoint, refusal, name, size):  # noqa: F811
    assert name in ARGS
    record(checkpoint, **{name: size})
    refusal(convert.megatron_to_hf, checkpoint)


def test_a_model_that_does_not_fit_into_memory_is_refused(hf, refusal, monkeypatch):  # noqa: F811
    monkeypatch.setattr(isolated, "machine_memory", lambda: 1 << 30)
    assert "1 GiB" in refusal(convert.hf_to_megatron, hf)


def test_a_kind_of_model_that_names_its_own_code_is_refused(hf, refusal):  # noqa: F811
    edit(hf, model_type="foreign", auto_map={"AutoConfig": "code.Config"})
    refusal(convert.hf_to_megatron, hf)


@pytest.mark.parametrize("make", [pipe, device, os.mkdir])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_only_regular_files_of_a_model_are_read(hf, refusal, name, make):  # noqa: F811
    (hf / name).unlink()
    make(hf / name)
    assert name in refusal(convert.hf_to_megatron, hf)
