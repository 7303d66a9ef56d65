"""The first failure is told from those it caused, and the user's traceback from ours."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distbench.config import LossKind
from distbench.errors import ConfigError, ExitCode, NonDeterministicStart
from distbench.launching.failure import clear_failures, first_failure, put_aside, root_failure, write_rank_failure
from distbench.launching.heartbeat import DONE, Beat
from distbench.launching.stalls import Stall
from distbench.losses import Loss, LossFunction
from distbench.runs.folder import RunFolder
from tests.models_for_tests import Raises


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path)


def caught(function: Callable[[], Any]) -> BaseException:
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("it did not raise")


def user_error() -> None:
    Raises()(torch.ones(1, 6))


LOST = RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:22966")


def test_a_users_traceback_starts_in_the_users_code(folder: RunFolder) -> None:
    failure = write_rank_failure(folder, 1, caught(user_error))
    assert json.loads((folder.logs / "failure_rank1.json").read_text()) == failure
    assert (failure["rank"], failure["type"], failure["message"]) == (1, "ArithmeticError", "the user's own mistake")
    assert failure["exit_code"] == ExitCode.CRASHED and failure["status"] == "crashed" and not failure["user_error"]
    lines = failure["traceback"].splitlines()
    assert lines[0] == "Traceback (most recent call last):" and lines[-1].startswith("ArithmeticError")
    assert "test_failure.py" in lines[1], "it starts in the file of the first frame that is not ours"
    assert "torch/nn/modules/module.py" in failure["full_traceback"]


def test_frames_of_ours_and_torchs_are_left_out_before_the_users(folder: RunFolder) -> None:
    def through_us() -> None:
        LossFunction(Loss(LossKind.sum)).sum(Raises()(torch.ones(1, 6)), torch.ones(1))

    error = caught(through_us)
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next.tb_next.tb_next  # as if called from torch
    lines = write_rank_failure(folder, 0, error)["traceback"].splitlines()
    assert "models_for_tests.py" in lines[1]


def test_an_error_in_our_code_alone_keeps_all_of_its_traceback(folder: RunFolder) -> None:
    error = caught(lambda: LossFunction(Loss(LossKind.mse)).sum(None, None))  # type: ignore[arg-type]
    error = error.with_traceback(error.__traceback__.tb_next.tb_next)  # type: ignore[union-attr]
    assert "losses.py" in write_rank_failure(folder, 0, error)["traceback"]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (MemoryError(), "oom", 4),
        (torch.OutOfMemoryError("CUDA out of memory"), "oom", 4),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), "oom", 4),
        (RuntimeError("something else"), "crashed", 4),
        (ConfigError("a wrong setting"), "crashed", 2),
        (NonDeterministicStart("weights differ"), "crashed", 4),
    ],
)
def test_kinds_of_failure(folder: RunFolder, error: BaseException, status: str, code: int) -> None:
    failure = write_rank_failure(folder, 0, error)
    assert (failure["status"], failure["exit_code"]) == (status, code)


def write(folder: RunFolder, rank: int, error: BaseException, when: float) -> None:
    failure = {**write_rank_failure(folder, rank, error), "time": when}
    (folder.logs / f"failure_rank{rank}.json").write_text(json.dumps(failure))


def test_the_earliest_is_the_cause(folder: RunFolder) -> None:
    assert first_failure(folder) is None
    write(folder, 0, LOST, when=2.0)
    write(folder, 1, ValueError("cause"), when=1.0)
    (folder.logs / "failure_rank2.json").write_text('{"rank": 2, "ti')  # killed while it wrote
    found = first_failure(folder)
    assert found is not None and found["rank"] == 1
    assert root_failure(folder, [(0, 1), (1, 1)], 3)["message"] == "cause"
    clear_failures(folder)
    assert first_failure(folder) is None


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([(1, -signal.SIGKILL)], "rank 1 died without an error: killed by signal 9 (SIGKILL), not for want of memory"),
        ([(1, -signal.SIGSEGV), (0, 1)], "rank 1 died without an error: killed by signal 11 (SIGSEGV)"),
        ([(1, 7)], "rank 1 died without an error: exit code 7"),
        ([(0, 1)], "rank 1 died without an error: killed"),
        ([], "rank 1 died without an error: killed"),
    ],
)
def test_a_killed_rank_is_named_and_not_the_peer_that_lost_it(
    folder: RunFolder, ranks: list[tuple[int, int]], message: str
) -> None:
    write(folder, 0, LOST, when=2.0)
    failure = root_failure(folder, ranks, 2)
    assert failure["message"].startswith(message) and failure["reason"] == failure["message"]
    assert (failure["rank"], failure["status"], failure["exit_code"]) == (1, "crashed", 4)


def test_where_it_cannot_be_told_who_was_killed_all_are_named(folder: RunFolder) -> None:
    write(folder, 0, LOST, when=2.0)
    ended = [(0, 1), (2, -signal.SIGTERM)]
    assert root_failure(folder, ended, 3)["message"].startswith("one of rank 1, rank 2 died without an error")
    assert root_failure(folder, [*ended, (1, -9)], 3)["message"].startswith("rank 1 died without an error: killed by s")


def test_a_lost_peer_that_told_why_is_not_called_dead(folder: RunFolder) -> None:
    write(folder, 0, LOST, when=1.0)
    write(folder, 1, LOST, when=2.0)
    assert root_failure(folder, [(0, 1)], 2)["message"] == str(LOST)


def test_the_baselines_process_can_die_as_well(folder: RunFolder) -> None:
    message = root_failure(folder, [(-1, -9)], 2)["message"]
    assert message.startswith("the baseline died without an error: killed by signal 9")


def test_what_the_kernel_killed_for_want_of_memory_ran_out_of_it(folder: RunFolder) -> None:
    write(folder, 0, LOST, when=2.0)
    failure = root_failure(folder, [(1, -signal.SIGKILL)], 2, out_of_memory=True)
    assert failure["status"] == "oom" and "while the kernel killed for want of memory" in failure["message"]
    failure = root_failure(folder, [(1, -signal.SIGSEGV)], 2, out_of_memory=True)
    assert failure["status"] == "crashed" and "memory" not in failure["message"]


def test_where_it_was_and_whom_it_took_with_it(folder: RunFolder) -> None:
    found = {0: Beat(1, 9, 3, "backward"), 1: Beat(2, 9, 3, "data"), 2: Beat(3, 9, None, DONE)}
    failure = root_failure(folder, [(1, -signal.SIGKILL), (0, -signal.SIGTERM)], 3, found)
    assert (failure["rank"], failure["step"], failure["phase"], failure["ended_with_it"]) == (1, 3, "data", [0])
    assert failure["ranks"] == {"0": "step 3, backward", "1": "step 3, data", "2": "done"} and failure["host"]
    unknown = root_failure(folder, [(-1, 1)], 3)
    assert unknown["step"] is unknown["phase"] is None and unknown["ended_with_it"] == []


def test_a_stall_is_told_instead_of_the_signal_that_ended_it(folder: RunFolder) -> None:
    stall = Stall(1, Beat(2, 9, 4, "forward"), "rank 0 waits for rank 1", ("rank 0: x", "rank 1: y"))
    failure = root_failure(folder, [(0, -9), (1, -9)], 2, {0: Beat(1, 1, 5, "data"), 1: Beat(2, 9, 5, "data")}, stall)
    assert (failure["status"], failure["message"], failure["step"]) == ("hung", "rank 0 waits for rank 1", 4)
    assert failure["lines"] == ["rank 0: x", "rank 1: y"] and failure["ended_with_it"] == [0]


@pytest.mark.parametrize(
    "message",
    [
        "Timed out waiting 3000ms for recv operation to complete",
        "[Rank 1] Watchdog caught collective operation timeout: x",
    ],
)
def test_a_collective_that_gave_up_waiting_has_hung(message: str, folder: RunFolder) -> None:
    assert write_rank_failure(folder, 0, RuntimeError(message))["status"] == "hung"


def test_the_last_words_of_a_rank_that_died(folder: RunFolder) -> None:
    log = folder.logs / "rank1.log"
    log.write_text("".join(f"line {n}\n\n" for n in range(30)))
    assert root_failure(folder, [(1, 7)], 2)["lines"] == [f"line {n}" for n in range(18, 30)]
    stack = "".join(f'  File "f", line {n} in g\n' for n in range(3))
    log.write_text(
        f"x\nterminate called\nFatal Python error: Aborted\n\nThread 0x1 (..):\n  File 1\nCurrent thread 0x2\n{stack}"
    )
    write(folder, 0, LOST, when=2.0)
    failure = root_failure(folder, [], 2)
    assert failure["lines"][:3] == ["terminate called", "Fatal Python error: Aborted", "Current thread 0x2"]
    assert (
        len(failure["lines"]) == 6 and failure["message"] == "rank 1 died without an error: Fatal Python error: Aborted"
    )


def test_evidence_of_attempts_before_is_put_aside(folder: RunFolder) -> None:
    put_aside(folder)
    assert not list(folder.logs.iterdir()), "nothing to keep"
    for number in (1, 2):
        write(folder, 0, LOST, when=2.0)
        (folder.logs / "stall.json").touch()
        (folder.logs / "rank0.log").touch()
        put_aside(folder)
        assert {path.name for path in (folder.logs / f"failed_{number}").iterdir()} == {
            "failure_rank0.json",
            "rank0.log",
            "stall.json",
        }
    assert first_failure(folder) is None
    (folder.logs / "rank0.log").touch()
    put_aside(folder)
    assert (folder.logs / "rank0.log").exists(), "of an attempt that did not fail"
