"""Draws formats.png: the values of each format, and how far a value is rounded.

    .venv/bin/python docs/plot_formats.py

An mx block has its scale at 1 here; another one shifts its curves along the axis.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "Megatron-LM"))

from megatron.quant import FORMATS, QuantSpec, code_values, fake_quantize  # noqa: E402

LOW, HIGH, PER_BINADE = -24, 17, 64


def main() -> None:
    """Write formats.png beside this file."""
    figure, (grid, error) = plt.subplots(
        2, 1, figsize=(9, 6.2), sharex=True, height_ratios=(1, 1.6), layout="constrained"
    )
    labels = [f"{kind} ({row.element.name.upper()})" for kind, row in FORMATS.items()]
    for row, kind in enumerate(FORMATS):
        color = FORMATS[kind].light[0]
        values = positive_values(kind)
        grid.scatter(values, [-row] * len(values), marker="|", s=160, lw=0.9, color=color)
        magnitudes = binades(kind)
        steps = {"drawstyle": "steps-mid", "lw": 2, "color": color, "label": labels[row]}
        error.plot(magnitudes, worst_errors(kind), **steps)
    grid.set_yticks([-row for row in range(len(FORMATS))], labels)
    grid.set_ylim(-len(FORMATS) + 0.4, 0.6)
    grid.set_title("Positive values (an mx block at scale 1)", loc="left")
    error.set_title("Largest relative rounding error in each binade", loc="left")
    error.set_xscale("log", base=2)
    error.set_xlim(2.0**LOW, 2.0**HIGH)
    error.set_yscale("log", base=2)
    error.set_ylim(2.0**-5, 1.2)
    error.set_yticks([2.0**-k for k in range(6)], ["100 %", "50 %", "25 %", "12.5 %", "6 %", "3 %"])
    error.set_xticks([2.0**k for k in range(LOW, HIGH, 4)])
    error.set_xlabel("magnitude")
    error.grid(axis="y", color="#dddddd")
    error.legend(frameon=False, loc="lower left", bbox_to_anchor=(0.02, 0.05))
    for axes in (grid, error):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE / "formats.png", dpi=130)


def positive_values(kind: str) -> list[float]:
    """The finite positive values of a format."""
    return sorted(value for value in code_values(kind) if 0 < value < float("inf"))


def binades(kind: str) -> list[float]:
    """The middles of the binades below the largest value, from where all is rounded to zero."""
    top = math.ceil(math.log2(positive_values(kind)[-1]))
    return [2.0 ** (exponent + 0.5) for exponent in range(LOW, top)]


def worst_errors(kind: str) -> list[float]:
    """The largest |q - x| / x within each of `binades`, short of saturation."""
    largest = positive_values(kind)[-1]
    errors = []
    for middle in binades(kind):
        x = middle * 2.0 ** torch.linspace(-0.5, 0.499, PER_BINADE * 8)
        x = x[x <= largest].unsqueeze(1)
        # Each value in a block of its own, beside one that gives the block the scale 1.
        spec = QuantSpec(kind)
        pin = torch.full_like(x, 2.0**spec.format.element.emax if spec.block else 0.0)
        q = fake_quantize(torch.cat((x, pin), dim=1), spec)[:, :1]
        errors.append(((q - x).abs() / x).max().item())
    return errors


if __name__ == "__main__":
    main()
