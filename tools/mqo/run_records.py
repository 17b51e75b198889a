"""The content of the files in a run folder, checked when read: the folder may be foreign.

A file that mqo writes from a class is read by that class.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from mqo.errors import RunError, one_line
from mqo.untrusted import UntrustedFileError, read_json, read_toml

T = TypeVar("T")
SHOWN = 200  # characters of a fault's text


class Device(BaseModel):
    """What device.json says: peak memory in bytes, of each process."""

    device: str = "cpu"
    peak_memory: list[float] | None = None


class RunEnd(BaseModel):
    """What ended.json says: the steps that the process trained before it reached the end."""

    steps: int


class Coverage(BaseModel):
    """What coverage.json says of a step.

    `differing` says how operands are quantized at sites whose layers differ, a line for each way.
    """

    quantized_share: float | None = None
    differing: tuple[str, ...] = ()


class Stat(BaseModel):
    """A row of quant_stats.json: what the quantizer of an operand measured, as energies."""

    site: str
    layer: str
    quant_type: str
    calls: int
    signal: float
    noise: float


class Layers(BaseModel):
    """The table of layers that are left out."""

    exclude: list[str] = []


class QuantToml(BaseModel):
    """What quant.toml says of a run's choices."""

    asked: dict[str, str] = {}
    quantizer: dict[str, Any] = {}
    schedule: dict[str, str] = {}
    layers: Layers = Layers()
    operands: dict[str, dict[str, Any]] = {}
    rules: list[dict[str, str]] = []


def parsed(path: Path, kind: type[T]) -> T:
    """Return what a JSON or TOML file holds, as `kind`; RunError where it holds something else."""
    try:
        table = read_toml(path) if path.suffix == ".toml" else read_json(path)
        return TypeAdapter(kind).validate_python(table)
    except (ValueError, RecursionError) as error:
        raise damaged(path, error) from error


def damaged(path: Path, error: Exception | str) -> RunError:
    """Return the error for a file of a run that cannot be what the run wrote."""
    if isinstance(error, UntrustedFileError):
        return RunError(error.found, expected=f"{error.expected}, as the run wrote it")
    if isinstance(error, ValidationError):  # what it says itself is a page
        first = error.errors()[0]
        error = f"{'.'.join(map(str, first['loc'])) or 'all of it'}: {first['msg']}"
    return RunError(
        f"{path} cannot be read: {one_line(error)[:SHOWN]}", expected="what the run wrote"
    )
