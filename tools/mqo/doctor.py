"""Report what this machine offers a run, and the cost of missing pieces, without importing any."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import psutil

from mqo.errors import MqoError, nearest
from mqo.launch.machine import detect, torch_cuda
from mqo.megatron.run import isolated
from mqo.megatron.transformer_engine import releases
from mqo.overlay.tree import Tree
from mqo.overlay.vendor import Pin
from mqo.project import Project

State = Literal["ok", "missing", "warning"]
GIB = 1 << 30
LITTLE_DISK_GIB, LITTLE_MEMORY_GIB = 5, 4
WIDTH = 80


@dataclass(frozen=True)
class Finding:
    """One piece: what it is, what was found, and the consequence if something is wrong.

    Without a `required` piece nothing can be trained.
    """

    what: str
    state: State
    found: str
    cost: str = ""
    required: bool = False

    @property
    def needs_action(self) -> bool:
        """Return whether the user should do something about it."""
        return self.state == "warning" or (self.required and self.state == "missing")


@dataclass(frozen=True)
class Diagnosis:
    """All findings, in the order in which a reader wants them."""

    findings: tuple[Finding, ...]

    @property
    def clean(self) -> bool:
        """Return whether nothing needs action."""
        return not any(finding.needs_action for finding in self.findings)


@dataclass(frozen=True)
class Piece:
    """A package that may be installed: its module, what its absence costs, and its names."""

    module: str
    cost: str
    distribution: str = ""
    label: str = ""


TORCH = Piece("torch", "nothing trains; `python3 tools/bootstrap.py` installs it")
TRANSFORMER_ENGINE = Piece(
    "transformer_engine",
    "no --transformer-impl transformer_engine; without that flag Megatron's own layers are used",
    "transformer-engine",
    "Transformer Engine",
)
APEX = Piece(
    "apex",
    "no fused Adam, no fused LayerNorm, and no kernel that accumulates weight gradients: "
    "torch's are "
    "used",
)
TRITON = "code that launches a Triton kernel (parts of Megatron's MoE and inference) fails"
MODELOPT = "no distillation, no post-training quantization, no export"
OTHERS = (
    Piece("triton", TRITON),
    Piece("numba", "the CPU's quantizers run as torch operations, not compiled"),
    Piece("modelopt", MODELOPT, "nvidia-modelopt"),
)


def examine(project: Project, tree: Tree) -> Diagnosis:
    """Look for everything that a run may use; `tree` is the Megatron to report on."""
    return Diagnosis(
        (
            Finding("Python", "ok", f"{platform.python_version()}, {sys.executable}"),
            _package(TORCH, required=True),
            _cuda(),
            _megatron(project, tree),
            *_installed_megatron(),
            _of_gpus(TRANSFORMER_ENGINE, _engine_fault),
            _of_gpus(APEX, _apex_fault),
            *map(_package, OTHERS),
            _disk(project.runs),
            _memory(),
        )
    )


def diagnosis_lines(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield the lines of the report, at most 80 columns wide; paths are never broken."""
    wide = max(len(finding.what) for finding in diagnosis.findings)
    for finding in diagnosis.findings:
        label = f"{finding.state:7}  {finding.what:{wide}}  "
        for text in (finding.found, finding.cost):
            room = WIDTH - len(label)
            for line in textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False):
                yield label + line
                label = " " * len(label)
    todo = [finding.what for finding in diagnosis.findings if finding.needs_action]
    yield f"needs action: {', '.join(todo)}" if todo else "nothing needs action"


# -- what nothing trains without ----------------------------------------------------------------


def _cuda() -> Finding:
    cost = "runs go to the CPU"
    release = torch_cuda()
    if release is None:
        return Finding("CUDA", "missing", "no torch built for CUDA", cost)
    devices = detect().gpus
    if devices == 0:
        return Finding("CUDA", "missing", f"torch has {release}, but no device was found", cost)
    return Finding("CUDA", "ok", f"{release}, {devices} device{'s' if devices > 1 else ''}")


def _megatron(project: Project, tree: Tree) -> Finding:
    label, option = "Megatron core", ""
    if tree.root.resolve() != project.tree.resolve():
        option = f" --tree {shlex.quote(str(tree.root))}"
    if not (tree.is_vendored or tree.is_checkout):
        text = f"no Megatron in {tree.root}"
        cost = f"nothing trains; `mqo vendor{option}` fetches it, `mqo apply{option}` patches it"
        return Finding(label, "missing", text, cost, required=True)
    try:
        upstream, manifest = tree.upstream(), tree.manifest()
    except MqoError as error:
        return Finding(label, "warning", error.found, error.help, required=True)
    text = f"{upstream.version}, {'patched' if manifest else 'not patched'}"
    if not option and upstream.version != (pinned := Pin.load(project.upstream_pin).version):
        cost = f"no run uses it, because {pinned} is pinned: run `mqo restore`, then `mqo vendor`"
        return Finding(label, "warning", text, cost, required=True)
    return Finding(label, "ok", text, required=True)


def _installed_megatron() -> Iterator[Finding]:
    """Report a second Megatron, which must not be mixed with the tree's."""
    if version := _version("megatron-core"):
        cost = (
            "a module that the tree lacks would silently come from there; "
            "`pip uninstall megatron-core`"
        )
        yield Finding("megatron-core", "warning", f"{version}, installed with pip", cost)


# -- what is optional ---------------------------------------------------------------------------


def _package(piece: Piece, *, required: bool = False) -> Finding:
    label, version = piece.label or piece.module, _version(piece.distribution or piece.module)
    if folder := _folder(piece.module):
        text = version or f"of unknown version, in {folder}"
        return Finding(label, "ok", text, required=required)
    text = f"{version} by its metadata, but no module" if version else "not installed"
    return Finding(label, "missing", text, piece.cost, required=required)


def _of_gpus(piece: Piece, fault_in: Callable[[Path], tuple[str, str] | None]) -> Finding:
    """Report a package that only GPUs use; `fault_in` returns its fault and the cost."""
    finding, folder = _package(piece), _folder(piece.module)
    if folder and not detect().has_cuda:
        return replace(finding, found=f"{finding.found}; not used, as it needs a GPU")
    if folder and (fault := fault_in(folder)):
        return replace(finding, state="warning", found=finding.found + fault[0], cost=fault[1])
    return finding


def _engine_fault(folder: Path) -> tuple[str, str] | None:
    """Look for its compiled library, which `pip install transformer-engine` does not install."""
    folders = (folder.parent, folder, folder / "wheel_lib")
    if any(any(path.glob("libtransformer_engine*")) for path in folders):
        fault = releases.fault(_version(TRANSFORMER_ENGINE.distribution)) or ""
        known = fault.partition("; ")[2]
        return (f"; {known}", "its layers run only with bf16") if known else None
    return ", without its compiled library", (
        "Megatron cannot be imported on a GPU; `pip uninstall transformer-engine`, or install "
        "`transformer-engine[core_cu13,pytorch]`"
    )


def _apex_fault(folder: Path) -> tuple[str, str] | None:
    """Look for NVIDIA's `apex.normalization`; PyPI has another package of that name.

    Megatron uses its FusedAdam if it imports, which fails without the compiled part `amp_C`.
    """
    if not (folder / "normalization").is_dir():
        cost = "Megatron takes it for NVIDIA's, and LayerNorm fails; `pip uninstall apex`"
        return ": the unrelated package of that name on PyPI, not NVIDIA's", cost
    if _folder("amp_C") is None:
        cost = "Adam fails on a GPU; `pip uninstall apex`, or build it with its extensions"
        return ", without its CUDA extensions", cost
    return None


# -- room ---------------------------------------------------------------------------------------


def _disk(folder: Path) -> Finding:
    """Report the free space where runs are, or will be, written."""
    folder = nearest(folder)
    free = shutil.disk_usage(folder).free / GIB
    text = f"{free:.0f} GiB free at {folder}"
    if free >= LITTLE_DISK_GIB:
        return Finding("disk", "ok", text)
    cost = f"with less than {LITTLE_DISK_GIB} GiB a run may stop when it saves a checkpoint"
    return Finding("disk", "warning", text, cost)


def _memory() -> Finding:
    """Report the memory of the machine, or of this container if that is less."""
    total = isolated.machine_memory()
    free = min(psutil.virtual_memory().available, total) / GIB
    text = f"{free:.0f} of {total / GIB:.0f} GiB free"
    if free >= LITTLE_MEMORY_GIB:
        return Finding("memory", "ok", text)
    cost = f"with less than {LITTLE_MEMORY_GIB} GiB even a smoke run may be killed"
    return Finding("memory", "warning", text, cost)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _folder(module: str) -> Path | None:
    """Return the path of a package's source; None for a folder without `__init__.py`."""
    spec = importlib.util.find_spec(module)
    return Path(spec.origin).parent if spec and spec.origin else None
