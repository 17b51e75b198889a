"""Estimate what native formats bring, compare with published speed-ups, and write the page.

    .venv/bin/python benchmarks/native.py benchmarks/results/native-2026-11-26.md

Writes the page and a plot of the same name (.png). Every figure is an estimate of `mqo simulate
--native` but for those called published, claimed or measured. Simulations are cached below .cache.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from mqo.overlay.tree import Tree
from mqo.project import Project
from mqo.quant.formats import LINEAR, NONE, SITES
from mqo.report.pictures import pyplot
from mqo.scale.devices import device
from mqo.simulate.command import SimulationOptions, estimated, prepared
from mqo.simulate.native import native_step, uniform_types
from mqo.simulate.result import Simulation
from mqo.simulate.roofline import Roofline, seconds

sys.path.insert(0, str(Path(__file__).parent / "study"))
from table import BASELINE, read

HERE, LAUNCHER = Path(__file__).parent, Path("script/train_config.py")
STEP_TOKENS = 2**20
LENGTHS = tuple(2**n for n in range(11, 18))
# {model: flags of its layout}
LAYOUTS = {
    "llama32-1b": "",
    "llama31-8b": "--tensor-model-parallel-size 2 --sequence-parallel",
    "deepseek2_lite": "--expert-model-parallel-size 8",
}
# {device: {label: types of the linear GEMMs, of QK and PV}}
CHOICES = {
    "h100-80gb": {
        "attention fp8": (NONE, "fp8_tensor"),
        "linear fp8": ("fp8_tensor", NONE),
        "both fp8": ("fp8_tensor", "fp8_tensor"),
    },
    "b200": {
        "attention mxfp8": (NONE, "mxfp8"),
        "linear mxfp8": ("mxfp8", NONE),
        "both mxfp8": ("mxfp8", "mxfp8"),
        "linear nvfp4": ("nvfp4", NONE),
        "linear nvfp4, attention mxfp8": ("nvfp4", "mxfp8"),
    },
}
# What the project's third document claims without a measurement: memory, speed, accuracy.
CLAIMS = {
    "FA_mxfp8": ("15 %", "+10 %", "high"),
    "FA_mxfp4": ("25 %", "+20 %", "medium"),
    "linear_mxfp8": ("20 %", "+15 %", "high"),
    "linear_mxfp4": ("30 %", "+25 %", "medium"),
    "FA_linear_mxfp8": ("35 %", "+25 %", "medium"),
    "FA_linear_mxfp4": ("50 %", "+40 %", "lower"),
}
SHAPE_70B = (
    "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 "
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --sequence-parallel "
    "--num-layers-per-virtual-pipeline-stage 4 --global-batch-size 256"
)
TORCHAO = "pytorch/ao at 36027d8, docs/source/workflows/training.md"
TORCHTITAN = "pytorch/torchtitan at b5bcd76, benchmarks/llama3_h100_202412_torchtitan.md, table 1"
BRIDGE = "NVIDIA-NeMo/Megatron-Bridge at 067f987, docs/performance-summary-archive.md, 26.04.01"


class Published(NamedTuple):
    """A published pair of speeds in tokens/s per GPU, and the run to simulate."""

    source: str
    setting: str
    device: str
    gpus: int
    slow: tuple[str, float]
    fast: tuple[str, float]
    flags: str


EIGHT = "--global-batch-size 8 --tensor-model-parallel-size 1"
SIXTEEN = "--micro-batch-size 2 --global-batch-size 16 --tensor-model-parallel-size 1"
H100S, B200S = "Llama 3 8B, 8 x H100, micro-batch 1", "Llama 3 8B, 8 x B200 (power limited)"
H100S_2 = "Llama 3.1 8B, 8 x H100 (96 GB, 500 W), micro-batch 2"
GB200S = "Llama 3 70B, 64 x GB200, TP 2, PP 4, VP 5"
B200_BF16, FP8 = (NONE, 8307.5), "fp8_tensor"
PUBLISHED = (
    Published(TORCHAO, H100S, "h100-80gb", 8, (NONE, 6150), (FP8, 7689.5), EIGHT),
    Published(TORCHTITAN, H100S_2, "h100-80gb", 8, (NONE, 6667), (FP8, 8532), SIXTEEN),
    Published(TORCHAO, B200S, "b200", 8, B200_BF16, (FP8, 10417), EIGHT),
    Published(TORCHAO, B200S, "b200", 8, B200_BF16, ("mxfp8", 9969), EIGHT),
    Published(BRIDGE, GB200S, "gb200", 64, ("mxfp8", 3712), ("nvfp4", 4864), SHAPE_70B),
)


@dataclass(frozen=True)
class Estimate:
    """A step in given types: of linear GEMMs, with or without the output layer's; of attention."""

    base: Simulation
    linear: str
    attention: str
    output: bool = True

    def roofline(self) -> Roofline:
        """Return the roofline of the slowest rank."""
        sites = [site for site in SITES.values() if not site.backward_of]
        types = {s.name: self.linear if s.layer == LINEAR else self.attention for s in sites}
        rooflines = []
        for rank in self.base.ranks:
            linear = uniform_types(rank, types)
            if not self.output:
                linear = {
                    key: {NONE: 1.0} if key[0] == "output_layer" else row
                    for key, row in linear.items()
                }
            rooflines.append(native_step(rank, linear, types, device(self.base.device)).roofline)
        return max(rooflines, key=lambda roofline: roofline.computing)


@cache
def base(model: str, flags: str, on: str, gpus: int, per_node: int = 8) -> Simulation:
    """Simulate a run without quantization."""
    words = ("--model", model, "--dataset", "wikipedia", "--quantization", "bf16")
    words += ("--nproc-per-node", str(per_node))
    print(model, flags, on, gpus, file=sys.stderr, flush=True)
    options = SimulationOptions(LAUNCHER, words, tuple(flags.split()), on, gpus // per_node, 1.0)
    run = prepared(options, Tree(Project.here().tree))
    return run.unquantized().simulate(lambda text: None)


def main(target: Path) -> None:
    """Write the page and its plot."""
    plot = target.with_suffix(".png")
    lines = [*HEAD.splitlines(), "", *published(), "", *claims(), "", *sweep(plot)]
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")


def published() -> Iterator[str]:
    """Yield the table of published and estimated speed-ups."""
    yield from PUBLISHED_HEAD.splitlines()
    for number, row in enumerate(PUBLISHED, 1):
        per_node = 64 if row.device == "gb200" else 8
        simulation = base("llama31-8b", row.flags, row.device, row.gpus, per_node)
        slow, fast = (
            Estimate(simulation, name, NONE, output=False).roofline()
            for name, _ in (row.slow, row.fast)
        )
        factor = row.fast[1] / row.slow[1]
        cells = [f"{row.setting} ([{number}])"]
        cells += [f"{name.replace(NONE, 'bf16')}: {speed:,.0f}" for name, speed in row[4:6]]
        cells.append(f"{factor:.2f}")
        for kind in ("serial", "overlapped"):
            estimate = getattr(slow, kind) / getattr(fast, kind)
            cells.append(f"{estimate:.2f} ({estimate / factor - 1:+.0%})")
        yield f"| {' | '.join(cells)} |"
    yield ""
    for number, row in enumerate(PUBLISHED, 1):
        yield f"- [{number}] {row.source}"


def claims() -> Iterator[str]:
    """Yield the table of claims, with the estimate and the measured loss of each mode."""
    yield from CLAIMS_HEAD.splitlines()
    for gemms in ("fprop", "all"):
        for mode, (memory, speed, accuracy) in CLAIMS.items():
            if gemms == "all" and mode.startswith("FA_mxfp"):
                continue
            words = ("--model", "llama31-8b", "--dataset", "wikipedia", "--quantization", mode)
            words += ("--gemms", gemms) if gemms == "all" else ()
            print(*words, file=sys.stderr, flush=True)
            options = SimulationOptions(LAUNCHER, words, (), "b200", 8, 1.0)
            estimate = estimated(options, Tree(Project.here().tree), lambda text: None)
            saved = 1 - estimate.need() / estimate.base.need
            low, high = sorted(factor - 1 for factor in estimate.speedups())
            claimed = (memory, speed, accuracy) if gemms == "fprop" else ("-", "-", "-")
            cells = [mode + (", all GEMMs" if gemms == "all" else ""), claimed[0], f"{saved:.0%}"]
            cells += [claimed[1], f"{low:+.0%} to {high:+.0%}", claimed[2], loss(mode, gemms)]
            yield f"| {' | '.join(cells)} |"


def loss(mode: str, gemms: str) -> str:
    """Return the measured loss of llama32-1b in a mode, relative to the unquantized loss."""
    if gemms == "all":
        arm = mode.removeprefix("linear_")
        losses = read(HERE / "study" / "runs.csv")["llama32-1b", "h128-init", 500]
        gaps = losses.paired(arm, BASELINE)
        share = sum(gaps) / len(gaps) / losses.baseline if gaps else None
        return f"{share:+.2%} ({len(gaps)} seeds)" if share is not None else "not measured"
    with (HERE / "loss_study" / "results.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == "llama32-1b"]
    row = next(row for row in rows if row["mode"] == mode)
    seeds = f"{row['seeds']} seed" + "s" * (row["seeds"] != "1")
    return f"{float(row['gap']):+.2%} ({seeds})"


def sweep(plot: Path) -> Iterator[str]:
    """Yield a table per device, over models and lengths, and draw the plot."""
    yield from SWEEP_HEAD.format(plot=plot.name).splitlines()
    factors: dict[tuple[str, str, str], list[float]] = {}
    for on, choices in CHOICES.items():
        yield f"\n### {on}, estimated\n"
        yield f"| model | length | {' | '.join(PARTS)} | {' | '.join(choices)} | answer |"
        yield "|---" * (len(PARTS) + len(choices) + 3) + "|"
        for model, layout in LAYOUTS.items():
            for length in LENGTHS:
                simulation = base(model, _sizes(length) + layout, on, 64)
                before = simulation.roofline(simulation.slowest).serial
                row = {
                    label: before / Estimate(simulation, *types).roofline().serial
                    for label, types in choices.items()
                }
                for label, factor in row.items():
                    factors.setdefault((on, model, label), []).append(factor)
                cells = [model, f"{length:,}" + " (!)" * (not simulation.fits)]
                cells += [f"{share:.0%}" for share in shares(simulation).values()]
                cells += [f"{factor:.2f}" for factor in row.values()]
                yield f"| {' | '.join(cells)} | {answer(row)} |"
    draw(factors, plot)


def _sizes(length: int) -> str:
    """Return the flags of a length: 8,192 tokens per GPU and micro-batch, 2^20 per step."""
    context, batch = max(1, length // 8192), max(1, 8192 // length)
    return (
        f"--seq-length {length} --max-position-embeddings {length} --micro-batch-size {batch} "
        f"--global-batch-size {STEP_TOKENS // length} --use-distributed-optimizer "
        f"--context-parallel-size {context} "
    )


PARTS = ("linear GEMMs", "attention, forward", "attention, backward", "other kernels", "exchanges")


def shares(simulation: Simulation) -> Mapping[str, float]:
    """Return the shares of an unquantized step of its parts, if nothing overlaps."""
    rank, on = simulation.slowest, device(simulation.device)
    whole = simulation.roofline(rank)
    parts = dict.fromkeys(PARTS, 0.0)
    for work, calls in rank.works().items():
        if work.flops:
            backward = work.gemm.endswith("attention backward")
            name = PARTS[1 + backward] if "attention" in work.gemm else PARTS[0]
            parts[name] += seconds(work, on) * calls
    parts["other kernels"] = whole.others.seconds
    parts["exchanges"] = whole.exchanging
    return {name: value / whole.serial for name, value in parts.items()}


def answer(row: Mapping[str, float]) -> str:
    """Return what brings more: attention or linear layers; both if each adds 5 %."""
    attention, linear, both, *_ = row.values()
    if both < 1.05:
        return "neither"
    if both / max(attention, linear) >= 1.05:
        return "both"
    return "linear" if linear >= attention else "attention"


def draw(factors: Mapping[tuple[str, str, str], list[float]], target: Path) -> None:
    """Plot the estimated speed-ups over the length: a row per device, a column per model."""
    plt = pyplot()
    size = {"figsize": (11, 6.4), "sharex": True, "sharey": "row", "squeeze": False}
    figure, axes = plt.subplots(len(CHOICES), len(LAYOUTS), **size)
    for on, line in zip(CHOICES, axes, strict=True):
        for model, axis in zip(LAYOUTS, line, strict=True):
            for label in CHOICES[on]:
                axis.plot(LENGTHS, factors[on, model, label], marker="o", markersize=3, label=label)
            axis.set_xscale("log", base=2)
            axis.set_xticks(LENGTHS, [f"{length // 1024}k" for length in LENGTHS])
            axis.set_title(f"{model}, {on}", fontsize=10)
            axis.grid(alpha=0.3)
        line[0].set_ylabel("estimated speed-up over bf16")
        line[-1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.02, 1))
    for axis in axes[-1]:
        axis.set_xlabel("sequence length, tokens")
    figure.suptitle("Estimated, not measured: a step on 64 GPUs in native formats, all GEMMs")
    figure.tight_layout()
    figure.savefig(target, dpi=110)


HEAD = """\
# Native formats, estimated, 2026-11-26

    .venv/bin/python benchmarks/native.py benchmarks/results/native-2026-11-26.md

Estimates of `mqo simulate --native` ([assumptions](../../docs/native.md)), computed on two CPU
cores without a GPU. Speed-ups are estimated from peak rates, with the range between a step in which
nothing overlaps and one in which all that can overlap does."""
PUBLISHED_HEAD = """\
## Published speed-ups, and the estimate's error

Speeds are published tokens/s per GPU, at 8,192 tokens, read on 2026-11-26. Estimated: all GEMMs of
linear layers, without the output layer; attention in bf16. The error is relative to the published
factor.

| run | slower | faster | published factor | estimated, no overlap | estimated, full overlap |
|---|---|---|---|---|---|"""
CLAIMS_HEAD = """\
## The claims of the seven modes

Claimed: the documents that this project started from, in which nothing was measured. Estimated:
llama31-8b, `standard`, on 64 b200. bf16 is the baseline. Loss: llama32-1b at a small size, relative
to the unquantized loss, from the [loss study](../loss_study/README.md); of linear modes with "all
GEMMs" from the [study](../study/README.md).

| mode | memory claimed | estimated | speed claimed | estimated | accuracy | loss, measured |
|---|---|---|---|---|---|---|"""
SWEEP_HEAD = """\
## Attention or linear layers, by sequence length

64 GPUs, 2^20 tokens per step, 8,192 tokens per TP group and micro-batch, CP for longer sequences;
TP 2 for llama31-8b, EP 8 for deepseek2_lite. Shares of the bf16 step and estimated speed-ups hold
if nothing overlaps. Attention: QK and PV of the forward pass; its backward pass stays in bf16.
Linear: fprop, dgrad and wgrad, also of the output layer. The answer is `both` if the second adds
5 %, `neither` if both together bring less than 5 %. Lengths with (!) do not fit the GPU's memory in
bf16 in this layout.

![estimated speed-ups over the sequence length]({plot})"""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
