"""Check that the types, rules, recipes and rows of operands in a configuration fit together.

All functions raise ValueError; the text names the tables and keys of quant.toml.
"""

from __future__ import annotations

from mqo.quant.formats import ATTENTION_BACKWARD, NONE, SITES, check_choice
from mqo.quant.operand_table import FPROP
from mqo.quant.plugins import PLUGINS
from mqo.quant.quant_config import QuantConfig


def check_layers(config: QuantConfig) -> None:
    """Raise ValueError for rules, recipes and rows of operands that do not fit together."""
    _check_recipes(config)
    _check_sources(config)
    _check_packed(config)


def _check_recipes(config: QuantConfig) -> None:
    """Raise ValueError for a rule's recipe that is missing, or that turns on a site."""
    named = {rule.recipe for rule in config.rules if rule.recipe}
    for name in sorted(named):
        check_choice("recipe of a rule", name, tuple(config.recipes))
    for name, recipe in config.recipes.items():
        if name not in named:
            raise ValueError(f"no rule has the recipe {name}; valid: [recipes] of [[rules]]")
        for site, kind in recipe.types.items():
            if kind != NONE and config.asked.get(site, kind) == NONE:
                raise ValueError(
                    f"the recipe {name} of a rule quantizes {site}, which is 'none' in the other "
                    f"layers; valid: types.{site} = 'mixed', with quant_type = 'none' for its "
                    "operands"
                )


def _check_sources(config: QuantConfig) -> None:
    """Raise ValueError for a source in a site or a phase where fprop has not its own type."""
    of_fprop = config.phases(FPROP)
    for name, recipe in config.recipes.items():
        for operand, row in recipe.operands.items():
            site = operand.partition(".")[0]
            phases = config.phases(site)
            same = [(p.until, p.quant_type == NONE) for p in of_fprop] == [
                (p.until, p.quant_type == NONE) for p in phases
            ]
            if row.source and (not same or NONE in {recipe.type_at(s) for s in (FPROP, site)}):
                raise ValueError(
                    f"{operand} of the recipe {name} has source = '{FPROP}'; valid: types other "
                    f"than 'none' for {FPROP} and {site}, with the same schedule"
                )
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


def _check_packed(config: QuantConfig) -> None:
    """Raise ValueError if activations cannot be saved in the form of fprop's operand `x`."""
    if config.save_activations != "packed":
        return
    for table in config.tables:
        x = table.row(FPROP, "x")
        if table.types.get(FPROP) != NONE and (not x.is_plain or x.quant_type == NONE):
            raise ValueError(
                "[quantizer] save_activations = 'packed' saves the quantized fprop.x; valid: "
                "operands.fprop.x with a type, without hadamard and gain"
            )


def check_own_types(config: QuantConfig) -> None:
    """Raise ValueError for an option that no custom quantizer supports."""
    if not (own := config.own_types()):
        return
    if config.save_activations == "packed":
        raise ValueError(
            f"[quantizer] save_activations = 'packed' saves codes, and {min(own)} is a quantizer "
            "in Python, which has none; valid: 'full'"
        )
    _check_estimators(config, {name for name in own if PLUGINS[name].estimator})
    for site in ATTENTION_BACKWARD:
        for _, operand_spec in config.ever(site):
            if operand_spec.spec.plugin:
                raise ValueError(
                    f"{site} computes attention in chunks, and {operand_spec.spec.quant_type} is a "
                    "quantizer in Python, which takes the whole operand; valid: formats"
                )
    of_probs = {each.spec.quant_type for operand, each in config.ever("pv") if operand == "probs"}
    if config.unnormalized_probs and own & of_probs:
        raise ValueError(
            "[quantizer] unnormalized_probs = true needs attention in chunks, and "
            f"{min(own & of_probs)} is a quantizer in Python, which takes all probabilities; "
            "valid: false"
        )


def _check_estimators(config: QuantConfig, estimators: set[str]) -> None:
    """Raise ValueError for a quantizer with an estimator that would not compute gradients."""
    for operand, operand_spec in config.ever(FPROP):
        if operand_spec.gain != 1.0 and operand_spec.spec.quant_type in estimators:
            raise ValueError(
                f"{FPROP}.{operand} has a gain, and a quantizer with an estimator computes the "
                "gradient of what it rounds; valid: no gain"
            )
    used = {site: {each.spec.quant_type for _, each in config.ever(site)} for site in SITES}
    if own := estimators & (used["qk"] | used["pv"]):
        raise ValueError(f"{min(own)} has an estimator; valid: linear layers, not qk or pv")
    if own := estimators & set().union(*used.values()) - used[FPROP]:
        raise ValueError(f"{min(own)} has an estimator; valid: as a type of fprop, which calls it")
