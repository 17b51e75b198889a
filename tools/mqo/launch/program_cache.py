"""Cache the results of programs that run on a run's source without training, below .cache.

A program needs torch and about ten seconds, mostly for imports. The key of a result covers all that
it depends on: the source's code and tables, the request, the options, torch's version.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from mqo.launch import bytecode
from mqo.launch.config import RunConfig
from mqo.launch.options import ENVIRONMENT_VARIABLE
from mqo.overlay.series import Series, source_files
from mqo.overlay.snapshot import digests, edits, snapshot
from mqo.overlay.tree import Tree
from mqo.process import temporary_folder
from mqo.program import call
from mqo.project import Project
from mqo.untrusted import UntrustedFileError, read_json_object

# What programs import in addition to Megatron; other trees have none, their own, or older ones.
OURS = ("preflight.py", "distill_gpt.py", "megatron/inference")


@dataclass(frozen=True)
class Source:
    """The source of a run."""

    path: Path

    def digests(self) -> dict[str, str]:
        """Return {path: SHA-256} of its Python and TOML files."""
        return digests(self.path, {})


class LazySource:
    """A copy of a tree with a run's types and our programs, made when a program first needs it."""

    def __init__(
        self,
        project: Project,
        tree: Tree,
        series: Series,
        config: RunConfig,
        programs: Sequence[str],
        target: Path,
    ) -> None:
        self._tree, self._target, self._lock = tree, target, Lock()
        self._arguments: dict[str, Any] = {"types": config.quantization.types, "series": series}
        self._arguments["without"] = config.placement.without
        paths = (path for name in programs for path in source_files(project.ours / name))
        self._ours = {path.relative_to(project.ours).as_posix(): path for path in paths}

    def digests(self) -> dict[str, str]:
        """Return {path: SHA-256} of the Python and TOML files of the copy, made or not."""
        with self._tree.reading("snapshot"):
            files, *_ = edits(self._tree, **self._arguments)
            files |= {name: path.read_bytes() for name, path in self._ours.items()}
            return digests(self._tree.root, files)

    @property
    def path(self) -> Path:
        """Make the copy, and return its folder."""
        with self._lock:
            if not self._target.exists():
                snapshot(self._tree, self._target, is_temporary=True, **self._arguments)
                bytecode.share(self._tree, self._target)
                for name, path in self._ours.items():
                    target = self._target / name
                    target.unlink(missing_ok=True)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, target)
        return self._target


@contextmanager
def source_of(
    project: Project, tree: Tree, series: Series, config: RunConfig, *programs: str
) -> Iterator[LazySource]:
    """Yield a temporary copy of the tree with the run's types and our `programs`."""
    with temporary_folder("mqo-source-") as folder:
        yield LazySource(project, tree, series, config, (*programs, *OURS), folder / "source")


def ask_cached(
    project: Project,
    source: Source | LazySource,
    program: str,
    function: str,
    request: Mapping[str, Any],
    *,
    options: str = "",
    reads: Sequence[Path] = (),
    limit_s: float,
    help: str,
) -> dict[str, Any]:
    """Return what a function of a program of `source` returns, from the cache if possible.

    `request` are its arguments by name. `options` is its quant.toml, `reads` are files outside of
    the source that the request names.

    Raises:
        RunError: it fails, or takes more than `limit_s`.
    """
    name = Path(program).stem

    def file_of(digests: Mapping[str, str]) -> Path:
        return project.cache / name / f"{_key(digests, [request, options], reads)}.json"

    with suppress(UntrustedFileError):  # the cached file may be missing or truncated
        return read_json_object(file_of(source.digests()))
    # A lazy source is made only now, and the tree may have changed since.
    cached = file_of(Source(source.path).digests())
    cached.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(f"mqo-{name}-", cached.parent) as folder:
        whole, quant_toml = folder / cached.name, folder / "quant.toml"
        quant_toml.write_text(options, encoding="utf-8")
        # On the CPU, with one thread.
        variables = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        variables |= {ENVIRONMENT_VARIABLE: str(quant_toml)}
        settings = {"variables": variables, "help": help, "limit_s": limit_s}
        result: dict[str, Any] = call(source.path / program, function, request, **settings)
        whole.write_text(json.dumps(result), encoding="utf-8")
        whole.replace(cached)
    return result


def _key(digests: Mapping[str, str], words: list[Any], reads: Sequence[Path]) -> str:
    """Return a hash of all that the result depends on."""
    digest = hashlib.sha256(json.dumps([words, importlib.metadata.version("torch")]).encode())
    outside = {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in reads}
    for name, code in (*sorted(digests.items()), *outside.items()):
        digest.update(f"{name} {code}\n".encode())
    return digest.hexdigest()[:32]
