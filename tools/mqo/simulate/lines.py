"""The simulation as text: one screen, 80 columns."""

from __future__ import annotations

from collections.abc import Iterator

from mqo.display import WIDTH
from mqo.scale.devices import GIB, device, usable
from mqo.scale.memory import CONTEXT
from mqo.simulate.result import UNSEEN, Simulation, gib, needed
from mqo.simulate.roofline import Part

SHOWN = 6  # lines of source
MEANINGS = {
    "weights": "",
    "gradients": "",
    "optimizer": "states",
    "activations": "kept from forward for backward",
    "logits": "and what the loss makes of them",
    "quantizer": "copies that quantizers make",
    "temporary": "",
}


def lines(found: Simulation) -> list[str]:
    """Return the table."""
    return [*_head(found), "", *_memory(found), "", *_step(found), "", *_answer(found)]


def _head(found: Simulation) -> Iterator[str]:
    of, rank = found.config.experiment, found.worst
    cluster = found.config.placement.cluster
    yield (
        f"{of.model.name}, {found.config.quantization.name}, {of.training.name}, {of.dtype}, on "
        f"{cluster.processes} {found.device} ({cluster.nnodes} x {cluster.nproc_per_node})"
    )
    yield f"layout: {found.layout}"
    yield (
        f"a step: {rank.global_batch:,} sequences of {rank.sequence:,} tokens, "
        f"{rank.micro_batches} micro-batches of {rank.micro_batch} a rank"
    )
    if of.model.moe:
        how = "evenly" if found.imbalance == 1 else f"{found.imbalance:g} times the even share"
        yield f"tokens to this rank's experts: {how}, an input (--imbalance)"


def _memory(found: Simulation) -> Iterator[str]:
    rank = found.worst
    stage = f", pipeline stage {rank.stage} of {rank.stages}" if rank.stages > 1 else ""
    yield f"memory at the peak of rank {rank.rank}{stage}, GiB"
    for kind, size in rank.kinds.items():
        yield f"  {kind:12}{gib(size):>8}  {MEANINGS[kind]}".rstrip()
    if needed(rank) > rank.peak:
        yield f"  {'set-up':12}{gib(needed(rank) - rank.peak):>8}  more than in a step"
    yield f"  {'reserve':12}{gib(CONTEXT):>8}  {UNSEEN}: an allowance"
    memory = device(found.device).memory
    yield (
        f"  {'in all':12}{gib(found.need):>8}  of {gib(usable(memory))} usable "
        f"({found.device} has {gib(memory)}, a tenth for fragments)"
    )
    yield "most of it, by the line that made it"
    for row in rank.at_peak[:SHOWN]:
        start = f"  {row.bytes / GIB:5.1f} {row.kind:11} {row.tensors:5} x "
        yield start + _end(row.line, WIDTH - len(start))


def _step(found: Simulation) -> Iterator[str]:
    bound = found.roofline(found.slowest)
    yield f"a step of rank {found.slowest.rank} at peak rates, an estimate{'':7}s{'':11}amount"
    yield _row("matrix products", bound.products, f"{bound.products.flops / 1e12:,.1f} TFLOPs")
    yield _row("other kernels", bound.others, f"{bound.others.size / 1e9:,.1f} GB")
    rows = sorted(bound.exchanges.items(), key=lambda one: -one[1].seconds)
    for (kind, operation), part in rows[:SHOWN]:
        amount = f"{part.size / 1e9:,.1f} GB sent, {part.calls:,.0f} calls"
        yield _row(f"{kind} {operation}", part, amount)
    if bound.bubble:
        part = Part(seconds=bound.computing * bound.bubble)
        yield _row("pipeline bubble", part, f"{bound.bubble:.0%} of the kernels")
    yield (
        f"  in all {bound.overlapped:.2f} s if all that can overlap does, {bound.serial:.2f} s if "
        f"nothing does"
    )


def _answer(found: Simulation) -> Iterator[str]:
    if not all(rank.is_steady for rank in found.ranks):
        yield "more micro-batches than were simulated may need more memory"
    short = found.need - found.room
    left = f"{gib(-short)} GiB are left" if found.fits else f"{gib(short)} GiB are missing"
    yield f"Does it fit? {'Yes' if found.fits else 'No'}: {left}."
    bound = found.roofline(found.slowest).bound
    yield f"What bounds the step? {bound[0].upper()}{bound[1:]}."


def _row(name: str, part: Part, amount: str) -> str:
    return f"  {name:38}{part.seconds:8.3f}  {amount:>20}"


def _end(text: str, width: int) -> str:
    """Return a text's end that fits."""
    return text if len(text) <= width else f"...{text[3 - width :]}"
