"""The share of outputs that equal the exact model, and the products that a process stores."""

import os
import subprocess
import sys

import pytest
import torch

FPROP = """
import torch
from mqo.quant.gemms import gemm_operands

torch.manual_seed(0)
x, weight = torch.randn(3, 40, 256).bfloat16(), torch.randn(64, 256).bfloat16()
operands = gemm_operands("fprop", "nvfp4", None)
operands.product(torch.matmul)(operands.lhs(x), operands.rhs(weight).t())
print(operands.alphas)
"""


@pytest.fixture(scope="module")
def exactness(benchmark_module):
    return benchmark_module("exactness")


@pytest.mark.parametrize("kind", ["nvfp4", "fp8_tensor_e4m3"])
def test_rounded_operands_are_told_from_alpha_in_the_product(exactness, kind):
    torch.manual_seed(0)
    a, b = torch.randn(64, 512), torch.randn(48, 512)
    shares = [exactness.equal(kind, torch.bfloat16, a, b, alphas=a_) for a_ in (False, True)]
    assert shares[0] < 0.9 < 0.999 < shares[1]


def run(exactness, chosen):
    with exactness.products(str(chosen)):
        command = [sys.executable, "-c", FPROP]
        done = subprocess.run(command, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_process_stores_its_products(exactness, tmp_path):
    assert "Alphas" in run(exactness, tmp_path)
    (path,) = tmp_path.glob("*.pt")
    assert path.stem.split() == ["fprop", "unlabeled"]
    kept = torch.load(path)
    assert kept["left"].shape == (120, 256)
    shares = exactness.as_model(kept["left"], kept["right"], kept["alpha"], kept["result"])
    assert shares > 0.999


def test_a_process_rounds_operands_with_their_alpha(exactness):
    assert run(exactness, "rounded") == "None"
    assert run(exactness, "") != "None"
