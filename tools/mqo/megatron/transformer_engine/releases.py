"""List the supported releases of Transformer Engine, their features, and upstream's flags.

The interface for custom quantizers is marked experimental, so an unknown release may change the
meaning of names. This module imports only the standard library.
"""

import importlib.metadata
import re
import sys

Release = tuple[int, int]

NAME = "transformer_engine"  # of the package, and a value of upstream's --transformer-impl
FACTORY = "mqo.megatron.transformer_engine.factory.quantizer"
# Upstream's flags that make it call the factory. The fp8 format is required, but has no effect.
FLAGS = ("--fp8-format", "e4m3", "--fp8-recipe", "custom", "--fp8-quantizer-factory", FACTORY)

# The first supported release, and the first unsupported one after it.
FIRST: Release = (2, 10)
BEYOND: Release = (2, 21)
# Since this release a quantizer may return plain tensors, which the engine multiplies itself. This
# adds layers with a bias, grouped layers, and weight gradients that are accumulated in place.
PLAIN: Release = (2, 19)

_DISTRIBUTIONS = (NAME, "transformer-engine-torch")


class EngineError(RuntimeError):
    """Transformer Engine cannot quantize as configured."""


def installed() -> str | None:
    """Return the version of the imported Transformer Engine, or else the installed one."""
    if loaded := sys.modules.get(NAME):
        return loaded.__version__
    for name in _DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def release(version: str) -> Release:
    """Return (2, 19) for "2.19.0+cu12"; (0, 0) for a text that is not a version."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def fault(version: str | None) -> str | None:
    """Return why a version is not supported; None if it is."""
    known = f"{text(FIRST)} to {text((BEYOND[0], BEYOND[1] - 1))}"
    if version is None:
        return f"Transformer Engine is not installed; supported releases are {known}"
    if FIRST <= release(version) < BEYOND:
        return None
    return f"Transformer Engine {version} is installed; supported releases are {known}"


def check_release(version: str) -> None:
    """Raise EngineError for an unsupported version."""
    if why := fault(version):
        raise EngineError(
            f"{why}. Expected: one of these, or --transformer-impl local, whose layers quantize "
            "the same operands to the same bits"
        )


def multiplies_plain_tensors(version: str) -> bool:
    """Return whether the engine multiplies plain tensors from a quantizer."""
    return release(version) >= PLAIN


def text(version: Release) -> str:
    """Return "2.19" for (2, 19)."""
    return ".".join(map(str, version))
