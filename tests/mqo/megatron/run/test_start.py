"""What has upstream start faster changes nothing that it finds."""

import ast
import inspect
from dataclasses import dataclass

import pytest
import torch
from mqo.megatron.run import start

from .... import forking


@dataclass(
    frozen=True,
)
class Decorated:
    """Of several lines."""

    n: int = 1


@pytest.mark.parametrize("kind", [Decorated, forking.Forked, start._late, ast.NodeVisitor])
def test_a_source_is_what_inspect_finds(kind, monkeypatch):
    monkeypatch.setattr(inspect, "getsource", start._getsource)
    start.quicken_sources()
    assert inspect.getsource(kind).strip() == start._getsource(kind).strip()
    assert inspect.getsource is not start._getsource


def test_a_class_within_a_function_has_its_source():
    class Inner:
        n = 1

    assert start.source_of(Inner) == inspect.getsource(Inner)


def test_a_function_is_compiled_when_it_is_called(monkeypatch):
    compiled = []

    def compile(function, **options):
        compiled.append(options)
        return function

    monkeypatch.setattr(start, "_compile", compile)
    monkeypatch.setattr(torch, "compile", start._late)

    @torch.compile
    def plain(x):
        return x + 1

    @torch.compile(dynamic=True)
    def with_options(x):
        return x + 2

    assert compiled == []
    assert (plain(1), plain(1), with_options(1)) == (2, 2, 3)
    assert compiled == [{}, {"dynamic": True}]
    assert plain.__name__ == "plain"
