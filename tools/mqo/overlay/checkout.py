"""Upstream's bytes in a git work tree: what a checkout of HEAD would put there."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mqo.errors import OverlayError

PACKAGES = ("megatron/core", "megatron/training")


@dataclass(frozen=True)
class Head:
    """The commit that is checked out, and the contents of its files below PACKAGES."""

    commit: str
    contents: dict[str, bytes]
    others: frozenset[str]
    """Paths of all other files of the commit: a file of ours must not take the place of one."""


def is_checkout(root: Path) -> bool:
    """Whether `root` is the top folder of a git work tree (also a linked one) with Megatron."""
    return (root / ".git").exists() and (root / PACKAGES[0]).is_dir()


def read_head(root: Path) -> Head:
    """HEAD of the work tree at `root`; OverlayError when git cannot tell it."""
    commit = _git(root, "rev-parse", "--verify", "HEAD").decode().strip()
    names = _git(root, "ls-tree", "-r", "-z", "--name-only", "--full-tree", "HEAD")
    paths = [name.decode("utf-8", "surrogateescape") for name in names.split(b"\0") if name]
    ours = [path for path in paths if path.startswith(tuple(f"{p}/" for p in PACKAGES))]
    # A name with a line break or white space would break the batch's protocol; upstream has none.
    wanted = [path for path in ours if not any(c.isspace() for c in path)]
    contents = dict(zip(wanted, _contents(root, wanted), strict=True))
    return Head(commit, contents, frozenset(paths) - contents.keys())


def _contents(root: Path, paths: Sequence[str]) -> Iterator[bytes]:
    """Contents as a checkout writes them: line endings and other filters of the user's applied."""
    asked = "".join(f"HEAD:{path} {path}\n" for path in paths).encode()
    answer = _git(root, "cat-file", "--batch", "--filters", stdin=asked)
    at = 0
    for _ in paths:
        end = answer.index(b"\n", at)
        size = int(answer[at:end].split()[2])
        yield answer[end + 1 : end + 1 + size]
        at = end + 1 + size + 1


def _git(root: Path, *arguments: str, stdin: bytes = b"") -> bytes:
    try:
        done = subprocess.run(["git", "-C", root, *arguments], input=stdin, capture_output=True)
    except FileNotFoundError as error:
        raise OverlayError(
            f"{root} is a git work tree, and there is no program 'git'", expected="git in PATH"
        ) from error
    if done.returncode != 0:
        words = done.stderr.decode(errors="replace").strip().splitlines()
        raise OverlayError(
            f"{root}: git {arguments[0]} failed ({words[-1] if words else done.returncode})",
            expected="a git work tree with a commit, whose HEAD holds upstream's files",
        )
    return done.stdout
