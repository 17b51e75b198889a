"""Whose code a rerun executes without a question."""

import shutil

import pytest
from mqo.launch.origin import foreign, is_own, sign
from mqo.project import Project
from mqo.runs import RunFolder


@pytest.fixture
def project(tmp_path):
    (tmp_path / "clone").mkdir()
    return Project(tmp_path / "clone")


@pytest.fixture
def run(project, tmp_path):
    """A signed run."""
    found = RunFolder(tmp_path / "run")
    (found.source / "megatron").mkdir(parents=True)
    (found.source / "pretrain_gpt.py").write_text("print()")
    (found.source / "megatron/a.py").write_text("a = 1")
    (found.plugins / "mine").mkdir(parents=True)
    for name in ("mine.py", "helper.py"):
        (found.plugins / "mine" / name).write_text("a = 1")
    for path in (found.command, found.config, found.quant_config, found.metrics):
        path.write_text("{}")
    sign(project, found)
    assert is_own(project, found)
    return found


def link(path, target):
    path.rename(target)
    path.symlink_to(target)


CHANGES = {
    "unsigned": lambda run: run.origin.unlink(),
    "wrongly signed": lambda run: run.origin.write_text("0" * 64),
    "not text": lambda run: run.origin.write_bytes(b"\xff" * 64),
    "another command": lambda run: run.command.write_text("rm -rf /"),
    "another source": lambda run: (run.source / "megatron/a.py").write_text("a = 2"),
    "more source": lambda run: (run.source / "sitecustomize.py").write_text(""),
    "less source": lambda run: (run.source / "megatron/a.py").unlink(),
    "moved source": lambda run: (run.source / "megatron/a.py").rename(run.source / "megatron/b.py"),
    "other options": lambda run: run.quant_config.write_text("[]"),
    "another configuration": lambda run: run.config.write_text("[]"),
    "linked source": lambda run: link(run.source / "megatron/a.py", run.root / "a.py"),
    "another quantizer": lambda run: (run.plugins / "mine/mine.py").write_text("a = 2"),
    "another module": lambda run: (run.plugins / "mine/helper.py").write_text("a = 2"),
    "more modules": lambda run: (run.plugins / "mine/torch.py").write_text(""),
    "fewer modules": lambda run: (run.plugins / "mine/helper.py").unlink(),
    "moved quantizer": lambda run: (run.plugins / "mine").rename(run.plugins / "other"),
    "linked quantizer": lambda run: link(run.plugins / "mine/mine.py", run.root / "mine.py"),
    "linked folder": lambda run: link(run.plugins / "mine", run.root / "mine"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_run_is_foreign(project, run, change):
    change(run)
    assert not is_own(project, run)
    assert "--trust" in str(foreign(run))


def test_what_a_run_writes_later_and_bytecode_do_not_count(project, run):
    run.metrics.write_text("more")
    run.result.write_text("{}")
    for folder in (run.source, run.plugins / "mine"):
        (folder / "__pycache__").mkdir()
        (folder / "__pycache__/a.pyc").write_bytes(b"code")
    assert is_own(project, run)


def test_a_run_that_was_moved_stays_ones_own(project, run, tmp_path):
    assert is_own(project, RunFolder(shutil.move(run.root, tmp_path / "elsewhere")))


def test_a_run_of_another_clone_is_foreign(run, tmp_path):
    (tmp_path / "other").mkdir()
    assert not is_own(Project(tmp_path / "other"), run)


def test_only_its_owner_can_read_the_key(project, run):
    (key,) = project.cache.iterdir()
    assert key.stat().st_mode & 0o777 == 0o600
    assert len(key.read_bytes()) == 32


def test_a_damaged_key_signs_nothing(project, run):
    (key,) = project.cache.iterdir()
    key.write_bytes(b"short")
    run.origin.unlink()
    sign(project, run)
    assert not run.origin.exists()
    assert not is_own(project, run)
