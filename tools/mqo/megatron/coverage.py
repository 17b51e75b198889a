"""Compare what a run should quantize with what its quantizers did: no mode may fail silently."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from mqo.quant.config import current
from mqo.quant.formats import NONE, SITES, GemmSite
from mqo.quant.labels import UNLABELED, Layer
from mqo.quant.record import EXCLUDED, QuantRecord


def missing(types: Mapping[str, str], records: Iterable[QuantRecord]) -> list[str]:
    """Return one text per difference between the requested and the recorded quantization.

    Args:
        types: site -> quant type; an absent site has 'none'.
        records: from all ranks, because a pipeline stage may have no site of a kind.

    A difference is a site that never ran, ran with another type or with one operand, or ran
    although its type is 'none'. Excluded layers count as not run. A 'mixed' site whose operands
    have no type does not count as one that never ran.
    """
    records = list(records)
    faults = []
    for name in SITES:
        here = [record for record in records if record.site == name and record.calls]
        faults += _site_faults(name, types.get(name, NONE), here)
    return faults


def ineffective(records: Iterable[QuantRecord]) -> list[str]:
    """Return one text per site and type whose quantizer changed no measured value.

    Args:
        records: from all ranks, with all measurements up to now.

    All layers and operands of a site count together, because a single operand can be zero, or can
    contain only values of the format. A site is judged if any measured element is not zero and
    its sums are not NaN. Without a measurement the list is empty.
    """
    together: dict[tuple[str, str], list[QuantRecord]] = {}
    for record in records:
        if record.measured and record.quant_type != EXCLUDED:
            together.setdefault((record.site, record.quant_type), []).append(record)
    return [
        f"{site}: ran as {quant_type}, but its quantizer changed no value in "
        f"{sum(r.measured for r in here)} measured calls of {_layers(here)}"
        for (site, quant_type), here in sorted(together.items())
        if sum(r.signal for r in here) > 0 and sum(r.noise for r in here) == 0
    ]


@dataclass(frozen=True)
class SiteCoverage:
    """The sites and layers that the first step of one rank reached.

    missed: (site, layer) of each layer that ran without the site. idle: layers that never ran.
    unlabeled: sites that quantized an operand of a layer whose name was lost.
    """

    missed: frozenset[tuple[str, str]] = frozenset()
    idle: frozenset[str] = frozenset()
    unlabeled: frozenset[str] = frozenset()


def site_coverage(
    types: Mapping[str, str],
    layers: Iterable[Layer],
    used: Collection[str],
    records: Iterable[QuantRecord],
) -> SiteCoverage:
    """Compare the layers of one rank with its records, after a forward and backward pass.

    `used` are the names of the layers that ran. `find_traps` reports frozen layers. A layer that
    ran on no token counts as run, on both sides.
    """
    ran = {(r.site, r.layer, r.operand) for r in records if r.quant_type != EXCLUDED}
    wanted = [site for site in SITES.values() if types.get(site.name, "none") != "none"]
    missed, idle = set(), set()
    for site in wanted:
        for layer in layers:
            if layer.kind != site.layer or layer.frozen:
                continue
            if current().is_excluded(site.name, layer.name):
                continue
            if layer.name not in used:
                idle.add(layer.name)
            elif not _due(site, layer.name, types[site.name]) <= ran:
                missed.add((site.name, layer.name))
    lost = {site for site, layer, _ in ran if layer == UNLABELED}
    return SiteCoverage(frozenset(missed), frozenset(idle), frozenset(lost))


def _due(site: GemmSite, layer: str, quant_type: str) -> set[tuple[str, str, str]]:
    """Return the (site, layer, operand) that a record must have."""
    type_of, operands = current().operand_type, (site.lhs, site.rhs)
    due = (op for op in operands if type_of(site.name, op, layer, quant_type) != NONE)
    return {(site.name, layer, op) for op in due}


def coverage_faults(ranks: Iterable[SiteCoverage]) -> list[str]:
    """Return one text per site: the layers of any rank that ran without their quantizers."""
    ranks = list(ranks)
    faults = []
    for site in SITES:
        names = sorted({layer for rank in ranks for s, layer in rank.missed if s == site})
        if names:
            faults.append(f"{site}: {_some(names)} ran, but bypassed this site: exclude it")
        if any(site in rank.unlabeled for rank in ranks):
            faults.append(
                f"{site}: a layer lost its name, so excludes cannot be checked for it "
                "(its weight is gathered, or its activations are offloaded)"
            )
    return faults


def idle_layers(ranks: Iterable[SiteCoverage]) -> list[str]:
    """Return the names of the layers that ran on no rank; their types are not checked."""
    return sorted({name for rank in ranks for name in rank.idle})


def _site_faults(name: str, wanted: str, records: list[QuantRecord]) -> list[str]:
    type_of, excluded = current().operand_type, bool(records)
    records = [record for record in records if record.quant_type != EXCLUDED]
    if wanted != NONE and not records:
        if not excluded and not _due(SITES[name], UNLABELED, wanted):
            return []  # a mixed site, none of whose operands has a type
        why = "every layer is excluded" if excluded else "its quantizer never ran"
        return [f"{name}: its type is {wanted}, but {why}"]
    wrong: dict[tuple[str | None, str], list[QuantRecord]] = {}
    for record in records:
        due = type_of(name, record.operand, record.layer, wanted)
        if record.quant_type != due:
            wrong.setdefault((due, record.quant_type), []).append(record)
    faults = [
        f"{name}: its type is {due}, but {_layers(here)} ran as {ran}"
        for (due, ran), here in sorted(wrong.items())
    ]
    for operand in (SITES[name].lhs, SITES[name].rhs):
        others = [record for record in records if record.operand != operand]
        expected = any(type_of(name, operand, r.layer, wanted) != NONE for r in others)
        if expected and len(others) == len(records):
            ran = ", ".join(sorted({record.quant_type for record in others}))
            faults.append(f"{name}: ran as {ran}, but without its operand {operand}")
    return faults


def _layers(records: list[QuantRecord]) -> str:
    return _some(sorted({record.layer for record in records}))


def _some(names: list[str]) -> str:
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{others}"
