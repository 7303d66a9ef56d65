"""Unions and intersections of time intervals: [start, end) pairs of nanoseconds."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as disjoint intervals in order; empty ones are dropped."""
    merged: list[Interval] = []
    for start, end in sorted((s, e) for s, e in intervals if e > s):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> int:
    """Total length of the union, ns."""
    return sum(end - start for start, end in union(intervals))


def intersection(left: Iterable[Interval], right: Iterable[Interval]) -> list[Interval]:
    """Points in both, as disjoint intervals in order."""
    found: list[Interval] = []
    a, b = union(left), union(right)
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if end > start:
            found.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found
