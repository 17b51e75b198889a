"""Holds what a run asked for against what its quantisers did: no mode may fail silently."""

from collections.abc import Iterable, Mapping

from .formats import check_choice, check_type
from .record import EXCLUDED, QuantRecord
from .sites import SITES


def missing(asked: Mapping[str, str], records: Iterable[QuantRecord]) -> list[str]:
    """Say, one text a fault, where a run did not quantise what it was asked to.

    Args:
        asked: site -> quant type; an absent site is asked 'none'.
        records: of all ranks, for a pipeline stage may hold no site of a kind.

    Faults are a site that never ran, ran as another type, ran with one operand only, or ran
    though nobody asked. Excluded layers did not run. An empty list means that the run did as asked.

    Raises:
        ValueError: `asked` holds an unknown site or type; the text names the valid ones.
    """
    for name, wanted in asked.items():
        check_choice("GEMM site", name, tuple(SITES))
        check_type(wanted)
    records = list(records)
    faults = []
    for name in SITES:
        here = [record for record in records if record.site == name and record.calls]
        faults += _site_faults(name, asked.get(name, "none"), here)
    return faults


def _site_faults(name: str, wanted: str, records: list[QuantRecord]) -> list[str]:
    excluded = bool(records)
    records = [record for record in records if record.quant_type != EXCLUDED]
    if wanted != "none" and not records:
        why = "every layer is excluded" if excluded else "its quantiser never ran"
        return [f"{name}: asked for {wanted}, but {why}"]
    faults = []
    for ran in sorted({record.quant_type for record in records}):
        here = [record for record in records if record.quant_type == ran]
        if ran != wanted:
            faults.append(f"{name}: asked for {wanted}, but {_layers(here)} ran as {ran}")
        operands = {record.operand for record in here}
        for operand in (SITES[name].lhs, SITES[name].rhs):
            if operand not in operands:
                faults.append(f"{name}: ran as {ran}, but its operand {operand} never did")
    return faults


def _layers(records: list[QuantRecord]) -> str:
    layers = sorted({record.layer for record in records})
    others = f" and {len(layers) - 1} more" if len(layers) > 1 else ""
    return f"{layers[0]}{others}"
