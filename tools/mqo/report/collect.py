"""Read run folders into records: what ran, its end, its measurements and its costs."""

import hashlib
import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from mqo.errors import MqoError, RunError
from mqo.launch.command import command_of, flag_table, flag_words, is_number
from mqo.launch.config import Quantization, RunConfig
from mqo.launch.failure import reason
from mqo.launch.flags import length
from mqo.launch.folder import Environment
from mqo.launch.libraries import UNNAMED, library_labels
from mqo.launch.naming import own_data
from mqo.launch.run import Result
from mqo.matrix.tables import NONE, Dtype
from mqo.overlay.diff import FileDiff
from mqo.overlay.tree import release_in
from mqo.run_records import Coverage, Device, QuantToml, RunEnd, Stat, parsed
from mqo.runs import (
    QUANTIZERS,
    STEP_TIME,
    TRAIN_LOSS,
    VALID_LOSS,
    RunFolder,
    Series,
    is_run,
    last_of_each_step,
    training_losses,
)
from mqo.sweep.state import SweepFolder
from mqo.untrusted import UntrustedFileError, read_bytes, read_text, shown, walk_folders

T = TypeVar("T")
# The first step times, which are left out.
LEFT_OUT_STEPS, LEFT_OUT_SHARE = 2, 0.1
# Flags in which runs of one comparison may differ: paths, the seed, what is written and when.
_FREE = (
    *("--tokenizer-model", "--data-path", "--data-cache-path", "--tensorboard-dir", "--seed"),
    *("--save", "--load", "--ckpt-step", "--save-interval", "--verify-integrity"),
    *("--exit-signal-handler", "--tensorboard-log-interval", "--log-timers-to-tensorboard"),
    # Recomputation gives the same bits; a mode with a PV type may need it.
    *("--recompute-granularity", "--recompute-modules"),
    *("--recompute-method", "--recompute-num-layers"),
    # Flags of torchrun; the program, a path of the run, follows the last of them.
    *("--standalone", "--node-rank", "--master-addr", "--master-port"),
)
SHOWN = 300  # characters of an error
LONGEST_NAME, LONGEST_SHOWN = 4096, 80  # characters of a name or setting, and of one that is odd
_LITERAL = b"custom_quant_type = "


@dataclass(frozen=True)
class Site:
    """The measurements of a site's quantizers in a run, over all layers and operands.

    The SQNR is in dB, of the summed energies; underflow is the mean share, 0 to 1, of the nonzero
    elements that became zero. None if nothing was measured.
    """

    site: str
    quant_type: str
    layers: int
    calls: int
    sqnr_db: float | None
    underflow: float | None


@dataclass(frozen=True)
class Machine:
    """The machine of a run: "cpu" or "gpu", its model, cores, processes, and threads of each."""

    kind: str
    device: str
    cores: int
    processes: int
    threads: str

    def line(self) -> str:
        """Return the machine in words."""
        threads = f"{self.threads} thread" + ("s" if self.threads != "1" else "")
        per = f"{self.processes} processes, each " if self.processes > 1 else ""
        return f"{self.device}, {self.cores} cores, {per}{threads}"


@dataclass(frozen=True)
class FileChange(FileDiff):
    """A file's part of overlay.diff."""

    @property
    def kind(self) -> str:
        """Return "site" if it writes a quant type, "added" for an added file, else "other"."""
        if b"\n--- /dev/null" in self.content:
            return "added"
        return "site" if b"\n+" in self.content and _LITERAL in self.content else "other"

    @property
    def digest(self) -> str:
        """Return a hash, equal for equal parts."""
        return hashlib.sha256(self.content).hexdigest()[:16]


@dataclass(frozen=True)
class Run:
    """A run that ended successfully.

    `variant` is the mode with the user's changes to the quantization, `label` the same for tables
    and plots. `setting` must be the same in runs that are compared; `data_file` is the name of the
    user's own data, '' for a sample. Losses are in nats per token, times in seconds, memory in
    bytes, `share` is the quantized part of the FLOPs. `implementation` names the norms, optimizers
    and fusions of the run; it is empty if they were not recorded. `differing` says how operands are
    quantized at sites whose layers differ. `quantizers` are the quantizers' metrics, by name.
    """

    folder: RunFolder
    name: str
    model: str
    dataset: str
    config: str
    dtype: Dtype
    label: str
    variant: str
    types: Mapping[str, str]
    setting: Mapping[str, str]
    data_file: str
    seed: str
    continued: bool
    steps: int
    tokens_per_step: int
    vocabulary: int | None
    train: Series
    valid: Series
    step_times: tuple[float, ...]
    peak_memory: float | None
    share: float | None
    sites: tuple[Site, ...]
    quantizers: Mapping[str, Series]
    machine: Machine
    implementation: Mapping[str, str]
    command: str
    commit: str | None
    upstream: str | None
    python: str
    packages: Mapping[str, str]
    changes: tuple[FileChange, ...]
    differing: tuple[str, ...] = ()

    @property
    def kind(self) -> tuple:
        """Return what runs that may be compared have in common; the variant and seed may differ."""
        return self.model, self.dataset, self.config, frozenset(self.setting.items()), self.steps

    @property
    def step_time(self) -> float | None:
        """Return the median step time without the first steps; None if none was recorded."""
        rest = warm(self.step_times) or self.step_times[-1:]
        return statistics.median(rest) if rest else None

    @property
    def tokens_per_s(self) -> float | None:
        """Return tokens per second of the median step."""
        return self.tokens_per_step / self.step_time if self.step_time else None


def warm(steps: Sequence[T]) -> Sequence[T]:
    """Return the steps without the first ones, in which caches fill and kernels are compiled."""
    return steps[max(LEFT_OUT_STEPS, math.ceil(LEFT_OUT_SHARE * len(steps))) :]


@dataclass(frozen=True)
class LeftOut:
    """A run that is not in a comparison."""

    name: str
    what: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.what}; {self.reason}"


def named_paths(names: Iterable[Path], runs: Path) -> list[Path]:
    """Return paths of runs or of folders of runs; each may be a name in the folder `runs`."""
    return [path if path.exists() or not (runs / path).exists() else runs / path for path in names]


def find(
    paths: Iterable[Path], skip: Callable[[UntrustedFileError], None] = lambda error: None
) -> list[tuple[str, RunFolder]]:
    """Return (name, run) of each run folder in or below `paths`, sorted by name in each path.

    `skip` gets the error of a folder that cannot be read or named.

    RunError for a path that is not a folder, and without any run.
    """
    names: dict[Path, str] = {}
    paths = list(paths)
    for path in paths:
        if not path.is_dir():
            raise RunError(f"{path} is not a folder", expected="a run, or a folder of runs")
        root = path.resolve()
        for run_path in filter(is_run, walk_folders(root, is_run, skip)):
            name = run_path.relative_to(root.parent if run_path == root or len(paths) > 1 else root)
            names.setdefault(run_path, name.as_posix())
    if not names:
        raise RunError(
            f"{', '.join(map(str, paths))} holds no run",
            expected="folders with a cell.json",
            help="Run `mqo train` or `mqo sweep` to train some",
        )
    return [(name, RunFolder(run_path)) for run_path, name in names.items()]


def collect(paths: Sequence[Path]) -> tuple[list[Run], list[LeftOut]]:
    """Return the runs at `paths` that ended successfully, and the others with the reasons."""
    runs: list[Run] = []
    left_out: list[LeftOut] = []

    def skip(error: UntrustedFileError) -> None:
        left_out.append(LeftOut(shown(error.path), "unreadable", error.fault))

    for name, folder in find(paths, skip):
        match _read(name, folder):
            case Run() as run:
                runs.append(run)
            case LeftOut() as other:
                left_out.append(other)
    for path in paths:
        left_out += _not_started(path)
    return runs, left_out


def _not_started(path: Path) -> Iterator[LeftOut]:
    """Yield the runs that sweeps have not started."""
    for folder in walk_folders(path, is_run, lambda error: None):
        for entry in SweepFolder(folder).read():
            if entry.run is None:
                yield LeftOut(entry.name, "not started", "its sweep has not reached it")


def _read(name: str, folder: RunFolder) -> Run | LeftOut:
    try:
        config = RunConfig.read(folder)
        if not folder.result.exists():
            return _unfinished(name, folder, config)
        result = parsed(folder.result, Result)
        if folder.ended.exists() and parsed(folder.ended, RunEnd).steps == 0:
            words = "an earlier run trained its steps, and has their losses"
            return LeftOut(name, "a final validation", words)
        if result.train_loss is None:
            return LeftOut(name, "part of a run", "a node without losses: the last node has them")
        metrics = folder.read_metrics()
        if TRAIN_LOSS not in metrics:
            words = "it learned only from a teacher, and its version of mqo logged no loss on text"
            return LeftOut(name, "without a loss on its text", words)
        run = _run(name, folder, config, result, metrics)
        if odd := _odd_text(run):
            return LeftOut(name, "unreadable", f"its name or setting {odd} cannot be shown")
        return run
    except (OSError, ValueError, KeyError, TypeError, MqoError) as error:
        text = " ".join(str(error).split())
        return LeftOut(name, "unreadable", f"{type(error).__name__}: {text[:SHOWN]}")


def _odd_text(run: Run) -> str | None:
    """Return the first text of a run that tables and plots cannot show, escaped; None without."""
    names = (run.name, run.model, run.dataset, run.config, run.dtype, run.label, run.data_file)
    for text in (*names, run.variant, run.seed, *run.setting, *run.setting.values()):
        if not text.isprintable() or len(text) > LONGEST_NAME:
            return ascii(text[:LONGEST_SHOWN])
    return None


def _unfinished(name: str, folder: RunFolder, config: RunConfig) -> LeftOut:
    if folder.failure.exists():
        return LeftOut(name, "failed", reason(folder))
    rows = training_losses(folder.read_metrics())
    at = f"step {rows[-1][0] if rows else 0} of {length(config.experiment).steps}"
    words = reason(folder) if folder.log.exists() else "it has no log"
    return LeftOut(name, "unfinished", f"{at}; last message: {words}")


def _run(
    name: str,
    folder: RunFolder,
    config: RunConfig,
    result: Result,
    metrics: Mapping[str, Series],
) -> Run:
    experiment, (command, env) = config.experiment, command_of(folder)
    facts = parsed(folder.environment, Environment)
    device = parsed(folder.device, Device) if folder.device.exists() else Device()
    types = dict.fromkeys(quantizing_libraries(folder), UNNAMED) | config.quantization.library_types
    changed = changed_quantization(folder, config.quantization)
    return Run(
        folder=folder,
        name=name,
        model=experiment.model_name,
        dataset=experiment.dataset.name,
        config=experiment.training.name,
        dtype=experiment.dtype,
        label=config.mode_label + changed,
        variant=config.quantization.name + changed,
        types=types | result.types,
        setting=_setting(config, command, facts),
        data_file=own_data(experiment.data_prefix, experiment.extra_flags) or "",
        seed=flag_table(command).get("--seed") or "default",
        continued=facts.inputs.iteration is not None,
        steps=result.iterations,
        tokens_per_step=length(experiment).tokens_per_step,
        vocabulary=result.vocab_size,
        train=last_of_each_step(metrics[TRAIN_LOSS]),
        valid=last_of_each_step(metrics.get(VALID_LOSS, [])),
        step_times=tuple(seconds for _, seconds in metrics.get(STEP_TIME, [])),
        peak_memory=max(device.peak_memory) if device.peak_memory else None,
        share=_coverage(folder).quantized_share,
        sites=tuple(_sites(folder, metrics)),
        quantizers={name: rows for name, rows in metrics.items() if name.startswith("quant/")},
        machine=_machine(config, facts, env, device),
        implementation=folder.read_implementation(),
        command=read_text(folder.command),
        commit=facts.commit,
        upstream=release_in(folder.source),
        python=facts.python.split()[0],
        packages=facts.packages,
        changes=tuple(changes(folder)),
        differing=_coverage(folder).differing,
    )


def _coverage(folder: RunFolder) -> Coverage:
    """Return the content of coverage.json; nothing without it."""
    return parsed(folder.coverage, Coverage) if folder.coverage.exists() else Coverage()


def changed_quantization(run: RunFolder, chosen: Quantization) -> str:
    """Return a run's changes to its mode or recipe, to append to the name.

    Options of the quantizers change nothing in a run whose sites quantize nothing.
    """
    config = parsed(run.quant_config, QuantToml) if _quantizes(chosen) else QuantToml()
    return named_changes(chosen, config, quantizing_libraries(run))


def named_changes(
    chosen: Quantization, config: QuantToml, libraries: Set[str] = frozenset()
) -> str:
    """Return the changes to a mode or recipe of a run with this quant.toml."""
    unnamed = libraries - chosen.library_types.keys()
    texts = library_labels(dict.fromkeys(unnamed, UNNAMED))
    if _quantizes(chosen):
        texts += (
            [f"{chosen.gemms} GEMMs"] if chosen.gemms != "fprop" and chosen.recipe is None else []
        )
        texts += ["all attention GEMMs"] if chosen.attention_gemms == "all" else []
        texts += _options(config, chosen.recipe.options if chosen.recipe else {})
    return "".join(f", {text}" for text in texts)


def _quantizes(chosen: Quantization) -> bool:
    return not chosen.types or set(chosen.types.values()) != {NONE} or bool(chosen.schedule)


def quantizing_libraries(run: RunFolder) -> set[str]:
    """Return the libraries whose quantizers were enabled in the model that was trained."""
    names = run.read_implementation().get(QUANTIZERS, "")
    return {name for name in names.split(", ") if name}


def _options(config: QuantToml, own: Mapping[str, Any]) -> Iterator[str]:
    """Yield the quantizers' options except `own`, and the patterns of layers."""
    chosen = config.quantizer.items()
    yield from (f"{name} {value}" for name, value in chosen if own.get(name) != value)
    yield from (f"without {glob}" for glob in config.layers.exclude)
    yield from (f"only {glob}" for glob in config.layers.include)


def _setting(config: RunConfig, command: Sequence[str], facts: Environment) -> dict[str, str]:
    """Return what must agree: flags, processes, patches, the content of input files."""
    # Without torchrun there is one process.
    flags = {"--nproc-per-node": "1"} | flag_table(command)
    kept = {name: value for name, value in flags.items() if name not in _FREE}
    files = facts.inputs.files
    marks = sorted(
        [Path(path).name, sorted(asdict(mark).items(), key=str)] for path, mark in files.items()
    )
    data_path = flag_words(command).get("--data-path", [])
    weights = [word for word in data_path if not files or is_number(word)]
    digest = hashlib.sha256(json.dumps([marks, weights]).encode()).hexdigest()[:8]
    return kept | {"data": digest, "without": " ".join(config.placement.without)}


def _machine(
    config: RunConfig, facts: Environment, env: Mapping[str, str], device: Device
) -> Machine:
    name = device.device
    return Machine(
        kind="cpu" if name == "cpu" else "gpu",
        device=(facts.cpu or "unnamed CPU") if name == "cpu" else name,
        cores=facts.cores,
        processes=config.placement.cluster.processes,
        threads=env.get("OMP_NUM_THREADS", "?"),
    )


def _sites(folder: RunFolder, metrics: Mapping[str, Series]) -> Iterator[Site]:
    """Yield a record per site and type; a schedule gives a site several."""
    if not folder.quant_stats.exists():
        return
    kinds: dict[tuple[str, str], list[Stat]] = {}
    for row in parsed(folder.quant_stats, list[Stat]):
        kinds.setdefault((row.site, row.quant_type), []).append(row)
    for (site, quant_type), rows in sorted(kinds.items()):
        signal, noise = sum(row.signal for row in rows), sum(row.noise for row in rows)
        names = {row.layer for row in rows}
        under = [
            value
            for name, series in metrics.items()
            if name.startswith(f"quant/{site}/") and name.endswith("/underflow")
            for _, value in series
        ]
        yield Site(
            site,
            quant_type,
            layers=len(names),
            calls=sum(row.calls for row in rows),
            sqnr_db=10 * math.log10(signal / noise) if signal > 0 and noise > 0 else None,
            # Layers that were left out have no measurements.
            underflow=statistics.fmean(under) if under and signal > 0 else None,
        )


def changes(folder: RunFolder) -> Iterator[FileChange]:
    """Yield overlay.diff, file by file; nothing without it."""
    if not folder.overlay_diff.exists():
        return
    for part in (b"\n" + read_bytes(folder.overlay_diff)).split(b"\ndiff --git ")[1:]:
        path = part.partition(b"\n")[0].rpartition(b" b/")[2]
        yield FileChange(path.decode("utf-8", "backslashreplace"), b"diff --git " + part)
