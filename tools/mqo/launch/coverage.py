"""Find which products of a training step a tree's source quantizes, by running that source.

The program is Megatron-LM/tools/coverage.py; its results are cached.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mqo.display import Say
from mqo.errors import MqoError, RunError
from mqo.launch.config import RunConfig
from mqo.launch.effects import differing_lines
from mqo.launch.engine import LOCAL
from mqo.launch.flags import RunData, model_flags, tokenizer_flags, vocabulary_flags
from mqo.launch.machine import Machine
from mqo.launch.products import Coverage, coverage_lines
from mqo.launch.program_cache import LazySource, Source, ask_cached, source_of
from mqo.matrix.tables import LINEAR_SITES, NONE
from mqo.overlay.series import Series
from mqo.overlay.tree import Tree
from mqo.project import Project
from mqo.quant.recipe import OUTPUT_LAYER
from mqo.run_records import Coverage as Recorded
from mqo.run_records import parsed
from mqo.runs import RunFolder

PROGRAM = "tools/coverage.py"
TIME_LIMIT_S = 300
WIDTH = 80
LEAST_SHARE = 0.5  # of the FLOPs that a recipe is for
_CPU = Machine(1, 0)


def of_config(project: Project, tree: Tree, series: Series, config: RunConfig) -> Coverage:
    """Return what a run on `tree` would quantize.

    The vocabulary is the sample's for a smoke run, and the published one otherwise.
    """
    flags = one_process_flags(config, vocabulary_flags(config.experiment))
    with source_of(project, tree, series, config, PROGRAM) as source:
        result = measure(project, source, flags, config.layers_toml())
    return _with_libraries(config, result)


def record(
    project: Project,
    folder: RunFolder,
    config: RunConfig,
    data: RunData,
    report: Say,
) -> None:
    """Write a run's coverage.json and coverage.txt; print a note if they cannot be computed.

    Raises:
        RunError: a recipe leaves most of its layers' FLOPs unquantized without the user's consent.
    """
    reads: list[Path] = []
    if data.vocab_size:
        words = ["--vocab-size", str(data.vocab_size)]
    else:
        words = tokenizer_flags(data.tokenizer)
        reads = sorted(data.tokenizer.glob("*.json"))
    try:
        flags = one_process_flags(config, words)
        result = _with_libraries(
            config, measure(project, Source(folder.source), flags, config.layers_toml(), reads)
        )
    except MqoError as error:
        report(f"coverage : unknown. {error}")
        return
    differing = differing_layers(config, result)
    facts = names(config) | result.as_table() | {"differing": differing}
    folder.coverage.write_text(json.dumps(facts, indent=1), encoding="utf-8")
    folder.coverage_table.write_text(as_text(config, result), encoding="utf-8")
    report(f"coverage : {result.summary()}")
    check_share(config, result)


def _with_libraries(config: RunConfig, coverage: Coverage) -> Coverage:
    """Return the coverage with what other libraries quantize; RunError if that is unknown."""
    for library in config.quantization.libraries:
        if not library.rules:
            raise RunError(
                f"The layers that {library.library} quantizes ({library.format}) are not known",
                expected="a checkpoint quantized by text_generation_ptq.py, or a recipe in flags",
            )
        coverage = coverage.with_library(library)
    return coverage


def one_process_flags(config: RunConfig, vocabulary: list[str]) -> list[str]:
    """Return a run's flags for one process; the user's flags follow `vocabulary` to override it."""
    experiment = config.experiment
    model = model_flags(experiment, _CPU, stages=1)
    return [*vocabulary, *model, *experiment.extra_flags, *LOCAL]


def check_share(config: RunConfig, coverage: Coverage) -> None:
    """Raise RunError if a recipe quantizes less than half of the FLOPs that it applies to.

    Those are the FLOPs of the transformer blocks' linear layers at the sites of which it quantizes
    both operands, or at all sites with a type if there are none.
    """
    quant = config.quantization
    if quant.recipe is None or quant.allow_mostly_unquantized:
        return
    resolved = quant.recipe.resolved().items()
    plain = {site for (site, _), spec in resolved if not (spec.is_quantized or spec.source)}
    typed = [site for site in LINEAR_SITES["all"] if getattr(quant.recipe.types, site) != NONE]
    if not typed:  # a recipe for attention
        return
    sites = [site for site in typed if site not in plain] or typed
    share = coverage.share_of(sites, without=OUTPUT_LAYER)
    if share < LEAST_SHARE:
        raise RunError(
            f"The recipe {quant.recipe.name} quantizes {share:.1%} of the linear layers' FLOPs at "
            f"{', '.join(sites)}; its rules, --exclude or operands of type none leave the rest "
            "unquantized",
            expected=f"{LEAST_SHARE:.0%} or more",
            help="--allow-mostly-unquantized runs it anyway",
        )


def as_text(config: RunConfig, coverage: Coverage) -> str:
    """Return the text of coverage.txt: the run's names, the table, and layers that differ."""
    experiment, quant = config.experiment, config.quantization
    which = [] if quant.recipe else [f"{quant.gemms} GEMMs"]
    which += ["all attention GEMMs"] if quant.attention_gemms == "all" else []
    names = (experiment.model_name, config.mode_label, *which, experiment.training.name)
    differing = differing_layers(config, coverage)
    more = [row for line in differing for row in textwrap.wrap(line, WIDTH, subsequent_indent="  ")]
    more = ["", "operands of sites that differ between layers:", *more] if differing else []
    return "\n".join([", ".join(names), *coverage_lines(coverage), *more, ""])


def differing_of(folder: RunFolder) -> tuple[str, ...]:
    """Return the lines in a run's coverage.json on sites whose layers differ."""
    there = folder.coverage.is_file()
    return parsed(folder.coverage, Recorded).differing if there else ()


def differing_layers(config: RunConfig, coverage: Coverage) -> list[str]:
    """Return one line per quantization of operands at the sites whose layers differ by rule."""
    types = config.quantization.types
    if types is None or config.quantization.recipe is None:
        return []
    return differing_lines(config, types, coverage.layers_by_site())


def names(config: RunConfig) -> dict[str, Any]:
    """Return the names of the run that the coverage describes, for JSON."""
    experiment, quant = config.experiment, config.quantization
    table = {"model": experiment.model_name, "training": experiment.training.name}
    table |= {"dtype": experiment.dtype, "mode": quant.mode, "gemms": quant.gemms}
    table |= {"attention_gemms": quant.attention_gemms}
    return table | {"recipe": quant.recipe.label if quant.recipe else None}


def measure(
    project: Project,
    source: Source | LazySource,
    flags: list[str],
    layers: str = "",
    reads: Sequence[Path] = (),
) -> Coverage:
    """Return the result of the program in `source`, maybe cached; RunError if it fails.

    `reads` are files outside of the source that the flags name, `layers` is a quant.toml with the
    layers that are unquantized or have another type.
    """
    table = ask_cached(
        project,
        source,
        PROGRAM,
        "measure",
        {"flags": flags},
        options=layers,
        reads=reads,
        limit_s=TIME_LIMIT_S,
        help="Coverage runs the model without data or memory; leave out flags that need them",
    )
    return Coverage(**table)
