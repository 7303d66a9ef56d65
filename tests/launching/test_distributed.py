"""The helper that the other tests stand on, and one rank's view of the world."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from distbench.launching.world import World
from tests.distributed import RankFailed, run_distributed


def identity(world: World, word: str) -> tuple[str, int, int, int, str | None]:
    return word, world.rank, world.size, os.getpid(), world.backend


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_ranks_value_comes_back_in_order(size: int) -> None:
    values = run_distributed(identity, size, "word")
    assert [value[:3] for value in values] == [("word", rank, size) for rank in range(size)]
    assert len({value[3] for value in values} | {os.getpid()}) == size + 1, "not processes of their own"
    assert {value[4] for value in values} == {"gloo"}


def test_ranks_are_fresh() -> None:
    (first,), (second,) = run_distributed(identity, 1, ""), run_distributed(identity, 1, "")
    assert first[3] != second[3]


def fail_on(world: World, rank: int, how: str) -> None:
    if world.rank == rank:
        if how == "raise":
            raise ArithmeticError("the first cause")
        if how == "exit":
            os._exit(3)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_failure_is_told_and_nobody_waits(rank: int) -> None:
    with pytest.raises(RankFailed, match=rf"rank {rank} failed:(.|\n)*ArithmeticError: the first cause"):
        run_distributed(fail_on, 2, rank, "raise")


@pytest.mark.parametrize(("how", "code"), [("exit", "3"), ("kill", "-9")])
def test_a_rank_that_dies_is_told(how: str, code: str) -> None:
    with pytest.raises(RankFailed, match=f"died with exit code {code}|closed by peer|reset by peer"):
        run_distributed(fail_on, 2, 1, how)


def test_a_deadlock_ends() -> None:
    with pytest.raises(RankFailed, match=r"ranks \[0, 1\] did not return in time"):
        run_distributed(fail_on, 2, 1, "sleep", timeout_s=3.0)


# --------------------------------------------------------------------------------------------------------------
# World
# --------------------------------------------------------------------------------------------------------------


def collectives(world: World) -> dict[str, object]:
    return {
        "sum": world.sum(torch.tensor([2.0**world.rank, 2.0**-1074], dtype=torch.float64)).tolist(),
        "gather": world.gather({"rank": world.rank}),
        "described": world.describe(),
    }


def test_collectives() -> None:
    for rank, got in enumerate(run_distributed(collectives, 3)):
        assert got["sum"] == [7.0, 3 * 2.0**-1074]
        assert got["gather"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        described = got["described"]
        assert isinstance(described, dict)
        assert (described["rank"], described["local_rank"], described["device"]) == (rank, rank, "cpu")
        assert described["threads"] == 1


def test_one_process_needs_no_group() -> None:
    world = World.join("cpu", 10.0, needs_group=False)
    assert (world.rank, world.size, world.backend) == (0, 1, None)
    assert not dist.is_initialized()
    tensor = torch.ones(2)
    assert world.sum(tensor) is tensor and world.gather("x") == ["x"]
    world.barrier()
    world.leave()
