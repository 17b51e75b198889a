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
    """The content of device.json: peak memory of each process in bytes."""

    device: str = "cpu"
    peak_memory: list[float] | None = None


class RunEnd(BaseModel):
    """The content of ended.json: the steps that the process trained before it ended."""

    steps: int


class Coverage(BaseModel):
    """The content of coverage.json, for one step.

    `differing` has one line for each way to quantize operands at sites whose layers differ.
    """

    quantized_share: float | None = None
    differing: tuple[str, ...] = ()


class Stat(BaseModel):
    """A row of quant_stats.json: the signal and noise energies of a quantized operand."""

    site: str
    layer: str
    quant_type: str
    calls: int
    signal: float
    noise: float


class Layers(BaseModel):
    """The patterns of the layers that stay unquantized, and of the only ones that do not."""

    exclude: list[str] = []
    include: list[str] = []


class QuantToml(BaseModel):
    """The content of quant.toml: a run's choices."""

    asked: dict[str, str] = {}
    quantizer: dict[str, Any] = {}
    schedule: dict[str, str] = {}
    layers: Layers = Layers()
    operands: dict[str, dict[str, Any]] = {}
    rules: list[dict[str, Any]] = []
    recipes: dict[str, dict[str, dict[str, Any]]] = {}
    formats: dict[str, dict[str, Any]] = {}
    plugins: dict[str, dict[str, Any]] = {}


def parsed(path: Path, kind: type[T]) -> T:
    """Return the content of a JSON or TOML file as `kind`; RunError if it does not fit."""
    try:
        table = read_toml(path) if path.suffix == ".toml" else read_json(path)
        return TypeAdapter(kind).validate_python(table)
    except (ValueError, RecursionError) as error:
        raise damaged(path, error) from error


def damaged(path: Path, error: Exception | str) -> RunError:
    """Return the error for a damaged file of a run."""
    if isinstance(error, UntrustedFileError):
        return RunError(error.found, expected=f"{error.expected}, as the run wrote it")
    if isinstance(error, ValidationError):  # its own text is a page long
        first = error.errors()[0]
        error = f"{'.'.join(map(str, first['loc'])) or 'all of it'}: {first['msg']}"
    return RunError(
        f"{path} cannot be read: {one_line(error)[:SHOWN]}", expected="the file as the run wrote it"
    )
