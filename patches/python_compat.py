"""Replace imports that fail on Python 3.11 or on a machine without Triton."""

import ast
import re
from collections.abc import Iterable

from mqo.overlay.codemod import Codemod, Source, Splice
from mqo.overlay.drift import Place

# Names of `typing` that 3.11 lacks; typing_extensions has them on every version.
NEW_IN_TYPING = {"override"}
# {module of triton: its name in mqo.megatron.device}
FROM_DEVICE = {"triton": "triton", "triton.language": "triton_language"}


def splices(source: Source) -> Iterable[Splice]:
    """Move new typing names to typing_extensions, and unguarded triton imports to the facade."""
    for node in source.walk():
        if isinstance(node, ast.ImportFrom) and node.module == "typing":
            new = [a for a in node.names if a.name in NEW_IN_TYPING]
            if new:
                old = [a for a in node.names if a not in new]
                lines = [ast.unparse(ast.ImportFrom("typing_extensions", new, 0))]
                if old:
                    lines.insert(0, ast.unparse(ast.ImportFrom("typing", old, 0)))
                yield source.lines_over(node, lines)
    for node in source.tree.body:
        if isinstance(node, ast.Import) and any(alias.name in FROM_DEVICE for alias in node.names):
            yield source.lines_over(node, list(map(_from_device, node.names)))


def leftovers(source: Source) -> Iterable[Place]:
    """Yield typing names that 3.11 lacks, and imports of triton outside `try`."""
    for node in source.walk():
        if isinstance(node, ast.ImportFrom) and node.module == "typing":
            for alias in node.names:
                if alias.name in NEW_IN_TYPING:
                    yield Place(node.lineno, f"typing.{alias.name}")
    for node in source.tree.body:
        if any(module.split(".")[0] == "triton" for module in _imported(node)):
            yield Place(node.lineno, "an unguarded import of triton")


def _imported(node: ast.stmt) -> list[str]:
    """Return the modules that a statement imports from outside its own package."""
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=str(module), level=0):
            return [module]
    return []


def _from_device(alias: ast.alias) -> str:
    """Turn `import triton.language as tl` into an import from our device module."""
    if alias.name not in FROM_DEVICE:
        return ast.unparse(ast.Import([alias]))
    if alias.asname:
        return f"from mqo.megatron.device import {FROM_DEVICE[alias.name]} as {alias.asname}"
    return "from mqo.megatron.device import triton"


CODEMOD = Codemod(
    roots=("megatron/core/", "megatron/training/"),
    needle=re.compile(
        rb"^[ \t]*(?:import|from)\b.*\btriton\b|\b(?:%s)\b" % "|".join(NEW_IN_TYPING).encode(),
        re.MULTILINE,
    ),
    splices=splices,
    leftovers=leftovers,
)
