"""A simulated shared machine: step times with known true medians, to hold the intervals to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distbench.runs.noise import Windows


@dataclass(frozen=True)
class Noise:
    """A shared machine: relative standard deviations, and now and then a step that something else holds up."""

    between: float = 0.02
    windows: float = 0.01
    steps: float = 0.03
    hiccups: float = 0.05
    """Share of steps that take up to twice as long."""
    num_windows: int = 3
    num_steps: int = 10

    def run(self, random: np.random.Generator, median: float) -> Windows:
        level = math.log(median) + random.normal(0, self.between)
        return tuple(self._window(random, level + random.normal(0, self.windows)) for _ in range(self.num_windows))

    def _window(self, random: np.random.Generator, level: float) -> NDArray[np.float64]:
        hiccup = np.where(
            random.random(self.num_steps) < self.hiccups, random.uniform(0, math.log(2), self.num_steps), 0
        )
        # Steps of one window follow each other: a slow one has slow neighbours.
        shocks = random.normal(0, self.steps, self.num_steps + 1)
        return np.exp(level + 0.8 * shocks[1:] + 0.6 * shocks[:-1] + hiccup)


def simulate(random: np.random.Generator, medians: Sequence[float], repeats: int, noise: Noise) -> list[list[Windows]]:
    """Step times of candidates with known true medians in s: of each, as many runs as repeats."""
    return [[noise.run(random, median) for _ in range(repeats)] for median in medians]
