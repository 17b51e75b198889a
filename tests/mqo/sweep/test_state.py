import json
from dataclasses import replace

import pytest
from mqo.errors import MqoError
from mqo.launch.config import RunConfig
from mqo.sweep import configs
from mqo.sweep.state import Entry


def jobs(**rest):
    return configs.jobs("llama32-1b", "wikipedia", "bf16,mxfp8", "tiny", **rest)


RESULT = {"iterations": 8, "train_loss": 7.5, "valid_loss": None, "seconds": 9.0}


def write_result(run):
    more = {"run": str(run.root), "vocab_size": 4096, "types": {}}
    run.result.write_text(json.dumps(RESULT | more))


def test_a_new_folder_has_all_runs_queued(folder):
    entries = folder.entries(jobs())
    assert list(entries) == [job.name for job in jobs()]
    assert {entry.state for entry in entries.values()} == {"queued"}


def test_what_is_written_is_read_back(folder):
    entries = folder.entries(jobs())
    folder.write(entries)
    assert folder.read() == list(entries.values())
    assert [path.name for path in folder.root.iterdir()] == ["sweep.json"]


@pytest.mark.parametrize("ended", [True, False])
def test_a_run_that_ended_after_its_sweep_was_killed_counts(folder, ended):
    job = jobs()[0]
    run = folder.new_run(job)
    entry = Entry(job.name, job.digest, "running", run.root.name, 1)
    folder.write({job.name: entry})
    if ended:
        write_result(run)
    expected = replace(entry, state="done", **RESULT) if ended else replace(entry, state="queued")
    assert folder.entries(jobs())[job.name] == expected


def test_runs_that_are_not_asked_for_stay(folder):
    other = Entry("other", "0", "failed", "other", 2, "its reason")
    folder.write({"other": other})
    assert folder.entries(jobs())["other"] == other


def test_a_run_with_other_settings_is_refused(folder):
    folder.write(folder.entries(jobs()))
    with pytest.raises(MqoError) as caught:
        folder.entries(jobs(extra_flags=("--lr", "1")))
    assert str(caught.value) == (
        f"{folder.file} holds llama32-1b_wikipedia_bf16 with other settings. Expected: the same "
        "training configuration, flags and quantizers as before. Give another folder with -o: "
        "`mqo report` takes several folders."
    )


@pytest.mark.parametrize("same", [True, False])
def test_a_digest_of_an_earlier_version_counts_if_the_run_has_the_same_settings(folder, same):
    job = jobs()[0]
    run = folder.new_run(job)
    write_result(run)
    folder.write({job.name: Entry(job.name, "of old", "done", run.root.name, 1, **RESULT)})
    if same:
        found = folder.entries(jobs())[job.name]
        assert (found.state, found.digest) == ("done", job.digest)
    else:
        with pytest.raises(MqoError, match=f"{folder.file} .*{job.name} .*-o"):
            folder.entries(jobs(extra_flags=("--lr", "1")))


@pytest.mark.parametrize("text", ["{", '{"schema": 2, "cells": []}', '{"schema": 1}', "[]"])
def test_a_file_of_something_else_is_refused_and_left(folder, text):
    folder.file.write_text(text)
    with pytest.raises(MqoError, match=r"sweep\.json cannot be read"):
        folder.entries(jobs())
    assert folder.file.read_text() == text


def test_a_second_sweep_in_the_folder_is_refused(folder):
    refused = pytest.raises(MqoError, match=rf"{folder.root} \(process \d+\)")
    with folder.held(), refused:
        folder.held().__enter__()
    with folder.held():
        pass


def test_each_attempt_has_a_folder_that_holds_the_run(folder):
    job = jobs()[0]
    first, second = folder.new_run(job), folder.new_run(job)
    assert (first.root.name, second.root.name) == (job.name, f"{job.name}_2")
    assert RunConfig.read(second) == job.config
