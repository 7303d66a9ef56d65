"""Figures with their spread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

RESAMPLES = 2000
WALL = "time.perf_counter around each step, the device synchronised"
"""The meter of step times."""
SEED = 0


def figure(
    windows: Sequence[Sequence[float]],
    unit: str,
    meter: str,
    *,
    statistic: Callable[[np.ndarray], np.ndarray] | None = None,
) -> dict[str, Any]:
    """Median of all samples and its 95 % bootstrap interval, windows resampled first and then their steps: what drifts
    between windows is not averaged away by many steps in one.

    `windows`: samples, one list a window. `statistic`: (resamples, steps) -> (resamples,), instead of the median.
    """
    filled = [np.asarray(samples, dtype=np.float64) for samples in windows if len(samples)]
    if not filled:
        return missing(unit, meter, "no step was measured")
    if not all(np.isfinite(samples).all() for samples in filled):
        return missing(unit, meter, "a sample is not finite")
    median = statistic or (lambda rows: np.median(rows, axis=1))
    drawn = np.random.default_rng(SEED)
    length = min(len(samples) for samples in filled)
    table = np.stack([samples[:length] for samples in filled])
    window = drawn.integers(len(filled), size=(RESAMPLES, len(filled)))
    step = drawn.integers(length, size=(RESAMPLES, len(filled), length))
    resampled = table[window[:, :, None], step].reshape(RESAMPLES, -1)
    low, high = np.quantile(median(resampled), [0.025, 0.975])
    return {
        "median": float(median(np.concatenate(filled)[None])[0]),
        "low": float(low),
        "high": float(high),
        "unit": unit,
        "meter": meter,
        "reason": None,
    }


def missing(unit: str, meter: str, reason: str) -> dict[str, Any]:
    """A figure that could not be measured."""
    return {"median": None, "low": None, "high": None, "unit": unit, "meter": meter, "reason": reason}
