"""The checks of `mqo verify` on the files: they compile, and restore is exact."""

from __future__ import annotations

import builtins
import symtable
import warnings
from collections.abc import Mapping

from mqo.overlay.tree import Tree, sha256


def compile_faults(tree: Tree) -> list[str]:
    """Return the faults of the files that the patches changed, without running them."""
    faults = []
    for path, file in sorted(tree.patched().files.items()):
        if not path.endswith(".py"):
            continue
        before = b"" if file.pristine is None else tree.object(file.pristine)
        after = tree.read(path) or b""
        try:
            with warnings.catch_warnings(action="ignore"):
                compile(after, path, "exec", dont_inherit=True)
                new = sorted(unbound_names(after, path) - unbound_names(before, path))
        except (SyntaxError, ValueError) as error:
            faults.append(f"{path} does not compile once patched: {error}")
            continue
        if new:
            faults.append(f"{path} uses {', '.join(new)} once patched, without binding it")
    return faults


def unbound_names(source: bytes, path: str) -> set[str]:
    """Return names that a file looks up in its module and never binds there.

    This finds a patch that uses a variable which this release names differently, even in code that
    no check runs.
    """
    module = symtable.symtable(source.decode("utf-8-sig"), path, "exec")
    used: set[str] = set()
    bound = {*dir(builtins), "__file__", "__path__"}
    tables = [module]
    for table in tables:
        tables += table.get_children()
        for symbol in table.get_symbols():
            of_module = table is module or symbol.is_global()
            if of_module and symbol.is_referenced():
                used.add(symbol.get_name())
            if of_module and (symbol.is_assigned() or symbol.is_imported()):
                bound.add(symbol.get_name())
    return used - bound


def restore_faults(
    tree: Tree, packages: tuple[str, ...], members: Mapping[str, bytes]
) -> list[str]:
    """Return the differences of the restored tree from the wheel's files, {path: bytes}."""
    # vendor may have added the compiled helper of another wheel, and recorded it.
    digests = {**tree.upstream().files, **{path: sha256(data) for path, data in members.items()}}
    files = [path for package in packages for path in (tree.root / package).rglob("*")]
    there = {path.relative_to(tree.root).as_posix() for path in files if path.is_file()}
    faults = [f"{path} remains after restore" for path in sorted(there - set(digests))]
    for path, digest in sorted(digests.items()):
        content = tree.read(path)
        if content is None or sha256(content) != digest:
            faults.append(f"{path} differs from the wheel's after restore")
    if tree.manifest() is not None:
        faults.append("the tree counts as patched after restore")
    return faults
