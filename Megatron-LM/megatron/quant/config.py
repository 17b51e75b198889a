"""The quantiser's options: a TOML file that the run's environment names, read once a process."""

import functools
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from . import excludes
from .formats import (
    BLOCK_SIZES,
    OVERFLOWS,
    ROUNDINGS,
    SAVED_FORMS,
    SCALE_RULES,
    SITES,
    check_choice,
    check_seed,
    check_type,
)
from .progress import step, total
from .schedule import Phase, Schedule, parse, type_at
from .spec import QuantSpec

ENVIRONMENT_VARIABLE = "MQO_QUANT_CONFIG"


@dataclass(frozen=True)
class QuantConfig:
    """What a run may choose beyond the types that stand in its source.

    `asked` maps a site to the type the run's mode wants there; the guard holds the records against
    it. `exclude` are patterns of layers that stay unquantised (excludes.py). `block` and `rounding`
    None are each format's own. `seed` is the base that the seeds of stochastic rounding are derived
    from. `every` is in iterations: the first one is measured, and each multiple; 0 measures nothing
    and only counts. `dump` are the iterations whose operands are kept. `schedule` maps a site to
    the types that it runs as, the first of which is the one in the source. `keep_checkpoints` is
    how many a run leaves of its own, 0 for all; `check_nan` has it look at every output.
    """

    asked: Mapping[str, str] = field(default_factory=dict)
    block: int | None = None
    scale_rule: str = "floor"
    rounding: str | None = None
    overflow: str = "saturate"
    tensor_scale: bool = False
    seed: int = 0
    cache_weights: bool = False
    save_activations: str = "full"
    schedule: Mapping[str, Schedule] = field(default_factory=dict)
    every: int = 50
    dump: tuple[int, ...] = ()
    exclude: tuple[str, ...] = ()
    keep_checkpoints: int = 0
    check_nan: bool = False

    def phases(self, site: str) -> Schedule:
        """Return the types that `site` is asked to run as, by schedule or as the only one."""
        return self.schedule.get(site) or (Phase(self.asked.get(site, "none")),)

    def spec(self, quant_type: str) -> QuantSpec:
        """Return how `quant_type` is quantised."""
        choices = (self.block, self.scale_rule, self.rounding, self.overflow, self.tensor_scale)
        return QuantSpec(quant_type, *choices)

    def blocks(self) -> dict[str, int]:
        """Return the longest block of each site that quantises in blocks at any step."""
        sizes = {
            site: [self.spec(p.quant_type).block or 0 for p in self.phases(site)] for site in SITES
        }
        return {site: max(found) for site, found in sizes.items() if any(found)}


# bool is an int in Python, and `true` is no number.
def _check_count(value: object) -> None:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no whole number; valid: 0, 1, 2, ...")


def _check_dump(value: object) -> None:
    if not isinstance(value, list) or not all(type(i) is int and i > 0 for i in value):
        raise ValueError(f"{value!r} is no list of iterations, such as [1, 100]")


# The tables of the file, with a check for each of their keys.
_CHECKS: dict[str, dict[str, Callable[[object], None]]] = {
    "quantiser": {
        "block": lambda value: check_choice("block size", value, BLOCK_SIZES),
        "scale_rule": lambda value: check_choice("scale rule", value, SCALE_RULES),
        "rounding": lambda value: check_choice("rounding", value, ROUNDINGS),
        "overflow": lambda value: check_choice("overflow", value, OVERFLOWS),
        "tensor_scale": lambda value: check_choice("tensor scale", value, (False, True)),
        "seed": check_seed,
        "cache_weights": lambda value: check_choice("cache of weights", value, (False, True)),
        "save_activations": lambda value: check_choice("form of activations", value, SAVED_FORMS),
    },
    "layers": {"exclude": excludes.check},
    "record": {"every": _check_count, "dump": _check_dump},
    "run": {
        "keep_checkpoints": _check_count,
        "check_nan": lambda value: check_choice("look for NaN", value, (False, True)),
    },
}
_CHECKS["asked"] = dict.fromkeys(SITES, check_type)
_CHECKS["schedule"] = dict.fromkeys(SITES, parse)


@functools.cache
def current() -> QuantConfig:
    """Return this process's options: from the file that MQO_QUANT_CONFIG names, or the defaults.

    Raises:
        FileNotFoundError: the named file does not exist.
        ValueError: the file is no TOML, or holds an unknown key or value; the text names the
            file, the key and the valid ones.
    """
    path = os.environ.get(ENVIRONMENT_VARIABLE)
    return load(Path(path)) if path else QuantConfig()


@functools.cache
def spec_of(quant_type: str) -> QuantSpec:
    """Return how this process quantises to `quant_type`; raises what `current` raises."""
    return current().spec(quant_type)


@functools.cache
def is_excluded(site: str, layer: str) -> bool:
    """Whether this process leaves `layer` unquantised at `site`; raises what `current` raises."""
    return any(excludes.matches(pattern, site, layer) for pattern in current().exclude)


def scheduled(site: str, quant_type: str) -> str:
    """Return the type of `site` at this step, whose source says `quant_type`.

    Raises what `current` raises, and ValueError where a share cannot be told.
    """
    schedule = current().schedule.get(site)
    return quant_type if schedule is None else type_at(schedule, step(), total())


def reset() -> None:
    """Forget the options, so that the next `current()` reads them again."""
    current.cache_clear()
    spec_of.cache_clear()
    is_excluded.cache_clear()


def load(path: Path) -> QuantConfig:
    """Read the options from the TOML file `path`; raises what `current` raises."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        for name, table in tables.items():
            _check_table(name, table)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    asked = tables.pop("asked", {})
    schedule = {site: parse(text) for site, text in tables.pop("schedule", {}).items()}
    options = {key: value for table in tables.values() for key, value in table.items()}
    lists = {key: tuple(value) for key, value in options.items() if isinstance(value, list)}
    return QuantConfig(asked=asked, schedule=schedule, **(options | lists))


def _check_table(name: str, table: object) -> None:
    check_choice("table", name, tuple(_CHECKS))
    if not isinstance(table, dict):
        raise ValueError(f"{name} = {table!r} should be a table, [{name}]")
    for key, value in table.items():
        check_choice(f"key in [{name}]", key, tuple(_CHECKS[name]))
        try:
            _CHECKS[name][key](value)
        except ValueError as error:
            raise ValueError(f"[{name}] {key}: {error}") from error
