"""What the modes were said to save, gain and cost, beside what was measured: a markdown table.

    .venv/bin/mqo sweep --models llama32-1b --datasets wikipedia --training-config smoke --jobs 1 \\
        --modes 'bf16,FA_mxfp*,linear_mxfp*,FA_linear_mxfp*' -o runs/claims -- --train-samples 160
    .venv/bin/mqo report runs/claims -o runs/claims/report
    .venv/bin/python benchmarks/claims.py runs/claims/report runs/loss_study/report

Memory and speed are the first report's, of runs one after the other on a machine without other
work; the loss is the second's, the loss study's, of the same model.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

MODEL = "llama32-1b"
# The project's third document, without a measurement: memory saved, speed-up, accuracy.
CLAIMED = {
    "bf16": ("0", "baseline", "highest"),
    "FA_mxfp8": ("15 %", "+10 %", "high"),
    "FA_mxfp4": ("25 %", "+20 %", "medium"),
    "linear_mxfp8": ("20 %", "+15 %", "high"),
    "linear_mxfp4": ("30 %", "+25 %", "medium"),
    "FA_linear_mxfp8": ("35 %", "+25 %", "medium"),
    "FA_linear_mxfp4": ("50 %", "+40 %", "lower"),
}


def main() -> None:
    """Print the table."""
    speed, loss = (results(Path(folder)) for folder in sys.argv[1:3])
    print("| mode | memory saved: claimed | measured | speed: claimed | measured", end=" ")
    print("| accuracy: claimed | loss beside bf16's, measured |\n|---|---|---|---|---|---|---|")
    for mode, (memory, faster, accuracy) in CLAIMED.items():
        ours = speed[mode]
        cells = [memory, percent(ours["memory_saved"]), faster, percent(ours["speed_up"])]
        cells += [accuracy, percent(loss[mode]["gap"], 2)]
        print(f"| {mode} | {' | '.join(cells)} |")


def results(folder: Path) -> dict[str, dict[str, str]]:
    """Read {mode: row} of the model in a report."""
    with (folder / "results.csv").open(encoding="utf-8", newline="") as file:
        return {row["mode"]: row for row in csv.DictReader(file) if row["model"] == MODEL}


def percent(text: str, digits: int = 0) -> str:
    """Return a share as percents with its sign; a dash for bf16 itself."""
    return f"{float(text):+.{digits}%}" if text else "-"


if __name__ == "__main__":
    main()
