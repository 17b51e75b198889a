"""The quantizer's options, read once per process from the TOML file that MQO_QUANT_CONFIG names."""

import functools
import os
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from mqo.quant import excludes
from mqo.quant.formats import NONE, SITES, GemmSite, check_choice, check_type
from mqo.quant.operand_table import (
    FPROP,
    PLAIN,
    LayerRule,
    OperandRow,
    member,
    parse_operands,
    parse_rules,
    row_of,
    rule_for,
)
from mqo.quant.options import ENVIRONMENT_VARIABLE, OPTIONS, TABLES, Options, check_value
from mqo.quant.plugin_rows import PluginRow
from mqo.quant.plugins import PLUGINS, registrations
from mqo.quant.schedule import Phase, Schedule, parse_schedule
from mqo.quant.spec import Hadamard, OperandSpec, QuantSpec

P = ParamSpec("P")
T = TypeVar("T")


def _memoized(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Compute a method of QuantConfig once for each list of arguments."""

    @functools.wraps(method)
    def remembered(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        key = (method.__name__, registrations(), args, *kwargs.items())
        if key not in self.memo:
            self.memo[key] = method(self, *args, **kwargs)
        result: T = self.memo[key]
        return result

    return remembered


@dataclass(frozen=True)
class QuantConfig(Options):
    """A run's options, the types of its source, and its schedules.

    `asked` maps a site to the type of the run's mode; the guard compares the records with it.
    `schedule` maps a site to its types over time; the first is the one in the source. `operands`
    maps SITE.OPERAND to its differences, and `rules` override the types of layers. `plugins` are
    the custom quantizers, by name.
    """

    asked: Mapping[str, str] = field(default_factory=dict)
    schedule: Mapping[str, Schedule] = field(default_factory=dict)
    operands: Mapping[str, OperandRow] = field(default_factory=dict)
    rules: tuple[LayerRule, ...] = ()
    plugins: Mapping[str, PluginRow] = field(default_factory=dict)
    memo: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def phases(self, site: str) -> Schedule:
        """Return the types of `site`: those of its schedule, or the only one."""
        return self.schedule.get(site) or (Phase(self.asked.get(site, "none")),)

    def contradictions(self) -> list[str]:
        """Return one text per schedule that does not begin with the type in the source."""
        return [
            f"the schedule of {site} begins with {schedule[0].quant_type}, but the source has "
            f"{wanted}"
            for site, schedule in self.schedule.items()
            if (wanted := self.asked.get(site, NONE)) != schedule[0].quant_type
        ]

    def quantizes(self, kind: str) -> bool:
        """Return whether any site of this kind of layers is quantized at any step."""
        sites = (site.name for site in SITES.values() if site.layer == kind)
        return any(phase.quant_type != NONE for site in sites for phase in self.phases(site))

    def spec(self, quant_type: str) -> QuantSpec:
        """Return the spec of a format, for operands without a row in [operands]."""
        return self._spec(quant_type, PLAIN)

    @_memoized
    def is_excluded(self, site: str, layer: str) -> bool:
        """Return whether `layer` stays unquantized at `site`, whatever the type of the site."""
        return self.ruled_type(site, layer, "mixed") == NONE

    def layer_type(self, site: str, layer: str, quant_type: str) -> str:
        """Return the type of `layer` at `site`, whose literal or schedule has `quant_type`."""
        return self.ruled_type(site, layer, quant_type) or quant_type

    def ruled_type(self, site: str, layer: str, quant_type: str) -> str | None:
        """Return the type that a rule or an exclude gives `layer`; None if it has the site's."""
        excluded = any(excludes.matches(pattern, site, layer) for pattern in self.exclude)
        if quant_type == NONE or excluded:
            return NONE
        rule = rule_for(self.rules, site, layer)
        return rule.quant_type if rule else None

    def operand_type(self, site: str, operand: str, layer: str, quant_type: str) -> str:
        """Return the format of an operand of `layer` if the site's type is `quant_type`.

        It is 'none' if the operand is not quantized, as in an excluded layer, and that of fprop if
        it has only the values of fprop. Raise ValueError if no row gives the type of an operand of
        a 'mixed' site.
        """
        operand_spec = self.operand_spec(site, operand, layer, quant_type)
        if operand_spec.source and not operand_spec.is_quantized:
            return self.operand_type(FPROP, operand, layer, self.asked.get(FPROP, NONE))
        return operand_spec.spec.quant_type

    @_memoized
    def operand_spec(self, site: str, operand: str, layer: str, quant_type: str) -> OperandSpec:
        """Return the spec of an operand of `layer`; arguments as `operand_type`."""
        return self.spec_in(site, operand, quant_type, self.ruled_type(site, layer, quant_type))

    def spec_in(
        self, site: str, operand: str, quant_type: str, ruled: str | None = None
    ) -> OperandSpec:
        """Return the spec of an operand in layers to which a rule gives the type `ruled`.

        A row of [operands] applies only to the type in the source. Layers with a rule, and later
        phases of a schedule with another type, use the defaults of their own type. Raise what
        `operand_type` raises.
        """
        name, is_the_sources = f"{site}.{operand}", quant_type == self.asked.get(site, quant_type)
        row = self.operands.get(name, PLAIN) if is_the_sources and ruled is None else PLAIN
        site_type = quant_type if ruled is None else ruled
        own = row.quant_type if site_type != NONE else None
        if (kind := member(own or site_type, operand)) is None:
            raise ValueError(
                f"{site} is '{site_type}', and [operands] has no quant_type for {name}"
            )
        hadamard = Hadamard(row.hadamard, row.signs or "fixed") if row.hadamard else None
        smooth = self.smooth_key and name == "qk.key" and kind != NONE
        return OperandSpec(self._spec(kind, row), hadamard, row.gain, smooth, row.source)

    def _spec(self, quant_type: str, row: OperandRow) -> QuantSpec:
        plugin = self.plugins.get(quant_type)
        return QuantSpec(
            quant_type,
            self.block,
            row.scale_rule or self.scale_rule,
            row.rounding or self.rounding,
            self.overflow,
            self.tensor_scale,
            row.tile or "row",
            options=plugin.options if plugin else {},
        )

    @property
    def is_random(self) -> bool:
        """Whether an operand is rounded stochastically, or transformed with random signs."""
        if any(PLUGINS[name].stochastic for name in self.own_types()):
            return True
        rows = self.operands.values()
        random = any(row.rounding == "stochastic" or row.signs == "random" for row in rows)
        return random or self.rounding == "stochastic"

    @_memoized
    def own_types(self) -> frozenset[str]:
        """Return the names of the custom quantizers that operands have at any step."""
        names = {phase.quant_type for site in SITES for phase in self.phases(site)}
        names |= {row.quant_type or NONE for row in self.operands.values()}
        return frozenset((names | {rule.quant_type for rule in self.rules}) & PLUGINS.keys())

    def blocks(self) -> dict[str, int]:
        """Return the longest block of each site, of a scale or a transform, at any step."""
        lengths = {
            name: [spec.longest_block for _, spec in self._ever(site)]
            for name, site in SITES.items()
        }
        return {name: max(sizes) for name, sizes in lengths.items() if any(sizes)}

    def squares(self) -> dict[str, int]:
        """Return {SITE.OPERAND: side} of the operands that are quantized in squares at any step."""
        sides: dict[str, int] = {}
        for name, site in SITES.items():
            for operand, operand_spec in self._ever(site):
                if operand_spec.spec.tile == "square":
                    side = max(operand_spec.longest_block, sides.get(f"{name}.{operand}", 0))
                    sides[f"{name}.{operand}"] = side
        return sides

    def _ever(self, site: GemmSite) -> Iterator[tuple[str, OperandSpec]]:
        """Yield (operand, spec) of a site, over all steps and layers, if quantized."""
        types = [p.quant_type for p in self.phases(site.name) if p.quant_type != NONE]
        # Without the model, any rule may match a layer.
        rules = [rule.quant_type for rule in self.rules if excludes.is_for(rule.layers, site)]
        for operand in (site.lhs, site.rhs):
            for site_type in types:
                for ruled in (None, *rules):
                    operand_spec = self.spec_in(site.name, operand, site_type, ruled)
                    if operand_spec.is_quantized:
                        yield operand, operand_spec


# The tables of the file, with a check for each of their keys.
_CHECKS: dict[str, dict[str, Callable[[object], object]]] = {
    table: {o.name: o.check for o in OPTIONS.values() if o.table == table} for table in TABLES
}
_CHECKS["asked"] = dict.fromkeys(SITES, check_type)
_CHECKS["schedule"] = dict.fromkeys(SITES, parse_schedule)
_TABLES = (*_CHECKS, "operands", "rules", "plugins")


@functools.cache
def current() -> QuantConfig:
    """Return this process's options: from the file that MQO_QUANT_CONFIG names, or the defaults.

    This runs the files in [plugins]: a command has started this process for the run that has them.

    Raises:
        QuantizerError: a file of quantizers cannot be run, or declares something else.
        FileNotFoundError: the named file does not exist.
        ValueError: the file is not TOML, or has an unknown key or value; the text names the file,
            the key and the valid ones.
    """
    path = os.environ.get(ENVIRONMENT_VARIABLE)
    if not path:
        return QuantConfig()
    config = load(Path(path))
    if any(row.file for row in config.plugins.values()):
        from mqo.quant.plugin_file import load_rows  # imports torch, which commands do not load

        load_rows(config.plugins, Path(path).parent)
    return config


def reset() -> None:
    """Forget the options, so that the next `current()` reads them again."""
    current.cache_clear()


def load(path: Path) -> QuantConfig:
    """Read the options from the TOML file `path`; raise what `current` raises."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def parse(text: str) -> QuantConfig:
    """Read the options from TOML; raise a ValueError that names the key and the valid ones."""
    tables = tomllib.loads(text)
    plugins = _parse_plugins(tables.pop("plugins", {}))  # before their names are types
    operands = parse_operands(tables.pop("operands", {}))
    rules = parse_rules(tables.pop("rules", []))
    for name, table in tables.items():
        _check_table(name, table)
    check_packed(tables.get("quantizer", {}), operands.get("fprop.x", PLAIN))
    types = tables.pop("asked", {})
    schedule = {site: parse_schedule(text) for site, text in tables.pop("schedule", {}).items()}
    options = {key: value for table in tables.values() for key, value in table.items()}
    lists = {key: tuple(value) for key, value in options.items() if isinstance(value, list)}
    parts = {"asked": types, "schedule": schedule, "operands": operands, "rules": rules}
    config = QuantConfig(**parts, plugins=plugins, **(options | lists))
    check_sources(config)
    _check_own_types(config)
    return config


def check_sources(config: QuantConfig) -> None:
    """Raise ValueError for a source in a site or a phase where fprop has not its own type."""
    of_fprop = config.phases(FPROP)
    for name, row in config.operands.items():
        site = name.partition(".")[0]
        if not row.source:
            continue
        if config.asked.get(site, NONE) == NONE or config.asked.get(FPROP, NONE) == NONE:
            raise ValueError(
                f"{name} has source = '{FPROP}'; valid: types other than 'none' for {FPROP} and "
                f"{site}"
            )
        phases = config.phases(site)
        same = [p.until for p in of_fprop] == [p.until for p in phases] and all(
            of_fprop[i].quant_type == config.asked[FPROP]
            for i, phase in enumerate(phases)
            if phase.quant_type == config.asked[site]  # the row applies
        )
        if not same:
            raise ValueError(
                f"{name} has source = '{FPROP}', and the schedules of {FPROP} and {site} differ; "
                "valid: the same steps for both, as in 'linear: TYPE until 0.8, then bf16'"
            )


def _check_own_types(config: QuantConfig) -> None:
    """Raise ValueError for an option that no custom quantizer supports."""
    if config.save_activations == "packed" and (own := config.own_types()):
        raise ValueError(
            f"[quantizer] save_activations = 'packed' saves codes, and {min(own)} is a quantizer "
            "in Python, which has none; valid: 'full'"
        )
    _check_estimators(config)
    if not config.unnormalized_probs:
        return
    probs = [config.spec_in("pv", "probs", phase.quant_type).spec for phase in config.phases("pv")]
    of_probs = {spec.quant_type for spec in probs if spec.plugin}
    if of_probs:
        raise ValueError(
            f"[quantizer] unnormalized_probs = true needs attention in chunks, and {min(of_probs)} "
            "is a quantizer in Python, which takes all probabilities; valid: false"
        )


def _check_estimators(config: QuantConfig) -> None:
    """Raise ValueError for a quantizer with an estimator that would not compute gradients."""
    types = {site: {phase.quant_type for phase in config.phases(site)} for site in SITES}
    of_fprop = types["fprop"] | {rule.quant_type for rule in config.rules}
    for name, row in config.operands.items():
        if name.startswith("fprop."):
            of_fprop |= {row.quant_type} if row.quant_type else set()
            if row.gain != 1.0 and _estimators(config, of_fprop):
                raise ValueError(
                    f"{name} has a gain, and a quantizer with an estimator computes the gradient "
                    "of what it rounds; valid: no gain"
                )
    if own := _estimators(config, types["qk"] | types["pv"]):
        raise ValueError(f"{own} has an estimator; valid: linear layers, not qk or pv")
    if own := _estimators(config, config.own_types() - of_fprop):
        raise ValueError(f"{own} has an estimator; valid: as a type of fprop, which calls it")


def _estimators(config: QuantConfig, types: Iterable[str | None]) -> str | None:
    """Return the first of these types that has an estimator."""
    own = config.own_types() & {*types}
    return min((name for name in own if PLUGINS[name].estimator), default=None)


def _parse_plugins(table: object) -> dict[str, PluginRow]:
    """Read [plugins], and make each quantizer a type, without running its code."""
    if not isinstance(table, dict):
        raise ValueError(f"plugins = {table!r} should be a table, [plugins]")
    rows = {}
    for name, row in table.items():
        rows[name] = row_of(f"plugins.{name}", PluginRow, row)
        rows[name].declare(name)
    return rows


def check_packed(options: Mapping[str, Any], x: OperandRow) -> None:
    """Raise ValueError if activations cannot be saved in the form of fprop's operand `x`."""
    if options.get("save_activations") == "packed" and (not x.is_plain or x.quant_type == NONE):
        raise ValueError(
            "[quantizer] save_activations = 'packed' saves the quantized fprop.x; valid: "
            "operands.fprop.x with a type, without hadamard and gain"
        )


def _check_table(name: str, table: object) -> None:
    check_choice("table", name, _TABLES)
    if not isinstance(table, dict):
        raise ValueError(f"{name} = {table!r} should be a table, [{name}]")
    for key, value in table.items():
        check_choice(f"key in [{name}]", key, tuple(_CHECKS[name]))
        check_value(name, key, _CHECKS[name][key], value)
