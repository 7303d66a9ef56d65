"""From timings to the two numbers of a link, and to the hosts that hold the others up. Nothing here measures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SLOW = 0.8
"""A direction is slow below so much of the typical bandwidth, or above the typical latency divided by it."""
LATENCY_S = 20e-6
"""A difference of latency that is nobody's business."""


@dataclass(frozen=True)
class Line:
    """seconds = alpha + bytes / beta (Hockney, Parallel Computing 20, 1994), of the bytes that busbw counts."""

    alpha: float
    """Seconds of a collective of no bytes."""
    beta: float
    """Bytes a second."""
    error: float
    """The largest relative difference between the line and what was measured."""


def fit(points: Sequence[tuple[float, float]]) -> Line | None:
    """Through (bytes, seconds), by least squares of relative differences; None where that gives no line that rises."""
    if len({size for size, _ in points}) < 2:
        return None
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    x, y = (sum(w * point[i] for w, point in zip(weights, points, strict=True)) / total for i in (0, 1))
    across = sum(w * (size - x) * (seconds - y) for w, (size, seconds) in zip(weights, points, strict=True))
    along = sum(w * (size - x) ** 2 for w, (size, _) in zip(weights, points, strict=True))
    slope = across / along
    alpha = y - slope * x
    if alpha < 0:  # through the origin, then
        alpha = 0.0
        slope = sum(size / seconds for size, seconds in points) / sum((size / seconds) ** 2 for size, seconds in points)
    if slope <= 0:
        return None
    return Line(alpha, 1 / slope, max(abs(alpha + size * slope - seconds) / seconds for size, seconds in points))


@dataclass(frozen=True)
class Direction:
    """From one host to another."""

    source: str
    target: str
    latency: float
    bandwidth: float
    latency_best: float
    bandwidth_best: float

    def is_slow(self, latency: float, bandwidth: float) -> bool:
        """Against what is typical. Its best counts: what else runs on a host holds up some messages, a slow link all."""
        return self.bandwidth_best < SLOW * bandwidth or self.latency_best > latency / SLOW + LATENCY_S


def typical(directions: Sequence[Direction]) -> tuple[float, float]:
    """(latency, bandwidth) of a link that nothing is wrong with: of five the second best. Not the median: of three hosts a
    slow one makes four of the six directions slow."""
    place = math.ceil(0.8 * (len(directions) - 1))
    return (
        sorted((d.latency for d in directions), reverse=True)[place],
        sorted(d.bandwidth for d in directions)[place],
    )


def slow(directions: Sequence[Direction], latency: float, bandwidth: float) -> list[Direction]:
    """Those that hold a job up, the slowest first: every collective waits for its slowest link. Against `typical`."""
    return sorted((d for d in directions if d.is_slow(latency, bandwidth)), key=lambda d: d.bandwidth)


def slow_hosts(directions: Sequence[Direction], found: Sequence[Direction]) -> list[str]:
    """Hosts of whose pairs most are slow, where there are others: it is the host then, and not the pair."""
    pairs: Mapping[str, list[Direction]] = {
        host: [d for d in directions if host in (d.source, d.target)]
        for host in dict.fromkeys(host for d in directions for host in (d.source, d.target))
    }
    if len(pairs) < 3:
        return []
    share = {host: sum(d in found for d in its) / len(its) for host, its in pairs.items()}
    return [host for host, part in share.items() if part > 0.5] if any(part <= 0.5 for part in share.values()) else []
