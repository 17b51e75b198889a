"""Has a tree's own source say which products of a cell's training step it quantises.

The program (Megatron-LM/tools/coverage.py) needs torch and some ten seconds, most of them imports,
so what it said is kept below .cache, by everything that it depends on.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mqo.data.tokenizer import DEFAULT_VOCAB_SIZE
from mqo.errors import MqoError
from mqo.launch import bytecode
from mqo.launch.cell import Cell
from mqo.launch.flags import RunPaths, megatron_flags
from mqo.launch.machine import Machine
from mqo.launch.products import Coverage, lines
from mqo.launch.ready import RunData
from mqo.overlay.series import Series
from mqo.overlay.snapshot import snapshot
from mqo.overlay.tree import Tree
from mqo.process import temporary_folder
from mqo.program import run_program
from mqo.project import Project
from mqo.runs import RunFolder

PROGRAM = "tools/coverage.py"
# What the program runs beside Megatron: a tree from elsewhere has none, or its own.
OURS = (PROGRAM, "own_tree.py", "pretrain_gpt.py")
TIME_LIMIT_S = 300


def of_cell(project: Project, tree: Tree, series: Series, cell: Cell) -> Coverage:
    """What a run of the cell on `tree` would quantise, at the vocabulary it would have.

    That is the sample's for a smoke run, and the published one otherwise.
    """
    vocabulary = DEFAULT_VOCAB_SIZE if cell.training.is_smoke else cell.model.vocab_size
    with temporary_folder("mqo-coverage-") as folder:
        source = folder / "source"
        snapshot(tree, source, types=cell.types, without=cell.without, series=series)
        bytecode.share(tree, source)
        for name in OURS:
            (source / name).unlink(missing_ok=True)
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(project.tree / name, source / name)
        flags = ["--vocab-size", str(vocabulary), *model_flags(cell)]
        return measure(project, source, flags, exclude=cell.exclude)


def record(
    project: Project,
    folder: RunFolder,
    cell: Cell,
    data: RunData,
    report: Callable[[str], None],
) -> None:
    """coverage.json and coverage.txt of a run; one that cannot be had is said, and no error."""
    reads: list[Path] = []
    if data.vocab_size:
        words = ["--vocab-size", str(data.vocab_size)]
    else:
        words = ["--tokenizer-type", "HuggingFaceTokenizer"]
        words += ["--tokenizer-model", str(data.tokenizer)]
        reads = sorted(data.tokenizer.glob("*.json"))
    try:
        # The words first: what the user gave behind `--` comes later and counts.
        flags = [*words, *model_flags(cell)]
        found = measure(project, folder.source, flags, reads=reads, exclude=cell.exclude)
    except MqoError as error:
        report(f"coverage : not known. {error}")
        return
    folder.coverage.write_text(as_json(cell, found), encoding="utf-8")
    folder.coverage_table.write_text(as_text(cell, found), encoding="utf-8")
    report(f"coverage : {found.summary()}")


def as_text(cell: Cell, coverage: Coverage) -> str:
    """The table under the cell's name."""
    names = (cell.model.name, cell.mode, f"{cell.gemms} GEMMs", cell.training.name)
    return "\n".join([", ".join(names), *lines(coverage), ""])


def as_json(cell: Cell, coverage: Coverage) -> str:
    """The names of the cell, and every product."""
    return json.dumps(names(cell) | coverage.as_table(), indent=1)


def names(cell: Cell) -> dict[str, Any]:
    """What the coverage is of."""
    where = {"model": cell.model.name, "training": cell.training.name, "dtype": cell.dtype}
    return where | {"mode": cell.mode, "gemms": cell.gemms}


def model_flags(cell: Cell) -> list[str]:
    """A run's own flags, as on a machine without CUDA; without data and output, which cost."""
    nowhere = Path("none")
    paths = RunPaths(nowhere, nowhere, nowhere, nowhere, nowhere, load=False)
    flags = megatron_flags(cell, Machine(1, 0), paths)
    groups = ("model", "training", "precision", "platform", "given after --")
    return [word for group in groups for word in flags[group]]


def measure(
    project: Project,
    source: Path,
    flags: list[str],
    *,
    reads: Sequence[Path] = (),
    exclude: Sequence[str] = (),
) -> Coverage:
    """What the program in `source` says, or said before; RunError when it fails.

    `reads` are files outside of the source that the flags name, `exclude` globs of layers that are
    left unquantised.
    """
    kept = project.cache / "coverage" / f"{_key(source, [*flags, *exclude], reads)}.json"
    try:
        return Coverage.from_table(json.loads(kept.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, MqoError):
        pass  # not there, or cut short: a cache may be
    kept.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder("mqo-coverage-", kept.parent) as folder:
        target = folder / kept.name
        options = target.with_name("quant.toml")
        options.write_text(f"[layers]\nexclude = {json.dumps(exclude)}\n", encoding="utf-8")
        _run(source, target, flags, options)
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


def _run(source: Path, target: Path, flags: list[str], options: Path) -> None:
    """Run the program on the CPU, alone, with nothing of this environment's Megatron."""
    chosen = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    chosen["MQO_QUANT_CONFIG"] = str(options)
    run_program(
        source / PROGRAM,
        [str(target), *flags],
        variables=chosen,
        help="What it cannot do without data and memory, it cannot count",
        limit_s=TIME_LIMIT_S,
    )
