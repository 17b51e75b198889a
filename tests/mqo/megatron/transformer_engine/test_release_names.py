"""Which Transformer Engine is known, by name alone."""

import importlib.metadata
import sys
from types import SimpleNamespace

import pytest
from mqo.megatron.transformer_engine import releases
from mqo.megatron.transformer_engine.factory import quantizer


@pytest.mark.parametrize("version", ["2.10.0", "2.16.0+cu12", "2.19.0.dev0+abc", "2.20.2"])
def test_known_releases_have_no_fault(version):
    assert releases.fault(version) is None
    releases.check_release(version)


@pytest.mark.parametrize("version", ["1.13.0", "2.9.1", "2.21.0", "3.0", "main", None])
def test_others_are_refused_with_the_range(version):
    assert "2.10 to 2.20" in releases.fault(version)
    with pytest.raises(releases.EngineError, match="--transformer-impl local"):
        releases.check_release(version)


def test_the_refusal_names_the_releases_and_the_alternative():
    with pytest.raises(releases.EngineError) as error:
        releases.check_release("3.0")
    assert str(error.value) == (
        "Transformer Engine 3.0 is installed; supported releases are 2.10 to 2.20. Expected: one "
        "of these, or --transformer-impl local, whose layers quantize the same operands to the "
        "same bits"
    )


def test_plain_tensors_are_multiplied_from_2_19_on():
    known = ["2.10.0", "2.18.1", "2.19.0", "2.20.2"]
    assert list(map(releases.multiplies_plain_tensors, known)) == [False, False, True, True]


def test_the_imported_one_counts_before_the_installed_one(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.11.0")
    monkeypatch.setitem(sys.modules, releases.NAME, SimpleNamespace(__version__="2.12.0"))
    assert releases.installed() == "2.12.0"
    monkeypatch.setitem(sys.modules, releases.NAME, None)  # hidden
    assert releases.installed() == "2.11.0"


def test_without_one_there_is_no_version(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    monkeypatch.setitem(sys.modules, releases.NAME, None)
    assert releases.installed() is None


def test_the_factorys_path_leads_to_it():
    module, _, name = releases.FACTORY.rpartition(".")
    assert getattr(sys.modules[module], name) is quantizer
