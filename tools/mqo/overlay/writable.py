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
        raise OverlayError(
            f"{store} is not a folder; nothing was changed",
            expected="the folder of this tree's records, or none",
            help="Move it away",
        )
    for path in (store, *(store / name for name in (*LOCK_FILES, JOURNAL, INCOMING))):
        if path.is_symlink():
            raise OverlayError(
                f"{path} is a symbolic link; nothing was changed",
                expected="a file or folder of this tree",
                help="Check where it leads, and remove it",
            )
        if path.name in (*LOCK_FILES, JOURNAL) and path.is_dir():
            raise OverlayError(
                f"{path} is a folder; nothing was changed",
                expected="a file of mqo, or none",
                help="Move it away",
            )


def check_writable(root: Path, path: str) -> None:
    """Refuse read-only files, links and paths through links, which a rename would replace."""
    top = root.resolve()
    file = top / path
    if not is_contained(top, path):
        raise OverlayError(
            f"{root / path} leaves the tree, or passes a symbolic link; nothing was changed",
            expected="a file of this tree",
            help="Use --tree with the tree that the link leads to",
        )
    folder = nearest(file.parent)
    if file.is_dir() or not folder.is_dir() or folder.stat().st_dev != top.stat().st_dev:
        raise OverlayError(
            f"{file if file.is_dir() else folder} is in the way of {path}; nothing was changed",
            expected="files in folders on the file system of the tree",
            help="Move it away",
        )
    for target in (file, folder) if file.exists() else (folder,):
        # Check the mode for root, too, which the kernel would let through.
        if not target.stat().st_mode & 0o222 or not os.access(target, os.W_OK):
            raise OverlayError(
                f"{target} is read-only; nothing was changed",
                expected="a writable tree, which the source of a run is not",
                help="Change the tree that runs are made from, or see `ls -l`",
            )


def check_records(root: Path, records: Iterable[str]) -> None:
    """Refuse records that would not be files in the tree's .mqo."""
    store = root / STORE
    for name in records:
        if not is_contained(store, name):
            raise OverlayError(
                f"{store / name} leaves .mqo, or passes a symbolic link; nothing was changed",
                expected="a file of this tree",
                help="Remove the link",
            )
        if (store / name).is_dir():
            raise OverlayError(
                f"{store / name} is a folder; nothing was changed",
                expected="a file, or none",
                help="Move it away",
            )


def refuse_clash(paths: Iterable[str]) -> None:
    """Refuse a file below another file, which a rename would detect too late."""
    written = set(paths)
    for path in written:
        if above := written.intersection(map(str, PurePosixPath(path).parents)):
            raise OverlayError(
                f"{path} and {min(above)} cannot both be files; nothing was changed",
                expected="no file below another one",
            )
