"""A whole performance test: real runs of a very small model."""

import json

import pytest
from mqo.perf.trace import PARTS, REST
from mqo.quant.formats import SITES
from mqo.runs import RunFolder

pytest.importorskip("torch")
from .real_runs import TINY, launched, losses
from .vendored_tree import PROJECT as PROJECT

pytestmark = pytest.mark.slow

STEPS = 6  # of TINY


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The command's folder, its exit code and its output."""
    folder = tmp_path_factory.mktemp("a test") / "perf"
    words = ("--model", "llama32-1b", "--mode", "FA_linear_mxfp8", "--training-config", "tiny")
    ended = launched("-m", "mqo", "perf", *words, "--no-scaling", "-o", folder, "--", *TINY)
    assert (folder / "perf.json").exists(), ended.stdout + ended.stderr
    return folder, ended


@pytest.fixture(scope="module")
def sections(done):
    record = json.loads((done[0] / "perf.json").read_text())
    return {section["name"]: section for section in record["sections"]}


def outcomes(section):
    return [verdict["outcome"] for verdict in section["verdicts"]]


def test_the_exit_code_says_whether_a_verdict_failed(done, sections):
    folder, ended = done
    failed = any("fail" in outcomes(section) for section in sections.values())
    assert ended.returncode == int(failed)
    assert ended.stdout.endswith(f"{folder / 'index.html'}\n")
    assert sorted(path.name for path in (folder / "runs").iterdir()) == [
        "again",
        "baseline",
        "mode",
    ]


def test_the_products_of_all_sites_are_as_exact_as_their_types(sections):
    rows = {row["site"]: row for row in sections["precision"]["rows"]}
    types = dict.fromkeys(SITES, "none") | {"fprop": "mxfp8", "qk": "mxfp8"}
    del types["qk_recompute"]  # it is counted only if it has a type
    assert {site: row["type"] for site, row in rows.items()} == types
    assert outcomes(sections["precision"]) == ["pass"] * 3


def test_losses_of_so_few_steps_are_not_judged(done, sections):
    (row,) = sections["loss"]["rows"]
    assert row["steps"] == STEPS
    one, other = (losses(RunFolder(done[0] / "runs" / name))[0] for name in ("baseline", "mode"))
    errors = [abs(b - a) for (_, a), (_, b) in zip(one, other, strict=True)]
    assert row["mean absolute error, nats"] == pytest.approx(sum(errors) / STEPS)
    assert row["mean absolute error, nats"] > 0
    assert outcomes(sections["loss"]) == ["not judged"]


def test_two_runs_end_with_the_same_bits(sections):
    assert outcomes(sections["determinism"]) == ["pass", "pass"]
    compared = {row["what"]: row["compared"] for row in sections["determinism"]["rows"]}
    assert compared["steps' losses"] == STEPS
    # The weights, and as many of each of Adam's two moments.
    assert compared["tensors saved"] > 20


def test_a_steps_time_has_a_label(done, sections):
    seconds = {row["part"]: row["ms a step"] for row in sections["breakdown"]["rows"]}
    assert list(seconds) == [*PARTS, REST]
    assert all(value > 0 for value in seconds.values())
    assert (done[0] / "trace.json.gz").stat().st_size > 1000


def test_throughput_and_memory_are_of_real_runs(sections):
    for row in sections["throughput"]["rows"]:
        assert row["tokens/s"] > 0
        assert row["TFLOP/s"] > 0
    parts = {row["part"]: row["MiB"] for row in sections["memory"]["rows"]}
    assert 0 < parts["weights"] < parts["activations and all else"] < parts["peak, mode"]


def test_what_was_left_out_says_so(sections):
    (verdict,) = sections["scaling"]["verdicts"]
    assert (verdict["outcome"], verdict["value"]) == ("not judged", None)
    assert verdict["why"] == "--no-scaling was given"
