"""Check what a command may write in a tree: only its own files, not through a symbolic link."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from mqo.errors import OverlayError, nearest
from mqo.overlay.journal import INCOMING, JOURNAL, STORE, is_contained

LOCK_FILES = ("lock", "lock.holder", ".gitignore")


def check_store(root: Path) -> None:
    """Refuse a .mqo that leads elsewhere, because commands would write and delete there.

    Raises:
        OverlayError: it, or a file or folder in it that is written first, is a symbolic link.
    """
    store = root / STORE
    if store.exists() and not store.is_dir():
        raise _refusal(
            f"{store} is not a folder", "the folder of this tree's records, or none", "Move it away"
        )
    for path in (store, *(store / name for name in (*LOCK_FILES, JOURNAL, INCOMING))):
        if path.is_symlink():
            raise _refusal(
                f"{path} is a symbolic link",
                "a file or folder of this tree",
                "Check where it leads, and remove it",
            )
        if path.name in (*LOCK_FILES, JOURNAL) and path.is_dir():
            raise _refusal(f"{path} is a folder", "a file of mqo, or none", "Move it away")


def check_writable(root: Path, path: str) -> None:
    """Refuse read-only files, links and paths through links, which a rename would replace."""
    top = root.resolve()
    file = top / path
    if not is_contained(top, path):
        raise _refusal(
            f"{root / path} leaves the tree, or passes a symbolic link",
            "a file of this tree",
            "Use --tree with the tree that the link leads to",
        )
    folder = nearest(file.parent)
    if file.is_dir() or not folder.is_dir() or folder.stat().st_dev != top.stat().st_dev:
        raise _refusal(
            f"{file if file.is_dir() else folder} is in the way of {path}",
            "files in folders on the file system of the tree",
            "Move it away",
        )
    for target in (file, folder) if file.exists() else (folder,):
        # Check the mode for root, too, which the kernel would let through.
        if not target.stat().st_mode & 0o222 or not os.access(target, os.W_OK):
            raise _refusal(
                f"{target} is read-only",
                "a writable tree, which the source of a run is not",
                "Change the tree that runs are made from, or see `ls -l`",
            )


def check_records(root: Path, records: Iterable[str]) -> None:
    """Refuse records that would not be files in the tree's .mqo."""
    store = root / STORE
    for name in records:
        if not is_contained(store, name):
            raise _refusal(
                f"{store / name} leaves .mqo, or passes a symbolic link",
                "a file of this tree",
                "Remove the link",
            )
        if (store / name).is_dir():
            raise _refusal(f"{store / name} is a folder", "a file, or none", "Move it away")


def refuse_clash(paths: Iterable[str]) -> None:
    """Refuse a file below another file, which a rename would detect too late."""
    written = set(paths)
    for path in written:
        if above := written.intersection(map(str, PurePosixPath(path).parents)):
            raise _refusal(
                f"{path} and {min(above)} cannot both be files", "no file below another one"
            )


def _refusal(fault: str, expected: str, help: str = "") -> OverlayError:
    return OverlayError(f"{fault}; nothing was changed", expected=expected, help=help)
