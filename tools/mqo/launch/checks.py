"""Check a run before it starts: a run and a dry run do the same checks in the same order.

If data, a tokenizer or a teacher are missing, a run stops and a dry run lists them. Any other
fault stops both with the same message.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mqo.errors import RunError
from mqo.launch import coverage, engine
from mqo.launch.config import RunConfig
from mqo.launch.effects import PATTERNS, check_effects, resolved_config
from mqo.launch.flags import RunData, megatron_flags, vocabulary_flags
from mqo.launch.machine import Machine
from mqo.launch.program_cache import ask_cached, source_of
from mqo.launch.sizes import check_sizes, needs_sizes
from mqo.matrix.tables import NONE, SITES
from mqo.overlay.series import Series
from mqo.overlay.tree import Tree
from mqo.project import Project
from mqo.quant import excludes, formats
from mqo.runs import RunFolder

PROGRAM = "tools/check_run.py"
TIME_LIMIT_S = 300
_SHARDED = ("--use-torch-fsdp2", "--use-megatron-fsdp")
HEAD = "output_layer"


def check_run(
    project: Project,
    tree: Tree,
    series: Series,
    config: RunConfig,
    machine: Machine,
    types: Mapping[str, str],
) -> list[str]:
    """Check a run's flags and layers with the patched tree's own code; return notes.

    Args:
        tree: the patched tree whose source the run would use.
        config: the run, with the flags of its layout.
        types: the types of its sites.

    Raises:
        RunError: Megatron refuses the flags, they would bypass a quantizer, or a quantizer does not
            accept the sizes of a layer.
        NoEffectError: an option, a pattern or a schedule changes nothing.
    """
    _check_engine(config, machine)
    _check_fsdp(config, machine)
    facts = _facts(project, tree, series, config, machine)
    resolved = resolved_config(config, types)
    _refuse(resolved.contradictions(), "schedules that begin with the types in the source")
    if traps := _traps(facts["traps"], resolved):
        raise RunError(
            f"The run would not quantize as configured: {'; '.join(traps)}",
            expected="flags under which Megatron runs each quantized site",
        )
    if facts["layers"] is not None:
        check_layers(config, types, facts["layers"])
        if needs_sizes(resolved):
            products = coverage.of_config(project, tree, series, config).products
            check_sizes(config, resolved, products, facts["sides"])
    return facts["notes"]


def check_layers(
    config: RunConfig, types: Mapping[str, str] | None, names: Mapping[str, Sequence[str]]
) -> None:
    """Raise RunError or NoEffectError for patterns and options that change no layer of a model.

    Args:
        config: the run.
        types: the types of its sites; None to check only that patterns match.
        names: the model's layers by kind.
    """
    _check_patterns(config, names)
    if types is not None:
        layers = {site: names.get(row.layer, ()) for site, row in formats.SITES.items()}
        check_effects(config, types, layers)


def validated_variables(flags: Sequence[str]) -> dict[str, str]:
    """Return the variables of a run with these flags that Megatron's validation reads.

    One connection keeps kernels in the order in which tensor and context parallelism start them.
    FSDP, which overlaps them, refuses that: it gets CUDA's default.
    """
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "8" if _fsdp(flags) else "1"}


def _fsdp(flags: Sequence[str]) -> list[str]:
    """Return the flags that shard the parameters over data-parallel ranks."""
    return [name for name in _SHARDED if name in flags]


def _check_fsdp(config: RunConfig, machine: Machine) -> None:
    """Raise RunError for FSDP without a GPU, where it fails while it builds the model."""
    given = _fsdp(config.experiment.extra_flags)
    if given and not machine.has_cuda:
        raise RunError(
            f"{given[0]} trains only on GPUs, because Megatron's FSDP calls CUDA and NCCL",
            expected="a machine with GPUs, or the run without the flag",
            help="`--dry-run --device h100-80gb` checks its flags anyway",
        )


def _check_engine(config: RunConfig, machine: Machine) -> None:
    """Raise RunError for Transformer Engine's layers on a GPU machine that lacks the package.

    They also support no custom quantizer with an estimator. Without a GPU the program reports
    a missing package: it imports it as the run does.
    """
    uses_engine = engine.is_asked(config.experiment.extra_flags)
    own = [p.name for p in config.quantization.plugins if p.declared.get("estimator")]
    if uses_engine and own:
        raise RunError(
            f"{own[0]} computes gradients, which Transformer Engine's layers do not ask it for",
            expected="--transformer-impl local",
        )
    if uses_engine and machine.has_cuda and importlib.util.find_spec(engine.NAME) is None:
        raise RunError(
            f"--transformer-impl {engine.NAME} was passed, but Transformer Engine is not installed",
            expected="a package transformer_engine that imports",
            help="`mqo doctor` shows what is installed",
        )


def _facts(
    project: Project, tree: Tree, series: Series, config: RunConfig, machine: Machine
) -> dict[str, Any]:
    """Return the program's facts about the run, from the cache if nothing changed.

    The run's own folders have fixed names in the flags, so that all runs share a result. The source
    has type 'none' at each site, since the result does not depend on the types.
    """
    experiment = config.experiment
    data = RunData(Path("TOKENIZER"), Path("DATA_PREFIX"), None)
    processes = str(config.placement.cluster.processes)
    folder, uses_engine = RunFolder(Path("RUN")), engine.is_asked(experiment.extra_flags)
    request = {
        "flags": megatron_flags(config, machine, data, folder, Path("INDICES")),
        "model_flags": coverage.one_process_flags(config, vocabulary_flags(experiment)),
        "distills": experiment.teacher is not None,
        "is_cpu": not machine.has_cuda,
        "variables": {**validated_variables(experiment.extra_flags), "WORLD_SIZE": processes},
        # Without the run's own packages Transformer Engine would seem to be missing.
        "python_path": os.environ.get("PYTHONPATH", "") if uses_engine else "",
    }
    quant = config.quantization
    # Only Transformer Engine's layers read more than the flags.
    options = config.quant_toml(dict(quant.types or {})) if uses_engine else ""
    plain = config.changed("quantization", types=dict.fromkeys(SITES, NONE))
    with source_of(project, tree, series, plain, PROGRAM, coverage.PROGRAM) as source:
        return ask_cached(
            project,
            source,
            PROGRAM,
            "check",
            request,
            options=options,
            limit_s=TIME_LIMIT_S,
            help="`mqo doctor` checks this machine",
        )


def _traps(faults: Mapping[str, list[str]], resolved: Any) -> list[str]:
    """Return the faults that would bypass the quantizer of a site with a type at any time."""
    traps: dict[str, None] = {}
    for site in SITES:
        kinds = {phase.quant_type for phase in resolved.phases(site)} - {NONE}
        excluded = all(resolved.layer_type(site, HEAD, kind) == NONE for kind in kinds)
        name = f"{site}:-{HEAD}" if excluded else site
        traps |= dict.fromkeys(faults[name] if kinds else ())
    return list(traps)


def _check_patterns(config: RunConfig, kinds: Mapping[str, Sequence[str]]) -> None:
    """Raise RunError for the patterns that match no layer."""
    layers = [
        SimpleNamespace(name=name, kind=kind) for kind, names in kinds.items() for name in names
    ]
    recipe = config.quantization.recipe
    options = config.quantization.options
    patterns = [pattern for name in PATTERNS for pattern in options.get(name, ())]
    if recipe is not None:
        named = [rule for rule in recipe.rules if rule.layers]
        patterns += [row.layers for rule in named for row in rule.rows(recipe.scope)]
    expected = "patterns that match layers of the model; `mqo coverage` lists them"
    _refuse(excludes.unmatched(patterns, layers), expected)


def _refuse(faults: Sequence[str], expected: str) -> None:
    """Raise RunError if there are faults; each is a clause that begins with a small letter."""
    if faults:
        text = "; ".join(faults)
        raise RunError(text[0].upper() + text[1:], expected=expected)
