"""Interval sets against sets of integers."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from distbench.measure.intervals import Interval, intersection, length, union

intervals = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


def points(found: list[Interval]) -> set[int]:
    return {point for start, end in found for point in range(start, end)}


@given(intervals)
def test_union_is_the_same_points_disjoint_and_in_order(found: list[Interval]) -> None:
    merged = union(found)
    assert points(merged) == points(found) and length(found) == len(points(found))
    assert all(a[1] < b[0] for a, b in pairwise(merged))


@given(intervals, intervals)
def test_intersection_is_the_points_in_both(left: list[Interval], right: list[Interval]) -> None:
    both = intersection(left, right)
    assert points(both) == points(left) & points(right)
    assert length(both) == len(points(both)) == sum(end - start for start, end in both)
