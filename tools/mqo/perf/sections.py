"""Evaluate the runs of a performance test in sections: numbers, verdicts, commands."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mqo.launch.rerun import BitEqual, compare
from mqo.megatron.run.files import iteration_folder
from mqo.perf import trace
from mqo.perf.comparability import Timed, check_comparable, timed
from mqo.perf.ratio import median_step, ratio
from mqo.perf.train import PerfPlan
from mqo.perf.verdicts import Quartiles, Verdict, exactly, judge, tables
from mqo.program import ask
from mqo.report.collect import Run
from mqo.run_records import QuantToml, parsed
from mqo.scale.memory import FP32, STATES, WIDTH
from mqo.untrusted import read_json_object

PYTHON = ".venv/bin/python"
PRECISION, DIGESTS = "tools/gemm_precision.py", "tools/weight_digests.py"
TRACE = "trace.json.gz"
MIB = 1 << 20
NO_COVERAGE = "the run has no coverage.json, which lists the products; see its log.txt"
# Options of the quantizers that change the values of an operand.
CHANGES_VALUES = (
    *("block", "scale_rule", "rounding", "overflow", "tensor_scale"),
    *("smooth_key", "unnormalized_probs"),
)
TableRow = Mapping[str, Any]


@dataclass(frozen=True)
class Section:
    """A table with its verdicts, how it was measured, and commands that repeat it."""

    name: str
    title: str
    about: str
    rows: tuple[TableRow, ...]
    verdicts: tuple[Verdict, ...]
    commands: tuple[str, ...]


@dataclass(frozen=True)
class Measured:
    """The plan, its runs by name, and their folder."""

    plan: PerfPlan
    runs: Mapping[str, Run]
    folder: Path

    def path(self, name: str, *parts: str) -> str:
        """Return the path of a run's folder for a command."""
        return str(self.folder.joinpath("runs", name, *parts))


def sections(measured: Measured) -> list[Section]:
    """Return all sections in the order of the page; MqoError if runs are not comparable."""
    runs = measured.runs
    check_comparable(timed(runs["baseline"]), timed(runs["mode"]))
    makers = (precision, loss, determinism, throughput, breakdown, memory, scaling)
    return [make(measured) for make in makers]


# -- 1. precision ---------------------------------------------------------------------------------


def precision(measured: Measured) -> Section:
    """Compare the product of each site with fp64."""
    run = measured.runs["mode"]
    path = measured.path
    command = (
        f"MQO_QUANT_CONFIG={path('mode', 'quant.toml')} {PYTHON} "
        f"{path('mode', 'source', PRECISION)} {path('mode', 'coverage.json')} precision.json"
    )
    result = _precision(run)
    about = (
        "Random operands with a fixed seed, in the sizes of the largest product of each site in "
        "the run (rows, columns and heads are capped, the contraction k is not), quantized and "
        "multiplied by the same code as in the patched source. The product is compared with the "
        "fp64 product of the operands before quantization. The last column compares with the fp64 "
        "product of the quantized operands, so it shows only the error of the multiplication. ULPs "
        "are in the output dtype at the exact value."
    )
    rows = tuple(_precision_row(site) for site in result.get("sites", ()))
    verdicts = tuple(_precision_verdicts(result, parsed(run.folder.quant_config, QuantToml)))
    return Section("precision", "Operator precision", about, rows, verdicts, (command,))


def _precision(run: Run) -> Mapping[str, Any]:
    """Return the result of the program in the run's source; {} without a coverage."""
    if not run.folder.coverage.exists():
        return {}
    options = {"MQO_QUANT_CONFIG": str(run.folder.quant_config)}
    return ask(run.folder.source / PRECISION, [str(run.folder.coverage)], variables=options)


def _precision_row(site: TableRow) -> TableRow:
    total = {name: float(value) for name, value in site["total"].items()}
    return {
        "site": site["site"],
        "type": site["quant_type"],
        "batch x m x n x k": " x ".join(str(site[name]) for name in ("batch", "m", "n", "k")),
        "max ULP": total["max_ulp"],
        "mean ULP": total["mean_ulp"],
        "relative error": total["relative_error"],
        "SQNR, dB": total["sqnr_db"],
        "product alone, dB": float(site["product"]["sqnr_db"]),
    }


def _changed(options: QuantToml, site: str) -> str:
    """Return why the threshold of a site's format does not apply; '' if it does."""
    chosen = options.quantizer.items()
    changes = [f"{name} {value}" for name, value in chosen if name in CHANGES_VALUES]
    changes += [name for name in options.operands if name.startswith(f"{site}.")]
    defaults = "the threshold is for the format's defaults, and quant.toml changes"
    return f"{defaults} {', '.join(changes)}" if changes else ""


def _precision_verdicts(result: Mapping[str, Any], options: QuantToml) -> list[Verdict]:
    if not result:
        return [judge("SQNR of the products", None, "product_fp32", NO_COVERAGE)]
    verdicts = [
        judge(
            f"SQNR of {site['site']} in {site['quant_type']}",
            float(site["total"]["sqnr_db"]),
            f"sqnr_{site['quant_type']}",
            _changed(options, site["site"]),
        )
        for site in result["sites"]
        if site["quant_type"] != "none"
    ]
    worst = min(float(site["product"]["sqnr_db"]) for site in result["sites"])
    dtype = result["dtype"]
    return [
        *verdicts,
        judge(f"SQNR of the worst multiplication, {dtype}", worst, f"product_{dtype}"),
    ]


# -- 2. loss --------------------------------------------------------------------------------------


def loss(measured: Measured) -> Section:
    """Compare the training losses of the mode with those of its baseline."""
    base, mode = (dict(measured.runs[name].train) for name in ("baseline", "mode"))
    wanted = tables().steps
    steps = sorted({*base} & {*mode})[:wanted]
    errors = [abs(mode[step] - base[step]) for step in steps]
    relative = [error / abs(base[step]) for error, step in zip(errors, steps, strict=True)]
    row = {
        "steps": len(steps),
        "mean relative error": statistics.fmean(relative),
        "mean absolute error, nats": statistics.fmean(errors),
        "largest relative error": max(relative),
        "last loss, baseline": base[steps[-1]],
        "last loss, mode": mode[steps[-1]],
    }
    few = f"{len(steps)} steps, and the threshold is for {wanted}" if len(steps) < wanted else ""
    verdict = judge("mean relative error of the loss", statistics.fmean(relative), "loss", few)
    about = (
        "Training losses in nats per token: the difference of mode and baseline at each step, with "
        "the same data and seeds; relative errors are relative to the baseline."
    )
    commands = tuple(planned.command() for planned in (measured.plan.baseline, measured.plan.mode))
    return Section("loss", "Loss", about, (row,), (verdict,), commands)


# -- 3. determinism -------------------------------------------------------------------------------


def determinism(measured: Measured) -> Section:
    """Check that both runs of the mode have the same bits."""
    first, again = measured.runs["mode"], measured.runs["again"]
    losses = compare(first.folder, again.folder)
    difference = "" if isinstance(losses, BitEqual) else losses.line()
    digests, again_digests = (_digests(run) for run in (first, again))
    names = sorted({*digests, *again_digests})
    unlike = [name for name in names if digests.get(name) != again_digests.get(name)]
    which = f"{len(unlike)} differ, first {unlike[0]}" if unlike else ""
    none = "" if names else "the runs saved no tensor"
    rows = (
        {"what": "steps' losses", "compared": first.steps, "differ": int(bool(difference))},
        {"what": "tensors saved", "compared": len(names), "differ": len(unlike)},
    )
    verdicts = (
        exactly("losses of two runs", difference),
        exactly("weights and optimizer of two runs", which, none),
    )
    about = (
        "The mode runs twice, the second time with torch's profiler. Losses of each step are "
        "compared bit by bit, as in `mqo rerun`. Every tensor in the last torch_dist checkpoints "
        "(weights and optimizer states; not random states and arguments) is hashed with SHA-256. "
        "For losses, differ is 1 if any step differs."
    )
    where = iteration_folder(Path(measured.path("mode", "checkpoints")), str(first.steps))
    commands = (
        f".venv/bin/mqo rerun {measured.path('mode')}",
        f"{PYTHON} {measured.path('mode', 'source', DIGESTS)} {where} digests.json",
    )
    return Section("determinism", "Determinism", about, rows, verdicts, commands)


def _digests(run: Run) -> Mapping[str, Any]:
    folder = iteration_folder(run.folder.checkpoints, str(run.steps))
    return ask(run.folder.source / DIGESTS, [str(folder)]) if folder.is_dir() else {}


# -- 4. throughput --------------------------------------------------------------------------------


def throughput(measured: Measured) -> Section:
    """Show tokens and FLOPs per second, and the step time of mode and baseline."""
    base, mode = (measured.runs[name] for name in ("baseline", "mode"))
    times = ratio(timed(base), timed(mode))
    rows = tuple(_speed(name, run) for name, run in (("baseline", base), ("mode", mode)))
    verdict = judge("step time, mode over baseline", times.quartiles, f"step_{mode.machine.kind}")
    peak = _peak(mode)
    about = (
        f"Median step time without the first steps, on {mode.machine.line()}. FLOPs are those of "
        "the matrix products in the run's coverage. "
        + (f"MFU refers to {peak:g} TFLOP/s. " if peak else "No MFU: the peak rate is not known. ")
        + f"Step time of the mode over the baseline: {times.line}. Quantization is emulated: this "
        "is the cost of the emulation, not the speed of a format."
    )
    command = (
        f".venv/bin/mqo perf --compare {measured.path('baseline')} {measured.path('mode')} "
        "--repeats 5"
    )
    return Section("throughput", "Throughput", about, rows, (verdict,), (command,))


def _speed(name: str, run: Run) -> TableRow:
    flops, peak = _flops(run), _peak(run)
    rate = flops / run.step_time / 1e12 if flops and run.step_time else None
    return {
        "run": f"{name}, {run.label}",
        "tokens/s": run.tokens_per_s,
        "step, ms": run.step_time and 1000 * run.step_time,
        "TFLOP/s": rate,
        "MFU, %": 100 * rate / peak if rate and peak else None,
    }


def _flops(run: Run) -> float | None:
    """Return the FLOPs of a step; None without a coverage, which has them per micro-batch."""
    if not run.folder.coverage.exists():
        return None
    facts = read_json_object(run.folder.coverage)
    return facts["flops"] * run.tokens_per_step / (facts["micro_batch"] * facts["sequence"])


def _peak(run: Run) -> float | None:
    """Return the dense TFLOP/s of all processes' devices in the run's dtype; None if unknown."""
    rate = tables().peaks.get(run.machine.device, {}).get(run.dtype)
    return rate and rate * run.machine.processes


# -- 5. breakdown ---------------------------------------------------------------------------------


def breakdown(measured: Measured) -> Section:
    """Show the parts of a step's time; the trace stays in the folder."""
    parts = trace.read(measured.folder / TRACE)
    rows = tuple(
        {"part": part, "ms a step": 1000 * seconds, "share, %": 100 * parts.share(part)}
        for part, seconds in parts.seconds.items()
    )
    verdict = judge("share of a step without a label", parts.share(trace.REST), "unlabeled")
    about = (
        f"Mean of {parts.steps} profiled steps. The profiler slows them, so use the shares. Labels "
        "are upstream's timers, torch's collectives, and the quantizers' autograd function. Each "
        "part excludes those above it, so the forward pass excludes its quantizers. The Chrome "
        f"trace is {TRACE}."
    )
    commands = (measured.plan.again.command(),)
    return Section("breakdown", "Step time by part", about, rows, (verdict,), commands)


# -- 6. memory ------------------------------------------------------------------------------------


def memory(measured: Measured) -> Section:
    """Show the peak memory of the mode by part, and the peak of the baseline."""
    base, mode = (measured.runs[name] for name in ("baseline", "mode"))
    states, peak = _states(mode), mode.peak_memory
    parts: dict[str, float | None] = {**states}
    if peak and states:
        parts["activations and all else"] = peak - sum(states.values())
    parts |= {"peak, mode": peak, "peak, baseline": base.peak_memory}
    rows = tuple(
        {"part": name, "MiB": None if size is None else size / MIB} for name, size in parts.items()
    )
    share = peak / base.peak_memory if peak and base.peak_memory else None
    kind = (
        "all resident memory, including libraries"
        if mode.machine.kind == "cpu"
        else "torch's allocations on the GPU"
    )
    about = (
        f"The largest peak of a process, from device.json: {kind}. Weights, gradients and Adam's "
        "states are computed from the number of weights. The rest is the difference, which "
        "includes saving the checkpoint."
    )
    verdict = judge("peak memory, mode over baseline", share, f"memory_{mode.machine.kind}")
    commands = tuple(planned.command() for planned in (measured.plan.baseline, measured.plan.mode))
    return Section("memory", "Peak memory", about, rows, (verdict,), commands)


def _states(run: Run) -> dict[str, float]:
    """Return the bytes of a process with the whole model; {} without a coverage."""
    if not run.folder.coverage.exists():
        return {}
    count = read_json_object(run.folder.coverage)["parameters"]
    weight, states = WIDTH[run.dtype], STATES[run.dtype]
    return {"weights": weight * count, "gradients": FP32 * count, "optimizer": states * count}


# -- 7. scaling -----------------------------------------------------------------------------------


def scaling(measured: Measured) -> Section:
    """Compare one process with two that split its batch."""
    title, about = "Scaling over processes", "Not measured."
    pair = measured.plan.scaling
    if not pair:
        verdict = judge("efficiency of 2 processes", None, "efficiency", measured.plan.unscaled)
        return Section("scaling", title, about, (), (verdict,), ())
    single, two = (timed(measured.runs[planned.name]) for planned in pair)
    check_comparable(single, two, but=("--nproc-per-node", "machine"))
    faster = ratio(two, single)
    about = (
        "Data parallelism: one and two processes with the same global batch, half the micro-batch, "
        "and the same threads or one GPU per process. Efficiency is the speed-up of paired steps "
        f"divided by 2. Step time of one process over two: {faster.line}."
    )
    rows = tuple(_scale_row(measured.runs[planned.name], single) for planned in pair)
    low, high = faster.quartiles.low, faster.quartiles.high
    halves = Quartiles(faster.quartiles.median / 2, low and low / 2, high and high / 2)
    verdict = judge("efficiency of 2 processes", halves, "efficiency")
    commands = tuple(planned.command() for planned in pair)
    return Section("scaling", title, about, rows, (verdict,), commands)


def _scale_row(run: Run, single: Timed) -> TableRow:
    own = timed(run)
    faster = median_step(single.repeats[0]) / median_step(own.repeats[0])
    return {
        "processes": run.machine.processes,
        "threads each": run.machine.threads,
        "tokens/s": run.tokens_per_s,
        "speed-up": faster,
        "efficiency": faster / run.machine.processes,
    }


def outcomes(evaluated: Sequence[Section]) -> list[Verdict]:
    """Return all verdicts."""
    return [verdict for section in evaluated for verdict in section.verdicts]
