"""Print what --dry-run shows: the command, what is missing, and what the run would refuse."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from mqo.errors import MissingError, MqoError
from mqo.launch.checks import check_run
from mqo.launch.command import as_shell
from mqo.launch.config import SOURCE, RunConfig
from mqo.launch.machine import Machine
from mqo.launch.plan import plan_layout
from mqo.launch.prepare import check_config, check_tree, text_note
from mqo.launch.run import check_checkpoint, dry_run, with_checkpoint_library
from mqo.launch.source import ready_checkout, source_diff, types_of
from mqo.matrix import tables
from mqo.overlay.series import Series
from mqo.overlay.tree import Tree
from mqo.project import Project


def print_preview(
    project: Project, config: RunConfig, machine: Machine, args: argparse.Namespace
) -> None:
    """Print what the command would do, and what is missing; raise the errors of a run.

    With --device the tree on this machine is not the run's, so its faults are only notes.
    """
    missing: list[MissingError] = []
    check_config(config, machine, missing)
    notes = [note] if (note := text_note(project, config.experiment)) else []
    notes += [f"missing: {error}" for error in missing]
    try:
        check_tree(project, config, allow_edits=args.allow_edits)
    except MqoError as error:
        if args.device is None:
            raise
        notes.append(f"not yet: {error}")
    try:
        check_checkpoint(project, config)
    except MqoError as error:  # another run saves there now
        notes.append(f"not yet: {error}")
    tree, types = _tree(project, config), config.quantization.types or {}
    if tree is not None and not types:
        types = types_of(tree)
        config = config.using(types)
    if Tree(project.tree).manifest():
        config = with_checkpoint_library(project, config)
    config, layout = plan_layout(project.tree, config, machine, types)
    if config.placement.megatron is not None:
        notes.append("not checked: the flags, since the checkout's own program reads them")
    elif tree is None:
        notes.append("not checked yet: flags and patterns of layers, which need a patched Megatron")
    else:
        notes += check_run(project, tree, Series.of_project(project), config, machine, types)
    text = preview_text(project, config, machine, types, layout)
    print("\n".join([*(f"# {note}" for note in notes), text]))


def preview_text(
    project: Project,
    config: RunConfig,
    machine: Machine,
    types: Mapping[str, str],
    layout: Sequence[str],
) -> str:
    """Return what a run would do, as shell text: comments, then its command.

    The comments are the types in its source, the difference of that source to the tree's, its
    options, and on GPUs the layout with the memory that it needs. `config` and the lines in
    `layout` are the result of `plan_layout`, `types` those in the run's source. Reads the tree if
    it exists, and changes nothing.
    """
    lines = [f"source: {site} = {value}" for site, value in types.items()]
    lines += [f"library: {library.label}" for library in config.quantization.libraries]
    tree, diff = _source_of(project, config)
    # With `source` the types are unknown until the tree exists.
    sites = types or dict.fromkeys(tables.SITES, SOURCE)
    options = config.quant_toml(sites).splitlines()[2 + len(sites) :]
    lines += [*diff, *(f"quant.toml: {line}" for line in options)]
    lines += [f"layout: {line}" for line in layout]
    command, variables = dry_run(project, config, machine, tree)
    return "\n".join([*(f"# {line}".rstrip() for line in lines), as_shell(command, variables)])


def _tree(project: Project, config: RunConfig) -> Tree | None:
    """Return the tree that would run, or be copied; None for the shared one without patches."""
    if config.placement.megatron is not None:
        return ready_checkout(config, config.placement.megatron, allow_edits=True)
    tree = Tree(project.tree)
    return tree if tree.manifest() else None


def _source_of(project: Project, config: RunConfig) -> tuple[Path | None, list[str]]:
    """Return a tree that would run unchanged, if any, and lines on how the source would differ."""
    tree = _tree(project, config)
    if tree is None:
        there = (project.tree / "megatron/core").exists()
        state = "is not patched" if there else "does not hold Megatron"
        return None, [f"source: {project.tree} {state} yet; a run does that first"]
    if tree.manifest() is None:
        return tree.root, [f"source: {tree.root} as it is"]
    diff = source_diff(tree, config.quantization.types).splitlines()
    return None, diff or [f"source: identical to {tree.root}"]
