"""A comparison as a LaTeX table, for a paper: needs \\usepackage{booktabs}."""

from __future__ import annotations

from mqo.report.compare import Group
from mqo.report.evidence import LEVEL, Evidence
from mqo.report.rows import Row

_SPECIAL = {c: f"\\{c}" for c in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}


def table(group: Group) -> str:
    """Return the rows of a group: seeds, loss, and the gap with its interval, paired by seed."""
    kind = "Validation" if group.validated else "Training"
    level = escape(f"{LEVEL:.0%} interval")
    head = f"Variant & Seeds & {kind} loss & Gap (\\%) & {level} & $p$ (Holm)"
    caption = f"{escape(group.full_title)}. Gaps are relative to {escape(group.reference_run)}."
    return "\n".join(
        [
            r"\begin{table}",
            f"  \\caption{{{caption}}}",
            r"  \centering",
            r"  \begin{tabular}{lrrrrr}",
            r"    \toprule",
            f"    {head} \\\\",
            r"    \midrule",
            *(f"    {line(row)} \\\\" for row in group.rows),
            r"    \bottomrule",
            r"  \end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def line(row: Row) -> str:
    """Return a variant's cells; values not measured, or that need several seeds, are empty."""
    loss = f"{row.loss.mean:.4f}"
    cells = (escape(row.label), str(len(row.runs)), loss, *gap_cells(row.gap))
    return " & ".join(cells)


def gap_cells(gap: Evidence | None) -> tuple[str, str, str]:
    """Return the gap, its interval and p."""
    if gap is None:
        return "", "", ""
    mean = f"${100 * gap.mean:+.2f}$"
    if gap.low is None or gap.high is None or gap.adjusted is None:
        return mean, "", ""
    interval = f"$[{100 * gap.low:+.2f}, {100 * gap.high:+.2f}]$"
    return mean, interval, "$<0.001$" if gap.adjusted < 0.001 else f"${gap.adjusted:.3f}$"


def escape(text: str) -> str:
    """Return text with LaTeX's special characters escaped."""
    return "".join(_SPECIAL.get(character, character) for character in text)
