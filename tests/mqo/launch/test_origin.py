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


def unsigned(run):
    run.origin.unlink()


def wrongly_signed(run):
    run.origin.write_text("0" * 64)


def not_text(run):
    run.origin.write_bytes(b"\xff" * 64)


def another_command(run):
    run.command.write_text("rm -rf /")


def another_source(run):
    (run.source / "megatron/a.py").write_text("a = 2")


def more_source(run):
    (run.source / "sitecustomize.py").write_text("")


def less_source(run):
    (run.source / "megatron/a.py").unlink()


def moved_source(run):
    (run.source / "megatron/a.py").rename(run.source / "megatron/b.py")


def other_options(run):
    run.quant_config.write_text("[]")


def another_configuration(run):
    run.config.write_text("[]")


def linked_source(run):
    (run.source / "megatron/a.py").rename(run.root / "a.py")
    (run.source / "megatron/a.py").symlink_to(run.root / "a.py")


def another_quantizer(run):
    (run.plugins / "mine/mine.py").write_text("a = 2")


def another_module_of_a_quantizer(run):
    (run.plugins / "mine/helper.py").write_text("a = 2")


def more_modules_of_a_quantizer(run):
    (run.plugins / "mine/torch.py").write_text("")


def fewer_modules_of_a_quantizer(run):
    (run.plugins / "mine/helper.py").unlink()


def moved_quantizer(run):
    (run.plugins / "mine").rename(run.plugins / "other")


def linked_quantizer(run):
    (run.plugins / "mine/mine.py").rename(run.root / "mine.py")
    (run.plugins / "mine/mine.py").symlink_to(run.root / "mine.py")


def linked_folder_of_a_quantizer(run):
    (run.plugins / "mine").rename(run.root / "mine")
    (run.plugins / "mine").symlink_to(run.root / "mine")


CHANGES = [unsigned, wrongly_signed, not_text, another_command, another_source, more_source]
CHANGES += [less_source, moved_source, other_options, another_configuration, linked_source]
CHANGES += [another_quantizer, another_module_of_a_quantizer, more_modules_of_a_quantizer]
CHANGES += [fewer_modules_of_a_quantizer, moved_quantizer, linked_quantizer]
CHANGES += [linked_folder_of_a_quantizer]


@pytest.mark.parametrize("change", CHANGES)
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
