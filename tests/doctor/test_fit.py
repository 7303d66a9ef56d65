"""Two numbers of a link from its timings, and who is slow: on links that were made up."""

from __future__ import annotations

import random

import pytest

from distbench.doctor.fit import Direction, fit, slow, slow_hosts, typical

MS, MB = 1e-3, 1e6


def test_a_line_is_found_through_noise() -> None:
    generator = random.Random(0)
    alpha, beta = 0.5 * MS, 100 * MB
    sizes = [4**n * 1024.0 for n in range(9)]
    points = [(size, (alpha + size / beta) * generator.uniform(0.9, 1.1)) for size in sizes]
    line = fit(points)
    assert line is not None
    assert line.alpha == pytest.approx(alpha, rel=0.15) and line.beta == pytest.approx(beta, rel=0.15)
    assert line.error < 0.25, "relative: small messages count as much as large ones"


def test_a_line_that_would_begin_below_zero_begins_at_zero() -> None:
    line = fit([(1.0, 0.5), (10.0, 10.0), (100.0, 100.0)])
    assert line is not None and line.alpha == 0.0 and line.beta == pytest.approx(1.0, rel=0.5)


def test_what_is_no_line() -> None:
    assert fit([]) is None and fit([(1.0, 1.0)]) is None and fit([(1.0, 1.0), (1.0, 2.0)]) is None
    assert fit([(1.0, 2.0), (1000.0, 1.0)]) is None, "larger messages do not take less"


def directions(hosts: int, slowed: dict[tuple[int, int], float], seed: int = 0, late: float = 1.0) -> list[Direction]:
    """Between all, 5 % of scatter; `slowed` pairs have a part of the bandwidth, and `late` times the latency."""
    generator, found = random.Random(seed), []
    for a in range(hosts):
        for b in range(hosts):
            if a != b:
                part = slowed.get((a, b), 1.0)
                rate = 100 * MB * part * generator.uniform(0.95, 1.05)
                wait = 0.1 * MS * (late if part < 1.0 else 1.0) * generator.uniform(0.95, 1.05)
                found.append(Direction(f"h{a}", f"h{b}", wait, rate, wait, rate))
    return found


def host(number: int, hosts: int, part: float) -> dict[tuple[int, int], float]:
    both = [[(number, other), (other, number)] for other in range(hosts) if other != number]
    return {pair: part for pairs in both for pair in pairs}


@pytest.mark.parametrize("hosts", [2, 3, 4, 8, 32])
@pytest.mark.parametrize("seed", range(5))
def test_links_that_are_the_same_are_not_slow(hosts: int, seed: int) -> None:
    found = directions(hosts, {}, seed)
    assert slow(found, *typical(found)) == []


@pytest.mark.parametrize("hosts", [3, 4, 8, 32])
def test_a_slow_host_is_told_from_a_slow_pair(hosts: int) -> None:
    found = directions(hosts, host(1, hosts, 0.5))
    named = slow(found, *typical(found))
    assert len(named) == 2 * (hosts - 1) and all("h1" in (d.source, d.target) for d in named)
    assert slow_hosts(found, named) == ["h1"]
    if hosts > 3:
        found = directions(hosts, {(0, 2): 0.5, (2, 0): 0.5})
        named = slow(found, *typical(found))
        assert [{d.source, d.target} for d in named] == [{"h0", "h2"}] * 2 and slow_hosts(found, named) == []


def test_one_way_may_be_slow() -> None:
    found = directions(2, {(1, 0): 0.5})
    (named,) = slow(found, *typical(found))
    assert (named.source, named.target) == ("h1", "h0") and slow_hosts(found, [named]) == []


def test_latency_counts_as_well() -> None:
    found = directions(6, {(1, 4): 0.99}, late=3.0)
    assert [(d.source, d.target) for d in slow(found, *typical(found))] == [("h1", "h4")]
    near = [
        Direction(d.source, d.target, d.latency / 100, d.bandwidth, d.latency_best / 100, d.bandwidth) for d in found
    ]
    assert slow(near, *typical(near)) == [], "microseconds apart"
