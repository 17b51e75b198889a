"""Preparing a dataset once, whole or not at all, by one process at a time."""

import dataclasses
import json
import subprocess
import sys
import threading

import pytest
from mqo.data import cached, mix, sample, tokenizer
from mqo.data import prepare as prepare_module
from mqo.data.cached import STAMP
from mqo.data.prepare import prepare
from mqo.errors import UnknownNameError
from mqo.project import Project

from .conftest import count_lines


@pytest.fixture
def project(tmp_path, dump, monkeypatch):
    """A checkout in a path with a space; the sample is ours, and indexing counts lines only."""
    project = Project(tmp_path / "a checkout")
    monkeypatch.setattr(sample, "fetch", lambda cache, report: dump)
    monkeypatch.setattr(tokenizer, "DEFAULT_VOCAB_SIZE", 262)
    monkeypatch.setattr(prepare_module, "build_index", count_lines)
    return project


def _names(folder):
    return sorted(p.name for p in folder.iterdir() if not p.name.endswith(".lock"))


def test_the_result_lies_where_it_says(project):
    folder, contents = prepare(project, "wikipedia", report=print)
    assert folder == project.data / "wikipedia"
    assert contents == cached.Contents(documents=2, tokens=20, vocab_size=262)
    assert (folder / "tokenizer/tokenizer.json").is_file()
    assert len((folder / "text.jsonl").read_text(encoding="utf-8").splitlines()) == 2
    assert all((folder / f"wikipedia_text_document.{end}").is_file() for end in ("bin", "idx"))


def test_a_second_call_does_nothing_whatever_training_added_beside_the_index(project, monkeypatch):
    first = prepare(project, "wikipedia", report=print)
    (first[0] / "cache").mkdir()
    (first[0] / "cache" / "shuffle.npy").touch()
    monkeypatch.setattr(prepare_module, "build_index", None)
    monkeypatch.setattr(sample, "fetch", None)
    said = []
    assert prepare(project, "wikipedia", report=said.append) == first
    assert said == []


def _truncate(folder):
    path = folder / "wikipedia_text_document.bin"
    path.write_bytes(path.read_bytes()[:-1])


def _remove(folder):
    (folder / "tokenizer" / "tokenizer.json").unlink()


def _garble(folder):
    (folder / STAMP).write_text("{")


def _age(folder):
    stamp = json.loads((folder / STAMP).read_text())
    stamp["inputs"]["recipe"] -= 1
    (folder / STAMP).write_text(json.dumps(stamp))


@pytest.mark.parametrize("damage", [_truncate, _remove, _garble, _age])
def test_data_that_is_not_as_stamped_is_made_again(project, damage):
    first = prepare(project, "wikipedia", report=print)
    index = first[0] / "wikipedia_text_document.bin"
    before = index.read_bytes()
    damage(project.data / "wikipedia")
    assert prepare(project, "wikipedia", report=print) == first
    assert index.read_bytes() == before
    assert _names(project.data) == ["wikipedia"]


class Killed(BaseException):
    """Like a kill: nothing in the code under test handles it."""


_STEPS = [
    (sample, "fetch"),
    (sample, "write_jsonl"),
    (tokenizer, "train"),
    (prepare_module, "build_index"),
    (cached, "_fingerprints"),
]


@pytest.mark.parametrize(("module", "step"), _STEPS, ids=[s for _, s in _STEPS])
def test_a_kill_at_any_step_leaves_nothing_that_passes_for_done(project, module, step):
    def die(*_, **__):
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, step, die)
        with pytest.raises(Killed):
            prepare(project, "wikipedia", report=print)
    assert not (project.data / "wikipedia").exists()
    prepare(project, "wikipedia", report=print)
    assert _names(project.data) == ["wikipedia"]


def test_a_kill_between_the_two_renames_is_made_good(project):
    first = prepare(project, "wikipedia", report=print)
    (project.data / "wikipedia").rename(project.data / ".wikipedia.old")
    assert prepare(project, "wikipedia", report=print) == first
    assert _names(project.data) == ["wikipedia"]


def test_of_two_at_once_one_works_and_the_other_waits(project, monkeypatch):
    waiting, calls, results = threading.Event(), [], []

    def build(*arguments, **how):
        calls.append(arguments)
        # Goes on when the other has found the lock taken. The limit only ends a broken test.
        assert waiting.wait(timeout=60)
        return count_lines(*arguments, **how)

    def report(line):
        if "waiting" in line:
            waiting.set()

    def work():
        results.append(prepare(project, "wikipedia", report=report))

    monkeypatch.setattr(prepare_module, "build_index", build)
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert len(results) == 2
    assert results[0] == results[1]


def test_an_unknown_name_lists_the_valid_ones(project):
    with pytest.raises(
        UnknownNameError, match=r"'wikipaedia'.*one of debian_docs, dolma, wikipedia"
    ):
        prepare(project, "wikipaedia", report=print)


def test_dolma_is_prepared_from_the_mix(project, monkeypatch):
    mixed = [mix.Document(str(n), "novel", f"The miller met {n} bakers.") for n in range(3)]
    monkeypatch.setattr(mix, "documents", lambda cache, report: mixed)
    data = prepare(project, "dolma", report=print)
    assert data[0] == project.data / "dolma"
    text = (data[0] / "text.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    assert lines == [dataclasses.asdict(document) for document in mixed]
    # The sources that a machine can get may change; data that was made stays.
    monkeypatch.setattr(mix, "documents", None)
    assert prepare(project, "dolma", report=print) == data


def test_preparing_imports_no_torch_and_no_megatron():
    code = (
        "import sys, mqo.data.prepare, mqo.data.preprocess, mwparserfromhell, tokenizers; "
        "sys.exit({'torch', 'megatron', 'transformers'} & set(sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
