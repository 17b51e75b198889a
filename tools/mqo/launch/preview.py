"""What --dry-run prints: the command of a run, what is missing, and what the run would refuse."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from mqo.errors import MissingError, MqoError
from mqo.launch.checks import check_run
from mqo.launch.command import as_shell
from mqo.launch.config import SOURCE, RunConfig
from mqo.launch.machine import Machine, detect
from mqo.launch.plan import Planned, place
from mqo.launch.prepare import check_config, check_tree
from mqo.launch.run import check_checkpoint, dry_run, with_checkpoint_library
from mqo.launch.source import ready_checkout, source_diff, types_of
from mqo.matrix import tables
from mqo.overlay.series import Series
from mqo.overlay.tree import Tree
from mqo.project import Project


def print_preview(
    project: Project, config: RunConfig, machine: Machine, args: argparse.Namespace
) -> None:
    """Print what the command would do, and what is missing; raise what it would refuse.

    For a machine that is planned for, the tree on this one is not the run's: its edits are a note.
    """
    missing: list[MissingError] = []
    check_config(config, machine, missing)
    notes = [f"missing: {error}" for error in missing]
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
    planned = _planned(project, config, machine)
    notes += _checked(project, planned.config, machine)
    text = describe(project, config, machine, planned)
    print("\n".join([*(f"# {note}" for note in notes), text]))


def _planned(project: Project, config: RunConfig, machine: Machine) -> Planned:
    """Return the run with its layout, and with what a checkpoint's library quantizes."""
    if Tree(project.tree).manifest():
        config = with_checkpoint_library(project, config)
    types = config.quantization.types or _types_there(project, config.placement.megatron)
    return place(project.tree, config, machine, types)


def _checked(project: Project, config: RunConfig, machine: Machine) -> list[str]:
    """Return notes of the checks that need Megatron's source; raise what it refuses."""
    tree = Tree(project.tree)
    if config.placement.megatron is not None:
        return ["not checked here: the flags, which the checkout's own program reads"]
    if tree.manifest() is None:
        return ["not checked yet: flags and patterns of layers, since there is no patched Megatron"]
    types = config.quantization.types or types_of(tree)
    return check_run(project, tree, Series.of_project(project), config, machine, types)


def describe(
    project: Project,
    config: RunConfig,
    machine: Machine | None = None,
    planned: Planned | None = None,
) -> str:
    """Return what a run would do, as shell: its command, and in comments what it would write.

    That is the types in its source, how that source would differ from the tree's, its options, and
    on GPUs the layout with the memory that it needs. `machine` is by default this one, and
    `planned` the run as `place` returns it. Reads the tree if it is there, and changes nothing.
    """
    machine, asked = machine or detect(), config.quantization.types
    lines = [f"source: {site} = {value}" for site, value in (asked or {}).items()]
    planned = planned or _planned(project, config, machine)
    config = planned.config
    lines += [f"library: {library.label}" for library in config.quantization.libraries]
    tree, diff = _source_of(project, config)
    # With `source` the tree gives the sites their types, which are known when it is read.
    sites = asked or dict.fromkeys(tables.SITES, SOURCE)
    options = config.quant_toml(sites).splitlines()[2 + len(sites) :]
    lines += [*diff, *(f"quant.toml: {line}" for line in options)]
    lines += [f"layout: {line}" for line in planned.lines]
    command, variables = dry_run(project, config, machine, tree)
    return "\n".join([*(f"# {line}".rstrip() for line in lines), as_shell(command, variables)])


def _types_there(project: Project, megatron: Path | None) -> Mapping[str, str]:
    """Return the types in the tree's source; none if there is no tree yet."""
    tree = Tree((megatron or project.tree).resolve())
    return types_of(tree) if megatron or tree.manifest() else {}


def _source_of(project: Project, config: RunConfig) -> tuple[Path | None, list[str]]:
    """Return a tree that would be run as it is, and how the source would differ from the tree's."""
    if config.placement.megatron:
        tree = ready_checkout(config, config.placement.megatron, allow_edits=True)
        if tree.manifest() is None:
            return tree.root, [f"source: {tree.root} as it is"]
    else:
        tree = Tree(project.tree)
        if tree.manifest() is None:
            there = tree.root / "megatron/core"
            what = "is not patched" if there.exists() else "holds no Megatron"
            return None, [f"source: {tree.root} {what} yet: a run first sees to that"]
    diff = source_diff(tree, config.quantization.types).splitlines()
    return None, diff or [f"source: as {tree.root} has it, to the byte"]
