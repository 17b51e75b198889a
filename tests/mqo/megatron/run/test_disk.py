"""What is said of a full disk, where the error says something else."""

import errno
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from mqo.megatron.run import checkpoints, disk
from mqo.megatron.run.checkpoints import before_save
from mqo.megatron.run.disk import DiskError
from mqo.megatron.run.files import RunFiles
from mqo.megatron.run.record import recorded
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

MASKED = "Worker failure: An error is caught while starting worker 0, error: <class 'RuntimeError'>"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Where a run saves; what it needs is known, and nothing is being saved."""
    for name, value in (("_saved", None), ("_begun", None)):
        monkeypatch.setattr(checkpoints, name, value)
    monkeypatch.setattr(disk, "_save", tmp_path)
    monkeypatch.setattr(disk, "_needed", 5000)
    return tmp_path


@pytest.fixture
def free(monkeypatch):
    """A function that sets how many bytes every disk has free."""

    def put(count):
        usage = SimpleNamespace(free=count)
        monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: usage)

    return put


def full(name=None):
    return OSError(errno.ENOSPC, "No space left on device", name)


def collected(error):
    """As torch raises what a rank's save failed with."""
    try:
        raise error
    except Exception as raised:
        return CheckpointException("write", {0: _wrap_exception(raised)})


# -- which errors a full disk is behind --------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        full("/tmp/x/metrics.jsonl"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        RuntimeError("Worker failure: [Errno 28] No space left on device"),
        collected(full()),
        collected(RuntimeError("os error 28: no space left on device")),
    ],
    ids=str,
)
def test_what_says_that_it_is_full_is_believed(place, free, error):
    free(10**12)
    assert isinstance(disk.explain(error), DiskError)


def test_a_cause_that_says_so_is_found(place, free):
    free(10**12)
    error = ValueError("no such thing")
    error.__context__ = RuntimeError("odd")
    error.__context__.__cause__ = full()
    error.__context__.__context__ = error  # and no circle holds it up
    assert isinstance(disk.explain(error), DiskError)
    error.__context__.__cause__ = None
    assert disk.explain(error) is None


@pytest.mark.parametrize(
    ("count", "written", "is_full"),
    [(70_000, 0, True), (70_000, 40_000, False), (100, 110_000, True), (200_000, 0, False)],
)
def test_a_save_that_fails_for_want_of_room_is_told_by_the_room(
    place, free, monkeypatch, count, written, is_full
):
    monkeypatch.setattr(disk, "_needed", 100_000)
    free(count)
    before_save(Namespace(save=str(place)), 7)
    begun = place / "iter_0000007"
    begun.mkdir()
    (begun / "__0_0.distcp").write_bytes(bytes(written))
    assert (disk.explain(collected(RuntimeError(MASKED))) is not None) == is_full


def test_where_nothing_is_saved_a_full_disk_is_no_reason(place, free):
    free(0)
    assert disk.explain(ValueError("no such head size")) is None
    before_save(Namespace(save=str(place)), 7)
    checkpoints.keep_last(0)  # the next step
    assert disk.explain(ValueError("no such head size")) is None


# -- what is said ------------------------------------------------------------------------------


def test_the_folder_its_room_and_the_need_are_named(place, free):
    (place / checkpoints.TRACKER).write_text("4")
    free(1_234_567)
    before_save(Namespace(save=str(place)), 7)
    text = str(disk.explain(full()))
    assert text == (
        f"The disk of {place} is full: 1.2 MB are free. A checkpoint needs about 5.0 kB; the "
        "newest is of step 4. Free some space, keep fewer checkpoints (--keep-last N) or give "
        "a folder on another disk; with a CHECKPOINT, the same command resumes from the newest "
        "one"
    )


def test_a_file_elsewhere_is_named_by_its_folder(place, free, tmp_path):
    free(0)
    text = str(disk.explain(full("/some/where/metrics.jsonl")))
    assert "/some/where " in text and "0 bytes" in text
    assert "checkpoint needs" not in text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (4_189_319, "4.2 MB"),
        (10**12, "1.0 TB"),
        (10**17, "100000.0 TB"),
    ],
)
def test_bytes_are_told_in_a_unit_that_fits(count, text):
    assert disk.readable(count) == text


def test_a_failed_save_leaves_the_disk_as_its_reason(place, free, run):
    # torch's error is no Exception, and says nothing of the disk.
    folder = run()
    free(0)
    before_save(Namespace(save=str(place)), 7)
    with pytest.raises(DiskError), recorded(None):
        raise collected(RuntimeError(MASKED))
    assert RunFiles(folder).failure.read_text().startswith("DiskError: The disk of ")


def test_a_failed_save_on_a_disk_with_room_keeps_its_words(place, free, run):
    folder = run()
    free(10**12)
    before_save(Namespace(save=str(place)), 7)
    with pytest.raises(CheckpointException), recorded(None):
        raise collected(RuntimeError(MASKED))
    assert MASKED in RunFiles(folder).failure.read_text()


def test_a_disk_without_room_is_warned_of_before_the_first_step(place, free):
    model, args = nn.Linear(100, 10, bias=False), Namespace(save=str(place / "new" / "folder"))
    free(11_999)
    (said,) = disk.begin_run([model], args)
    assert "needs about 12.0 kB" in said
    assert f"{place}/new/folder has 12.0 kB free" in said
    free(12_000)
    assert disk.begin_run([model], args) == []
    assert disk.begin_run([model], Namespace(save=None)) == []


# -- what a checkpoint needs -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "options", "bytes_a_weight"),
    [
        (torch.float32, {}, 4 + 8),
        (torch.bfloat16, {}, 2 + 4 + 8),
        (torch.bfloat16, {"no_save_optim": True}, 2),
    ],
)
def test_weights_and_adams_state_count(dtype, options, bytes_a_weight):
    model = nn.Linear(100, 10, bias=False, dtype=dtype)
    assert disk.checkpoint_bytes([model], Namespace(**options)) == 1000 * bytes_a_weight


def test_what_several_ranks_hold_counts_once(monkeypatch):
    """Of 16 ranks in two stages, two ways of tensors and four of experts."""
    model = nn.ModuleDict(
        {name: nn.Linear(100, 10, bias=False) for name in ("whole", "split", "expert", "frozen")}
    )
    model["split"].weight.tensor_model_parallel = True
    model["expert"].weight.allreduce = False
    model["frozen"].weight.requires_grad = False
    args = Namespace(
        world_size=16,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        expert_model_parallel_size=4,
        expert_tensor_parallel_size=1,
    )
    monkeypatch.setattr(disk, "all_ranks", lambda here: [here] * 16)
    # Each stage has all four: the split one in 2 parts, the expert one in 4.
    once = 1000 * (12 + 2 * 12 + 4 * 12 + 4)
    assert disk.checkpoint_bytes([model], args) == 2 * once
