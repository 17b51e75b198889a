"""Cache the results of programs that run on a run's source without training, below .cache.

A program needs torch and about ten seconds, mostly for imports. The key of a result covers all that
it depends on: the source's code and tables, the words, the options, torch's version.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mqo.launch import bytecode
from mqo.launch.config import RunConfig
from mqo.launch.options import ENVIRONMENT_VARIABLE
from mqo.overlay.series import Series, source_files
from mqo.overlay.snapshot import snapshot
from mqo.overlay.tree import Tree
from mqo.process import temporary_folder
from mqo.program import ask
from mqo.project import Project
from mqo.untrusted import UntrustedFileError, read_json_object

# What programs import in addition to Megatron; other trees have none, their own, or older ones.
OURS = ("preflight.py", "distill_gpt.py", "megatron/inference")


@contextmanager
def source_of(
    project: Project, tree: Tree, series: Series, config: RunConfig, *programs: str
) -> Iterator[Path]:
    """Yield a temporary copy of the tree with the run's types and our `programs`."""
    types, without = config.quantization.types, config.placement.without
    with temporary_folder("mqo-source-") as folder:
        source = folder / "source"
        snapshot(tree, source, types=types, without=without, series=series)
        bytecode.share(tree, source)
        for name in (*programs, *OURS):
            for path in source_files(project.ours / name):
                target = source / path.relative_to(project.ours)
                target.unlink(missing_ok=True)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
        yield source


def ask_cached(
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
    """Return the JSON that a program of `source` writes, from the cache if possible.

    Its arguments are the file to write, then `words`. `options` is its quant.toml, `reads` are
    files outside of the source that the words name.

    Raises:
        RunError: it fails, or takes more than `limit_s`.
    """
    name = Path(program).stem
    key = _key(source, [*words, options], reads)
    cached = project.cache / name / f"{key}.json"
    with suppress(UntrustedFileError):  # the cached file may be missing or truncated
        return read_json_object(cached)
    cached.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(f"mqo-{name}-", cached.parent) as folder:
        whole, quant_toml = folder / cached.name, folder / "quant.toml"
        quant_toml.write_text(options, encoding="utf-8")
        # On the CPU, with one thread.
        variables = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        variables |= {ENVIRONMENT_VARIABLE: str(quant_toml)}
        settings = {"variables": variables, "help": help, "limit_s": limit_s}
        result = ask(source / program, [], after=words, **settings)
        whole.write_text(json.dumps(result), encoding="utf-8")
        whole.replace(cached)
    return result


def _key(source: Path, words: list[str], reads: Sequence[Path]) -> str:
    """Return a hash of all that the result depends on."""
    digest = hashlib.sha256(json.dumps([words, importlib.metadata.version("torch")]).encode())
    for path in (*sorted(source.rglob("*.py")), *sorted(source.rglob("*.toml")), *reads):
        name = path.relative_to(source) if path.is_relative_to(source) else path
        digest.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:32]
