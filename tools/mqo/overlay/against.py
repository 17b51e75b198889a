"""The differences of any Megatron tree, such as a fork, from a release or a commit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mqo.display import Say
from mqo.errors import OverlayError, UnknownNameError
from mqo.overlay import checkout, vendor
from mqo.overlay.checkout import PACKAGES
from mqo.overlay.diff import FileDiff, total
from mqo.overlay.pin import Pin
from mqo.overlay.tree import Tree
from mqo.overlay.unified import unified


def contents(root: Path, name: str, pin: Pin, cache: Path, report: Say) -> dict[str, bytes]:
    """Return the files of a release in UPSTREAM.toml, or of a commit of the git work tree `root`.

    Raises:
        UnknownNameError: there is no such release, and `root` is not a git work tree.
        OverlayError: git has no such commit.
        VendorError: the wheel is not the pinned one.
    """
    if name in pin.releases:
        return vendor.release(pin, name, cache, report)
    if not (root / ".git").exists() or name.startswith("-"):
        raise UnknownNameError(
            "megatron-core release in UPSTREAM.toml",
            name,
            pin.releases,
            help="In a git work tree, a tag or a commit can be named, too",
        )
    return checkout.read_commit(root, name).contents


def differences(root: Path, expected: Mapping[str, bytes]) -> list[FileDiff]:
    """Return one diff per Python file of megatron/core and megatron/training that differs.

    A package that the tree lacks is not compared, since forks may hold only megatron/core.
    """
    packages = [package for package in PACKAGES if (root / package).is_dir()]
    if not packages:
        raise OverlayError(
            f"{root} holds no {' or '.join(PACKAGES)}",
            expected="a Megatron tree",
            help="Give --tree the folder that holds megatron/",
        )
    tree, paths = Tree(root), set()
    for package in packages:
        paths |= {path for path in expected if path.startswith(f"{package}/")}
        paths |= {file.relative_to(root).as_posix() for file in (root / package).rglob("*.py")}
    diffs = [
        FileDiff(path, unified(path, expected.get(path), tree.read(path)))
        for path in sorted(paths)
        if path.endswith(".py")
    ]
    return [diff for diff in diffs if diff.content]


def lines(diffs: Sequence[FileDiff], name: str, *, stat: bool) -> Iterator[str]:
    """Yield the lines to print: the diffs by file, or with `stat` only their counts."""
    for diff in diffs:
        yield diff.row if stat else diff.text.rstrip("\n")
    yield f"# compared with {name}: {len(diffs)} files differ, {total(diffs)}"
