"""Take hand-made quantization out of a source file, so that the patches can replace it.

Hand-made is this form: a function sets the literal, and the `if` chain after it compares the
literal with types. Each branch is one assignment to the same names, or one `return`, after imports
that only the chain reads; the branch `else` is upstream's. The chain becomes its `else`. The
literal goes, and so do imports before it that only the chain reads. If a class or function is then
equal to an earlier one of another name, it was a copy that held the chain: it goes too, and its
readers read the earlier one. Everything else stays, byte for byte.
"""

from __future__ import annotations

import ast
import copy
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeGuard

from mqo.errors import OverlayError
from mqo.overlay.quant_types.sites import METHODS
from mqo.overlay.tree import Tree
from mqo.quant.source import VARIABLE

_Definition = ast.ClassDef | ast.FunctionDef


@dataclass(frozen=True)
class Cut:
    """Lines of a file, counted from 1, that are replaced by `lines`; `label` says what they are."""

    first: int
    last: int
    lines: tuple[bytes, ...]
    label: str


def plain(path: str, content: bytes) -> tuple[bytes, list[Cut]]:
    """Return the file without its hand-made sites, and what was cut, in source order.

    Raises:
        OverlayError: the literal is used in another form; the error names file and line.
    """
    lines = content.splitlines(keepends=True)
    tree = ast.parse(content)
    cuts = [cut for body in _bodies(tree) for cut in _site_cuts(path, body, lines)]
    cuts += [_removed(node, "its import") for node in _unread_imports(tree, cuts)]
    _refuse_reads(path, tree, cuts)
    folded = ast.parse(_spliced(lines, cuts))
    equal_before = _twins(tree)  # these are not copies for the sites
    twins = {name: twin for name, twin in _twins(folded).items() if name not in equal_before}
    copies = _copy_cuts(tree, twins)
    renamed = _renamed(_without(lines, cuts, copies), twins)
    if ast.dump(ast.parse(renamed)) != ast.dump(_expected(folded, twins)):
        raise _refusal(path, cuts[0].first if cuts else 1, "cannot be replaced line by line")
    return renamed, sorted([*cuts, *copies], key=lambda cut: cut.first)


def files_by_hand(tree: Tree) -> list[str]:
    """Return the files whose version at HEAD has sites, which cannot be those of the patches."""
    held = [path for path in METHODS if tree.is_checkout and path in tree.upstream().files]
    return [path for path in held if VARIABLE.encode() in tree.pristine(path)]


def _refusal(path: str, line: int, why: str) -> OverlayError:
    return OverlayError(
        f"{path}:{line} {why}",
        expected=f"hand-made sites in the form `{VARIABLE} = 'T'`, `if {VARIABLE} == 'T'`, `elif`, "
        "`else`, with one assignment per branch",
        help="Bring the code into this form, or undo it by hand; nothing was written",
    )


# -- the chain of a site ---------------------------------------------------------------------------


def _bodies(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield every list of statements that sets the literal."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if isinstance(body, list) and any(_sets_literal(child) for child in body):
                yield body


def _sets_literal(node: ast.AST) -> bool:
    match node:
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str())):
            return name == VARIABLE
    return False


def _site_cuts(path: str, body: list[ast.stmt], lines: list[bytes]) -> Iterator[Cut]:
    for index, node in enumerate(body):
        if not _sets_literal(node):
            continue
        chain = body[index + 1] if index + 1 < len(body) else None
        if not isinstance(chain, ast.If):
            raise _refusal(path, node.lineno, f"sets {VARIABLE}, and no `if` follows")
        last = _else_of(path, chain)
        yield _removed(node, f"the literal {ast.unparse(node).partition(' = ')[2]}")
        shift = last.col_offset - chain.col_offset
        kept = tuple(
            line[shift:] if line[:shift].isspace() else line
            for line in lines[last.lineno - 1 : last.end_lineno]
        )
        yield Cut(chain.lineno, chain.end_lineno or 0, kept, "the chain, for its else")


def _removed(node: ast.stmt, label: str) -> Cut:
    return Cut(node.lineno, node.end_lineno or 0, (), label)


def _unread_imports(tree: ast.Module, cuts: list[Cut]) -> Iterator[ast.stmt]:
    """Yield the imports before a literal that nothing outside of the chains reads."""
    reads = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
    kept = {n.id for n in reads if not any(c.first <= n.lineno <= c.last for c in cuts)}
    kept |= {n.id for cut in cuts for n in _names_in(cut.lines)}
    for body in _bodies(tree):
        before: list[ast.stmt] = []
        for node in body:
            if _sets_literal(node):
                yield from before
            if _is_import(node):
                before += [] if _imported(node) & kept else [node]
            else:
                before = []


def _names_in(lines: tuple[bytes, ...]) -> list[ast.Name]:
    code = ast.parse(textwrap.dedent(b"".join(lines).decode())) if lines else ast.Module([], [])
    return [node for node in ast.walk(code) if isinstance(node, ast.Name)]


def _else_of(path: str, chain: ast.If) -> ast.stmt:
    """Return the statement in the last `else` of a chain."""
    branches: list[ast.stmt] = []
    node: ast.stmt = chain
    while isinstance(node, ast.If) and _compares(node.test):
        *imports, branch = node.body
        if not all(map(_is_import, imports)) or len(node.orelse) != 1:
            raise _refusal(path, node.lineno, "needs one statement per branch, and an else")
        branches.append(branch)
        node = node.orelse[0]
    for branch in branches:
        if not _alike(branch, node):
            raise _refusal(path, branch.lineno, "does not assign what the chain's else assigns")
    return node


def _compares(test: ast.expr) -> bool:
    match test:
        case ast.Compare(left=ast.Name(id=name), ops=[ast.Eq()], comparators=[ast.Constant()]):
            return name == VARIABLE
    return False


def _alike(first: ast.stmt, second: ast.stmt) -> bool:
    """Return whether both return, or both assign to the same names."""
    if isinstance(first, ast.Assign) and isinstance(second, ast.Assign):
        return [*map(ast.dump, first.targets)] == [*map(ast.dump, second.targets)]
    return isinstance(first, ast.Return) and isinstance(second, ast.Return)


def _is_import(node: ast.AST) -> TypeGuard[ast.Import | ast.ImportFrom]:
    return isinstance(node, ast.Import | ast.ImportFrom)


def _imported(node: ast.Import | ast.ImportFrom) -> set[str]:
    return {alias.asname or alias.name.partition(".")[0] for alias in node.names}


def _refuse_reads(path: str, tree: ast.Module, cuts: list[Cut]) -> None:
    """Refuse a use, outside of the chains, of the literal or of a name that a chain imports."""
    inside = {line for cut in cuts for line in range(cut.first, cut.last + 1)}
    imports = (node for node in ast.walk(tree) if _is_import(node) and node.lineno in inside)
    names = {VARIABLE}.union(*map(_imported, imports))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in names and node.lineno not in inside:
            raise _refusal(path, node.lineno, f"uses {node.id} outside of such a chain")


# -- copies of upstream's functions ----------------------------------------------------------------


def _twins(tree: ast.Module) -> dict[str, str]:
    """Return {name of a copy: name of the earlier definition that it equals}."""
    twins: dict[str, str] = {}
    definitions = [node for node in tree.body if isinstance(node, _Definition)]
    shapes = {node: _shape(node) for node in definitions}
    grows = True
    while grows:
        grows = False
        for index, node in enumerate(definitions):
            for earlier in definitions[:index]:
                is_new = node.name not in twins and earlier.name not in twins
                may_be = is_new and shapes[earlier] == shapes[node]
                if may_be and _as(node, earlier.name, twins) == _as(earlier, earlier.name, twins):
                    twins[node.name], grows = earlier.name, True
    return twins


def _shape(node: _Definition) -> str:
    """Return the code of a definition without names: that of copies is equal."""
    return re.sub(r"\b(id|name)='\w+'", "", _as(node, node.name, {}))


def _as(node: _Definition, name: str, twins: dict[str, str]) -> str:
    """Return the code of a definition under another name, without docstrings."""
    code = _Rename(twins | {node.name: name}).visit(copy.deepcopy(node))
    for part in ast.walk(code):
        if isinstance(part, _Definition) and ast.get_docstring(part, clean=False) is not None:
            part.body = part.body[1:] or [ast.Pass()]
    return ast.dump(code)


class _Rename(ast.NodeTransformer):
    def __init__(self, names: dict[str, str]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.Name:
        node.id = self.names.get(node.id, node.id)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.name = self.names.get(node.name, node.name)
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.name = self.names.get(node.name, node.name)
        return self.generic_visit(node)


def _is_copy(node: ast.stmt, twins: dict[str, str]) -> bool:
    """Return whether a statement defines a copy, or sets one of its attributes."""
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
            return name in twins
        case ast.Assign(targets=[ast.Attribute(value=ast.Name(id=name))]):
            return name in twins
    return False


def _copy_cuts(tree: ast.Module, twins: dict[str, str]) -> list[Cut]:
    cuts = []
    for node in tree.body:
        if _is_copy(node, twins):
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
            name = getattr(node, "name", "")
            label = f"{name}, a copy of {twins[name]}" if name else "an attribute of a copy"
            cuts.append(Cut(first, node.end_lineno or 0, (), label))
    return cuts


def _expected(folded: ast.Module, twins: dict[str, str]) -> ast.Module:
    folded.body = [node for node in folded.body if not _is_copy(node, twins)]
    return _Rename(twins).visit(folded)


# -- bytes -----------------------------------------------------------------------------------------


def _spliced(lines: list[bytes], cuts: list[Cut]) -> bytes:
    result = list(lines)
    for cut in sorted(cuts, key=lambda cut: cut.first, reverse=True):
        result[cut.first - 1 : cut.last] = cut.lines
    return b"".join(result)


def _without(lines: list[bytes], cuts: list[Cut], copies: list[Cut]) -> bytes:
    """Return the lines after all cuts; those in a copy need no cut of their own."""
    outer = [c for c in cuts if not any(o.first <= c.first <= o.last for o in copies)]
    return _spliced(lines, [*outer, *copies])


def _renamed(content: bytes, twins: dict[str, str]) -> bytes:
    """Return the content with the names of copies replaced, wherever they are read."""
    lines = content.splitlines(keepends=True)
    nodes = [n for n in ast.walk(ast.parse(content)) if isinstance(n, ast.Name) and n.id in twins]
    for node in sorted(nodes, key=lambda n: (n.lineno, n.col_offset), reverse=True):
        line, start = lines[node.lineno - 1], node.col_offset
        end = start + len(node.id.encode())
        lines[node.lineno - 1] = line[:start] + twins[node.id].encode() + line[end:]
    return b"".join(lines)
