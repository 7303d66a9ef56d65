"""When one step time is really shorter than another: intervals that hold within a run, and from run to run.

Step times are compared as ratios, so everything here is in logarithms. The noise has two sources, and steps alone show
only the first:

- *within a run*, its windows drift and its steps scatter: a bootstrap that resamples windows, then steps in each;
- *from run to run*, where cells are repeated: the spread of the repeats' medians, pooled over all candidates, because
  two or three repeats of one say little about it. Without any repeat it is assumed (`ASSUMED_BETWEEN`), and said so.

The larger of both counts. Where every candidate was run in every repeat, they are compared within repeats (`Blocks`).
Intervals are Student's, with as many degrees of freedom as the repeats leave.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Windows = tuple[NDArray[np.float64], ...]
"""Step times of one run in s, an array a window."""

LEVEL = 0.05
"""How often a difference may be seen where there is none."""
ASSUMED_BETWEEN = 0.03
"""Relative standard deviation from run to run where no run was repeated: what a shared machine does, not a measurement."""
FOUND = 0.8
"""How often a difference is to be found that a sweep is said to be able to find: four times in five."""
MAX_REPEATS = 1000
DRAWS = 200
"""Bootstrap draws a run: only their variance is used. Fewer, down to 50, where there are thousands of runs."""
CHUNK = 1 << 21
"""Resampled step times held at once."""


@dataclass(frozen=True)
class Ratio:
    """How much longer one step time is than another: 1.1 is 10 % longer, with its interval."""

    value: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """`slower`, `faster` or `no difference`."""
        if self.low > 1:
            return "slower"
        return "faster" if self.high < 1 else "no difference"

    def __str__(self) -> str:
        percent = [100 * (v - 1) for v in (self.value, self.low, self.high)]
        if self.verdict == "no difference":
            return f"no difference in step time ({_signed(percent[1])} to {_signed(percent[2])} %)"
        size, low, high = (abs(p) for p in percent)
        return f"{digits(size)} % {self.verdict} ({digits(min(low, high))} to {digits(max(low, high))} %)"


def digits(percent: float) -> str:
    """Of a size from 0 on; in powers of ten where a table has no room for it otherwise."""
    if 0 < percent < 0.05:
        return f"{percent:.1g}"
    return f"{percent:.1f}" if percent < 9.95 else f"{percent:.0f}" if percent < 1e5 else f"{percent:.1e}"


def _signed(percent: float) -> str:
    return ("+" if percent >= 0 else "-") + digits(abs(percent))


@dataclass(frozen=True)
class Blocks:
    """Candidates compared repeat by repeat: what a repeat has in common (a machine that is slow for minutes) cancels out.

    The randomised block design, without interaction: residuals of the medians' logarithms from the sum of a candidate's and
    a repeat's effect (R. A. Fisher, The Design of Experiments, 1935, chapter IV).
    """

    errors: NDArray[np.float64]
    """Standard errors of the candidates' means, without the repeats' common part."""
    within: float
    """Relative standard deviation within a repeat."""
    spread: float
    """The same, that of steps included where that is larger: a typical candidate's."""
    degrees: int

    @classmethod
    def of(
        cls, medians: Sequence[NDArray[np.float64]], steps: NDArray[np.float64], repeats: Sequence[Sequence[str | None]]
    ) -> Blocks | None:
        """`steps`: variance that a candidate's median has from its steps alone. None where a candidate lacks a repeat or
        has one twice, or there is nothing to compare."""
        named = {tuple(sorted(name for name in own if name is not None)) for own in repeats}
        if len(repeats) < 2 or len(named) != 1 or any(None in own for own in repeats):
            return None
        (common,) = named
        if len(common) < 2 or len(set(common)) < len(common):
            return None
        table = np.array(
            [own[np.argsort(np.array(names, dtype=str))] for own, names in zip(medians, repeats, strict=True)]
        )
        residuals = table - table.mean(axis=1, keepdims=True) - table.mean(axis=0, keepdims=True) + table.mean()
        rows, columns = table.shape
        degrees = (rows - 1) * (columns - 1)
        own = np.square(residuals).sum(axis=1) * rows / degrees
        pooled = float(own.mean())
        variance = np.maximum(np.maximum(pooled, own), steps)
        return cls(np.sqrt(variance / columns), math.sqrt(pooled), math.sqrt(float(variance.mean())), degrees)


@dataclass(frozen=True)
class StepTimes:
    """The step times of candidates, and what may be said of their differences."""

    log_medians: NDArray[np.float64]
    """Of each candidate: mean over its runs of the logarithm of a run's median."""
    errors: NDArray[np.float64]
    """Standard errors of them."""
    between: float
    """Relative standard deviation from run to run."""
    degrees: float
    """Degrees of freedom of `between`; infinite where it is assumed."""
    spread: float = ASSUMED_BETWEEN
    """Relative standard deviation of one run, that of its steps included where that is larger: a typical candidate's."""
    blocks: Blocks | None = None
    """Where every candidate was run in every repeat."""

    @classmethod
    def of(cls, candidates: Sequence[Sequence[Windows]], repeats: Sequence[Sequence[str | None]] = ()) -> StepTimes:
        """From each candidate's runs; every run has at least one positive step time. `repeats`: each run's number."""
        runs = [run for candidate in candidates for run in candidate]
        medians, within = log_medians(runs)
        counts = np.array([len(candidate) for candidate in candidates])
        ends = np.cumsum(counts)
        by_candidate = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
        means = np.array([medians[part].mean() for part in by_candidate])
        squares = np.array([np.square(medians[part] - medians[part].mean()).sum() for part in by_candidate])
        degrees = int((counts - 1).sum())
        steps = np.array([within[part].mean() for part in by_candidate])
        if degrees == 0:
            return cls(means, np.sqrt(steps + ASSUMED_BETWEEN**2), ASSUMED_BETWEEN, math.inf)
        pooled = float(squares.sum()) / degrees
        own = squares / np.maximum(counts - 1, 1)
        # A repeat's median already has the noise of its steps in it, so the variances are alternatives, not summands.
        variance = np.maximum(np.maximum(pooled, own), steps)
        blocks = Blocks.of([medians[part] for part in by_candidate], steps, repeats)
        spread = math.sqrt(float(variance.mean())) if blocks is None else blocks.spread
        return cls(means, np.sqrt(variance / counts), math.sqrt(pooled), degrees, spread, blocks)

    @property
    def assumed(self) -> bool:
        return math.isinf(self.degrees)

    @property
    def comparisons(self) -> int:
        """Pairs of candidates. The one that others are compared with is whichever came out fastest, so any pair may be
        the one that chance has set apart: held to all of them (Bonferroni)."""
        count = len(self.errors)
        return max(1, count * (count - 1) // 2)

    @property
    def contrast_degrees(self) -> float:
        """Degrees of freedom of `contrasts`."""
        return self.degrees if self.blocks is None else self.blocks.degrees

    @property
    def quantile(self) -> float:
        """Of `contrasts`: standard errors either side, so that all comparisons hold together."""
        return student_quantile(LEVEL / self.comparisons, self.contrast_degrees)

    @property
    def contrasts(self) -> NDArray[np.float64]:
        """Standard errors that a difference of two candidates is made of."""
        return self.errors if self.blocks is None else self.blocks.errors

    @property
    def resolution(self) -> float:
        """The ratio of two step times that such a sweep finds in four of five cases (`FOUND`)."""
        typical = math.sqrt(float(np.square(self.contrasts).mean()))
        return _exp(_reach(self.contrast_degrees, self.comparisons) * typical * math.sqrt(2))

    def repeats_to_find(self, ratio: float) -> int | None:
        """Of every candidate, with this noise, for `resolution` to be `ratio`. None: not with any number worth naming."""
        rows = len(self.errors) if self.blocks is None else len(self.errors) - 1
        found = (
            n
            for n in range(2, MAX_REPEATS)
            if _reach(rows * (n - 1), self.comparisons) * self.spread * math.sqrt(2 / n) <= math.log(ratio)
        )
        return next(found, None)

    def median(self, index: int) -> tuple[float, float, float]:
        """(median, low, high) of one candidate's step time in s, 95 %."""
        reach = student_quantile(LEVEL, self.degrees) * self.errors[index]
        value = self.log_medians[index]
        return _exp(value), _exp(value - reach), _exp(value + reach)

    def ratio(self, index: int, reference: int) -> Ratio:
        """How much longer candidate `index` takes than `reference`, at 95 % for all such comparisons together."""
        value = float(self.log_medians[index] - self.log_medians[reference])
        if index == reference:
            return Ratio(1.0, 1.0, 1.0)
        reach = self.quantile * math.hypot(self.contrasts[index], self.contrasts[reference])
        return Ratio(_exp(value), _exp(value - reach), _exp(value + reach))


def log_medians(runs: Sequence[Windows]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Logarithm of each run's median, and its variance by a bootstrap over the run's windows and the steps in them.

    Runs of one shape share the draws, so that a run's figure does not depend on which others are ranked with it.
    """
    by_shape: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, run in enumerate(runs):
        by_shape[tuple(map(len, run))].append(index)
    draws = max(50, min(DRAWS, 100_000 // max(1, len(runs))))
    medians, variances = np.zeros(len(runs)), np.zeros(len(runs))
    for shape, members in by_shape.items():
        picked = _draws(shape, draws)
        # Resampling w windows shows (w - 1) / w of their variance.
        few = len(shape) / (len(shape) - 1) if len(shape) > 1 else 1.0
        size = max(1, CHUNK // picked.size)
        for start in range(0, len(members), size):
            part = members[start : start + size]
            samples = np.stack([np.concatenate(runs[index]) for index in part])
            medians[part] = np.log(np.median(samples, axis=-1))
            if samples.shape[1] > 1:
                resampled = np.median(samples[:, picked], axis=-1, overwrite_input=True)
                variances[part] = np.log(resampled).var(axis=1, ddof=1) * few
    return medians, variances


def _draws(shape: tuple[int, ...], draws: int) -> NDArray[np.int64]:
    """Indices into the concatenated windows: `draws` rows of as many windows, each of its steps drawn with replacement.

    Windows of unequal length are drawn as the shortest.
    """
    random = np.random.default_rng(0)
    num_steps = min(shape)
    starts = np.concatenate([[0], np.cumsum(shape)[:-1]]).astype(np.int64)
    windows = random.integers(len(shape), size=(draws, len(shape), 1))
    lengths = np.array(shape)[windows]
    steps = (random.random((draws, len(shape), num_steps)) * lengths).astype(np.int64)
    return (starts[windows] + steps).reshape(draws, -1)


def _reach(degrees: float, comparisons: int) -> float:
    """Standard errors that a difference must have to be found in four of five cases, with so many comparisons made."""
    return student_quantile(LEVEL / max(1, comparisons), degrees) + student_quantile(2 * (1 - FOUND), degrees)


def _exp(value: float) -> float:
    """Of any logarithm, as far as there are numbers: a few absurd step times must not end a ranking."""
    return math.exp(max(-700.0, min(value, 700.0)))


@cache
def student_quantile(level: float, degrees: float) -> float:
    """The t that |T| exceeds with probability `level`, by bisection on the exact distribution function."""
    if degrees > 200:
        z = NormalDist().inv_cdf(1 - level / 2)
        return z if math.isinf(degrees) else z + (z**3 + z) / (4 * degrees)
    low, high = 0.0, 1.0
    while student_inside(high, int(degrees)) < 1 - level:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if student_inside(middle, int(degrees)) < 1 - level else (low, middle)
    return high


def student_inside(t: float, degrees: int) -> float:
    """P(|T| <= t) for Student's T: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(degrees // 2):
        total += term
        term *= cosine**2 * ((2 * k + 2) / (2 * k + 3) if odd else (2 * k + 1) / (2 * k + 2))
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
