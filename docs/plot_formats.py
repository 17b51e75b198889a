"""Plot formats.png: the values of each element type, and the relative rounding error.

    .venv/bin/python docs/plot_formats.py

Formats with the same element share a row and a curve. All scales are 1 here; another scale shifts a
curve along the axis.
"""

from __future__ import annotations

import math
from pathlib import Path
from textwrap import wrap

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from matplotlib.transforms import ScaledTranslation
from mqo.quant.backend import fake_quantize
from mqo.quant.codes import code_values
from mqo.quant.formats import FORMATS
from mqo.quant.spec import QuantSpec

HERE = Path(__file__).resolve().parent

LOW, HIGH, PER_BINADE = -24, 17, 64
# The powers of two that multiply a value of hif4 in addition to its block's scale.
HIF4_POWERS = (1.0, 2.0, 4.0)


def main() -> None:
    """Write formats.png next to this file."""
    figure, (grid, error) = plt.subplots(
        2, 1, figsize=(10, 8.4), sharex=True, height_ratios=(1, 1.5), layout="constrained"
    )
    rows = elements()
    for row, (element, kinds) in enumerate(rows.items()):
        color = FORMATS[kinds[0]].light
        values = positive_values(kinds[0])
        grid.scatter(values, [-row] * len(values), marker="|", s=130, lw=0.9, color=color)
        steps = {"drawstyle": "steps-mid", "lw": 2, "color": color, "label": element.upper()}
        # Shifted by their width, so that equal curves stay visible.
        apart = ScaledTranslation(0, (row - len(rows) / 2) * 2 / 72, figure.dpi_scale_trans)
        steps["transform"] = error.transData + apart
        error.plot(binades(kinds[0]), worst_errors(kinds[0]), **steps)
    labels = [f"{element.upper()}: {', '.join(kinds)}" for element, kinds in rows.items()]
    grid.set_yticks(
        [-row for row in range(len(rows))], ["\n".join(wrap(t, 40)) for t in labels], size=8
    )
    grid.set_ylim(-len(rows) + 0.4, 0.6)
    grid.set_title("Positive values, with all scales at 1 (hif4: its block's)", loc="left")
    title = "Largest relative rounding error in each binade (equal ones side by side)"
    error.set_title(title, loc="left")
    error.set_xscale("log", base=2)
    error.set_xlim(2.0**LOW, 2.0**HIGH)
    error.set_yscale("log", base=2)
    error.set_ylim(2.0**-8.3, 1.2)
    shares = ["100 %", "50 %", "25 %", "12.5 %", "6 %", "3 %", "1.6 %", "0.8 %", "0.4 %"]
    error.set_yticks([2.0**-k for k in range(9)], shares)
    error.set_xticks([2.0**k for k in range(LOW, HIGH, 4)])
    error.set_xlabel("magnitude")
    error.grid(axis="y", color="#dddddd")
    error.legend(frameon=False, loc="lower left", ncols=2)
    for axes in (grid, error):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE / "formats.png", dpi=130)


def elements() -> dict[str, list[str]]:
    """Return the formats by their element."""
    kinds_by_element: dict[str, list[str]] = {}
    for kind, row in FORMATS.items():
        levels = ", 3 levels" if row.scale == "hif4" else ""
        kinds_by_element.setdefault(f"{row.element.name}{levels}", []).append(kind)
    return kinds_by_element


def positive_values(kind: str) -> list[float]:
    """Return the finite positive values of a format, sorted."""
    values = {value for value in code_values(kind) if 0 < value < float("inf")}
    if FORMATS[kind].scale == "hif4":
        values = {value * power for value in values for power in HIF4_POWERS}
    return sorted(values)


def binades(kind: str) -> list[float]:
    """Return the middles of the binades from 2**LOW to the largest value of a format."""
    top = math.ceil(math.log2(positive_values(kind)[-1]))
    return [2.0 ** (exponent + 0.5) for exponent in range(LOW, top)]


def worst_errors(kind: str) -> list[float]:
    """Return the largest |q - x| / x in each of `binades`, without saturated values."""
    largest = positive_values(kind)[-1]
    errors = []
    for middle in binades(kind):
        x = middle * 2.0 ** torch.linspace(-0.5, 0.499, PER_BINADE * 8)
        x = x[x <= largest]
        # Each value has its own block, whose last value gives the block the scale 1.
        spec = QuantSpec(kind)
        blocks = torch.zeros(len(x), spec.block or 2)
        blocks[:, 0] = x
        if spec.block:
            to_largest = spec.format.scale in ("hif4", "fp32")
            blocks[:, -1] = largest if to_largest else 2.0**spec.format.element.emax
        q = fake_quantize(blocks, spec)[:, 0]
        errors.append(((q - x).abs() / x).max().item())
    return errors


if __name__ == "__main__":
    main()
