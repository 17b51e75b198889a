"""Provide a run's source: a snapshot of a patched tree, or a hand-patched tree as it is."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mqo.errors import OverlayError
from mqo.launch import bytecode
from mqo.launch.config import RunConfig
from mqo.matrix import tables
from mqo.overlay import literals
from mqo.overlay.apply import refuse_edits
from mqo.overlay.diff import tree_diff
from mqo.overlay.goal import types_in
from mqo.overlay.quant_types import modifier
from mqo.overlay.quant_types.by_hand import files_by_hand
from mqo.overlay.series import Series
from mqo.overlay.snapshot import Snapshot, snapshot
from mqo.overlay.tree import Tree
from mqo.overlay.unified import unified
from mqo.quant import formats
from mqo.runs import RunFolder

PROGRAM, DISTILLER = "pretrain_gpt.py", "distill_gpt.py"


def ready_checkout(config: RunConfig, path: Path, *, allow_edits: bool) -> Tree:
    """Return a full checkout for a run; OverlayError if it cannot be run.

    A checkout patched by `mqo apply` is copied into the run, with the run's types. In a checkout
    patched by hand the types cannot be set, so those in its source must be the run's.
    """
    tree = Tree(path.resolve())
    if not (tree.root / PROGRAM).is_file():
        raise OverlayError(
            f"{tree.root} does not hold {PROGRAM}",
            expected="a full Megatron-LM checkout, or one of Megatron 0.17 or newer with the patch "
            "`programs`, which adds the file",
            help=f"Run `mqo apply --tree {_quoted(tree)}`",
        )
    tree.settle()
    if tree.manifest() is None:
        _check_by_hand(tree, config)
        return tree
    if by_hand := files_by_hand(tree):
        folder = _quoted(tree)
        raise OverlayError(
            f"{by_hand[0]} in {tree.root} has hand-made quantization, next to that of the patches",
            expected="only that of the patches, which has the run's types",
            help=f"Run `mqo restore --tree {folder}`, then `mqo adopt --tree {folder}`",
        )
    if not allow_edits:
        refuse_edits(tree)
    return tree


def take_source(folder: RunFolder, tree: Tree, series: Series, config: RunConfig) -> Snapshot:
    """Return the run's source, and write its differences to upstream if upstream is known."""
    types, placed = config.quantization.types, config.placement
    if tree.manifest() is None and placed.megatron:
        present = said_by_hand(tree)
        shot = Snapshot(tree, present, present)
    else:
        shot = snapshot(tree, folder.source, types=types, without=placed.without, series=series)
        shot = replace(shot, types=formats.chosen_types(shot.types))
        _check_program(shot.tree, config)
        if placed.megatron is None:
            bytecode.share(tree, folder.source)
    if tree.is_vendored or tree.is_checkout:
        folder.overlay_diff.write_text(tree_diff(tree, shot.tree), encoding="utf-8")
    return shot


def program_of(config: RunConfig) -> str:
    """Return the name of the program that trains."""
    return DISTILLER if config.experiment.teacher else PROGRAM


def _check_program(source: Tree, config: RunConfig) -> None:
    program = program_of(config)
    if not (source.root / program).is_file():
        raise OverlayError(
            f"The run's source has no {program}",
            expected="a --without-patch that keeps the patch that adds it",
        )


def source_diff(tree: Tree, types: Mapping[str, str] | None) -> str:
    """Return a diff of the literals that a snapshot of a patched tree would change."""
    manifest = tree.patched()
    wanted = types_in(tree, manifest)
    if types is not None:
        wanted = {site: types.get(site, literals.NONE) for site in wanted}
    diffs = []
    for path in manifest.touched_by("quant_sites"):
        content = tree.read(path) or b""
        diffs.append(unified(path, content, literals.write(content, wanted)))
    return b"".join(diffs).decode("utf-8", errors="backslashreplace")


def types_of(tree: Tree) -> dict[str, str]:
    """Return {site: type} of the tree's literals.

    Raises:
        OverlayError: a literal is not a quant type, or a tree patched by hand lacks a site.
    """
    manifest = tree.manifest()
    types = types_in(tree, manifest) if manifest else said_by_hand(tree)
    types = formats.chosen_types(types)
    for site, value in types.items():
        if value not in formats.source_types():
            raise OverlayError(
                f"The quant type of {site} in {tree.root} is '{value}'",
                expected=f"one of {', '.join(formats.source_types())}, or one of --formats",
                help=f"`{modifier.COMMAND} --tree {_quoted(tree)} "
                f"--{modifier.OPTIONS[site]}-quant T` sets it",
            )
    return types


def said_by_hand(tree: Tree) -> dict[str, str]:
    """Return {site: type} of a tree patched by hand; OverlayError if it lacks a site."""
    report = modifier.check(tree.root)
    if report.due:
        raise OverlayError(
            f"{tree.root}: {'; '.join(report.due)}",
            expected="a checkout with a quant type at each of its sites",
            help=f"`mqo apply --tree {_quoted(tree)}` patches a git work tree of Megatron-LM",
        )
    return {state.site.name: state.type or literals.NONE for state in report.sites}


def _check_by_hand(tree: Tree, config: RunConfig) -> None:
    """Raise OverlayError for types or options that a tree patched by hand would not apply."""
    present, quant = said_by_hand(tree), config.quantization
    wrong = {s: t for s, t in (quant.types or {}).items() if present.get(s, literals.NONE) != t}
    if wrong:
        options = " ".join(f"--{modifier.OPTIONS[s]}-quant {t}" for s, t in wrong.items())
        raise OverlayError(
            f"{tree.root} was not patched by `mqo apply`, so its types cannot be set for the mode "
            f"{quant.mode}; they are {_listed(present, wrong)}",
            expected=_listed(wrong, wrong),
            help=f"`{modifier.COMMAND} --tree {_quoted(tree)} {options}` sets them",
        )
    chosen = quant.schedule or quant.recipe or quant.options or config.recording.options
    if config.placement.without or chosen:
        raise OverlayError(
            f"{tree.root} was not patched by `mqo apply`, so it does not read a run's options",
            expected="no options except the types and the processes",
            help=f"Undo its patches, then run `mqo apply --tree {_quoted(tree)}`",
        )


def _quoted(tree: Tree) -> str:
    return shlex.quote(str(tree.root))


def _listed(types: Mapping[str, str], sites: Mapping[str, str]) -> str:
    return ", ".join(f"{site} = {types[site]}" for site in tables.SITES if site in sites)
