"""Measure the SQNR of formats on 2^20 values of N(0, 1), for `mqo formats`."""

import torch
from mqo.quant import sqnr
from mqo.quant.own_formats import FormatRow

SHAPE, SEED = (256, 4096), 1234


def measure(formats: list[str], own: dict[str, FormatRow]) -> dict[str, float]:
    """Return {format: dB}; `own` are the formats of the user."""
    for name, row in own.items():
        row.declare(name)
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(SEED))
    return {name: sqnr(x, name) for name in formats}
