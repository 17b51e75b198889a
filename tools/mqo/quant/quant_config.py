"""The options, types and rules of a model's quantizers."""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar

from mqo.quant import excludes
from mqo.quant.formats import NONE, SITES
from mqo.quant.layer_rules import UNQUANTIZED, Assigned, LayerRecipe, LayerRule, rule_for
from mqo.quant.operand_table import FPROP, PLAIN, OperandRow, member
from mqo.quant.options import Options
from mqo.quant.own_formats import FormatRow
from mqo.quant.plugin_rows import PluginRow
from mqo.quant.plugins import PLUGINS, registrations
from mqo.quant.schedule import Phase, Schedule
from mqo.quant.spec import Hadamard, OperandSpec, QuantSpec

# What --smooth-key smooths. Only the softmax reads the scores; and the rows of ds sum to zero, so a
# number that is added to all keys does not change dq.
_SMOOTHED = ("qk.key", "qk_recompute.key", "dq.key")

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
    maps SITE.OPERAND to its differences. `rules` override the types of layers, and `recipes` are
    those that they name. `formats` are the user's formats, and `plugins` the custom quantizers, by
    name.
    """

    asked: Mapping[str, str] = field(default_factory=dict)
    schedule: Mapping[str, Schedule] = field(default_factory=dict)
    operands: Mapping[str, OperandRow] = field(default_factory=dict)
    rules: tuple[LayerRule, ...] = ()
    recipes: Mapping[str, LayerRecipe] = field(default_factory=dict)
    formats: Mapping[str, FormatRow] = field(default_factory=dict)
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
        return self.layer_type(site, layer, "mixed") == NONE

    def layer_type(self, site: str, layer: str, quant_type: str) -> str:
        """Return the type of `layer` at `site`, whose literal or schedule has `quant_type`."""
        return self.type_in(site, quant_type, self.assigned(site, layer, quant_type))

    def assigned(self, site: str, layer: str, quant_type: str) -> Assigned | None:
        """Return what a rule or a pattern gives `layer`; None if it has the site's type."""
        if quant_type == NONE or excludes.leave_out(self.exclude, self.include, site, layer):
            return UNQUANTIZED
        rule = rule_for(self.rules, site, layer)
        return rule.assigned if rule else None

    def type_in(self, site: str, quant_type: str, assigned: Assigned | None) -> str:
        """Return the type of layers to which a rule gives `assigned`."""
        if assigned is None:
            return quant_type
        if assigned.recipe is None:
            return assigned.quant_type or NONE
        return self.recipes[assigned.recipe].type_at(site)

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
        return self.spec_in(site, operand, quant_type, self.assigned(site, layer, quant_type))

    def spec_in(
        self, site: str, operand: str, quant_type: str, assigned: Assigned | None = None
    ) -> OperandSpec:
        """Return the spec of an operand in layers to which a rule gives `assigned`.

        A row of [operands] applies only to the type in the source. Layers with another type by a
        rule, and later phases of a schedule with another type, use the defaults of their own type,
        and layers with a recipe use its rows. Raise what `operand_type` raises.
        """
        name, row = f"{site}.{operand}", PLAIN
        if assigned and assigned.recipe:
            row = self.recipes[assigned.recipe].row(site, operand)
        elif assigned is None and quant_type == self.asked.get(site, quant_type):
            row = self.operands.get(name, PLAIN)
        site_type = self.type_in(site, quant_type, assigned)
        own = row.quant_type if site_type != NONE else None
        if (kind := member(own or site_type, operand)) is None:
            raise ValueError(
                f"{site} is '{site_type}', and [operands] has no quant_type for {name}"
            )
        hadamard = Hadamard(row.hadamard, row.signs or "fixed") if row.hadamard else None
        smooth = self.smooth_key and name in _SMOOTHED and kind != NONE
        return OperandSpec(self._spec(kind, row), hadamard, row.gain, smooth, row.source)

    def _spec(self, quant_type: str, row: OperandRow) -> QuantSpec:
        options: dict[str, Any] = {}
        if quant_type in PLUGINS:
            run = self.plugins.get(quant_type)
            options = {**(run.options if run else {}), **row.options}
        return QuantSpec(
            quant_type,
            self.block,
            row.scale_rule or self.scale_rule,
            row.rounding or self.rounding,
            self.overflow,
            self.tensor_scale,
            row.tile or "row",
            options=options,
        )

    @property
    def is_random(self) -> bool:
        """Whether an operand is rounded stochastically, or transformed with random signs."""
        if any(PLUGINS[name].stochastic for name in self.own_types()):
            return True
        rows = [row for table in self.tables for row in table.operands.values()]
        random = any(row.rounding == "stochastic" or row.signs == "random" for row in rows)
        return random or self.rounding == "stochastic"

    @_memoized
    def all_types(self) -> frozenset[str]:
        """Return the types that sites or operands have at any step."""
        names = {phase.quant_type for site in SITES for phase in self.phases(site)}
        names |= {rule.quant_type or NONE for rule in self.rules}
        return frozenset(names.union(*(t.all_types() for t in self.tables)))

    def own_types(self) -> frozenset[str]:
        """Return the names of the custom quantizers that operands have at any step."""
        return self.all_types() & PLUGINS.keys()

    @property
    def tables(self) -> tuple[LayerRecipe, ...]:
        """Return the types and rows of layers without a rule, and those of the rules' recipes."""
        return LayerRecipe(self.asked, self.operands), *self.recipes.values()

    def blocks(self) -> dict[str, int]:
        """Return the longest block of each site, of a scale or a transform, at any step."""
        lengths = {site: [spec.longest_block for _, spec in self.ever(site)] for site in SITES}
        return {name: max(sizes) for name, sizes in lengths.items() if any(sizes)}

    def squares(self) -> dict[str, int]:
        """Return {SITE.OPERAND: side} of the operands that are quantized in squares at any step."""
        sides: dict[str, int] = {}
        for site in SITES:
            for operand, operand_spec in self.ever(site):
                if operand_spec.spec.tile == "square":
                    name = f"{site}.{operand}"
                    sides[name] = max(operand_spec.longest_block, sides.get(name, 0))
        return sides

    def ever(self, name: str) -> Iterator[tuple[str, OperandSpec]]:
        """Yield (operand, spec) of a site, over all steps and layers, if quantized."""
        site = SITES[name]
        types = [phase.quant_type for phase in self.phases(name) if phase.quant_type != NONE]
        # Without the model, any rule may match a layer.
        rules = [rule.assigned for rule in self.rules if excludes.is_for(rule.layers, site)]
        for operand in (site.lhs, site.rhs):
            for site_type in types:
                for assigned in (None, *rules):
                    operand_spec = self.spec_in(name, operand, site_type, assigned)
                    if operand_spec.is_quantized:
                        yield operand, operand_spec
