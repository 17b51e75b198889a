"""Read, set and restore the quant type literals of a tree that was patched by mqo or by hand.

A command is planned completely before anything is written: all sites are found, all files are
checked for other changes, and then all files change or none. Reading needs only the standard
library. Types are set with LibCST; writing takes the tree's lock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mqo.errors import EditedError, OverlayError, check_name
from mqo.overlay import literals, transaction
from mqo.overlay.journal import STORE
from mqo.overlay.literals import Literal
from mqo.overlay.quant_types import ledger
from mqo.overlay.quant_types.sites import METHODS, SourceSite, scan
from mqo.overlay.records import LITERALS, Modified, modified_as_json
from mqo.overlay.tree import Tree
from mqo.overlay.unified import unified
from mqo.project import Project
from mqo.quant.formats import NONE, SITES, source_types

# {site: its name in the option --...-quant}.
OPTIONS = {site: site.replace("_", "-") for site in SITES} | {"fprop": "linear"}
COMMAND = (
    "quant_type_modifier"
    if Project.here().is_installed
    else "python3 script/quant_type_modifier.py"
)
DIFFERS = "differs"
STORE_FILE = f"{STORE}/{LITERALS}"  # written by every modification
CUT_OFF = "a command was interrupted; the next command first finishes or undoes it"


@dataclass(frozen=True)
class SiteState:
    """A site in the source; `was` is its type before the first modification, if different.

    `type` is the quant type, 'none' for any other value, 'differs' if branches
    differ, and None if the source does not determine it.
    """

    site: SourceSite
    was: str | None = None

    @property
    def type(self) -> str | None:
        """Return the quant type, as the class describes it."""
        types = {v if v in source_types() else NONE for v in self.site.values}
        return types.pop() if len(types) == 1 else DIFFERS if types else None

    @property
    def unknown(self) -> tuple[str, ...]:
        """Return the values that are not a quant type."""
        return tuple(value for value in self.site.values if value not in source_types())


@dataclass(frozen=True)
class Report:
    """A tree's sites, what needs action, and notes for the user."""

    root: Path
    sites: tuple[SiteState, ...]
    due: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Edit:
    """One literal, before and after, at its 1-based line."""

    site: str
    path: str
    line: int
    before: str
    after: str


@dataclass
class Outcome:
    """What a modification or a restoration changed, or would change.

    `files` holds their contents, before and after. `record` is the ledger after it, and `originals`
    the contents that it refers to. `overwritten` are files that were changed by other means; their
    copies are kept.
    """

    root: Path
    record: dict[str, Modified]
    edits: list[Edit] = field(default_factory=list)
    files: dict[str, tuple[bytes, bytes]] = field(default_factory=dict)
    originals: list[bytes] = field(default_factory=list)
    overwritten: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def diff(self) -> bytes:
        """Return the change as a unified diff that `patch -p1` and `git apply` take."""
        return b"".join(unified(path, *pair) for path, pair in sorted(self.files.items()))


# -- the three commands ---------------------------------------------------------------------------


def check(root: Path) -> Report:
    """Read the sites of the tree at `root`; writes nothing."""
    tree = Tree(root)
    states: list[SiteState] = []
    due: list[str] = []
    notes: list[str] = []
    with _typed_errors(), tree.shared():
        interrupted = transaction.is_interrupted(root)
        rows = tree.modified()
        for path, content in _contents(tree, may_lack=interrupted).items():
            file = scan(path, content)
            try:
                before = ledger.original(tree, path, content, rows[path]) if path in rows else b""
            except EditedError:
                due.append(f"{path} changed by other means since its types were set")
                before = b""
            was = ledger.values(path, before)
            for site in file.sites:
                same = was.get(site.name) == " ".join(site.values)
                states.append(SiteState(site, None if same else was.get(site.name)))
            due += file.due
            notes += file.notes
        # What a killed command left is judged after the command that ends it.
        due = [CUT_OFF] if interrupted else [*due, *_faults(tree, states)]
    return Report(root, tuple(states), tuple(dict.fromkeys(due)), tuple(notes))


def modify(
    root: Path, types: Mapping[str, str], *, shared: bool = False, dry_run: bool = False
) -> Outcome:
    """Set the literals of the named sites, in all files or in none.

    A literal that several sites read is set if all of them get the same type in `types`, or, with
    `shared`, if one of them gets a type.

    Raises:
        OverlayError: a site has no effective literals, or shares one that may not be set.
        EditedError: a file was changed by other means since an earlier modification.
        UnknownNameError: there is no such type.
    """
    for value in types.values():
        check_name("quant type", value, source_types())
    return _run(root, lambda tree: _plan_modification(tree, types, shared), dry_run=dry_run)


def restore(root: Path, *, force: bool = False, dry_run: bool = False) -> Outcome:
    """Restore the bytes before the first modification, in all files or in none.

    Raises:
        EditedError: a file was changed by other means since. With `force` it is restored, too, and
            a copy of it is kept.
    """
    return _run(root, lambda tree: _plan_restoration(tree, force), dry_run=dry_run)


def _run(root: Path, plan: Callable[[Tree], Outcome], *, dry_run: bool) -> Outcome:
    tree = Tree(root)
    with _typed_errors():
        if dry_run:
            with tree.shared():
                return _checked(tree, plan(_whole(tree)))
        if not tree.store.exists():
            # The lock makes this folder, so lock only if there is something to do that can be done.
            first = plan(tree)
            if not first.files:
                return first
            for path in (*first.files, STORE_FILE):
                transaction.check_writable(root, path)
        with tree.locked(COMMAND):
            final = plan(tree)
            if final.files or final.record != tree.modified():
                transaction.commit(root, *_written(tree, final), command=COMMAND)
            return final


def _whole(tree: Tree) -> Tree:
    """Return the tree if no killed command left it half-changed."""
    if transaction.is_interrupted(tree.root):
        raise OverlayError(
            f"A command on {tree.root} was interrupted",
            expected="a tree that can be read without changing it",
            help="Any command that may write, such as `--restore`, first finishes or undoes it",
        )
    return tree


def _checked(tree: Tree, plan: Outcome) -> Outcome:
    """Return the plan if the tree allows that it is written."""
    if plan.files:
        transaction.check(tree.root, *_written(tree, plan))
        transaction.check_writable(tree.root, STORE_FILE)
    return plan


def _written(tree: Tree, plan: Outcome) -> tuple[list[transaction.Change], dict[str, bytes | None]]:
    """Return the files of the tree and of its records that a plan writes."""
    changes = [transaction.Change(path, new) for path, (_, new) in plan.files.items()]
    copies = tree.copies_of(plan.overwritten)
    objects = tree.new_objects(plan.originals)
    return changes, {**copies, **objects, LITERALS: modified_as_json(plan.record)}


@contextlib.contextmanager
def _typed_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OverlayError(
            f"{error.filename or 'The tree'}: {error.strerror or error}",
            expected="a tree that may be read and written",
            help=f"Correct that and repeat; `{COMMAND} --check` shows the tree's types",
        ) from error


# -- planning -------------------------------------------------------------------------------------


def _plan_modification(tree: Tree, types: Mapping[str, str], shared: bool) -> Outcome:
    from mqo.overlay.quant_types.rewrite import set_values  # LibCST, which --check does not need

    plan = Outcome(tree.root, tree.modified())
    after: list[SourceSite] = []
    for path, content in _contents(tree).items():
        sites = scan(path, content).sites
        new: dict[Literal, str] = {}
        for site in (site for site in sites if site.name in types):
            _refuse(tree, site, types, shared)
            new |= dict.fromkeys(site.literals, types[site.name])
        if content is not None:
            _plan_file(tree, plan, path, content, set_values(path, content, new))
        plan.edits += [
            Edit(site.name, path, literal.line, literal.value, new[literal])
            for site in sites
            for literal in site.literals
            if new.get(literal, literal.value) != literal.value
        ]
        after += scan(path, plan.files[path][1]).sites if path in plan.files else sites
    for name in types.keys() - {site.name for site in after}:
        raise OverlayError(
            f"{tree.root} has no literal for {name}, a product of attention's backward pass",
            expected="a tree that `mqo apply` patched, with the patch fused_attention",
            help=f"`{COMMAND} --check` lists the sites",
        )
    plan.warnings += _warnings(after, types)
    return plan


def _plan_file(tree: Tree, plan: Outcome, path: str, content: bytes, new: bytes) -> None:
    """Add one file to the plan, unless it stays as it is."""
    if new == content:
        return
    original = ledger.original(tree, path, content, plan.record.pop(path, None))
    plan.files[path] = content, new
    if new != original:
        plan.record[path] = ledger.row(path, original, new)
        plan.originals.append(original)


def _plan_restoration(tree: Tree, force: bool) -> Outcome:
    plan = Outcome(tree.root, {})
    for path, row in tree.modified().items():
        content = tree.read(path)
        try:
            original = ledger.original(tree, path, content, row)
        except EditedError:
            if not force:
                raise
            plan.overwritten.append(path)
            plan.files[path] = content or b"", ledger.stored(tree, row.original)
            continue
        if content is None or content == original:
            continue
        plan.files[path] = content, original
        pairs = zip(_site_literals(path, content), _site_literals(path, original), strict=True)
        for (site, now), (_, old) in pairs:
            if now.value != old.value:
                plan.edits.append(Edit(site, path, now.line, now.value, old.value))
    return plan


def _site_literals(path: str, content: bytes) -> Iterator[tuple[str, Literal]]:
    for site in scan(path, content).sites:
        yield from ((site.name, literal) for literal in site.literals)


def _refuse(tree: Tree, site: SourceSite, types: Mapping[str, str], shared: bool) -> None:
    """Raise OverlayError for a site that cannot be set, or only together with others."""
    if site.refusal:
        raise OverlayError(
            site.refusal,
            expected=f"a line {literals.VARIABLE} = '...' before the GEMM of {site.name} that "
            "applies there",
            help=f"`{COMMAND} --check` lists the sites{_patch_hint(tree)}",
        )
    both = f"{site.name} and {' and '.join(site.shares)}"
    if not (shared or types.keys() >= {*site.shares}):
        raise OverlayError(
            f"{site.path}:{site.line} is the literal of {both}: it cannot be set for only one",
            expected=f"a separate literal for {site.name}",
            help=f"Give {' and '.join(site.shares)} the same type, or set it for all with "
            "`--shared`",
        )
    if {types[name] for name in site.shares if name in types} - {types[site.name]}:
        raise OverlayError(
            f"{site.path}:{site.line} is the literal of {both}", expected="the same type for them"
        )


def _contents(tree: Tree, *, may_lack: bool = False) -> dict[str, bytes | None]:
    """Return the files that hold sites; OverlayError if all are missing, unless `may_lack`."""
    contents = {path: tree.read(path) for path in METHODS}
    if may_lack or any(content is not None for content in contents.values()):
        return contents
    raise OverlayError(
        f"{tree.root} holds no Megatron source",
        expected=" and ".join(METHODS) + " below it",
        help="Run `mqo vendor` and `mqo apply` for the project's tree, or give --tree the folder "
        "that holds megatron/",
    )


# -- messages ------------------------------------------------------------------------------------


def _faults(tree: Tree, states: Sequence[SiteState]) -> Iterator[str]:
    """Yield the faults of the current source."""
    for state in states:
        site = state.site
        if site.due:
            yield site.refusal
        if site.bound and state.unknown:
            values = ", ".join(state.unknown)
            yield f"{site.path}:{site.line}: this tree has no type '{values}': a run stops there"
    if not any(state.site.literals for state in states):
        yield f"no literal at any site{_patch_hint(tree)}"


def _warnings(sites: Sequence[SourceSite], types: Mapping[str, str]) -> Iterator[str]:
    """Yield what the user may not expect after a modification."""
    states = {site.name: SiteState(site) for site in sites}
    forward = states["fprop"].type
    odd = [s for s in ("dgrad", "wgrad") if states[s].type not in (None, forward)]
    if "fprop" in types and odd:
        types_of_odd = ", ".join(f"{name} {states[name].type}" for name in odd)
        options = " ".join(f"--{name}-quant {forward}" for name in odd)
        yield f"linear layers differ: fprop {forward}, {types_of_odd}; {options} makes them equal"


def _patch_hint(tree: Tree) -> str:
    unpatched = tree.is_vendored and tree.manifest() is None
    return "; `mqo apply` patches the tree, which gives it the sites" if unpatched else ""
