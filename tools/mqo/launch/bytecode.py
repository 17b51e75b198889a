"""Bytecode of a run's source: compiled once in the tree, and linked into each copy of it.

File times of a copy differ from the tree's, so Python would compile all modules again in every run.
Python checks this bytecode by the hash of the source instead (PEP 552), and compiles only changed
files.
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
    """Give `copy`, made of `tree`, the bytecode of the tree and of mqo; compile what they lack.

    Best effort: what cannot be compiled or written is left to Python. Nothing is written into a
    tree from elsewhere, which is the user's, or into an installed mqo.
    """
    if not tree.is_vendored:
        return
    _share(tree.root, "megatron", copy)
    if not Project.here().is_installed:
        for package in ("mqo/quant", "mqo/megatron"):
            _share(runtime.PACKAGE, package, copy / runtime.FOLDER)


def _share(root: Path, package: str, copy: Path) -> None:
    for source in (root / package).rglob("*.py"):
        with suppress(OSError, py_compile.PyCompileError):  # the latter: for another Python
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
    # Python 3.12 warns of upstream's invalid escape sequences, which are not the user's concern.
    with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
        py_compile.compile(str(source), str(compiled), doraise=True, invalidation_mode=mode)


def _link(compiled: Path, target: Path) -> None:
    """Link, for Python replaces such a file and never changes it; copy where that is impossible."""
    target.parent.mkdir(exist_ok=True)
    try:
        os.link(compiled, target)
    except OSError:
        shutil.copyfile(compiled, target)
