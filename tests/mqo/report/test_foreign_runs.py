"""Runs from elsewhere: a report names those that it cannot read or show, and shows the rest."""

import json
import os
import shutil

import pytest
from mqo.report.collect import collect
from mqo.runs import RunFolder

from ..odd_files import ODD
from .conftest import make_run

FILES = ("config", "result", "metrics", "environment", "quant_config", "command", "quant_stats")
FILES += ("coverage", "device", "ended", "implementation", "overlay_diff")
NAMES = ("a\0b", "a\nb", "a\x1b[2J", "\ud800", "n" * 5000)
SHOWN_NAMES = (r"$\frac{$/..", "<script>")


@pytest.fixture
def runs(tmp_path):
    """A folder with two runs that a report shows."""
    for mode in ("bf16", "FA_mxfp8"):
        make_run(tmp_path / "runs" / mode, mode, steps=20)
    return tmp_path / "runs"


def rename(run, name, part="experiment", key="name"):
    table = json.loads(run.config.read_text())
    table[part][key] = name
    run.config.write_text(json.dumps(table))


def report(command_line, runs, out):
    code, _, error = command_line("report", runs, "-o", out)
    assert code == 0, error
    return (out / "index.html").read_text(encoding="utf-8")


def nested(path):
    path.write_text("[" * 100_000)


@pytest.mark.parametrize("make", [*ODD, nested, os.mkdir])
@pytest.mark.parametrize("name", FILES)
def test_no_file_of_a_run_holds_a_report_up(runs, name, make):
    path = getattr(make_run(runs / "odd", "mxfp4", steps=20), name)
    path.unlink(missing_ok=True)
    make(path)
    shown, left_out = collect([runs])
    assert {run.name for run in shown} >= {"bf16", "FA_mxfp8"}
    assert len(shown) + len(left_out) >= 2 + (name != "config")


@pytest.mark.parametrize("name", NAMES)
def test_a_run_with_a_name_that_cannot_be_shown_is_left_out_and_named(runs, name):
    rename(make_run(runs / "odd", "mxfp4", steps=20), name)
    shown, left_out = collect([runs])
    assert {run.name for run in shown} == {"bf16", "FA_mxfp8"}
    assert [(one.name, one.what) for one in left_out] == [("odd", "unreadable")]


def test_a_folder_whose_name_is_not_utf_8_is_left_out_and_named(runs, tmp_path, command_line):
    shutil.copytree(runs / "bf16", runs / "od\udcffd")
    shown, left_out = collect([runs])
    assert len(shown) == 2 and [one.name.rpartition("/")[2] for one in left_out] == ["od\\xffd"]
    assert "od\\xffd" in report(command_line, runs, tmp_path / "out")


@pytest.mark.parametrize("name", SHOWN_NAMES)
def test_a_name_is_shown_as_it_is_whatever_it_means_elsewhere(runs, tmp_path, command_line, name):
    pytest.importorskip("matplotlib")
    for run in ("bf16", "FA_mxfp8"):
        rename(RunFolder(runs / run), name)
    page = report(command_line, runs, tmp_path / "out")
    assert "<script>" not in name or "&lt;script&gt;" in page
    assert {path.parent for path in (tmp_path / "out").iterdir()} == {tmp_path / "out"}


def test_links_to_a_folder_within_it_are_followed_once(runs, tmp_path, command_line):
    for name in ("one", "two", "three"):
        (runs / name).symlink_to(".")
    shown, left_out = collect([runs])
    assert len(shown) == 2 and left_out == []
    report(command_line, runs, tmp_path / "out")
