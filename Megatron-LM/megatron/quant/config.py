"""The quantizer's options: a TOML file that the run's environment names, read once a process."""

import functools
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from . import excludes
from .formats import SITES, check_choice, check_type
from .options import ENVIRONMENT_VARIABLE, OPTIONS, TABLES, Options, check_value
from .progress import step, total
from .schedule import Phase, Schedule, parse, type_at
from .spec import QuantSpec


@dataclass(frozen=True)
class QuantConfig(Options):
    """What a run quantizes: its options, what its source should say, and its schedules.

    `asked` maps a site to the type the run's mode wants there; the guard holds the records against
    it. `schedule` maps a site to the types that it runs as, the first of which is the one in the
    source.
    """

    asked: Mapping[str, str] = field(default_factory=dict)
    schedule: Mapping[str, Schedule] = field(default_factory=dict)

    def phases(self, site: str) -> Schedule:
        """Return the types that `site` is asked to run as, by schedule or as the only one."""
        return self.schedule.get(site) or (Phase(self.asked.get(site, "none")),)

    def spec(self, quant_type: str) -> QuantSpec:
        """Return how `quant_type` is quantized."""
        choices = (self.block, self.scale_rule, self.rounding, self.overflow, self.tensor_scale)
        return QuantSpec(quant_type, *choices)

    def blocks(self) -> dict[str, int]:
        """Return the longest block of each site that quantizes in blocks at any step."""
        sizes = {
            site: [self.spec(p.quant_type).block or 0 for p in self.phases(site)] for site in SITES
        }
        return {site: max(found) for site, found in sizes.items() if any(found)}


# The tables of the file, with a check for each of their keys.
_CHECKS: dict[str, dict[str, Callable[[object], object]]] = {
    table: {o.name: o.check for o in OPTIONS.values() if o.table == table} for table in TABLES
}
_CHECKS |= {"asked": dict.fromkeys(SITES, check_type), "schedule": dict.fromkeys(SITES, parse)}


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
    """Return how this process quantizes to `quant_type`; raises what `current` raises."""
    return current().spec(quant_type)


@functools.cache
def is_excluded(site: str, layer: str) -> bool:
    """Whether this process leaves `layer` unquantized at `site`; raises what `current` raises."""
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
        if "quantiser" in tables:  # its name in version 0.1
            tables.setdefault("quantizer", tables.pop("quantiser"))
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
        check_value(name, key, _CHECKS[name][key], value)
