"""Packed weights, as the programs that they are for read them."""

import json
import runpy
import shutil
import warnings
from pathlib import Path

import megatron.inference
import pytest
import torch
from megatron.inference.packed.folder import write
from megatron.inference.packed.layouts import COMPRESSED, LAYOUTS
from mqo.megatron.run.errors import PtqError
from mqo.quant.backend import fake_quantize
from mqo.quant.config import parse
from mqo.quant.formats import FORMATS
from mqo.quant.spec import QuantSpec
from safetensors.torch import load_file, save_file

from ....small_llama import small_llama

transformers = pytest.importorskip("transformers")
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
TOKENS = torch.arange(1, 13).reshape(2, 6)
READER = Path(megatron.inference.__file__).parents[2] / "tools/dequantize.py"
FP8 = ("fp8_block", "fp8_block_fp32")


def weights(folder):
    """{name: tensor} of the files."""
    files = folder.glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def rounded(tensors, how):
    """The projections as training would round them: q, k, v have one amax, and so have gate, up.

    `how` gives a spec, or None, by name.
    """
    made = dict(tensors)
    for name in (name for name in tensors if name.endswith("_proj.weight") or "_mqa." in name):
        parent, own = name.split(".")[:-2], name.split(".")[-2]
        group = next((one for one in FUSED if own in one), (own,))
        fused = [tensors.get(".".join([*parent, one, "weight"])) for one in group]
        amax = max(part.abs().max() for part in fused if part is not None).float()
        if spec := how(name):
            made[name] = fake_quantize(tensors[name], spec, axis=-1, amax=amax)
    return made


def uniform(quant_type):
    spec = QuantSpec(quant_type, tile="square" if quant_type in FP8 else "row")
    return lambda name: spec


def plain(folder, place, how):
    """A folder with the rounded weights in full."""
    place.mkdir()
    save_file(rounded(weights(folder), how), place / "model.safetensors", {"format": "pt"})
    shutil.copy(folder / "config.json", place)
    return place


def logits(place, **options):
    load = transformers.AutoModelForCausalLM.from_pretrained
    with torch.no_grad():
        return load(place, dtype=torch.bfloat16, **options)(TOKENS).logits


@pytest.mark.parametrize("quant_type", COMPRESSED)
def test_transformers_computes_with_our_values(folder, tmp_path, quant_type):
    pytest.importorskip("compressed_tensors")
    layout = "compressed-tensors"
    small = tmp_path / "packed"
    small.mkdir()
    if folder.name == "deepseek" and not COMPRESSED[quant_type].reads_experts:
        with pytest.raises(PtqError, match=rf"experts in {COMPRESSED[quant_type].name} "):
            write(folder, small, quant_type=quant_type, layout=layout)
        assert list(small.iterdir()) == []
        assert write(folder, small, quant_type=quant_type)["layout"] == "mqo"
        return
    facts = write(folder, small, quant_type=quant_type)
    assert (facts["layout"], facts["why"]) == (layout, None)
    actual = logits(small)
    assert actual.equal(logits(plain(folder, tmp_path / "plain", uniform(quant_type))))
    assert not actual.equal(logits(folder))


@pytest.mark.parametrize("quant_type", COMPRESSED)
def test_transformers_loads_a_model_in_fp32_without_being_told_a_dtype(tmp_path, quant_type):
    pytest.importorskip("compressed_tensors")
    full, small = tmp_path / "full", tmp_path / "packed"
    small_llama().save_pretrained(full)
    small.mkdir()
    write(full, small, quant_type=quant_type)
    load = transformers.AutoModelForCausalLM.from_pretrained
    with torch.no_grad():
        assert load(small)(TOKENS).logits.isfinite().all()


@pytest.mark.parametrize("quant_type", FP8)
def test_transformers_own_layout_has_our_values_too(folder, tmp_path, quant_type):
    small = tmp_path / "packed"
    small.mkdir()
    if folder.name == "deepseek":  # squares that its rows do not fill
        with pytest.raises(PtqError, match=r"kv_a_proj_with_mqa, \[\d+, \d+\]"):
            write(folder, small, quant_type=quant_type, layout="fp8")
        return
    write(folder, small, quant_type=quant_type, layout="fp8")
    how = transformers.FineGrainedFP8Config(dequantize=True)
    actual = logits(small, quantization_config=how)
    assert actual.equal(logits(plain(folder, tmp_path / "plain", uniform(quant_type))))


def dequantized(small, target):
    """What the reader that lies in a folder makes of it, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runpy.run_path(str(READER))["main"](small, target)
    return weights(target)


@pytest.mark.parametrize("quant_type", FORMATS)
def test_the_reader_of_our_layout_gives_every_formats_bits(folder, tmp_path, quant_type):
    small = tmp_path / "packed"
    small.mkdir()
    shutil.copy(folder / "config.json", small)
    write(folder, small, quant_type=quant_type, layout="mqo")
    actual = dequantized(small, tmp_path / "full")
    expected = rounded(weights(folder), uniform(quant_type))
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].view(torch.int16).equal(tensor.view(torch.int16)), name
    assert logits(tmp_path / "full").isfinite().all()


@pytest.mark.parametrize("quant_type", FORMATS)
def test_a_projection_takes_as_many_bits_as_its_format(folder, tmp_path, quant_type):
    write(folder, tmp_path, quant_type=quant_type, layout="mqo")
    name = "model.layers.0.mlp.down_proj."
    parts = {k.removeprefix(name): t for k, t in weights(tmp_path).items() if k.startswith(name)}
    elements = weights(folder)[f"{name}weight"].numel()
    row = FORMATS[quant_type]
    assert parts.pop("codes").nbytes * 8 == elements * row.code_bits
    scales = sum(part.nbytes for part in parts.values() if part.numel() > 1)
    assert scales <= elements * (row.packed_bytes - row.code_bits / 8)


def test_files_stay_as_many_and_their_index_names_each_tensor(folder, tmp_path):
    write(folder, tmp_path, quant_type="mxfp4")
    names = {path.name for path in folder.glob("*.safetensors*")}
    assert len(names) > 2
    assert {path.name for path in tmp_path.glob("*.safetensors*")} == names
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    found = weights(tmp_path)
    assert index["weight_map"].keys() == found.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())


RECIPE = """
[asked]
fprop = "nvfp4"
[operands]
"fprop.weight" = { tile = "square" }
[[rules]]
layers = "linear:decoder.layers.0.*"
quant_type = "none"
[[rules]]
layers = "linear:output_layer"
quant_type = "none"
"""
SQUARE = QuantSpec("nvfp4", tile="square")


def test_a_run_is_packed_as_it_quantized_its_weights(folder, tmp_path):
    small = tmp_path / "packed"
    small.mkdir()
    shutil.copy(folder / "config.json", small)
    facts = write(folder, small, config=parse(RECIPE))
    packed = sum(".layers.1." in name and "_proj" in name for name in weights(folder))
    assert facts["types"] == {"nvfp4": packed}
    full = plain(folder, tmp_path / "plain", lambda name: SQUARE if ".layers.1." in name else None)
    if folder.name == "deepseek":
        assert "experts" in facts["why"]
        actual = dequantized(small, tmp_path / "full")
        assert all(tensor.equal(actual[name]) for name, tensor in weights(full).items())
    else:
        pytest.importorskip("compressed_tensors")
        assert logits(small).equal(logits(full))


MIXED = """
[asked]
fprop = "hif4"
[[rules]]
layers = "decoder.layers.1.*"
quant_type = "mxfp6_e3m2"
"""


def test_several_types_go_into_our_layout(folder, tmp_path):
    small = tmp_path / "packed"
    small.mkdir()
    shutil.copy(folder / "config.json", small)
    facts = write(folder, small, config=parse(MIXED))
    assert (facts["layout"], facts["left"]) == ("mqo", 0)
    assert facts["types"].keys() == {"hif4", "mxfp6_e3m2"}
    actual = dequantized(small, tmp_path / "full")
    kinds = ("hif4", "mxfp6_e3m2")
    expected = rounded(weights(folder), lambda name: QuantSpec(kinds[".layers.1." in name]))
    # The output layer is quantized as others are.
    expected["lm_head.weight"] = fake_quantize(expected["lm_head.weight"], QuantSpec("hif4"))
    assert all(tensor.equal(actual[name]) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[asked]\nqk = "mxfp8"', "no weight"),
        (
            '[asked]\nfprop = "mxfp8"\n[schedule]\nfprop = "mxfp8 until 3, then none"',
            "no weight",
        ),
        (
            '[asked]\nfprop = "mxfp8"\n[operands]\n"fprop.weight" = { rounding = "stochastic" }',
            "stochastically",
        ),
        ('[asked]\nfprop = "mxfp8"\n[operands]\n"fprop.weight" = { gain = 0.5 }', "transforms"),
    ],
)
def test_what_packed_weights_cannot_repeat_is_refused(folder, tmp_path, text, said):
    with pytest.raises(PtqError, match=said):
        write(folder, tmp_path, config=parse(text))
    assert list(tmp_path.iterdir()) == []


def test_squares_that_span_heads_are_refused(folder, tmp_path):
    text = '[asked]\nfprop = "fp8_block"\n[operands]\n"fprop.weight" = { tile = "square" }'
    with pytest.raises(PtqError, match=r"Squares of 128 .*\.linear_"):
        write(folder, tmp_path, config=parse(text))


def test_a_layout_that_cannot_hold_a_type_says_which_can(folder, tmp_path):
    for layout in set(LAYOUTS) - {"mqo"}:
        with pytest.raises(PtqError, match=rf"{layout} .* hif4.*--layout mqo"):
            write(folder, tmp_path, quant_type="hif4", layout=layout)
    assert list(tmp_path.iterdir()) == []
