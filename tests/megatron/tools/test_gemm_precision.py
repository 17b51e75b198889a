"""How exact a site's GEMM is, on small products."""

import json
import math
import os
import sys

import pytest
from mqo.project import Project
from mqo.quant.formats import ATTENTION, SITES

from ... import forking

torch = pytest.importorskip("torch")
FILE = Project.here().tree / "tools/gemm_precision.py"
SIZES = {"batch": 2, "m": 16, "n": 24, "k": 64}


@pytest.fixture(scope="module")
def program(load_program):
    return load_program("gemm_precision")


def product(site, quant_type="none", **rest):
    return SIZES | {"gemm": site, "quant_type": quant_type, "flops": 1} | rest


@pytest.mark.parametrize("site", SITES)
def test_both_operands_are_blocked_along_the_contraction(program, site):
    lhs, rhs = program.operands(site, SIZES, torch.Generator().manual_seed(0))
    about = SITES[site]
    assert lhs.shape[about.lhs_axis] == rhs.shape[about.rhs_axis] == SIZES["k"]
    made = torch.matmul(*program.laid_out(site, lhs, rhs))
    batch = (2,) if about.layer == ATTENTION else ()
    assert made.shape == (*batch, 16, 24)


@pytest.mark.parametrize("site", SITES)
def test_mx_products_are_worth_their_bits_and_the_multiplication_adds_little(program, site):
    """Each bit of a mantissa is worth 6 dB: e2m1 has two fewer than e4m3."""
    rows = {t: program.measured(product(site, t), torch.float32, 1) for t in ("mxfp8", "mxfp4")}
    sqnr = {t: row["total"]["sqnr_db"] for t, row in rows.items()}
    assert 25 < sqnr["mxfp8"] < 30
    assert 10 < sqnr["mxfp8"] - sqnr["mxfp4"] < 14
    assert all(float(row["product"]["sqnr_db"]) > 130 for row in rows.values())


def test_an_unquantized_product_has_the_error_of_its_dtype_alone(program):
    found = {
        dtype: program.measured(product("fprop"), dtype, 1)
        for dtype in (torch.float32, torch.bfloat16)
    }
    for row in found.values():
        assert row["total"] == row["product"]
    # A bf16 result is the exact one rounded: half a ULP, but for the rare tie that fp32 moves.
    assert found[torch.bfloat16]["total"]["max_ulp"] < 0.6
    assert 50 < found[torch.bfloat16]["total"]["sqnr_db"] < 60
    assert found[torch.float32]["total"]["sqnr_db"] > 130


@pytest.mark.parametrize("site", SITES)
def test_a_product_with_scales_of_tensors_is_rounded_once(program, site):
    row = program.measured(product(site, "nvfp4"), torch.bfloat16, 1)
    assert row["product"]["max_ulp"] < 0.6


def test_equal_seeds_draw_equal_operands(program):
    one, again, other = (
        program.measured(product("qk", "hifp8"), torch.float32, n) for n in (1, 1, 2)
    )
    assert one == again != other


def test_errors_by_hand(program):
    exact = torch.tensor([1.0, -4.0, 0.0, 3.0], dtype=torch.float64)
    got = torch.tensor([1.0, -4.0, 0.0, 3.0 + 2**-22], dtype=torch.float32)
    found = program.error(got, exact)
    assert (found["max_ulp"], found["mean_ulp"]) == (1.0, 0.25)
    assert found["relative_error"] == pytest.approx(2**-22 / math.sqrt(26))
    assert found["sqnr_db"] == pytest.approx(-20 * math.log10(found["relative_error"]))
    assert program.error(exact.float(), exact)["sqnr_db"] == math.inf


def test_the_spacing_is_that_of_torchs_neighbors(program):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        values = torch.tensor([1.0, 1.5, 2.0, 3.99, -0.3, 1000.0, 0.0, 1e-30]).double()
        at = values.abs().to(dtype)
        up = torch.nextafter(at, torch.full_like(at, math.inf)).double() - at.double()
        kept = at.double() <= values.abs()  # rounding up may have passed a power of two
        assert torch.equal(program.spacing(values, dtype)[kept], up[kept])


def test_the_largest_quantized_product_of_a_site_is_taken(program):
    rows = [
        product("fprop", "none", flops=9),
        product("fprop", "mxfp8", flops=2),
        product("fprop", "mxfp8", flops=5, n=7),
        product("qk", "none", flops=3),
        product("mm", None, flops=99),
    ]
    assert program.largest(rows) == [rows[2], rows[3]]


def test_the_program_writes_a_row_a_site_by_the_runs_options(tmp_path):
    coverage, target = tmp_path / "coverage.json", tmp_path / "made.json"
    rows = [product(site, "mxfp8") for site in ("fprop", "pv")] + [product("mm", None)]
    coverage.write_text(json.dumps({"dtype": "fp32", "products": rows}))
    (tmp_path / "quant.toml").write_text('[layers]\nexclude = ["fprop:*"]\n')
    found = []
    for options in ({}, {"MQO_QUANT_CONFIG": str(tmp_path / "quant.toml")}):
        words = [sys.executable, "-I", str(FILE), str(coverage), str(target)]
        forking.run(words, check=True, env=os.environ | options)
        found.append(json.loads(target.read_text()))
    assert [row["site"] for row in found[0]["sites"]] == ["fprop", "pv"]
    quantized, left_out = (made["sites"][0]["total"]["sqnr_db"] for made in found)
    assert quantized < 30 < 120 < left_out
