"""Find the quant type literals of each GEMM site in a tree's files, hand-patched trees included.

The linear sites are in the autograd function that the file's parallel linear layers apply, with any
name; attention's are in the class whose `forward` takes query, key and value. A site's literals are
those that its GEMMs read (see `gemms`); there are several if each branch has its own. Only trees
with our patches have literals for the products of attention's backward pass, which autograd
computes elsewhere.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace

from mqo.errors import OverlayError
from mqo.overlay.literals import VARIABLE, Literal, Source
from mqo.overlay.quant_types.gemms import ATTEND, BACKWARD, FORWARD, Gemm, find_gemms
from mqo.overlay.tree import running_python
from mqo.quant.formats import ATTENTION_BACKWARD

LAYERS = "megatron/core/tensor_parallel/layers.py"
ATTENTION = "megatron/core/transformer/dot_product_attention.py"
METHODS = {LAYERS: {"forward": FORWARD, "backward": BACKWARD}, ATTENTION: {"forward": ATTEND}}
_CLASSES = {
    LAYERS: "autograd function that its parallel linear layers apply",
    ATTENTION: "class with a forward of query, key and value",
}
_LAYERS = {"ColumnParallelLinear", "RowParallelLinear"}
_OPERANDS = {"query", "key", "value"}
ABSENT = "absent"


@dataclass(frozen=True)
class SourceSite:
    """A site in the source: its literals in source order, and the reason if they cannot be edited.

    `shares` names the other sites that read one of its literals. `bound` tells that the patches'
    binding names the site, and `due` that the user should correct what `refusal` describes.
    """

    name: str
    path: str
    line: int
    literals: tuple[Literal, ...] = ()
    note: str = ""
    refusal: str = ""
    shares: tuple[str, ...] = ()
    bound: bool = False
    due: bool = False

    @property
    def values(self) -> tuple[str, ...]:
        """Return the values in the source, each once; several if branches differ."""
        return tuple(dict.fromkeys(literal.value for literal in self.literals))


@dataclass(frozen=True)
class FileScan:
    """The sites of one file, what the user should correct, and other notes."""

    sites: tuple[SourceSite, ...]
    due: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def scan(path: str, content: bytes | None) -> FileScan:
    """Return the sites that the file at tree-relative `path` should hold; `content` None: no file.

    Raises:
        OverlayError: it is not Python.
    """
    if content is None:
        return _without_sites(path, 1, f"{path} does not exist")
    try:
        source = Source.parse(content)
        named = {literal.site for literal in source.literals.values()}
        if named & {*_sites(path)}:
            sites = [*_sites(path), *(site for site in ATTENTION_BACKWARD if site in named)]
            return _with_strays(path, [_bound(path, site, source) for site in sites], source)
        holders = {node: _gemms(path, node, source) for node in _classes(path, source.tree)}
    except (SyntaxError, ValueError, RecursionError) as error:
        line = getattr(error, "lineno", None) or 1
        raise OverlayError(
            f"{path}:{line} cannot be read as Python {running_python()}, the one that runs mqo "
            f"({str(error).split(' (')[0]})",
            expected="its syntax, in UTF-8 or with a coding line that names the file's encoding",
            help="Correct the file, run mqo with a newer Python, or give another tree with --tree",
        ) from error
    complete = [n for n, gemms in holders.items() if {g.site for g in gemms} >= {*_sites(path)}]
    readers = [n for n, gemms in holders.items() if any(gemm.reads for gemm in gemms)]
    chosen = [n for n in readers if n in complete] or readers + complete or [*holders]
    if not chosen:
        return _without_sites(path, 1, f"{path} has no {_CLASSES[path]}", source)
    if len(chosen) > 1:
        first, second, *_ = sorted(chosen, key=lambda node: node.lineno)
        why = f"{_at(path, second)} may hold the sites as well as line {first.lineno}"
        return _without_sites(path, second.lineno, why, source)
    (holder,) = chosen
    sites = [_source_site(path, site, holder, holders[holder]) for site in _sites(path)]
    unused = (_at(path, node) for node in complete if node is not holder)
    notes = tuple(f"{at} computes the same sites and reads no literal" for at in unused)
    return _with_strays(path, sites, source, notes)


def _sites(path: str) -> list[str]:
    return [site for sites in METHODS[path].values() for site in sites]


def _without_sites(path: str, line: int, why: str, source: Source | None = None) -> FileScan:
    sites = [SourceSite(s, path, line, note=ABSENT, refusal=why, due=True) for s in _sites(path)]
    return _with_strays(path, sites, source)


def _with_strays(
    path: str, sites: list[SourceSite], source: Source | None, notes: tuple[str, ...] = ()
) -> FileScan:
    """Return a scan that notes shared literals, and literals without a site.

    The latter need action if sites are absent.
    """
    used = {literal for site in sites for literal in site.literals}
    strays = [lit.line for lit in source.literals.values() if lit not in used] if source else []
    absent = [site.name for site in sites if site.note == ABSENT]
    lack = f", and {' and '.join(absent)} {'have' if absent[1:] else 'has'} none" * bool(absent)
    unread = tuple(f"{path}:{line} is a literal that no GEMM of a site reads" for line in strays)
    due = tuple(f"{text}{lack}" for text in unread) if absent else ()
    shared = tuple(replace(site, shares=_sharing(site, sites)) for site in sites)
    return FileScan(shared, due, notes if absent else notes + unread)


def _sharing(site: SourceSite, sites: list[SourceSite]) -> tuple[str, ...]:
    others = (other for other in sites if {*other.literals} & {*site.literals})
    return tuple(other.name for other in others if other is not site)


# -- which class holds the sites ------------------------------------------------------------------


def _at(path: str, node: ast.ClassDef) -> str:
    return f"{path}:{node.lineno} ({node.name})"


def _gemms(path: str, node: ast.ClassDef, source: Source) -> list[Gemm]:
    methods = ((_method(node, name, source.tree), sites) for name, sites in METHODS[path].items())
    return [gemm for m, sites in methods if m for gemm in find_gemms(m, sites, source)]


def _method(node: ast.ClassDef, name: str, tree: ast.Module) -> ast.FunctionDef | None:
    """Return a class's method, its own or inherited from a base in the same file."""
    own = [m for m in node.body if isinstance(m, ast.FunctionDef) and m.name == name]
    bases = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id != node.name]
    classes = [c for c in _definitions(tree) if isinstance(c, ast.ClassDef) and c.name in bases]
    inherited = (_method(base, name, tree) for base in classes if base.lineno < node.lineno)
    return own[-1] if own else next(filter(None, inherited), None)


def _classes(path: str, tree: ast.Module) -> list[ast.ClassDef]:
    """Return the classes that may hold the file's sites."""
    classes = [node for node in _definitions(tree) if isinstance(node, ast.ClassDef)]
    if path == LAYERS:
        applied = _applied(tree)
        return [node for node in classes if node.name in applied]
    forwards = [(node, _method(node, "forward", tree)) for node in classes]
    return [n for n, f in forwards if f and {a.arg for a in f.args.args} >= _OPERANDS]


_Definition = ast.ClassDef | ast.FunctionDef | ast.Assign


def _definitions(node: ast.AST) -> Iterator[_Definition]:
    """Yield what a module defines, also under `if` and `try`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Definition):
            yield child
        elif isinstance(child, ast.stmt | ast.excepthandler):
            yield from _definitions(child)


def _applied(tree: ast.Module) -> set[str]:
    """Return the names X of the `X.apply` that the parallel linear layers reach in this file.

    Without such layers in the file, the functions `...linear_with_...` count instead; without
    these, all classes.
    """
    named = [(name, node) for node in _definitions(tree) for name in _names(node)]
    names = {name for name, _ in named}
    waiting = [*names & _LAYERS] or [name for name in names if "linear_with_" in name]
    if not waiting:
        return names
    reached, applied = set(), set()
    while waiting:
        reached.add(name := waiting.pop())
        for part in (part for n, node in named if n == name for part in ast.walk(node)):
            match part:
                case ast.Attribute(value=ast.Name(id=function), attr="apply"):
                    applied.add(function)
                case ast.Name(id=other) if other not in reached:
                    waiting.append(other)
    return applied


def _names(node: _Definition) -> list[str]:
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return [node.name]


# -- the literals of a site ----------------------------------------------------------------------


def _bound(path: str, name: str, source: Source) -> SourceSite:
    """Return a site of a patched tree, in which the statement after a literal names its site."""
    literals = tuple(lit for lit in source.literals.values() if lit.site == name)
    if not literals:
        return SourceSite(name, path, 1, note=ABSENT, refusal=f"{path} has no literal for {name}")
    return SourceSite(name, path, literals[0].line, literals, bound=True)


def _source_site(path: str, name: str, holder: ast.ClassDef, gemms: list[Gemm]) -> SourceSite:
    """Return a site, from what its GEMMs read."""
    mine = [gemm for gemm in gemms if gemm.site == name]
    reads = {quant_type for gemm in mine for quant_type in gemm.reads}
    literals = tuple(sorted((t for t in reads if isinstance(t, Literal)), key=lambda t: t.start))
    unknown = min((t for t in reads if isinstance(t, int)), default=0)
    line = mine[0].line if mine else holder.lineno
    line = literals[0].line if literals else unknown or line
    site = SourceSite(name, path, line, literals)
    if not reads:
        lack = f"no literal for the GEMM of {name}" if mine else f"no known GEMM of {name}"
        return replace(site, note=ABSENT, refusal=f"{path}:{line} ({holder.name}) has {lack}")
    if unknown:
        over = f", over the literal at line {line}" if literals else ""
        why = f"{path}:{unknown} does not set {VARIABLE} for {name} by a string literal{over}"
        note = f"or what line {unknown} sets" if literals else "not set by a string literal"
        return replace(site, note=note, refusal=why, due=True)
    for gemm in gemms:
        if not gemm.site and gemm.reads & {*literals}:
            why = (
                f"{path}:{gemm.line} also reads the literal of {name}, but belongs to no known site"
            )
            return replace(site, note=f"also read at line {gemm.line}", refusal=why, due=True)
    without = " and ".join(str(gemm.line) for gemm in mine if not gemm.reads)
    lines = " and ".join(f"{literal.line} ({literal.value})" for literal in literals)
    notes = [f"lines {lines}"] * (len(literals) > 1)
    notes += [f"not read by the GEMMs at {without}"] * bool(without)
    return replace(site, note=", ".join(notes))
