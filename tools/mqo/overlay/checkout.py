"""Read upstream's bytes in a git work tree, as a checkout of a commit would write them."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mqo import process
from mqo.errors import OverlayError

PACKAGES = ("megatron/core", "megatron/training")
_FOLDERS = tuple(f"{package}/" for package in PACKAGES)
# Git sets these for its hooks, and would use them instead of the tree.
_ELSEWHERE = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR")


@dataclass(frozen=True)
class Commit:
    """A commit, and the contents of its plain files below PACKAGES."""

    id: str
    contents: dict[str, bytes]
    others: frozenset[str]
    """Paths of everything else in the commit: files elsewhere, links, submodules."""

    def occupies(self, path: str) -> bool:
        """Return whether the commit has something at `path`, or a file in place of its parent."""
        places = {path, *map(str, PurePosixPath(path).parents)}
        return not places.isdisjoint(self.contents) or not places.isdisjoint(self.others)


def is_checkout(root: Path) -> bool:
    """Return whether `root` is the top of a git work tree (also a linked one) with Megatron."""
    return (root / ".git").exists() and (root / PACKAGES[0]).is_dir()


def read_commit(root: Path, revision: str = "HEAD") -> Commit:
    """Read a commit of the work tree at `root`; OverlayError if git cannot read it."""
    commit = git(root, "rev-parse", "--verify", f"{revision}^{{commit}}").decode().strip()
    blobs, others = {}, set()
    for row in git(root, "ls-tree", "-r", "-z", "--full-tree", commit).split(b"\0")[:-1]:
        facts, _, name = row.partition(b"\t")
        mode, _, blob = facts.decode().split()
        path = name.decode("utf-8", "surrogateescape")
        # A line break in a name would break the batch's protocol; upstream has none.
        if mode.startswith("100") and path.startswith(_FOLDERS) and "\n" not in path:
            blobs[path] = blob
        else:
            others.add(path)
    return Commit(commit, _contents(root, blobs), frozenset(others))


def _contents(root: Path, blobs: Mapping[str, str]) -> dict[str, bytes]:
    """Return contents as a checkout writes them, with the user's line endings and other filters.

    Git prints the sizes before the filters, so a mark that occurs in no content separates the
    files.
    """
    if not blobs:
        return {}
    mark = secrets.token_hex(32)
    request = "".join(f"{blob} {path}\n" for path, blob in blobs.items())
    stdin = request.encode("utf-8", "surrogateescape")
    answer = git(root, "cat-file", f"--batch={mark}", "--filters", stdin=stdin)
    contents = (part[:-1] for part in answer.split(f"{mark}\n".encode())[1:])  # less git's "\n"
    return dict(zip(blobs, contents, strict=True))


def git(root: Path, *arguments: str, stdin: bytes = b"", index: Path | None = None) -> bytes:
    """Return what a git command on the work tree prints; `index` replaces the tree's own index.

    Raises:
        OverlayError: the command fails, or git is missing.
    """
    command = ["git", "-C", str(root), *arguments]
    env = {name: value for name, value in os.environ.items() if name not in _ELSEWHERE}
    env |= {"GIT_INDEX_FILE": str(index)} if index else {}
    try:
        done = process.run(command, input=stdin, env=env)
    except FileNotFoundError as error:
        raise OverlayError(
            f"{root} is a git work tree, but the program 'git' is missing", expected="git in PATH"
        ) from error
    if done.returncode != 0:
        words = done.stderr.decode(errors="replace").strip().splitlines()
        reason = words[-1] if words else done.returncode
        raise OverlayError(
            f"{root}: git {arguments[0]} failed for {arguments[-1]} ({reason})",
            expected="a git work tree with this commit, which holds upstream's files",
        )
    return done.stdout
