"""Cached results of programs that run on a source, which is made only if one runs."""

import pytest
from mqo.launch import program_cache
from mqo.launch.config import resolve
from mqo.launch.program_cache import Source, ask_cached, source_of
from mqo.overlay.series import Series

PROGRAM = "tools/coverage.py"


@pytest.fixture
def asked(vendored, checkout_with, tmp_path, monkeypatch):
    """A function that asks for a result, and the list of the programs that ran."""
    project = checkout_with(cache=tmp_path / "cache")
    ran = []

    def call(program, *request, **rest):
        ran.append(program)
        return {"size": program.stat().st_size}

    monkeypatch.setattr(program_cache, "call", call)

    def answer(make=lambda source: source):
        series = Series.of_project(project)
        with source_of(project, vendored, series, config(), PROGRAM) as source:
            return ask_cached(project, make(source), PROGRAM, "measure", {}, limit_s=9, help="")

    return answer, ran


def config(mode="bf16", **rest):
    return resolve("llama32-1b", "wikipedia", mode, "tiny", **rest)


VARIANTS = {
    "unquantized": config(),
    "types": config("mxfp4", gemms="all"),
    "without sites": config(without=("quant_sites",)),
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_the_digests_are_those_of_the_source_when_it_is_made(vendored, checkout_with, variant):
    project = checkout_with()
    with source_of(project, vendored, Series.of_project(project), variant, PROGRAM) as source:
        expected = source.digests()
        assert Source(source.path).digests() == expected


def test_a_cached_result_makes_no_source(asked, monkeypatch):
    answer, ran = asked
    first = answer()
    monkeypatch.setattr(program_cache, "snapshot", None)
    assert answer() == first
    assert len(ran) == 1


def test_a_source_on_disk_shares_the_result(asked):
    answer, ran = asked
    assert answer() == answer(make=lambda source: Source(source.path))
    assert len(ran) == 1


def test_a_result_belongs_to_the_source_that_ran(asked, monkeypatch):
    """Not to the digests from before it was made: the tree may change in between."""
    answer, ran = asked
    with monkeypatch.context() as patch:
        patch.setattr(program_cache.LazySource, "digests", lambda source: {"before": "a change"})
        answer()
    answer()
    assert len(ran) == 1
