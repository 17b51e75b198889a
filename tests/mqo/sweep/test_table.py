import io
import json
from dataclasses import replace

import pytest
from mqo.launch.progress import Progress
from mqo.runs import RunFolder
from mqo.sweep import configs, table
from mqo.sweep.state import Entry
from rich.console import Console

LONGEST = "deepseek2_lite_wikipedia_FA_linear_mxfp8_seed12345"
ENTRIES = [
    Entry("a", "0", "done", "a", 1, "", 160, 6.5, 6.25, 3725.0),
    Entry(LONGEST, "0", "running"),
    Entry("b", "0", "failed", "b", 2, "[red]no markup"),
    Entry("c", "0"),
]


@pytest.fixture
def progress(tmp_path):
    """Of a run that is at step 3 of 8 (256 tokens each), at half a second a step."""
    (job,) = configs.jobs("llama32-1b", "wikipedia", "bf16", "tiny")
    rows = [("lm loss", 8.0), ("iteration-time", 0.5), ("lm loss validation", 7.25), ("x", 1.0)]
    text = [json.dumps({"iteration": 3, "name": name, "value": value}) for name, value in rows]
    run = RunFolder(tmp_path)
    run.metrics.write_text("\n".join(text) + '\n{"iteration": 4')
    made = Progress(job.config.experiment, run.metrics)
    made.update()
    return made


def console(width=80, terminal=False):
    return Console(
        file=io.StringIO(), width=width, height=12, force_terminal=terminal, color_system=None
    )


def test_progress_is_read_from_the_metrics(progress):
    assert (progress.step, progress.steps, progress.loss, progress.valid) == (3, 8, 8.0, 7.25)
    assert (progress.tokens_per_s, progress.seconds_left) == (512, 2.5)
    assert progress.line() == "  step      3/8  loss 8.0000  512 tokens/s  0:02 left"
    assert progress.losses() == "  step      3/8  loss 8.0000  validation loss 7.2500"


def test_a_run_without_metrics_has_no_speed(tmp_path):
    (job,) = configs.jobs("llama32-1b", "wikipedia", "bf16", "tiny")
    made = Progress(job.config.experiment, RunFolder(tmp_path).metrics)
    made.update()
    assert (made.step, made.loss, made.tokens_per_s, made.seconds_left) == (0, None, None, None)


@pytest.mark.parametrize("made", ["live", "summary"])
def test_the_tables_fit_80_columns_and_name_runs_in_full(made, progress):
    labels = {entry.name: entry.name for entry in ENTRIES}
    rows = [
        (entry.name, *table._row(entry, progress if entry.run is None else None))
        for entry in ENTRIES
    ]
    of = table.summary(ENTRIES, labels)
    shown = console()
    shown.print(table.table("title", table.COLUMNS, rows) if made == "live" else of)
    lines = shown.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert LONGEST in "".join(line.split(" ")[0] for line in lines)
    assert any("1:02:05" in line for line in lines) == (made == "summary")
    assert any(line.split()[-3:] == ["8.0000", "512", "0:02"] for line in lines) == (made == "live")


def test_a_log_gets_plain_lines(progress):
    to = console()
    with table.shown(to, {ENTRIES[0].name: "a label"}) as view:
        assert isinstance(view, table.Lines)
        view.say("started  [a]")
        view.show(ENTRIES, {LONGEST: progress})  # too soon
        view.said -= table.EVERY_S
        view.show(ENTRIES, {LONGEST: progress})
    assert to.file.getvalue().splitlines() == [
        "started  [a]",
        f"running  {LONGEST}",
        "  step      3/8  loss 8.0000  512 tokens/s  0:02 left",
        "1 of 4 done, 1 running, 1 failed",
    ]


def test_a_terminal_gets_a_table_that_fits_its_height_the_failed_first(progress):
    to = console(terminal=True)
    many = [*ENTRIES, *(replace(ENTRIES[0], name=f"done{n}") for n in range(30))]
    with table.shown(to, {ENTRIES[0].name: "a label"}) as view:
        view.say("started  a")
        view.say("failed   b: [red]no markup")
        view.show(many, {LONGEST: progress})
    text = to.file.getvalue()
    assert "failed   b: [red]no markup" in text
    assert "started" not in text
    assert "31 of 34 done, 1 running, 1 failed" in text
    assert "a label" in text
    assert text.index("b  ") < text.index("deepseek2_lite")
    assert "done29" not in text
