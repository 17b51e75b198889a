"""Choose the checkpoint from which a run resumes, and remove old ones.

Upstream names the newest checkpoint in a file and, with --verify-integrity, writes hashes of its
files. This module adds three things: it takes an older checkpoint if the newest is damaged, removes
a partial checkpoint of a killed run before its iteration is saved again, and removes old
checkpoints.
"""

import itertools
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.nn import Module

from mqo.megatron.run import engine
from mqo.megatron.run.files import (
    MOST_DIGITS,
    RELEASE,
    TRACKER,
    iteration_folder,
    iteration_of,
)
from mqo.megatron.run.ranks import rank
from mqo.megatron.run.unpickle import (
    FORMAT_FILE,
    METADATA,
    CheckpointError,
    check_common_state,
    check_metadata,
)
from mqo.megatron.run.untrusted import (
    Limit,
    NoFileError,
    UntrustedFileError,
    check_file,
    read_bytes,
    read_json_object,
    read_text,
)
from mqo.quant.collectives import all_ranks

MANIFEST = "integrity.json"
# Holds the name of the first iteration that is saved to a folder, until the tracker is there.
FIRST_SAVE = "first_save_under_way.txt"

# The folder of the last save, until old checkpoints in it are removed.
_saved: Path | None = None
# The folder of the iteration that is being saved, on every rank.
_begun: Path | None = None

Fault = Callable[[Path], str | None]


def before_load(args: Namespace, load_arg: str = "load", model: Any = ()) -> None:
    """Choose the newest complete checkpoint before one is read, and check it. A collective.

    `model` is this rank's chunks, or one model.

    If the checkpoint that upstream would take is damaged, set `args.ckpt_step` to the newest
    complete one before it, and print that. --ckpt-step is kept. Without --verify-integrity nothing
    is chosen, because checkpoints are not known to be complete. If the tracker file is missing,
    the newest complete checkpoint is loaded, because upstream would start from scratch in the same
    folder.

    Raises:
        CheckpointError: there are checkpoints, and none is known to be complete; or the chosen one
            would run code that no checkpoint needs.
    """
    engine.prepare([model] if isinstance(model, Module) else model, args)
    folder = load_folder(args, load_arg)
    if folder is None:
        return
    choice = error = None
    if rank() == 0:
        try:
            choice = _look(args, getattr(args, load_arg, None), folder)
        except CheckpointError as none:
            error = str(none)
    choice, error = all_ranks((choice, error))[0]
    if error:
        raise CheckpointError(error)
    if choice:
        args.ckpt_step, why = choice
        if rank() == 0:
            print(f"mqo: {why}; resuming from iteration {args.ckpt_step}", flush=True)


def to_verify(args: Namespace, checkpoint: str) -> bool:
    """Return whether to compare a checkpoint with its hashes when it is read.

    This needs --verify-integrity and hashes. Checkpoints of other programs may lack hashes;
    `before_load` accepts no checkpoint of this run without them. A checkpoint that --ckpt-step
    names is not compared.

    Raises:
        CheckpointError: the hashes are needed, and not in upstream's form.
    """
    chosen = getattr(args, "ckpt_step", None) is not None
    manifest = Path(checkpoint) / MANIFEST
    if not args.verify_integrity or chosen or not manifest.is_file():
        return False
    wrong = manifest_fault(manifest)
    if wrong:
        raise CheckpointError(
            f"{manifest} {wrong}. Expected: the hashes of that checkpoint's files. Give another "
            "checkpoint, or --ckpt-step N to load N without a check"
        )
    return True


def load_folder(args: Namespace, load_arg: str = "load") -> Path | None:
    """Return the folder of --load; of a pre-trained model if --load has no checkpoint."""
    folder = getattr(args, load_arg, None)
    pretrained = getattr(args, "pretrained_checkpoint", None)
    if pretrained and not (folder and (Path(folder) / TRACKER).is_file()):
        folder = pretrained
    return Path(folder) if folder else None


def newest(args: Namespace) -> Path | None:
    """Return the folder of the iteration that upstream will read, as chosen by `before_load`.

    Returns None without a folder to load. The returned folder may not exist. A collective.
    """
    before_load(args)
    folder = load_folder(args)
    return loaded(folder, getattr(args, "ckpt_step", None)) if folder else None


def loaded(folder: Path, step: int | None = None) -> Path:
    """Return the folder of iteration `step`, or of the iteration in the tracker file."""
    iteration = _tracked(folder) if step is None else step
    return iteration_folder(folder, RELEASE if iteration is None else iteration)


def _look(args: Namespace, own: str | None, used: Path) -> tuple[int, str] | None:
    """Return the result of `choose`, if it applies, and check the metadata of that checkpoint.

    `own` is the folder in the run's arguments, `used` the one from which upstream loads.
    """
    choice, chosen = None, getattr(args, "ckpt_step", None)
    folder = Path(own or used)
    if chosen is None and not _has_tracker(folder):
        choice = _without_tracker(args, folder)
    if choice is None:
        folder = used
    # A pre-trained model of another program may have no hashes.
    pretrained = str(folder) == getattr(args, "pretrained_checkpoint", None)
    if choice is None and chosen is None and _verifies(args) and not pretrained:
        choice = choose(folder, fault, own=_is_own(args, folder))
    checkpoint = loaded(folder, choice[0] if choice else chosen)
    check_metadata(checkpoint)
    check_common_state(checkpoint)
    return choice


def _without_tracker(args: Namespace, folder: Path) -> tuple[int, str] | None:
    """Return the newest complete checkpoint of a folder without a tracker, and why; else None.

    A partial first save of a killed run does not count. The tracker is written in the run's own
    folder, and also if upstream would load a pre-trained model instead.

    Raises:
        CheckpointError: there are checkpoints, and none is known to be complete.
    """
    complete = [i for i in _iterations(folder) if _is_complete(iteration_folder(folder, i))]
    release = (folder / RELEASE).is_dir()
    if not complete and not release:
        return None
    listed = ", ".join([str(i) for i in sorted(complete)] + [RELEASE] * release)
    why = f"{folder} has checkpoints ({listed}) and no {TRACKER}, which names the newest"
    pretrained = getattr(args, "pretrained_checkpoint", None)
    if _verifies(args) and str(folder) != pretrained:
        for iteration in sorted(complete, reverse=True):
            if fault(iteration_folder(folder, iteration)) is None:
                if pretrained or _is_own(args, folder):
                    _name_newest(folder, iteration)
                return iteration, why
    raise CheckpointError(
        f"{why}. Expected: that file, because none of them is known to be complete. Write a number "
        f"(or the word release) to {folder / TRACKER}, give --ckpt-step N to load N, or give an "
        "empty folder to start from scratch"
    )


def _verifies(args: Namespace) -> bool:
    return bool(getattr(args, "verify_integrity", False))


def _is_own(args: Namespace, folder: Path) -> bool:
    """Return whether the run also saves to the folder."""
    save = getattr(args, "save", None)
    return save is not None and Path(save).resolve() == folder.resolve()


def before_save(args: Namespace, iteration: int) -> None:
    """Remove a partial checkpoint of a killed run before the iteration is saved."""
    global _saved, _begun
    _begun = begun = iteration_folder(Path(args.save), iteration) if args.save else None
    if rank() == 0 and begun is not None:
        _saved = Path(args.save)
        clear_unfinished(_saved, iteration)
        if not _has_tracker(_saved):
            _saved.mkdir(parents=True, exist_ok=True)
            (_saved / FIRST_SAVE).write_text(begun.name, encoding="utf-8")


def keep_last(count: int) -> None:
    """Remove all but the `count` newest checkpoints after a complete save; 0 keeps all."""
    global _saved, _begun
    if _saved is not None and _has_tracker(_saved):
        (_saved / FIRST_SAVE).unlink(missing_ok=True)
    if _saved is not None and count:
        remove_old(_saved, count)
    _saved = _begun = None


def being_saved() -> Path | None:
    """Return the folder of the iteration that is being saved, until the next step begins."""
    return _begun


def choose(folder: Path, fault: Fault, *, own: bool = True) -> tuple[int, str] | None:
    """Return the iteration to load instead of upstream's choice, and why; None to keep that.

    `fault` returns what is wrong with a checkpoint's folder. In the run's `own` folder the tracker
    is changed to the returned iteration, so that the damaged one counts as unfinished. In another
    folder it is changed only if it is unreadable, because upstream would end the program.
    """
    newest = _tracked(folder)
    if newest is None:
        return None
    if newest < 0:
        before, why = _iterations(folder), f"{folder / TRACKER} names no iteration"
    else:
        wrong = fault(iteration_folder(folder, newest))
        if wrong is None:
            return None
        before = [i for i in _iterations(folder) if i < newest]
        why = f"the checkpoint of iteration {newest} is damaged ({wrong})"
    for iteration in sorted(before, reverse=True):
        if fault(iteration_folder(folder, iteration)) is None:
            if own or newest < 0:
                _name_newest(folder, iteration)
            return iteration, why
    raise CheckpointError(
        f"{why}, and {folder} has no complete checkpoint before it. Expected: a checkpoint whose "
        "files match its integrity.json. Give another folder, or --ckpt-step N to load N without a "
        "check"
    )


def fault(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint's folder; None if its files match its manifest."""
    from megatron.core.dist_checkpointing.validation import (
        CheckpointingException,
        _verify_integrity_manifest_impl,
    )

    if not checkpoint.is_dir():
        return "it does not exist"
    if not (checkpoint / MANIFEST).is_file():
        return f"it has no {MANIFEST}: its save was not complete, or without --verify-integrity"
    wrong = manifest_fault(checkpoint / MANIFEST)
    if wrong:
        return f"its {MANIFEST} {wrong}"
    try:
        _verify_integrity_manifest_impl(str(checkpoint))
    except (CheckpointingException, OSError, ValueError) as error:
        return " ".join(str(error).split())
    return None


def manifest_fault(manifest: Path) -> str | None:
    """Return why upstream could not read an integrity.json; None if it could.

    A manifest without files is a fault: it would match any checkpoint.
    """
    try:
        files = read_json_object(manifest, within=manifest.parent).get("files")
    except UntrustedFileError as error:
        return error.fault
    if not isinstance(files, dict) or not files:
        return "lists no files"
    for name, digest in files.items():
        if not isinstance(digest, str):
            return f"lists {name} without a hash"
        try:
            check_file(manifest.parent / name)
        except NoFileError:
            pass  # upstream's check reports it
        except UntrustedFileError as error:
            return f"lists a file that is not one: {error.found}"
    return None


def clear_unfinished(folder: Path, iteration: int) -> None:
    """Remove the folder of an iteration that the tracker does not name; links are left.

    Without a tracker a complete checkpoint is renamed, because it may not be from a killed run.
    """
    target = iteration_folder(folder, iteration)
    if not target.is_dir() or target.is_symlink() or _tracked(folder) == iteration:
        return
    if _has_tracker(folder) or not _is_complete(target):
        shutil.rmtree(target)
        return
    names = (target.with_name(f"old{n or ''}_{target.name}") for n in itertools.count())
    aside = next(name for name in names if not name.exists())
    target.rename(aside)
    print(f"mqo: {target} existed, and was renamed to {aside.name}", flush=True)


def remove_old(folder: Path, count: int) -> None:
    """Remove all but the `count` newest checkpoints up to the tracker's; links are left."""
    newest = _tracked(folder)
    if newest is None or newest < 0:
        return
    done = sorted(i for i in _iterations(folder) if i <= newest)
    for iteration in done[:-count]:
        target = iteration_folder(folder, iteration)
        if not target.is_symlink():
            shutil.rmtree(target)


def newest_saved(folder: Path) -> int | None:
    """Return the iteration in the tracker file of `folder`; None if there is none."""
    newest = _tracked(folder)
    return newest if newest is not None and newest >= 0 else None


def _has_tracker(folder: Path) -> bool:
    return (folder / TRACKER).is_file()


def _tracked(folder: Path) -> int | None:
    """Return the iteration in the tracker: -1 if it is unreadable, None without a tracker.

    A released model, which has no iteration, also gives None: a run never writes one.
    """
    try:
        text = read_text(folder / TRACKER, Limit.NAME).strip()
    except NoFileError:
        return None
    except UntrustedFileError:
        return -1
    if text == RELEASE:
        return None
    return int(text) if text.isdecimal() and len(text) < MOST_DIGITS else -1


def _name_newest(folder: Path, iteration: int) -> None:
    replacement = folder / f"{TRACKER}.new"
    try:
        replacement.write_text(str(iteration), encoding="utf-8")
        replacement.replace(folder / TRACKER)
    except OSError as error:
        raise CheckpointError(
            f"{folder / TRACKER} cannot be written ({error.strerror}). Expected: the number "
            f"{iteration}, of the newest complete checkpoint. Give a folder that you can write to"
        ) from error


def _is_complete(checkpoint: Path) -> bool:
    """Return whether an iteration's folder has the files that a save writes last.

    These are the hashes, or metadata if no first save is under way. Metadata are written before
    the hashes, which take long. In the format with one file per rank nothing marks the end.
    """
    begun = checkpoint.parent / FIRST_SAVE
    if not (checkpoint / MANIFEST).exists() and begun.is_file():
        return read_bytes(begun, Limit.NAME) != checkpoint.name.encode()
    marks = (METADATA, MANIFEST, FORMAT_FILE)
    return any((checkpoint / mark).exists() for mark in marks) or any(checkpoint.glob("mp_rank_*"))


def _iterations(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    numbers = (iteration_of(entry) for entry in folder.iterdir() if entry.is_dir())
    return [number for number in numbers if number is not None]
