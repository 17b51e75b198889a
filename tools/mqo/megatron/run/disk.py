"""Report that a write failed because of a full disk, which disk, and what a checkpoint needs.

A save passes its errors through threads and text: a full disk ends as "Worker failure", or as an
unexpected position in torch's zip writer. The free space shows the cause.
"""

import shutil
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path

from torch.nn import Module, Parameter

from mqo.megatron.run.checkpoints import being_saved, newest_saved
from mqo.megatron.run.errors import chain, is_full, nearest
from mqo.megatron.run.files import run_folder
from mqo.quant.collectives import all_ranks

# Bytes per weight in fp32: Adam's averages, and main weights of weights in a smaller dtype.
_AVERAGES, _MAIN = 8, 4
_LEAST = 1 << 16  # a disk with fewer free bytes counts as full for files without weights


class DiskError(RuntimeError):
    """A disk that a run writes to is full."""


# The folder where this run saves, and the bytes that a checkpoint needs, once known.
_save: Path | None = None
_needed = 0


def begin_run(model: Iterable[Module], args: Namespace) -> list[str]:
    """Record the bytes that a checkpoint needs; return a warning if the disk has less.

    A collective if the run saves.
    """
    global _save, _needed
    _save = Path(args.save) if getattr(args, "save", None) else None
    if _save is None:
        return []
    _needed = checkpoint_bytes(model, args)
    if free_bytes(_save) >= _needed:
        return []
    return [
        f"warning: a checkpoint needs about {readable(_needed)}, and the disk of {_save} has "
        f"{readable(free_bytes(_save))} free"
    ]


def explain(error: BaseException) -> DiskError | None:
    """Return a DiskError if a full disk caused `error`, else None."""
    begun = being_saved()
    if not is_full(error) and not _lacks_room(begun):
        return None
    if begun is not None:
        return DiskError(_text(begun.parent))
    named = (getattr(cause, "filename", None) for cause in chain(error))
    folders = [Path(name).parent for name in named if isinstance(name, str)]
    run = run_folder()
    folders = folders or [folder for folder in (_save, run.root if run else None) if folder]
    return DiskError(_text(min(folders or [Path.cwd()], key=free_bytes)))


def full_text(folder: Path, error: BaseException) -> str | None:
    """Return a clause if a full disk of `folder` caused a failed write to it, else None."""
    free = free_bytes(folder)
    if free >= _LEAST and not is_full(error):
        return None
    return f"The disk of {folder} is full: {readable(free)} are free"


def checkpoint_bytes(model: Iterable[Module], args: Namespace) -> int:
    """Estimate the bytes of a checkpoint of this run; a collective.

    `model` are this rank's chunks. A weight that several ranks hold counts once; the optimizer is
    assumed to be Adam. Buffers and metadata are left out.
    """
    share = sum(
        parameter.numel() * _bytes_a_weight(parameter, args) / _copies(parameter, args)
        for chunk in model
        for parameter in chunk.parameters()
    )
    return round(sum(all_ranks(share)))


def free_bytes(folder: Path | str) -> int:
    """Return the free bytes for a file in `folder`, which need not exist yet."""
    return shutil.disk_usage(nearest(Path(folder).absolute())).free


def readable(count: int) -> str:
    """Return a number of bytes with a fitting unit, such as 4.2 MB."""
    units = ("bytes", "kB", "MB", "GB", "TB")
    power = min((len(str(count)) - 1) // 3, len(units) - 1)
    return f"{count / 1000**power:.{1 if power else 0}f} {units[power]}"


def _lacks_room(begun: Path | None) -> bool:
    """Return whether a save is under way that needs more than the free bytes of the disk."""
    if begun is None:
        return False
    written = sum(file.stat().st_size for file in begun.rglob("*") if file.is_file())
    return free_bytes(begun) < max(_needed - written, _LEAST)


def _text(folder: Path) -> str:
    parts = [f"The disk of {folder} is full: {readable(free_bytes(folder))} are free."]
    if folder == _save:
        saved = newest_saved(folder)
        newest = "none was saved" if saved is None else f"the newest is of step {saved}"
        parts.append(f"A checkpoint needs about {readable(_needed)}; {newest}.")
    parts.append(
        "Free some space, keep fewer checkpoints (--keep-last N) or give a folder on another disk; "
        "with a CHECKPOINT, the same command resumes from the newest one"
    )
    return " ".join(parts)


def _bytes_a_weight(parameter: Parameter, args: Namespace) -> int:
    size = parameter.element_size()
    if getattr(args, "no_save_optim", None) or not parameter.requires_grad:
        return size
    return size + _AVERAGES + (_MAIN if size < _MAIN else 0)


def _copies(parameter: Parameter, args: Namespace) -> int:
    """Return the number of ranks with the same part of a weight, from upstream's attributes."""
    world, stages = _size(args, "world_size"), _size(args, "pipeline_model_parallel_size")
    if not getattr(parameter, "allreduce", True):  # an expert's
        parts = _size(args, "expert_model_parallel_size")
        parts *= _size(args, "expert_tensor_parallel_size")
    elif getattr(parameter, "tensor_model_parallel", False):
        parts = _size(args, "tensor_model_parallel_size")
    else:
        parts = 1
    return max(1, world // (stages * parts))


def _size(args: Namespace, name: str) -> int:
    return getattr(args, name, None) or 1
