"""The copy of mqo's runtime in a tree: what patched Megatron imports, in one folder.

So a run keeps the code that it ran, and a tree also runs on a machine without mqo. The patch
runtime_path and preflight.py put the folder before an installed mqo.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

FOLDER = ".mqo_runtime"
ENTRY = "runtime"  # the entry of the series that lists the copy's files
PACKAGE = Path(__file__).resolve().parents[2]  # the folder that holds the running mqo


def origin(path: str) -> Path | None:
    """Return the file of mqo that a path in a tree is a copy of; None for other paths."""
    parts = PurePosixPath(path).parts
    return PACKAGE.joinpath(*parts[1:]) if parts[:1] == (FOLDER,) else None
