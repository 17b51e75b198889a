"""Only one module opens files from elsewhere: every other call that reads a file is listed here.

A function may read a file by itself only if the project ships the file, or writes it where nobody
else does.
"""

import ast
import re
import subprocess
from collections.abc import Iterator

from mqo.project import Project

ROOT = Project.here().root
READER = "Megatron-LM/megatron/run/untrusted.py"
PLACES = ("tools", "Megatron-LM", "script", "setup.py")
# Attributes of a path, a module or a class that read a file.
ATTRIBUTES = {"read_text", "read_bytes", "safe_open", "load_file", "from_pretrained", "from_file"}
ATTRIBUTES |= {"memmap", "fromfile", "open_memmap", "safe_load", "ZipFile", "GzipFile"}
# Functions of a module that read a file, or what a file holds.
OF_MODULES = {
    "json": {"load", "loads"},
    "tomllib": {"load", "loads"},
    "yaml": {"load", "safe_load", "full_load", "compose", "SafeLoader"},
    "torch": {"load"},
    "np": {"load", "genfromtxt", "loadtxt"},
    "numpy": {"load", "genfromtxt", "loadtxt"},
    "pickle": {"load", "loads", "Unpickler", "_Unpickler"},
    "tarfile": {"open"},
    "gzip": {"open", "decompress"},
    "bz2": {"open", "decompress"},
    "zipfile": {"ZipFile"},
    "shutil": {"copyfile", "copy", "copy2", "copytree", "unpack_archive"},
    "os": {"open"},
    "io": {"open"},
}
NAMES = {"safe_open", "load_file", "memmap"}
ALLOWED: dict[str, str] = {}


def reads(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Yield (function, call) for each call that reads a file; functions as Class.method."""

    def visit(node: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[str, ast.Call]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = (*names, node.name)
        if isinstance(node, ast.Call) and is_read(node):
            yield ".".join(names), node
        for child in ast.iter_child_nodes(node):
            yield from visit(child, names)

    yield from visit(tree, ())


def is_read(call: ast.Call) -> bool:
    """Return whether a call reads a file: an open in a mode that only writes does not."""
    match call.func:
        case ast.Name("open"):
            return not writes(call.args[1:], call)
        case ast.Attribute(ast.Name(module), name) if module in OF_MODULES:
            return name in OF_MODULES[module]
        case ast.Attribute(_, "open"):
            return not writes(call.args, call)
        case ast.Attribute(_, name):
            return name in ATTRIBUTES
        case ast.Name(name):
            return name in NAMES
    return False


def writes(positional: list[ast.expr], call: ast.Call) -> bool:
    modes = [word.value for word in call.keywords if word.arg == "mode"] or positional[:1]
    match modes:
        case [ast.Constant(str(mode))]:
            return bool(re.fullmatch(r"[wax]b?", mode))
    return False


def found() -> dict[str, int]:
    """{"file::function": the number of reads in it} of the product's code."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *PLACES],
        cwd=ROOT, capture_output=True, check=True, text=True,
    )  # fmt: skip
    counts: dict[str, int] = {}
    for name in filter(None, listed.stdout.split("\0")):
        if name.endswith(".py") and name != READER and (ROOT / name).exists():
            for function, _ in reads(ast.parse((ROOT / name).read_text(encoding="utf-8"))):
                key = f"{name}::{function}"
                counts[key] = counts.get(key, 0) + 1
    return counts


def test_files_from_elsewhere_are_opened_in_one_module():
    counts = found()
    assert sorted(counts.keys() - ALLOWED.keys()) == []


def test_every_exception_is_still_needed_and_has_a_reason():
    assert sorted(ALLOWED.keys() - found().keys()) == []
    assert [key for key, reason in ALLOWED.items() if len(reason.split()) < 3] == []
