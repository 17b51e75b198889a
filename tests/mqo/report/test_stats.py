"""`mqo stats`: the tables of saved tensors, measured by the real program."""

import json
import subprocess
import sys
from functools import partial

import pytest
from mqo.errors import DataError, RunError
from mqo.project import Project
from mqo.quant import backend, formats
from mqo.report import stats as report
from mqo.report.stats import TensorStats, measure, stats_lines

torch = pytest.importorskip("torch")
TREE = Project.here().tree
FPROP, PV = "fprop/decoder.layers.0.mlp.linear_fc1/x", "pv/decoder.layers.0.core/value"


@pytest.fixture(scope="module", autouse=True)
def without_kernels():
    """The program computes with the reference: a kernel for each choice takes long to compile."""
    with pytest.MonkeyPatch.context() as patch:
        variables = {backend.ENVIRONMENT_VARIABLE: "reference"}
        patch.setattr(report, "call", partial(report.call, variables=variables))
        yield


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    """A file as a run dumps it, with a tensor of integers beside."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(48, 2, 64, generator=generator)
    path = tmp_path_factory.mktemp("a run") / "iteration_1_rank_0.safetensors"
    save_file({FPROP: normal, PV: normal.bfloat16(), "ids": torch.arange(4)}, path)
    return path


@pytest.fixture(scope="module")
def stats(dump):
    return measure(TREE, dump, ["*"], None)


def chosen(table, **choice):
    return [row for row in table["rows"] if choice.items() <= row.items()]


def test_there_is_a_row_for_every_choice_that_a_format_has(stats):
    table = next(table for table in stats.tables if table["name"] == FPROP)
    choices = ("quant_type", "block", "scale_rule", "tensor_scale", "tile")
    rows = [tuple(row[name] for name in choices) for row in table["rows"]]
    # Six mx formats, four with square tiles, hifp8 with and without a tensor scale, four more,
    # and two with two levels, which have square tiles and three rules.
    assert len(set(rows)) == len(rows) == 6 * 4 * 4 + 4 * 2 + 2 + 4 + 2 * 2 * 3
    assert {row[0] for row in rows} == set(formats.FORMATS)
    assert len(chosen(table, quant_type="hifp8")) == 2
    assert len(chosen(table, quant_type="nvfp4", tile="square", scale_rule=None)) == 1


def test_the_numbers_are_those_of_the_quantizers(stats):
    from mqo.quant.backend import fake_quantize
    from mqo.quant.measurement import decibels
    from mqo.quant.spec import QuantSpec

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(48, 2, 64, generator=generator)
    table = next(table for table in stats.tables if table["name"] == FPROP)
    (row,) = chosen(table, quant_type="mxfp4", block=16, scale_rule="rceil")
    q = fake_quantize(x, QuantSpec("mxfp4", block=16, scale_rule="rceil"))
    noise = (x - q).double().square().sum().item()
    expected = decibels(x.double().square().sum().item(), noise)
    assert row["sqnr_db"] == pytest.approx(expected, abs=1e-3)
    assert row["underflow"] == ((q == 0) & (x != 0)).sum().item() / (x != 0).sum().item()
    assert row["saturation"] == 0
    (floor,) = chosen(table, quant_type="mxfp4", block=16, scale_rule="floor")
    assert floor["saturation"] > 0
    assert table["amax"] == x.abs().max().item()


def test_a_dumped_operand_is_measured_along_the_axis_of_its_gemm(stats, dump):
    axes = {table["name"]: table["axis"] for table in stats.tables}
    assert axes == {FPROP: -1, PV: 0, "ids": -1}
    (other,) = measure(TREE, dump, [PV], -1).tables
    (own,) = (table for table in stats.tables if table["name"] == PV)
    assert other["axis"] == -1
    assert [r["sqnr_db"] for r in other["rows"]] != [r["sqnr_db"] for r in own["rows"]]


def test_what_cannot_be_quantized_has_no_rows(stats):
    (ids,) = (table for table in stats.tables if table["name"] == "ids")
    assert ids["rows"] == []


def test_a_files_only_tensor_needs_no_name(tmp_path):
    from safetensors.torch import save_file

    save_file({"w": torch.zeros(4, 32)}, tmp_path / "one.safetensors")
    stats = measure(TREE, tmp_path / "one.safetensors", [], None)
    assert [table["name"] for table in stats.tables] == ["w"]
    assert {row["sqnr_db"] for row in stats.tables[0]["rows"]} == {None}


def test_what_json_has_no_number_for_is_text(tmp_path):
    from safetensors.torch import save_file

    save_file({"w": torch.full((4, 32), torch.inf)}, tmp_path / "one.safetensors")
    (table,) = measure(TREE, tmp_path / "one.safetensors", [], None).tables
    assert table["amax"] == "inf"
    assert "nan" in {row["sqnr_db"] for row in table["rows"]} <= {"inf", "nan"}


@pytest.mark.parametrize(
    ("tensors", "message"), [([], "3 tensors, and none was named"), (["x*"], "none matches x")]
)
def test_without_a_choice_the_names_are_shown(dump, tensors, message):
    with pytest.raises(DataError, match=message) as caught:
        measure(TREE, dump, tensors, None)
    assert f"{FPROP}  F32 [48, 2, 64]" in caught.value.detail


def test_a_missing_file_and_one_that_is_no_safetensors_are_refused(tmp_path):
    with pytest.raises(DataError) as caught:
        measure(TREE, tmp_path / "absent", [], None)
    text = f"{tmp_path / 'absent'} is not a file. Expected: a safetensors file."
    assert str(caught.value) == text
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(RunError, match=r"could not measure .*text"):
        measure(TREE, tmp_path / "text", [], None)


def test_a_table_shows_percent_and_what_has_no_number():
    row = {"quant_type": "mxfp8", "block": 32, "scale_rule": "floor", "tensor_scale": False}
    row |= {"tile": "row"}
    row |= {"sqnr_db": 31.456, "underflow": 0.25, "saturation": 0.0001}
    other = row | {"quant_type": "hifp8", "block": None, "tensor_scale": True, "sqnr_db": None}
    other |= {"scale_rule": None}
    square = other | {"quant_type": "nvfp4", "block": 16, "tensor_scale": False, "tile": "square"}
    table = {"name": "w", "axis": 0, "amax": "nan", "rows": [row, other, square]}
    text = stats_lines(TensorStats((), (table,)))
    assert text[0] == "w: blocks along axis 0, amax nan"
    assert text[2].split() == ["mxfp8", "32", "floor", "31.46", "25.0000", "0.0100"]
    assert text[3].split() == ["hifp8", "-", "tensor", "-", "25.0000", "0.0100"]
    assert text[4].split() == ["nvfp4", "16x16", "-", "-", "25.0000", "0.0100"]


def test_the_command_prints_json_and_imports_no_torch(dump):
    code = (
        "import sys; from mqo import cli\n"
        "try:\n    cli.main()\nfinally:\n    assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "stats", dump, "--tensor", FPROP, "--json"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert [table["name"] for table in json.loads(done.stdout)["tables"]] == [FPROP]
