"""The examples in the docstrings of the public API give what they show."""

import doctest
from pathlib import Path

import mqo.quant
import pytest
import torch

# What other functions return, what only patched Megatron calls, and a report of times.
WITHOUT = {
    *("Comparison", "GemmOperands", "Measurement", "PackedTensor", "QuantConfig", "QuantizerError"),
    *("check_quantizer", "gemm_operands", "measure", "saved_operands", "site_types"),
}
PUBLIC = [name for name in mqo.quant.__all__ if callable(getattr(mqo.quant, name))]


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in WITHOUT])
def test_a_public_name_has_an_example_that_holds(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {name: getattr(mqo.quant, name) for name in mqo.quant.__all__}
    finder = doctest.DocTestFinder(recurse=False)
    globs = names | {"torch": torch, "Path": Path}
    (example,) = finder.find(getattr(mqo.quant, name), name, globs=globs)
    assert example.examples
    said = []
    failed, _ = doctest.DocTestRunner().run(example, out=said.append)
    assert not failed, "".join(said)


def test_no_name_without_an_example_is_gone():
    assert set(PUBLIC) >= WITHOUT
