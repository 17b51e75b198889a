"""Share the bytecode of a run's source: compile it once in the tree, link it into each copy.

A copy's file times differ from the tree's, so Python would compile all modules again in every run.
With this bytecode Python compares the hash of the source instead (PEP 552), and compiles only files
that changed.
"""

from __future__ import annotations

import importlib.util
import os
import py_compile
import shutil
import sys
import warnings
from contextlib import suppress
from pathlib import Path

from mqo.overlay import runtime
from mqo.overlay.tree import Tree
from mqo.project import Project

CHECKED = (0b11).to_bytes(4, "little")


def share(tree: Tree, copy: Path) -> None:
    """Link the bytecode of `tree` and of mqo into `copy`, a copy of the tree; compile as needed.

    Files that cannot be compiled or written are left to Python. Nothing is written into the user's
    own tree or into an installed mqo.
    """
    if not tree.is_vendored:
        return
    _share(tree.root, "megatron", copy)
    if not Project.here().is_installed:
        for package in ("mqo/quant", "mqo/megatron"):
            _share(runtime.PACKAGE, package, copy / runtime.FOLDER)


def _share(root: Path, package: str, copy: Path) -> None:
    for source in (root / package).rglob("*.py"):
        with suppress(OSError, py_compile.PyCompileError):  # it may need another Python version
            name = f"{source.stem}.{sys.implementation.cache_tag}.pyc"
            compiled = source.parent / "__pycache__" / name
            if not _is_current(compiled, source):
                _compile(source, compiled)
            _link(compiled, copy / compiled.relative_to(root))


def _is_current(compiled: Path, source: Path) -> bool:
    # Magic number, flags, hash of the source.
    header = importlib.util.MAGIC_NUMBER + CHECKED + importlib.util.source_hash(source.read_bytes())
    return compiled.exists() and compiled.read_bytes().startswith(header)


def _compile(source: Path, compiled: Path) -> None:
    mode = py_compile.PycInvalidationMode.CHECKED_HASH
    # Python 3.12 warns about upstream's invalid escape sequences, which the user need not know.
    with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
        py_compile.compile(str(source), str(compiled), doraise=True, invalidation_mode=mode)


def _link(compiled: Path, target: Path) -> None:
    """Link the file, as Python replaces bytecode and never edits it; copy if a link fails."""
    target.parent.mkdir(exist_ok=True)
    try:
        os.link(compiled, target)
    except OSError:
        shutil.copyfile(compiled, target)
