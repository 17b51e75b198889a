"""Write everything that determines a run into its folder, before it starts."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import MappingProxyType

from pydantic import BaseModel, Field

from mqo.launch.command import as_shell
from mqo.launch.config import RunConfig
from mqo.launch.inputs import Inputs
from mqo.launch.machine import cpu_model
from mqo.project import Project
from mqo.run_records import parsed
from mqo.runs import RunFolder, new_folder


class Environment(BaseModel):
    """The machine, versions and inputs in environment.json."""

    python: str = Field(min_length=1)
    cpu: str | None = None
    cores: int
    commit: str | None = None
    packages: dict[str, str]
    inputs: Inputs


def create(runs: Path, title: str) -> RunFolder:
    """Create a folder named by time and title; two runs in the same second get two folders."""
    stamp = datetime.datetime.now().strftime("%Y-%m-%d_%H%M%S")
    return new_folder(runs, f"{stamp}_{title}")


def write_facts(
    folder: RunFolder, config: RunConfig, command: list[str], env: Mapping[str, str]
) -> None:
    """Write the command as shell text, the configuration, and the environment with its inputs."""
    folder.command.write_text(f"#!/usr/bin/env bash\n{as_shell(command, env)}\n", encoding="utf-8")
    config.write(folder)
    facts = {
        "python": sys.version,
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "commit": Project.here().commit(),
        "variables": dict(env),
        "packages": dict(packages()),
        "inputs": asdict(Inputs.read_by(command)),
    }
    folder.environment.write_text(json.dumps(facts, indent=1), encoding="utf-8")


def environment_of(run: RunFolder) -> Environment | None:
    """Return the content of environment.json; None without the file, RunError if it is damaged."""
    return parsed(run.environment, Environment) if run.environment.is_file() else None


def loaded_packages(run: RunFolder) -> dict[str, str] | None:
    """Return {name: version} of the packages that a run loaded; None if it did not record them."""
    return parsed(run.packages, dict[str, str]) if run.packages.is_file() else None


@cache  # reading the metadata of hundreds takes 0.1 s
def packages() -> Mapping[str, str]:
    """Return {name: version} of the installed packages."""
    read = (distribution.metadata for distribution in importlib.metadata.distributions())
    versions = sorted((metadata["Name"], metadata["Version"]) for metadata in read)
    return MappingProxyType(dict(versions))
