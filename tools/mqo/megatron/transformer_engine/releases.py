"""Transformer Engine by name: the known releases, their features, and their arguments.

Its interface for custom quantizers is marked experimental, so an unknown release may change the
meaning of names. This module imports only the standard library.
"""

import importlib.metadata
import re
import sys

Release = tuple[int, int]

NAME = "transformer_engine"  # of its package, and of upstream's --transformer-impl
FACTORY = "mqo.megatron.transformer_engine.factory.quantizer"
# Upstream's flags that have it ask there. The fp8 format is its own affair, and any will do.
FLAGS = ("--fp8-format", "e4m3", "--fp8-recipe", "custom", "--fp8-quantizer-factory", FACTORY)

# The first release that is known, and the first one that is not.
FIRST: Release = (2, 10)
BEYOND: Release = (2, 21)
# From here on a quantizer may give plain tensors, which the engine multiplies as any others: layers
# with a bias, grouped ones, and weight gradients that are added up in place.
PLAIN: Release = (2, 19)

_DISTRIBUTIONS = (NAME, "transformer-engine-torch")


class EngineError(RuntimeError):
    """Transformer Engine cannot quantize as asked."""


def installed() -> str | None:
    """Return the version of Transformer Engine: the imported one's, or the installed one's."""
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
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def fault(version: str | None) -> str | None:
    """Return why a version is not supported; None if it is."""
    known = f"{text(FIRST)} to {text((BEYOND[0], BEYOND[1] - 1))}"
    if version is None:
        return f"Transformer Engine is not installed; known are its releases {known}"
    if FIRST <= release(version) < BEYOND:
        return None
    return f"Transformer Engine {version} is installed; known are its releases {known}"


def check_release(version: str) -> None:
    """Raise EngineError for a version that is not known."""
    if why := fault(version):
        raise EngineError(
            f"{why}. Expected: one of these, or --transformer-impl local, whose layers quantize "
            "the same operands to the same bits"
        )


def multiplies_plain_tensors(version: str) -> bool:
    """Return whether the engine multiplies what a quantizer leaves as a plain tensor."""
    return release(version) >= PLAIN


def text(of: Release) -> str:
    """Return "2.19" of (2, 19)."""
    return ".".join(map(str, of))
