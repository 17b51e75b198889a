"""Formats of a user's file: types like the built-in ones, and refusals that name the row."""

import pytest
import torch
from mqo.quant import QuantSpec, cpu, fake_quantize, formats, load_formats, pack, reference
from mqo.quant.own_formats import own_formats, read_rows

from ..own_format import FILE

ELEMENTS = {"e3m3": {"bits": 7, "mantissa_bits": 3}}
ROW = {"element": "e3m3", "scale": "e8m0", "block": 32}


@pytest.fixture
def own(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text(FILE, encoding="utf-8")
    assert load_formats(file) == ["own7"]
    return file


def test_a_format_of_a_file_is_a_type_of_every_implementation(own):
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    spec = QuantSpec("own7")
    expected = reference.qdq(x, spec)
    assert "own7" in formats.types()
    for values in (fake_quantize(x, "own7"), cpu.qdq(x, spec), pack(x, spec).unpack()):
        assert torch.equal(values, expected)
    assert load_formats(own) == ["own7"]


def test_another_definition_of_the_same_name_is_refused(own, tmp_path):
    other = tmp_path / "other.toml"
    other.write_text(FILE.replace("block = 32", "block = 16"), encoding="utf-8")
    with pytest.raises(ValueError, match=r"formats\.own7"):
        load_formats(other)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mxfp8", {}),
        ("Own", {}),
        ("own", {"block": 48}),
        ("own", {"block": "32"}),
        ("own", {"element": "e9m9"}),
        ("own", {"scale": "hif4"}),
        ("own", {"width": 3}),
    ],
)
def test_a_bad_row_is_refused_by_name(name, change):
    with pytest.raises(ValueError, match=rf"formats\.{name}"):
        own_formats({"elements": ELEMENTS, "formats": {name: ROW | change}}, "a file")


def test_all_faults_of_a_file_are_listed_with_its_valid_rows():
    rows = {"good": ROW, "bad": ROW | {"block": 48}, "nvfp4": ROW, "2nd": ROW}
    valid, faults = read_rows({"elements": ELEMENTS, "formats": rows}, "a file")
    assert list(valid) == ["good"]
    assert [fault.split(":")[0] for fault in faults] == [
        "formats.bad",
        "formats.nvfp4",
        "formats.2nd",
    ]
    assert read_rows({"formats": rows, "colors": {}}, "a file")[0] == {}
    assert read_rows({"elements": ELEMENTS}, "a file")[1] != []
