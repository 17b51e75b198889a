"""Show the simulation as text: one screen, 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap

from mqo.display import WIDTH
from mqo.scale.devices import GIB, device, gib, usable
from mqo.scale.memory import CONTEXT
from mqo.simulate.native import ASSUMPTIONS, NativeEstimate
from mqo.simulate.result import UNSEEN, Simulation, needed
from mqo.simulate.roofline import Cost

SHOWN = 6  # lines of source
MEANINGS = {
    "weights": "",
    "gradients": "",
    "optimizer": "states",
    "activations": "kept from forward for backward",
    "logits": "and the loss's copies of them",
    "quantizer": "quantizers' copies",
    "temporary": "",
}


def simulation_lines(simulation: Simulation) -> list[str]:
    """Return the text, line by line."""
    head = [part for line in heading(simulation) for part in wrap(line, WIDTH)]
    answer_lines = [f"{question} {answer}" for question, answer in answers(simulation)]
    return [*head, "", *_memory(simulation), "", *_step(simulation), "", *answer_lines]


def native_lines(estimate: NativeEstimate) -> list[str]:
    """Return the text of an estimate on native hardware; each line with a figure says so."""
    base, step, speedups = estimate.base_step, estimate.step(), estimate.speedups()
    native, on = step.roofline, device(estimate.base.device)
    before, after = estimate.base.need, estimate.need()
    rows = [
        ("matrix products, s", base.products.seconds, native.products.seconds),
        ("other kernels, s", base.others.seconds, native.others.seconds),
        ("  of these, quantizing operands, s", 0.0, step.quantizing.seconds),
        ("exchanges, s", base.exchanging, native.exchanging),
        ("a step if all that can overlap does, s", base.overlapped, native.overlapped),
        ("a step if nothing overlaps, s", base.serial, native.serial),
        ("memory of the fullest GPU, GiB", before / GIB, after / GIB),
    ]
    rates = [rate for rate in on.native if estimate.formats & set(rate.formats)]
    quantization = estimate.config.quantization
    head = [*heading(estimate.base), "", f"{'':52}{'bf16':>10}{'native':>10}"]
    notes = [
        f"estimated from a peak of {rate.tflops:,.0f} TFLOP/s in "
        f"{', '.join(sorted(estimate.formats & set(rate.formats)))} "
        f"({on.bf16_tflops:,.0f} in bf16); {rate.source}"
        for rate in rates
    ]
    notes += [f"assumed: {text}" for text in ASSUMPTIONS]
    return [
        *wrap(f"estimated in native formats: {quantization.name}", WIDTH),
        *(part for line in head for part in wrap(line, WIDTH, drop_whitespace=False) or [""]),
        *(f"  estimated {name:40}{old:10.3f}{new:10.3f}" for name, old, new in rows),
        "",
        f"estimated speed-up: {max(speedups):.2f} to {min(speedups):.2f}",
        f"estimated memory saved: {(before - after) / GIB:.1f} GiB ({1 - after / before:.0%})",
        f"estimated bound of the native step: {native.bound}",
        "",
        *(part for note in notes for part in wrap(note, WIDTH, subsequent_indent="  ")),
    ]


def heading(simulation: Simulation) -> list[str]:
    """Return the run, its layout, its step and its inputs."""
    experiment, rank = simulation.config.experiment, simulation.worst
    cluster = simulation.config.placement.cluster
    gpus = f"{cluster.processes} {simulation.device} ({cluster.nnodes} x {cluster.nproc_per_node})"
    names = (
        experiment.model_name,
        simulation.config.quantization.name,
        experiment.training.name,
        experiment.dtype,
    )
    text = [
        f"{', '.join(names)}, on {gpus}",
        f"layout: {simulation.layout}",
        f"a step: {rank.global_batch:,} sequences of {rank.sequence:,} tokens, "
        f"{rank.micro_batches} micro-batch{'es' * (rank.micro_batches != 1)} of "
        f"{rank.micro_batch} per rank",
    ]
    if experiment.teacher:
        text.append(f"with the teacher in {experiment.teacher}: its size, in the student's layout")
    if experiment.model.moe:
        share = (
            "evenly"
            if simulation.imbalance == 1
            else f"{simulation.imbalance:g} times the even share"
        )
        text.append(f"tokens to this rank's experts: {share}, an input (--imbalance)")
    return text


def answers(simulation: Simulation) -> list[tuple[str, str]]:
    """Return the two questions, each with its answer."""
    short = simulation.need - simulation.room
    left = f"{gib(-short)} GiB are left" if simulation.fits else f"{gib(short)} GiB are missing"
    fits = f"{'Yes' if simulation.fits else 'No'}: {left}."
    if not all(rank.is_steady for rank in simulation.ranks):
        fits += " More micro-batches than were simulated may need more."
    bound = simulation.roofline(simulation.slowest).bound
    return [
        ("Does it fit?", fits),
        ("What bounds the step?", f"{bound[0].upper()}{bound[1:]}."),
    ]


def _memory(simulation: Simulation) -> Iterator[str]:
    rank = simulation.worst
    stage = f", pipeline stage {rank.stage} of {rank.stages}" if rank.stages > 1 else ""
    yield f"memory at the peak of rank {rank.rank}{stage}, GiB"
    for kind, size in rank.kinds.items():
        yield f"  {kind:12}{gib(size):>8}  {MEANINGS[kind]}".rstrip()
    if needed(rank) > rank.peak:
        yield f"  {'set-up':12}{gib(needed(rank) - rank.peak):>8}  more than in a step"
    yield f"  {'reserve':12}{gib(CONTEXT):>8}  {UNSEEN}"
    memory = device(simulation.device).memory
    yield (
        f"  {'in all':12}{gib(simulation.need):>8}  of {gib(usable(memory))} usable: "
        f"{simulation.device} has {gib(memory)}, less a tenth"
    )
    yield "the largest, by source line"
    for row in rank.at_peak[:SHOWN]:
        start = f"  {row.bytes / GIB:5.1f} {row.kind:11} {row.tensors:5} x "
        yield start + _end(row.line, WIDTH - len(start))


def _step(simulation: Simulation) -> Iterator[str]:
    bound = simulation.roofline(simulation.slowest)
    yield f"a step of rank {simulation.slowest.rank} at peak rates, an estimate{'':7}s{'':11}amount"
    yield _row("matrix products", bound.products, f"{bound.products.flops / 1e12:,.1f} TFLOPs")
    yield _row("other kernels", bound.others, f"{bound.others.size / 1e9:,.1f} GB")
    rows = sorted(bound.exchanges.items(), key=lambda row: -row[1].seconds)
    for (kind, operation), part in rows[:SHOWN]:
        amount = f"{part.size / 1e9:,.1f} GB sent, {part.calls:,.0f} calls"
        yield _row(f"{kind} {operation}", part, amount)
    if bound.bubble:
        part = Cost(seconds=bound.computing * bound.bubble)
        yield _row("pipeline bubble", part, f"{bound.bubble:.0%} of the kernels")
    yield (
        f"  in all {bound.overlapped:.2f} s if all that can overlap does, {bound.serial:.2f} s if "
        f"nothing does"
    )


def _row(name: str, part: Cost, amount: str) -> str:
    return f"  {name:38}{part.seconds:8.3f}  {amount:>20}"


def _end(text: str, width: int) -> str:
    """Return the end of a text that fits the width."""
    return text if len(text) <= width else f"...{text[3 - width :]}"
