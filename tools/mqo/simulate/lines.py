"""Show the simulation as text: one screen, 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
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
    """Return the text of an estimate in native formats; each line with a figure says so."""
    low, high = estimate.speedups()
    before, after = estimate.base.need, estimate.need()
    named = replace(estimate.base, config=estimate.config)
    head = [part for line in heading(named) for part in wrap(line, WIDTH)]
    return [
        *head,
        "estimated in native formats, not measured",
        "",
        f"{'':52}{'bf16':>10}{'native':>10}",
        *_native_rows(estimate),
        "",
        f"estimated speed-up: {low:.2f} if nothing overlaps, {high:.2f} if all does that can",
        _memory_change(before, after),
        *wrap(f"estimated bound: {estimate.step.roofline.bound}", WIDTH),
        "",
        *_native_notes(estimate),
    ]


def _memory_change(before: float, after: float) -> str:
    change, share = abs(after - before) / GIB, abs(1 - after / before)
    direction = "less" if after <= before else "more"
    return f"estimated memory: {change:.1f} GiB {direction} ({share:.0%})"


def _native_rows(estimate: NativeEstimate) -> Iterator[str]:
    base, step = estimate.base_step, estimate.step
    native = step.roofline
    rows = (
        ("matrix products, s", base.products.seconds, native.products.seconds),
        ("other kernels, s", base.others.seconds, native.others.seconds),
        ("  of these, quantizing operands, s", 0.0, step.quantizing.seconds),
        ("exchanges, s", base.exchanging, native.exchanging),
        ("a step if all that can overlap does, s", base.overlapped, native.overlapped),
        ("a step if nothing overlaps, s", base.serial, native.serial),
        ("memory of the fullest GPU, GiB", estimate.base.need / GIB, estimate.need() / GIB),
    )
    for name, before, after in rows:
        yield f"  estimated {name:40}{before:10.3f}{after:10.3f}"


def _native_notes(estimate: NativeEstimate) -> Iterator[str]:
    """Yield the rates with their sources, and the assumptions."""
    on = device(estimate.base.device)
    notes = [f"assumed: {text}" for text in ASSUMPTIONS]
    for rate in reversed(on.native):
        if names := sorted(estimate.formats & set(rate.formats)):
            peaks = (
                f"{rate.tflops:,.0f} TFLOP/s in {', '.join(names)}, {on.bf16_tflops:,.0f} in bf16"
            )
            notes.insert(0, f"estimated from peaks of {peaks} ({rate.source})")
    for note in notes:
        yield from wrap(note, WIDTH, subsequent_indent="  ")


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
