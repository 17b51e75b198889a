"""Compute how well quantities that are known early, or without training, predict the final gap.

The gap of an arm is its final validation loss less that of the unquantized run of the same seed. A
predictor that needs training is taken from some of the seeds and compared with the gap of the
others: the same runs on both sides would share their noise. The result is Spearman's rank
correlation over the arms, the mean over all ways to divide the seeds.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from mqo.extras import package

if TYPE_CHECKING:
    from table import Losses

BASELINE = "none"
KNOWN = 2  # seeds that a predictor is taken from; the others have the gap to be predicted
RESAMPLES = 999
LEAST_ARMS = 8  # smallest number of arms whose order is reported
FORWARD = ("fprop.", "qk.", "pv.")
Gaps = Mapping[str, Mapping[int, float]]  # {arm: {seed: nats}}


@dataclass(frozen=True)
class Prediction:
    """A predictor's rank correlation with the final gap, and its 95 % interval over the arms."""

    name: str
    arms: int
    rho: float
    low: float
    high: float


def predictions(losses: Losses, noise_ratio: Mapping[str, float]) -> list[Prediction]:
    """Return the predictors that at least LEAST_ARMS arms with all seeds have.

    Args:
        losses: runs of one model, size and length.
        noise_ratio: gradient to noise of short runs, by arm.
    """
    final = _gaps(losses.last)
    decibels = {arm: statistics.fmean(values.values()) for arm, values in losses.sqnr.items()}
    forward = {arm: forward_sqnr(values) for arm, values in losses.sqnr.items()}
    fixed = {
        "SQNR, mean of all operands": decibels,
        "SQNR, mean of the forward pass's operands": forward,
        "gradient to noise after 100 steps": dict(noise_ratio),
    }
    # They grow with precision, and do not depend on the seed.
    known: dict[str, Gaps] = {
        name: {arm: dict.fromkeys(final.get(arm, ()), -value) for arm, value in values.items()}
        for name, values in fixed.items()
    }
    known |= {f"gap after {step} steps": _gaps_at(losses, step) for step in _steps(losses)}
    results = [_prediction(name, early, final) for name, early in known.items()]
    return [result for result in results if result is not None]


def forward_sqnr(decibels: Mapping[str, float]) -> float:
    """Return the mean SQNR of the forward pass's operands in dB; inf if none is quantized."""
    values = [value for name, value in decibels.items() if name.startswith(FORWARD)]
    return statistics.fmean(values) if values else math.inf


def _gaps(losses: Gaps) -> dict[str, dict[int, float]]:
    """Return the gaps of the arms that have all seeds of the unquantized runs."""
    base = losses[BASELINE]
    return {
        arm: {seed: loss - base[seed] for seed, loss in by_seed.items() if seed in base}
        for arm, by_seed in losses.items()
        if arm != BASELINE and by_seed.keys() >= base.keys()
    }


def _gaps_at(losses: Losses, step: int) -> dict[str, dict[int, float]]:
    return _gaps(
        {
            arm: {seed: loss for seed, curve in curves.items() for at, loss in curve if at == step}
            for arm, curves in losses.curve.items()
        }
    )


def _steps(losses: Losses) -> list[int]:
    (curve, *_) = losses.curve[BASELINE].values()
    return [step for step, _ in curve]


def _divisions(gaps: Gaps, arms: list[str]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield each choice of KNOWN seeds, and the others, of the seeds that all arms have."""
    seeds = sorted(set.intersection(*(set(gaps[arm]) for arm in arms))) if arms else []
    for known in itertools.combinations(seeds, KNOWN):
        if others := [seed for seed in seeds if seed not in known]:
            yield list(known), others


def _means(gaps: Gaps, arms: list[str], seeds: list[int]) -> np.ndarray:
    return np.array([statistics.fmean(gaps[arm][seed] for seed in seeds) for arm in arms])


def _prediction(name: str, early: Gaps, final: Gaps) -> Prediction | None:
    """Return the mean correlation over the divisions of the seeds; resample the arms."""
    arms = sorted(early.keys() & final.keys())
    pairs = [
        (_means(early, arms, known), _means(final, arms, others))
        for known, others in _divisions(final, arms)
    ]
    if not pairs or len(arms) < LEAST_ARMS:
        return None
    drawn = np.random.default_rng(0).integers(0, len(arms), (RESAMPLES, len(arms)))
    drawn = np.concatenate([np.arange(len(arms))[None], drawn])  # the first row: as they are
    rho = np.mean([_rank_correlation(x[drawn], y[drawn]) for x, y in pairs], axis=0)
    low, high = np.nanpercentile(rho[1:], [2.5, 97.5])
    return Prediction(name, len(arms), float(rho[0]), float(low), float(high))


def _rank_correlation(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return Spearman's correlation of each row; nan for a row of equal values."""
    ranks = [package("scipy.stats").rankdata(values, axis=1) for values in (x, y)]
    a, b = (values - values.mean(axis=1, keepdims=True) for values in ranks)
    norms = np.sqrt((a * a).sum(axis=1) * (b * b).sum(axis=1))
    with np.errstate(invalid="ignore"):
        return (a * b).sum(axis=1) / norms
