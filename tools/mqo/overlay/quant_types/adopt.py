"""Replace the hand-made sites of a fork by those of the patches, with the same types.

The fork is a git work tree. A commit on a branch of its own takes the hand-made code out, so git
keeps the originals; the patches are applied to that branch as to any other checkout.
"""

from __future__ import annotations

import ast
import difflib
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mqo.errors import EditedError, OverlayError
from mqo.overlay import apply as overlay
from mqo.overlay.checkout import git
from mqo.overlay.plan import plan
from mqo.overlay.quant_types import modifier
from mqo.overlay.quant_types.by_hand import Cut, plain
from mqo.overlay.quant_types.sites import METHODS
from mqo.overlay.series import Series
from mqo.overlay.tree import Tree
from mqo.process import temporary_folder
from mqo.quant.formats import NONE, source_types
from mqo.quant.source import VARIABLE

BRANCH = "mqo-adopted"
_SUBJECT = "Remove hand-made quantization sites"


@dataclass(frozen=True)
class Adoption:
    """What an adoption takes out of the files, and the types that it sets."""

    version: str
    types: Mapping[str, str]
    cuts: Mapping[str, Sequence[Cut]]
    contents: Mapping[str, bytes]

    def lines(self) -> Iterator[str]:
        """Yield the lines to print."""
        yield f"megatron-core {self.version}; these lines would go:"
        for path, cuts in self.cuts.items():
            yield path
            yield from (f"  {f'{cut.first}-{cut.last}':9}  {cut.label}" for cut in cuts)
        yield "the sites of the patches would get these types:"
        yield from (f"  {site:5}  {quant_type}" for site, quant_type in self.types.items())


@dataclass(frozen=True)
class Adopted:
    """An adoption that was made; `undo` are the commands that undo it."""

    types: Mapping[str, str]
    undo: tuple[str, ...]


def planned(tree: Tree, series: Series) -> Adoption:
    """Return what `adopt` would do; write nothing.

    Raises:
        OverlayError: the tree is not a git work tree of Megatron, is patched, or holds hand-made
            code in another form than `by_hand` describes; the error names file and line.
        EditedError: a file with sites was changed since HEAD.
        DriftError: the patches do not fit the rest of the tree.
    """
    _check_tree(tree)
    changed = _changed(tree, METHODS)
    if changed:
        raise EditedError(
            f"{changed[0]} in {tree.root} differs from HEAD",
            expected="files with sites as in HEAD, which keeps the originals",
            help="Commit the change, or stash it with git",
        )
    old = {path: tree.pristine(path) for path in METHODS}
    results = {path: plain(path, content) for path, content in old.items()}
    cuts = {path: tuple(cuts) for path, (_, cuts) in results.items() if cuts}
    if not cuts:
        raise OverlayError(
            f"{tree.root} holds no hand-made site",
            expected=f"{VARIABLE} in {' or '.join(METHODS)}",
            help=f"`mqo apply --tree {_quoted(tree)}` patches the tree",
        )
    contents = {path: results[path][0] for path in cuts}
    upstream = tree.upstream()
    files = plan(
        series, upstream.version, upstream.files, lambda p: contents.get(p) or tree.pristine(p)
    )
    for path in contents:
        _check_holders(path, old[path], cuts[path], contents[path], files[path].content)
    return Adoption(upstream.version, _types(tree), cuts, contents)


def adopt(tree: Tree, series: Series) -> Adopted:
    """Take the hand-made sites out in a commit on BRANCH, apply the patches, and set the types.

    If a step fails, the tree and its branch are as before.

    Raises:
        OverlayError: as in `planned`, or a step failed and could not be undone, as on a full disk.
    """
    adoption = planned(tree, series)
    before = _branch(tree.root)
    if before == "HEAD":
        before = f"--detach {git(tree.root, 'rev-parse', 'HEAD').decode().strip()}"
    commit = _commit(tree.root, adoption.contents)
    try:
        git(tree.root, "switch", "--quiet", "--create", BRANCH, commit)
        overlay.apply(Tree(tree.root), series)
        chosen = {site: value for site, value in adoption.types.items() if value != NONE}
        if chosen:
            modifier.modify(tree.root, chosen)
    except BaseException:
        try:
            _undo(Tree(tree.root), series, adoption.contents)
        except OverlayError as error:
            raise OverlayError(
                f"{tree.root} is half adopted: {error.found}",
                help=_help(_undo_commands(tree, before, adoption.contents)),
            ) from error
        raise
    return Adopted(adoption.types, _undo_commands(tree, before))


def _undo(tree: Tree, series: Series, paths: Iterable[str]) -> None:
    if tree.manifest() is not None:
        overlay.restore(tree, series)
    if _branch(tree.root) == BRANCH:
        git(tree.root, "switch", "--quiet", "-")
    left = _changed(tree, paths)  # by a switch that failed
    if left:
        git(tree.root, "checkout", "--quiet", "HEAD", "--", *left)
    if _exists(tree.root):
        git(tree.root, "branch", "--quiet", "-D", BRANCH)


def _undo_commands(tree: Tree, before: str, paths: Iterable[str] = ()) -> tuple[str, ...]:
    folder = _quoted(tree)
    checkout = [f"git -C {folder} checkout HEAD -- {shlex.join(paths)}"] if paths else []
    branch = (f"git -C {folder} switch {before}", f"git -C {folder} branch -D {BRANCH}")
    return f"mqo restore --tree {folder}", *checkout, *branch


def _help(commands: Iterable[str]) -> str:
    return "To undo that adoption: " + ", ".join(f"`{words}`" for words in commands)


def _changed(tree: Tree, paths: Iterable[str]) -> list[str]:
    """Return the files that differ from HEAD."""
    return [path for path in paths if tree.read(path) != tree.pristine(path)]


def _branch(root: Path) -> str:
    """Return the name of the current branch, or "HEAD" if it has none."""
    return git(root, "rev-parse", "--abbrev-ref", "HEAD").decode().strip()


def _exists(root: Path) -> bool:
    return bool(git(root, "for-each-ref", f"refs/heads/{BRANCH}"))


def _check_tree(tree: Tree) -> None:
    if not tree.is_checkout:
        raise OverlayError(
            f"{tree.root} is not a git work tree of Megatron-LM",
            expected="one, because git keeps the originals",
            help="`git init`, `git add --all` and `git commit` make the folder one",
        )
    if _exists(tree.root):
        commands = _undo_commands(tree, "-")
        here = _branch(tree.root) == BRANCH
        raise OverlayError(
            f"{tree.root} has the branch {BRANCH} already",
            expected="no branch of that name, which an adoption makes",
            help=_help(commands if here else commands[-1:]),
        )
    if tree.manifest() is not None:
        raise OverlayError(
            f"{tree.root} is patched by `mqo apply`", expected="a tree that was patched by hand"
        )


def _types(tree: Tree) -> dict[str, str]:
    """Return {site: type} of the hand-made literals; OverlayError if one is not a known type."""
    types = {}
    for state in modifier.check(tree.root).sites:
        site, value = state.site, state.type or NONE
        if state.unknown or value not in source_types():
            values = ", ".join(state.unknown) or site.note
            raise OverlayError(
                f"{site.path}:{site.line} does not give {site.name} one known type ({values})",
                expected=f"one of {', '.join(source_types())}",
                help=f"Set '{NONE}' if the fork does not quantize there",
            )
        types[site.name] = value
    return types


def _check_holders(path: str, old: bytes, cuts: Sequence[Cut], bare: bytes, patched: bytes) -> None:
    """Refuse a class that held a site, stays in the file, and gets none from the patches."""
    classes = {n.name: n for n in ast.parse(bare).body if isinstance(n, ast.ClassDef)}
    nodes = [node for node in ast.parse(patched).body if isinstance(node, ast.ClassDef)]
    sited = {node.name for node in nodes if _reads_literal(node)}
    for node in ast.parse(old).body:
        if not isinstance(node, ast.ClassDef) or node.name not in classes or node.name in sited:
            continue
        if any(node.lineno <= cut.first <= (node.end_lineno or 0) for cut in cuts):
            raise OverlayError(
                f"{path}:{node.lineno} {node.name} held sites, and the patches give it none",
                expected=f"a copy of {' or '.join(sorted(sited)) or 'a class with sites'} that "
                "differs from it only in the sites",
                help="Correct the lines below, commit the change, and repeat the command",
                detail=_difference(classes, sorted(sited), node.name),
            )


def _reads_literal(node: ast.ClassDef) -> bool:
    return VARIABLE in (part.id for part in ast.walk(node) if isinstance(part, ast.Name))


def _difference(classes: Mapping[str, ast.ClassDef], sited: Sequence[str], name: str) -> str:
    if not sited or sited[0] not in classes:
        return ""
    first, second = (ast.unparse(classes[n]).splitlines()[1:] for n in (sited[0], name))
    diff = difflib.unified_diff(first, second, sited[0], name, n=1, lineterm="")
    return "\n".join(diff) + "\n"


def _commit(root: Path, contents: Mapping[str, bytes]) -> str:
    """Write a commit on HEAD with these contents, without touching the tree; return its id."""
    with temporary_folder("mqo-adopt-") as folder:
        index = folder / "index"
        git(root, "read-tree", "HEAD", index=index)
        for path, content in contents.items():
            mode = git(root, "ls-files", "--stage", "--", path, index=index).split()[0].decode()
            words = ("hash-object", "-w", "--stdin", f"--path={path}")
            blob = git(root, *words, stdin=content).decode().strip()
            git(root, "update-index", "--cacheinfo", f"{mode},{blob},{path}", index=index)
        saved = git(root, "write-tree", index=index).decode().strip()
        return git(root, "commit-tree", saved, "-p", "HEAD", "-m", _SUBJECT).decode().strip()


def _quoted(tree: Tree) -> str:
    return shlex.quote(str(tree.root))
