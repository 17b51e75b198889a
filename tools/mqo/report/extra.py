"""Packages of the extra `report`, which a plain installation does without."""

from importlib import import_module
from typing import Any

from mqo.errors import SetupError


def package(name: str) -> Any:
    """Return a module by its dotted name; SetupError where its package is missing."""
    try:
        return import_module(name)
    except ImportError as error:
        raise SetupError(
            f"The package {name.partition('.')[0]} is missing",
            expected="the one that constraints.txt pins",
            help="Install it: .venv/bin/python -m pip install -c constraints.txt -e '.[report]'",
        ) from error
