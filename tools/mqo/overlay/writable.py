"""Checks what a command may write in a tree: its own files, and nothing through a symbolic link."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from mqo.errors import OverlayError, nearest
from mqo.overlay.journal import INCOMING, JOURNAL, STORE, is_contained

LOCK_FILES = ("lock", "lock.holder", ".gitignore")


def check_store(root: Path) -> None:
    """Refuse a .mqo that leads elsewhere, where the tree's commands would write and delete.

    Raises:
        OverlayError: it is a symbolic link, or one of the places in it that are written first is.
    """
    store = root / STORE
    if store.exists() and not store.is_dir():
        raise OverlayError(
            f"{store} is not a folder; nothing was changed",
            expected="the folder of this tree's records, or nothing",
            help="Move it away",
        )
    for path in (store, *(store / name for name in (*LOCK_FILES, JOURNAL, INCOMING))):
        if path.is_symlink():
            raise OverlayError(
                f"{path} is a symbolic link; nothing was changed",
                expected="a file or folder of this tree's own",
                help="See where it leads, and remove it",
            )
        if path.name in (*LOCK_FILES, JOURNAL) and path.is_dir():
            raise OverlayError(
                f"{path} is a folder; nothing was changed",
                expected="a file of mqo's, or nothing",
                help="Move it away",
            )


def check_writable(root: Path, path: str) -> None:
    """Refuse what a rename would do all the same: to read-only files, links, and through links."""
    top = root.resolve()
    file = top / path
    if not is_contained(top, path):
        raise OverlayError(
            f"{root / path} leaves the tree, or lies behind a symbolic link; nothing was changed",
            expected="a file of this tree's own",
            help="Give the tree that the link leads to to --tree",
        )
    folder = nearest(file.parent)
    if file.is_dir() or not folder.is_dir() or folder.stat().st_dev != top.stat().st_dev:
        raise OverlayError(
            f"{file if file.is_dir() else folder} stands where {path} belongs; nothing was changed",
            expected="files in their places, in folders of the tree's own file system",
            help="Move it away",
        )
    for target in (file, folder) if file.exists() else (folder,):
        # The mode counts for root, too, whom the kernel would let through.
        if not target.stat().st_mode & 0o222 or not os.access(target, os.W_OK):
            raise OverlayError(
                f"{target} is read-only; nothing was changed",
                expected="a tree that may be written, which a run's own source is not",
                help="Change the tree that runs are made from, or see `ls -l`",
            )


def check_records(root: Path, records: Iterable[str]) -> None:
    """Refuse records that would not be files in the tree's .mqo."""
    store = root / STORE
    for name in records:
        if not is_contained(store, name):
            raise OverlayError(
                f"{store / name} leaves .mqo, or lies behind a symbolic link; nothing was changed",
                expected="a file of this tree's own",
                help="Remove the link",
            )
        if (store / name).is_dir():
            raise OverlayError(
                f"{store / name} is a folder; nothing was changed",
                expected="a file, or nothing, in its place",
                help="Move it away",
            )


def refuse_clash(paths: Iterable[str]) -> None:
    """Refuse a file below another one, which a rename would find out too late."""
    written = set(paths)
    for path in written:
        if above := written.intersection(map(str, PurePosixPath(path).parents)):
            raise OverlayError(
                f"{path} and {min(above)} cannot both be files; nothing was changed",
                expected="no file below another one",
            )
