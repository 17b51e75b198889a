"""Imports that an older Python or a machine without Triton cannot make."""

import ast
import re
from collections.abc import Iterable

from mqo.overlay.sweep import Leftover, Source, Splice, Sweep

# Names of `typing` that 3.11 lacks; typing_extensions has them on every version.
NEW_IN_TYPING = {"override"}


def splices(source: Source) -> Iterable[Splice]:
    """Move new typing names to typing_extensions, and unguarded triton imports to the facade."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and node.module == "typing":
            new = [a for a in node.names if a.name in NEW_IN_TYPING]
            if new:
                old = [a for a in node.names if a not in new]
                lines = [ast.unparse(ast.ImportFrom("typing_extensions", new, 0))]
                if old:
                    lines.insert(0, ast.unparse(ast.ImportFrom("typing", old, 0)))
                yield Splice.over(node, "\n".join(lines))
    for node in source.tree.body:
        if isinstance(node, ast.Import) and _is_triton(node):
            yield Splice.over(node, "\n".join(map(_triton_from_facade, node.names)))


def leftovers(tree: ast.Module) -> Iterable[Leftover]:
    """Typing names that 3.11 lacks, and imports of triton outside `try`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "typing":
            for alias in node.names:
                if alias.name in NEW_IN_TYPING:
                    yield Leftover(node.lineno, f"typing.{alias.name}")
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom) and "triton" in ast.unparse(node).split():
            if getattr(node, "module", None) != "megatron.device":
                yield Leftover(node.lineno, "an unguarded import of triton")


def _is_triton(node: ast.Import) -> bool:
    return any(alias.name.split(".")[0] == "triton" for alias in node.names)


def _triton_from_facade(alias: ast.alias) -> str:
    """`import triton.language as tl` -> `from megatron.device import triton_language as tl`."""
    name = alias.name.replace(".", "_")
    return f"from megatron.device import {name}" + (f" as {alias.asname}" if alias.asname else "")


SWEEP = Sweep(
    roots=("megatron/core/", "megatron/training/"),
    needle=re.compile(
        rb"^[ \t]*(?:import|from)\b.*\btriton\b|\b(?:%s)\b" % "|".join(NEW_IN_TYPING).encode(),
        re.MULTILINE,
    ),
    splices=splices,
    leftovers=leftovers,
)
