"""What programs of a run's source say without training, kept below .cache.

A program needs torch and some ten seconds, most of them imports. Its answer is kept by everything
that it depends on: the source's code and tables, the words, the options, torch.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mqo.launch import bytecode
from mqo.launch.config import RunConfig
from mqo.launch.options import ENVIRONMENT_VARIABLE
from mqo.overlay.series import Series
from mqo.overlay.snapshot import snapshot
from mqo.overlay.tree import Tree
from mqo.process import temporary_folder
from mqo.program import run_program
from mqo.project import Project

# What every program runs beside Megatron: a tree from elsewhere has none, or its own.
OURS = ("preflight.py", "pretrain_gpt.py", "distill_gpt.py")


@contextmanager
def source_of(
    project: Project, tree: Tree, series: Series, config: RunConfig, program: str
) -> Iterator[Path]:
    """Yield a copy of the tree with the run's types, and our `program` in it, for a while."""
    types, without = config.quantization.types, config.placement.without
    with temporary_folder("mqo-source-") as folder:
        source = folder / "source"
        snapshot(tree, source, types=types, without=without, series=series)
        bytecode.share(tree, source)
        for name in (program, *OURS):
            (source / name).unlink(missing_ok=True)
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(project.ours / name, source / name)
        yield source


def answer(
    project: Project,
    source: Path,
    program: str,
    words: Sequence[str],
    *,
    options: str = "",
    reads: Sequence[Path] = (),
    limit_s: float,
    help: str,
) -> dict[str, Any]:
    """Return the JSON that a program of `source` writes, or wrote before.

    The program gets the file to write, then `words`; `options` is a quant.toml for it, `reads` are
    files outside of the source that the words name.

    Raises:
        RunError: it fails, or takes more than `limit_s`.
    """
    name = Path(program).stem
    key = _key(source, [*words, options], reads)
    kept = project.cache / name / f"{key}.json"
    try:
        return json.loads(kept.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        pass  # not there, or cut short: a cache may be
    kept.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(f"mqo-{name}-", kept.parent) as folder:
        target = folder / kept.name
        quant_toml = target.with_name("quant.toml")
        quant_toml.write_text(options, encoding="utf-8")
        run_program(
            source / program,
            [str(target), *words],
            # On the CPU, alone.
            variables={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
            | {ENVIRONMENT_VARIABLE: str(quant_toml)},
            help=help,
            limit_s=limit_s,
        )
        found = json.loads(target.read_text(encoding="utf-8"))
        target.replace(kept)
    return found


def _key(source: Path, words: list[str], reads: Sequence[Path]) -> str:
    """A hash of all that decides."""
    digest = hashlib.sha256(json.dumps([words, importlib.metadata.version("torch")]).encode())
    for path in (*sorted(source.rglob("*.py")), *sorted(source.rglob("*.toml")), *reads):
        name = path.relative_to(source) if path.is_relative_to(source) else path
        digest.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:32]
