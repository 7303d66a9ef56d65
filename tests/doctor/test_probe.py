"""Collectives and pairs between real ranks."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from distbench.doctor.probe import (
    COLLECTIVES,
    Buffers,
    Pair,
    Timing,
    sizes,
    time_alone,
    time_collectives,
    time_pairs,
    tournament,
)
from distbench.launching.world import World
from tests.distributed import run_distributed


@pytest.mark.parametrize("number", [2, 3, 4, 7, 8])
def test_everybody_meets_everybody_once_and_one_at_a_time(number: int) -> None:
    ranks = [10 * rank for rank in range(number)]
    rounds = tournament(ranks)
    assert len(rounds) == number - 1 + number % 2
    for pairs in rounds:
        met = [rank for pair in pairs for rank in pair]
        assert len(met) == len(set(met)), "one partner a round"
    assert sorted(pair for pairs in rounds for pair in pairs) == sorted(combinations(ranks, 2))


@pytest.mark.parametrize("ranks", [2, 3, 32, 1000])
def test_sizes_can_be_divided(ranks: int) -> None:
    found = sizes(ranks, 1 << 22)
    assert found == sorted(set(found)) and all(size % (4 * ranks) == 0 for size in found)
    assert found[-1] >= 1 << 22


def everything(world: World) -> tuple[list[Timing], list[Pair], list[Pair]]:
    beats: list[str] = []
    timings = list(time_collectives(world, 1 << 16, beats.append))
    pairs = time_pairs(world, range(world.size), 64, beats.append)
    alone = time_alone(world, [(0, 1)], beats.append)
    assert set(beats) == {*COLLECTIVES, "pairs"}
    return timings, pairs, alone


@pytest.mark.parametrize("size", [2, 3])
def test_between_ranks(size: int) -> None:
    (timings, pairs, alone), *others = run_distributed(everything, size)
    assert all(other == (timings, pairs, alone) for other in others), "every rank knows the same"
    assert {(row.op, row.bytes) for row in timings} == {(op, n) for op in COLLECTIVES for n in sizes(size, 1 << 16)}
    for row in timings:
        assert row.right and 0 < row.low <= row.seconds <= row.high
        assert row.algbw == pytest.approx(row.bytes / row.seconds)
        assert row.busbw == pytest.approx(row.algbw * COLLECTIVES[row.op].factor(size))
    assert {(pair.source, pair.target) for pair in pairs} == {
        (a, b) for a in range(size) for b in range(size) if a != b
    }
    assert {(pair.source, pair.target) for pair in alone} == {(0, 1), (1, 0)}
    for pair in [*pairs, *alone]:
        assert 0 < pair.latency_best <= pair.latency and 0 < pair.bandwidth <= pair.bandwidth_best


def test_factors_are_those_of_nccl_tests() -> None:
    """doc/PERFORMANCE.md: all-reduce 2(n-1)/n, all-gather, reduce-scatter and all-to-all (n-1)/n, broadcast 1."""
    assert {op: collective.factor(4) for op, collective in COLLECTIVES.items()} == {
        "all_reduce": 1.5,
        "all_gather": 0.75,
        "reduce_scatter": 0.75,
        "broadcast": 1.0,
        "all_to_all": 0.75,
    }


@pytest.mark.parametrize("op", COLLECTIVES)
def test_wrong_values_are_seen(op: str) -> None:
    """Of three ranks, as each collective should leave them, and with one value another."""
    rows = torch.arange(1.0, 4.0).repeat_interleave(2)
    whole = {"all_reduce": torch.full((6,), 6.0), "all_gather": rows, "broadcast": torch.ones(6)}.get(
        op, torch.zeros(6)
    )
    buffers = Buffers(whole, torch.full((2,), 6.0), rows.clone())
    assert COLLECTIVES[op].right(buffers, 3)
    for buffer in (buffers.whole, buffers.part, buffers.other):
        buffer[-1] += 1
    assert not COLLECTIVES[op].right(buffers, 3)
