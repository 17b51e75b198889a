"""Write files completely or not at all, and never through a symbolic link."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mqo.errors import OutputError, full_disk_of
from mqo.process import temporary_folder


def target_of(path: Path) -> Path:
    """Return the absolute path of a file or folder that a command makes or replaces.

    Links among the folders above it are followed.

    Raises:
        OutputError: the path itself is a symbolic link, even one that leads nowhere.
    """
    if path.name in ("", ".."):
        return path.resolve()
    if path.is_symlink():
        raise OutputError(
            f"{path} is a symbolic link to {path.readlink()}; nothing was written",
            expected="a new name, or a file or folder that is not a link",
            help="Give the path that the link leads to, or remove the link",
        )
    return path.parent.resolve() / path.name


def folder_of(path: Path) -> Path:
    """Return the absolute path of a folder that a command adds files to; it may be a link.

    Raises:
        OutputError: it is a link that does not lead to a folder.
    """
    if path.is_symlink() and not path.is_dir():
        raise OutputError(
            f"{path} is a symbolic link to {path.readlink()}, which is not a folder",
            expected="a folder, a link to a folder, or a new name",
            help="Make the folder that the link leads to, or remove the link",
        )
    return path.resolve()


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a temporary file of the same name, which replaces `path` if the block succeeds.

    Raises:
        OutputError: `path` is a symbolic link.
        DiskFullError: its disk is full.
    """
    target = target_of(path)
    with full_disk_of(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(f".{target.name}-", target.parent) as folder:
            yield folder / target.name
            (folder / target.name).replace(target)
