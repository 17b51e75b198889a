"""Fills a run folder with everything that decides the run, before it starts."""

from __future__ import annotations

import datetime
import importlib.metadata
import itertools
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from pydantic import BaseModel, Field

from mqo.launch.config import RunConfig
from mqo.launch.inputs import Inputs
from mqo.launch.machine import cpu_model
from mqo.project import Project
from mqo.run_records import damaged
from mqo.runs import RunFolder, new_folder

_JOIN = " \\\n  "


class Environment(BaseModel):
    """What environment.json says of machine, versions and inputs; early runs name no inputs."""

    python: str = Field(min_length=1)
    cpu: str | None = None
    cores: int
    commit: str | None = None
    packages: dict[str, str]
    inputs: Inputs | None = None


def create(runs: Path, title: str) -> RunFolder:
    """Make a folder, named by time and title; two runs of one second get two folders."""
    stamp = datetime.datetime.now().strftime("%Y-%m-%d_%H%M%S")
    return new_folder(runs, f"{stamp}_{title}")


def write_facts(
    folder: RunFolder, config: RunConfig, command: list[str], env: Mapping[str, str]
) -> None:
    """Write the command, to be pasted, the configuration, and the environment with its inputs."""
    folder.command.write_text(f"#!/usr/bin/env bash\n{as_shell(command, env)}\n", encoding="utf-8")
    config.write(folder)
    facts = {
        "python": sys.version,
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "commit": Project.here().commit(),
        "variables": dict(env),
        "packages": packages(),
        "inputs": asdict(Inputs.of(command)),
    }
    folder.environment.write_text(json.dumps(facts, indent=1), encoding="utf-8")


def as_shell(command: list[str], env: Mapping[str, str]) -> str:
    """The command as shell text that can be pasted: variables first, then a flag a line."""
    lines = [f"{name}={shlex.quote(value)}" for name, value in env.items()]
    for word in command:
        if word.startswith("--") or word == command[0]:
            lines.append(shlex.quote(word))
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return _JOIN.join(lines)


def from_shell(text: str) -> tuple[list[str], dict[str, str]]:
    """The command and the variables of a command.sh, as `as_shell` was given them."""
    words = shlex.split(text.replace(_JOIN, " "), comments=True)
    names = list(itertools.takewhile(lambda word: re.match(r"[A-Za-z_]\w*=", word), words))
    return words[len(names) :], dict(name.split("=", 1) for name in names)


def command_of(run: RunFolder) -> tuple[list[str], dict[str, str]]:
    """Return a run's command and its variables; RunError where its command.sh is damaged."""
    try:
        return from_shell(run.command.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise damaged(run.command, error) from error


def packages() -> dict[str, str]:
    """{name: version} of what is installed."""
    found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    return dict(sorted(found.items()))
