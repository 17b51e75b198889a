"""Has a tree's own source say which products of a run's training step it quantizes.

The program (Megatron-LM/tools/coverage.py) needs torch and some ten seconds, most of them imports,
so what it said is kept below .cache, by everything that it depends on.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mqo.data.tokenizer import DEFAULT_VOCAB_SIZE
from mqo.display import Say
from mqo.errors import MqoError, RunError
from mqo.launch import bytecode
from mqo.launch.config import RunConfig
from mqo.launch.flags import RunData, model_flags
from mqo.launch.machine import Machine
from mqo.launch.options import ENVIRONMENT_VARIABLE
from mqo.launch.products import Coverage, lines
from mqo.matrix.tables import NONE
from mqo.overlay.series import Series
from mqo.overlay.snapshot import snapshot
from mqo.overlay.tree import Tree
from mqo.process import temporary_folder
from mqo.program import run_program
from mqo.project import Project
from mqo.recipes.recipe import OUTPUT_LAYER
from mqo.runs import RunFolder

PROGRAM = "tools/coverage.py"
# What the program runs beside Megatron: a tree from elsewhere has none, or its own.
OURS = (PROGRAM, "preflight.py", "pretrain_gpt.py")
TIME_LIMIT_S = 300
LEAST_SHARE = 0.5  # of the FLOPs that a recipe is for
_CPU = Machine(1, 0)


def of_config(project: Project, tree: Tree, series: Series, config: RunConfig) -> Coverage:
    """Return what a run on `tree` would quantize, at the vocabulary it would have.

    That is the sample's for a smoke run, and the published one otherwise.
    """
    of, asked = config.experiment, config.quantization
    vocabulary = DEFAULT_VOCAB_SIZE if of.training.is_smoke else of.model.vocab_size
    without = config.placement.without
    with temporary_folder("mqo-coverage-") as folder:
        source = folder / "source"
        snapshot(tree, source, types=asked.types, without=without, series=series)
        bytecode.share(tree, source)
        for name in OURS:
            (source / name).unlink(missing_ok=True)
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(project.tree / name, source / name)
        flags = ["--vocab-size", str(vocabulary), *model_flags(of, _CPU), *of.extra_flags]
        return measure(project, source, flags, config.layers_toml())


def record(
    project: Project,
    folder: RunFolder,
    config: RunConfig,
    data: RunData,
    report: Say,
) -> None:
    """Write a run's coverage.json and coverage.txt; say where they cannot be had.

    Raises:
        RunError: a recipe leaves most of what it is for unquantized, and nobody said that it may.
    """
    reads: list[Path] = []
    if data.vocab_size:
        words = ["--vocab-size", str(data.vocab_size)]
    else:
        words = ["--tokenizer-type", "HuggingFaceTokenizer"]
        words += ["--tokenizer-model", str(data.tokenizer)]
        reads = sorted(data.tokenizer.glob("*.json"))
    try:
        # The words first: what the user gave behind `--` comes later and counts.
        of = config.experiment
        flags = [*words, *model_flags(of, _CPU), *of.extra_flags]
        found = measure(project, folder.source, flags, config.layers_toml(), reads)
    except MqoError as error:
        report(f"coverage : not known. {error}")
        return
    facts = json.dumps(names(config) | found.as_table(), indent=1)
    folder.coverage.write_text(facts, encoding="utf-8")
    folder.coverage_table.write_text(as_text(config, found), encoding="utf-8")
    report(f"coverage : {found.summary()}")
    check_share(config, found)


def check_share(config: RunConfig, coverage: Coverage) -> None:
    """RunError where a recipe quantizes less than half of the FLOPs that it is for.

    Those are the FLOPs of the transformer blocks' linear layers at the sites that have a type.
    """
    how = config.quantization
    if how.recipe is None or how.allow_mostly_unquantized:
        return
    sites = [site for site, kind in how.recipe.types.model_dump().items() if kind != NONE]
    share = coverage.share_of(sites, without=OUTPUT_LAYER)
    if share < LEAST_SHARE:
        raise RunError(
            f"The recipe {how.recipe.name} quantizes {share:.1%} of the linear layers' FLOPs at "
            f"{', '.join(sites)}; its rules and the excludes leave out the others",
            expected=f"{LEAST_SHARE:.0%} or more",
            help="--allow-mostly-unquantized runs it none the less",
        )


def as_text(config: RunConfig, coverage: Coverage) -> str:
    """Return the table under the run's names."""
    of, asked = config.experiment, config.quantization
    which = () if asked.recipe else (f"{asked.gemms} GEMMs",)
    names = (of.model.name, config.mode_label, *which, of.training.name)
    return "\n".join([", ".join(names), *lines(coverage), ""])


def names(config: RunConfig) -> dict[str, Any]:
    """Return what the coverage is of."""
    of, asked = config.experiment, config.quantization
    where = {"model": of.model.name, "training": of.training.name, "dtype": of.dtype}
    recipe = asked.recipe.label if asked.recipe else None
    return where | {"mode": asked.mode, "gemms": asked.gemms, "recipe": recipe}


def measure(
    project: Project,
    source: Path,
    flags: list[str],
    layers: str = "",
    reads: Sequence[Path] = (),
) -> Coverage:
    """What the program in `source` says, or said before; RunError when it fails.

    `reads` are files outside of the source that the flags name, `layers` a quant.toml that says
    which layers are left unquantized, or have another type.
    """
    kept = project.cache / "coverage" / f"{_key(source, [*flags, layers], reads)}.json"
    try:
        return Coverage.from_table(json.loads(kept.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, MqoError):
        pass  # not there, or cut short: a cache may be
    kept.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder("mqo-coverage-", kept.parent) as folder:
        target = folder / kept.name
        options = target.with_name("quant.toml")
        options.write_text(layers, encoding="utf-8")
        run_program(
            source / PROGRAM,
            [str(target), *flags],
            # On the CPU, alone.
            variables={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
            | {ENVIRONMENT_VARIABLE: str(options)},
            help="What it cannot do without data and memory, it cannot count",
            limit_s=TIME_LIMIT_S,
        )
        found = Coverage.from_table(json.loads(target.read_text(encoding="utf-8")))
        target.replace(kept)
    return found


def _key(source: Path, flags: list[str], reads: Sequence[Path]) -> str:
    """A hash of all that decides: the source's code and tables, the flags, `reads`, torch."""
    digest = hashlib.sha256(json.dumps([flags, importlib.metadata.version("torch")]).encode())
    for path in (*sorted(source.rglob("*.py")), *sorted(source.rglob("*.toml")), *reads):
        name = path.relative_to(source) if path.is_relative_to(source) else path
        digest.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:32]
