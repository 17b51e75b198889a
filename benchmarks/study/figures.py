"""Plot runs.csv: gaps with intervals, gaps during training, and gaps over SQNR.

    .venv/bin/python benchmarks/study/figures.py

Writes gaps.png, curves.png and sqnr.png next to this file, from the runs of the phase `study`;
answers/, a picture of each question; and gaps-experts.png from the phase `experts`, if it has runs.
"""

from __future__ import annotations

import math
import statistics
import tomllib
from collections.abc import Sequence
from pathlib import Path

from mqo.report.collect import named_changes
from mqo.report.colors import Look, look
from mqo.report.curves import Curve
from mqo.report.evidence import evidence
from mqo.report.looks import looks
from mqo.report.pictures import Gap, draw_curves, forest, pyplot, save
from mqo.report.series import Band, band, less
from mqo.run_records import QuantToml
from predict import Prediction, forward_sqnr, predictions
from study import ARMS, HERE, Cell
from table import BASELINE, Losses, noise_of, pairs_of, planned, read

CURVES = ("none", "mxfp4", "mxfp4+all", "mxfp4-backward", "nvfp4", "hif4", "mxfp8", "hifp8")


def main() -> None:
    """Draw all figures."""
    losses_by_key = read(HERE / "runs.csv")
    for name, file in (("study", "gaps"), ("experts", "gaps-experts")):
        phase = ARMS["phases"][name]
        for model, listed in phase["models"].items():
            key = (model, phase["size"], phase["steps"])
            losses = losses_by_key.get(key)
            if losses is None:
                continue
            losses.take_incomplete(planned(ARMS, key))
            arms = [arm for arm in listed if arm in losses.last]
            if len(arms) < 2:
                continue
            title = f"{model}, 8 layers of 128, {phase['steps']} steps: {_seeds(losses)}"
            gaps(losses, model, arms, title, HERE / f"{file}.png")
            if name == "study":
                curves(losses, model, arms, title, HERE / "curves.png")
                gaps_over_sqnr(losses, model, arms, title, HERE / "sqnr.png")
                answers(losses, model)
                predictors(predictions(losses, noise_of(losses_by_key, key)), title)


def _seeds(losses: Losses) -> str:
    counts = {len(by_seed) for by_seed in losses.last.values()}
    return f"{min(counts)} to {max(counts)} seeds" if len(counts) > 1 else f"{counts.pop()} seeds"


def types(model: str, arm: str) -> dict[str, str]:
    """Return an arm's type by site."""
    return Cell(model, arm, "h128-init", 100, 1).config.quantization.types or {}


def variant(model: str, arm: str) -> str:
    """Return the name that a report gives an arm's runs."""
    config = Cell(model, arm, "h128-init", 100, 1).config
    text = config.quant_toml(types(model, arm))
    options = QuantToml.model_validate(tomllib.loads(text))
    return config.quantization.name + named_changes(config.quantization, options)


def looks_of(model: str, arms: Sequence[str]) -> dict[str, Look]:
    """Return the look of each arm, the one that it has in a report."""
    chosen = looks((variant(model, arm), types(model, arm)) for arm in arms)
    return dict(zip(arms, chosen, strict=True))


def gaps(losses: Losses, model: str, arms: Sequence[str], title: str, target: Path) -> None:
    """Plot the gaps to `none` in percent of its loss, sorted by color and gap."""
    rest = [arm for arm in arms if arm != BASELINE]
    shares = {arm: [gap / losses.baseline for gap in losses.paired(arm, BASELINE)] for arm in rest}
    by_arm = dict(zip(rest, evidence([shares[arm] for arm in rest]), strict=True))
    colors = {arm: look(types(model, arm)).light for arm in rest}
    drawn = looks_of(model, arms)
    ordered = sorted(rest, key=lambda arm: (colors[arm], statistics.fmean(shares[arm])))
    rows = [Gap(arm, drawn[arm], gap) for arm in ordered if (gap := by_arm[arm])]
    forest(rows, title, [target])


def answers(losses: Losses, model: str) -> None:
    """Plot the gaps of each question, in percent of the unquantized loss."""
    for question in ARMS["questions"]:
        pairs = [pair for pair in pairs_of(question) if losses.paired(*pair)]
        if not pairs:
            continue
        known = [[gap / losses.baseline for gap in losses.paired(*pair)] for pair in pairs]
        drawn = looks_of(model, list(dict.fromkeys(arm for arm, _ in pairs)))
        rows = [
            Gap(f"{arm} less {than}", drawn[arm], gap)
            for (arm, than), gap in zip(pairs, evidence(known), strict=True)
            if gap is not None
        ]
        target = HERE / "answers" / f"{question['name']}.png"
        forest(rows, question["ask"], [target], reference="the second arm")


def predictors(known: Sequence[Prediction], title: str) -> None:
    """Plot each predictor's rank correlation with the final gap, and its interval."""
    figure, axes = pyplot().subplots(figsize=(8, 0.9 + 0.26 * len(known)), layout="constrained")
    for position, predictor in enumerate(known):
        color = "tab:blue" if predictor.name.startswith("gap") else "tab:orange"
        axes.plot([predictor.low, predictor.high], [position, position], color=color, linewidth=2)
        axes.plot([predictor.rho], [position], marker="o", color=color)
    axes.set_yticks(range(len(known)), [predictor.name for predictor in known], fontsize=8)
    axes.invert_yaxis()
    axes.axvline(0, color="grey", linewidth=0.8)
    axes.set_xlabel("rank correlation with the final gap of other seeds; 95 % interval over arms")
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(axis="x", alpha=0.25)
    axes.spines[["top", "right", "left"]].set_visible(False)
    save(figure, [HERE / "answers" / "predictors.png"])


def curves(losses: Losses, model: str, arms: Sequence[str], title: str, target: Path) -> None:
    """Plot validation losses, and their differences to `none`, during training."""
    chosen = [arm for arm in CURVES if arm in arms]
    drawn, base = [], losses.curve[BASELINE]
    arm_looks = looks_of(model, arms)
    for arm in chosen:
        series = losses.curve[arm]
        seeds = () if arm == BASELINE else series.keys() & base.keys()
        gap = band([less(series[seed], base[seed]) for seed in seeds])
        drawn.append(Curve(arm, arm, arm_looks[arm], Band(), gap, band([*series.values()])))
    draw_curves(drawn, title, [target])


def gaps_over_sqnr(
    losses: Losses, model: str, arms: Sequence[str], title: str, target: Path
) -> None:
    """Plot each arm's mean gap over the SQNR of all operands, and of the forward pass's.

    Variants share a hue.
    """
    figure, panels = pyplot().subplots(1, 2, figsize=(10, 4.5), sharey=True, layout="constrained")
    drawn, measured = looks_of(model, arms), [arm for arm in arms if arm in losses.sqnr]
    means = {arm: statistics.fmean(losses.sqnr[arm].values()) for arm in measured}
    forward = {arm: forward_sqnr(losses.sqnr[arm]) for arm in measured}
    for axes, decibels, operands in zip(
        panels, (means, forward), ("all operands", "the forward pass's operands"), strict=True
    ):
        for arm, x in decibels.items():
            if math.isinf(x):
                continue
            y = 100 * statistics.fmean(losses.paired(arm, BASELINE)) / losses.baseline
            its_look = drawn[arm]
            axes.plot([x], [y], marker=its_look.symbol.matplotlib, color=its_look.light)
            if arm in ARMS["arms"][arm].values():  # not a variant of another
                offset = {"xytext": (0, -13), "textcoords": "offset points", "ha": "center"}
                axes.annotate(arm, (x, y), fontsize=8, **offset)
        axes.margins(x=0.1, y=0.12)
        axes.axhline(0, color="grey", linewidth=0.8)
        axes.set_xlabel(f"mean SQNR of {operands}, dB")
        axes.grid(alpha=0.25)
    panels[0].set_ylabel("final loss, % from the unquantized run")
    panels[0].set_title(title, fontsize=10, loc="left")
    save(figure, [target])


if __name__ == "__main__":
    main()
