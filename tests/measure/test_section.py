"""The window's section put together from ranks that never ran."""

from __future__ import annotations

import pytest

from distbench.measure.section import _by_kind, _costs_too_much, _overhead
from distbench.measure.tracked import Tracked
from distbench.measure.window import Measurement, Step, Take


def rank(windows: int, metered: float, core_wait: float | None = 0.0, steps: int = 5) -> Measurement:
    """One whose steps take `metered` s with meters and 1 s without."""
    takes = [
        Take([Step(metered, {}, 0.0, None, 1) for _ in range(steps)], [1.0] * steps, core_wait=core_wait)
        for _ in range(windows)
    ]
    return Measurement(takes, {}, {}, "", None, None)


@pytest.mark.parametrize(
    ("ranks", "rejected"),
    [
        ([rank(3, 1.2)], True),
        ([rank(3, 1.2), rank(3, 1.2)], True),
        ([rank(3, 1.2, core_wait=None)], True),  # the system does not say: then only the steps do
        ([rank(3, 1.04)], False),
        ([rank(2, 1.2)], False),  # two windows were slow at once by chance on a busy machine
        ([rank(3, 1.2, steps=3)], False),
        ([rank(3, 1.2), rank(3, 1.2, core_wait=0.5)], False),
        ([rank(3, 1.2, core_wait=None), rank(3, 1.2, core_wait=0.5)], False),
    ],
)
def test_meters_that_cost_too_much_for_sure(ranks: list[Measurement], rejected: bool) -> None:
    assert _costs_too_much(ranks, _overhead(ranks), 0.05) is rejected


def test_memory_by_kind_and_predicted_are_of_the_rank_of_the_peak() -> None:
    tracked = [
        Tracked(memory={"parameters": 10}),
        Tracked(memory={"parameters": 20}),
        Tracked(memory={"parameters": 9}),
    ]
    predicted: list[dict[str, int | None]] = [{"parameters": 1}, {"parameters": 2}, {"parameters": 3}]
    for peak, of in ((2, 2), (0, 0), (None, 1)):
        found = _by_kind(peak, tracked, predicted, "untracked")
        assert found["memory_by_kind"] == {**(tracked[of].memory or {}), "rank": of}
        assert found["memory_predicted"] == {**predicted[of], "rank": of}
    assert _by_kind(1, [], predicted, "window.track=false") == {
        "memory_by_kind": None,
        "memory_by_kind_reason": "window.track=false",
        "memory_predicted": {"parameters": 2, "rank": 1},
    }
    assert _by_kind(None, [], predicted, "untracked")["memory_predicted"]["rank"] == 0
