"""Import optional packages, which a plain installation lacks."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from importlib import import_module
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from mqo.errors import SetupError
from mqo.project import Project

# Modules whose names differ from those of their distributions.
_DISTRIBUTIONS = {
    "yaml": "pyyaml",
    "modelopt": "nvidia-modelopt",
    "mlflow": "mlflow-skinny",
    "lm_eval": "lm-eval",
}


def package(name: str) -> Any:
    """Return a module by its dotted name; SetupError if its package is missing."""
    try:
        return import_module(name)
    except ImportError as error:
        raise missing(name.partition(".")[0]) from error


def require(module: str) -> None:
    """Raise SetupError unless the package of a module is installed; it is not imported."""
    if importlib.util.find_spec(module) is None:
        raise missing(module)


def missing(module: str) -> SetupError:
    """Return the error that says how to install the package of a module."""
    distribution = _DISTRIBUTIONS.get(module, module)
    extra = _extra_of(distribution)
    return SetupError(
        f"The package {distribution} is missing",
        expected=f"the packages of the extra '{extra}'" if extra else "it in mqo's environment",
        help=f"Install {'them' if extra else 'it'}: {command(extra or '', distribution)}",
    )


def command(extra: str, distribution: str = "") -> str:
    """Return the command that installs an extra of mqo, or else one distribution."""
    if Project.here().is_installed:
        return f"pip install '{f'mqo[{extra}]' if extra else distribution}'"
    target = f"-e '.[{extra}]'" if extra else distribution
    return f".venv/bin/python -m pip install -c constraints.txt {target}"


def _extra_of(distribution: str) -> str | None:
    """Return the first extra that needs a distribution, if there is one."""
    wanted = canonicalize_name(distribution)
    for line in importlib.metadata.requires("mqo") or ():
        match = re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        if match and canonicalize_name(Requirement(line).name) == wanted:
            return match[1]
    return None
