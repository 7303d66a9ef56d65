"""What remains when a rank dies, hangs, or is told to end: nobody left behind, the cause named, and a run to go on with."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from distbench import experiment
from distbench.checkpoint.manifest import complete
from distbench.launching.heartbeat import beats
from distbench.runs.folder import RunFolder, read_record
from tests.cli import distbench, start, start_torchrun, target, torchrun
from tests.configs import small

OK, CRASHED, INTERRUPTED = 0, 4, 5
COMMON = ["strategy=ddp", "window=off", "checkpoint.every=5", "hydra.run.dir=run", "logging.progress=false"]
STEPS = 18


def options(how: str, **kwargs: object) -> list[str]:
    words = [word for word in target("GoesWrong", how=how, **kwargs) if not word.startswith("steps=")]
    return [*words, *COMMON, f"steps={STEPS}"]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / read_record(run)["checkpoint"])


def losses(run: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())]


def same(run: Path, other: Path) -> bool:
    mine, theirs = weights(run), weights(other)
    return losses(run) == losses(other) and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happens to."""
    root = tmp_path_factory.mktemp("straight")
    ended = distbench(*options("nothing"), cwd=root)
    assert ended.code == OK, ended.said
    assert not list((root / "run" / "logs").glob(".*")), "heartbeats and the agent's files are gone"
    return root / "run"


def failure(run: Path) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((run / "logs" / "failure.json").read_text())["first"]
    return tree


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("kill", "rank 1 died without an error: killed by signal 9 (SIGKILL), not for want of memory as far as"),
        ("segfault", "rank 1 died without an error: killed by signal 11 (SIGSEGV)"),
        ("exit", "rank 1 died without an error: exit code 7"),
        ("exit well", "rank 1 died without an error: exit code 0, before it was done"),
        ("exit from Python", "rank 1: SystemExit: 0"),
        ("unspeakable", "rank 1: Unspeakable: (its __str__ raises ValueError)"),
    ],
)
def test_a_rank_that_dies_is_named_and_the_run_goes_on_to_the_same_end(
    how: str, reason: str, straight: Path, tmp_path: Path
) -> None:
    once, run = tmp_path / "once", tmp_path / "run"
    ended = distbench(*options(how, once=once), cwd=tmp_path)
    assert ended.code == CRASHED, ended.said
    record, first = read_record(run), failure(run)
    assert record["status"] == "crashed" and record["reason"].startswith(reason) and record["finished"]
    assert record["last_checkpoint"] == "checkpoints/step_00000010"
    assert (first["rank"], first["step"], first["phase"], first["ended_with_it"]) == (1, 12, "forward", [0])
    assert first["ranks"].keys() == {"0", "1"} and first["host"]
    for words in ("step 12, forward, rank 1 on ", "with it      rank 0\n", "python -m distbench resume=run"):
        assert words in ended.out, words
    if how == "segfault":
        assert "Fatal Python error: Segmentation fault" in ended.out and "in go_wrong" in ended.out
    if how != "kill":
        return
    resumed = distbench("resume=run", cwd=tmp_path)
    assert resumed.code == OK, resumed.said
    assert same(run, straight)
    assert not (run / "logs" / "failure.json").exists()
    assert json.loads((run / "logs" / "failed_1" / "failure.json").read_text())["first"] == first, "still there to read"


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("exit well", "one of rank 0, rank 1 died without an error: exit code 0, before it was done"),
        ("exit from Python", "SystemExit: 0"),
    ],
)
@pytest.mark.parametrize("strategy", ["ddp", "single"])
def test_ranks_that_all_say_they_ended_well_and_were_not_done(
    how: str, reason: str, strategy: str, tmp_path: Path
) -> None:
    """torch's agent waits for what they return, for good, or takes them for done."""
    words = [word for word in options(how, rank=-1) if not word.startswith("strategy=")]
    ended = distbench(*words, f"strategy={strategy}", "launch.grace_s=1", cwd=tmp_path)
    assert ended.code == CRASHED, ended.said
    record = read_record(tmp_path / "run")
    expected = reason.replace("one of rank 0, rank 1", "rank 0") if strategy == "single" else reason
    assert record["status"] == "crashed" and expected in record["reason"] and record["finished"]
    assert failure(tmp_path / "run")["step"] == 12 and record["last_checkpoint"] == "checkpoints/step_00000010"


def test_ranks_that_end_and_say_nothing_leave_no_record_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(experiment, "start_ranks", lambda *_: None)
    outcome = experiment.run(small(), RunFolder.create(tmp_path / "run"))
    record = read_record(tmp_path / "run")
    assert (outcome.status.value, outcome.exit_code) == ("crashed", CRASHED) == (record["status"], 4)
    assert "the ranks ended and said nothing" in record["reason"] and record["finished"]
    assert record["reason"] in capsys.readouterr().out


def test_a_run_is_started_again_as_often_as_asked(straight: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = distbench(*options("kill", once=tmp_path / "once"), "launch.max_restarts=1", cwd=tmp_path)
    assert ended.code == OK, ended.said
    assert "restart 1 of 1" in ended.out and same(run, straight)
    (restart,) = read_record(run)["restarts"]
    assert restart["step"] == 10 and restart["reason"].startswith("rank 1 died without an error: killed by signal 9")
    again = tmp_path / "again"
    words = [*options("exit", at=2), "checkpoint=off", "launch.max_restarts=2", f"hydra.run.dir={again}"]
    ended = distbench(*(word for word in words if word != "checkpoint.every=5"), cwd=tmp_path)
    assert ended.code == CRASHED and "restart 2 of 2" in ended.out, ended.said
    assert [row["step"] for row in read_record(again)["restarts"]] == [0, 0], "without a checkpoint, from the start"
    for kept in ("failed_1/failure.json", "failed_2/failure.json", "failure.json"):
        assert (again / "logs" / kept).is_file()


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_run_that_ended_in_its_tracked_steps_keeps_its_window_and_says_so(restarts: int, tmp_path: Path) -> None:
    words = [word for word in options("kill", at=STEPS + 2, once=tmp_path / "once") if word != "window=off"]
    ended = distbench(*words, "window=default", f"launch.max_restarts={restarts}", cwd=tmp_path)
    run, untracked = tmp_path / "run", "the run ended in its tracked steps"
    if restarts == 0:
        assert ended.code == CRASHED and failure(run)["step"] == STEPS + 2, ended.said
        window = read_record(run)["window"]
        assert (window["memory_by_kind"], window["memory_by_kind_reason"]) == (None, untracked)
        ended = distbench("resume=run", cwd=tmp_path)
    assert ended.code == OK, ended.said
    record = read_record(run)
    window = record["window"]
    assert (window["memory_by_kind"], window["memory_by_kind_reason"]) == (None, untracked)
    assert window["flops"] == {"per_step": None, "meter": None, "closed_form": None, "reason": untracked}
    assert window["step_time"]["median"] > 0 and record["result"]["steps"] == STEPS
    assert len(record["restarts"]) == restarts and record["status"] == "passed"


@pytest.mark.parametrize(
    ("how", "message", "answers"),
    [
        ("freeze", "rank 1 is stopped (SIGSTOP), in step 12, forward", {0}),
        ("sleep", "rank 1 has not come to it: it is in step 12, forward, at models_for_tests.py:", {0, 1}),
        ("native", "rank 1 has not come to it: it is in step 12, forward, at models_for_tests.py:", {0}),
    ],
)
def test_a_rank_that_hangs_is_found_and_what_the_others_wait_for(
    how: str, message: str, answers: set[int], tmp_path: Path
) -> None:
    began = time.monotonic()
    ended = distbench(*options(how), "launch.stall_timeout_s=3", cwd=tmp_path)
    assert ended.code == CRASHED and time.monotonic() - began < 120, ended.said
    run = tmp_path / "run"
    record, first = read_record(run), failure(run)
    assert record["status"] == "hung" and message in record["reason"], record["reason"]
    if how != "freeze":
        assert record["reason"].startswith("rank 0 waits for rank 1 in all_reduce ")
    assert (first["rank"], first["step"], first["phase"], first["ended_with_it"]) == (1, 12, "forward", [0])
    assert message in ended.out and "rank 0: step 12, backward" in ended.out
    assert {int(path.stem[-1]) for path in (run / "logs").glob("collectives_rank*.json")} == answers
    stacks = (run / "logs" / "stacks_rank0.txt").read_text()
    assert "in backward" in stacks and "trainer.py" in stacks
    assert "native code holds its interpreter" in ended.out if how == "native" else True
    assert (run / "logs" / "stall.json").is_file() and not (run / "logs" / ".ranks").exists()


def test_a_slow_rank_is_no_hung_one(tmp_path: Path) -> None:
    """Phases that take longer than others, and less than the limit; and no limit at all."""
    words = [*options("nothing"), "model._target_=tests.models_for_tests.Dawdles", "+model.kwargs.seconds=0.7"]
    words = [word for word in words if not word.startswith(("+model.kwargs.how", "steps="))]
    ended = distbench(*words, "steps=4", "launch.stall_timeout_s=2.5", cwd=tmp_path)
    assert ended.code == OK, ended.said
    ended = distbench(*words, "steps=3", "launch.stall_timeout_s=null", "hydra.run.dir=other", cwd=tmp_path)
    assert ended.code == OK, ended.said


# --- told to end


def until_checkpoint(run: Path) -> None:
    wait(lambda: bool(complete(run / "checkpoints")))


def wait(condition: Callable[[], bool], patience_s: float = 120.0) -> None:
    until = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_run_that_is_asked_to_stop_writes_a_checkpoint_first(number: signal.Signals, tmp_path: Path) -> None:
    words = [word for word in options("nothing") if not word.startswith("steps=")]
    command, run = start(*words, "steps=100000", cwd=tmp_path), tmp_path / "run"
    until_checkpoint(run)
    if number is signal.SIGINT:
        command.signal(number)  # as a terminal does it: to all
    else:
        os.kill(command.process.pid, number)
    ended = command.finish()
    assert ended.code == INTERRUPTED, ended.said
    record, reached = read_record(run), losses(run)[-1][0]
    assert record["status"] == "interrupted" and record["reason"] == f"stopped as asked after step {reached}"
    assert record["last_checkpoint"] == f"checkpoints/step_{reached:08d}" and record["finished"]
    assert "python -m distbench resume=run" in ended.out and not list((run / "logs").glob("fail*"))
    if number is signal.SIGTERM:
        assert distbench("resume=run", f"steps={reached + 1}", cwd=tmp_path).code == OK


def test_ranks_do_not_outlive_who_started_them(tmp_path: Path) -> None:
    words = [word for word in options("nothing") if not word.startswith("steps=")]
    command, run = start(*words, "steps=100000", cwd=tmp_path), tmp_path / "run"
    until_checkpoint(run)
    ranks = [beat.pid for beat in beats(RunFolder(run), range(2)).values()]
    assert len(ranks) == 2 and all(map(psutil.pid_exists, ranks))
    os.kill(command.process.pid, signal.SIGKILL)
    wait(lambda: not any(map(alive, ranks)), 20)
    command.finish()


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def unused(names: set[str]) -> set[str]:
    """Of shared memory: what no process maps. (Other tests may run beside.)"""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text()
        except OSError:
            continue
        names = {name for name in names if name not in text}
    return names


def test_nothing_is_left_in_shared_memory_or_listening(tmp_path: Path) -> None:
    before = shared_memory()
    words = [word for word in options("nothing") if not word.startswith("steps=")]
    command = start(*words, "steps=100000", cwd=tmp_path)
    until_checkpoint(tmp_path / "run")
    ports = {c.laddr.port for p in command.alive() for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert ports
    rank = beats(RunFolder(tmp_path / "run"), [1])[1].pid
    os.kill(rank, signal.SIGKILL)
    assert command.finish().code == CRASHED
    listening = {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert not ports & listening
    # Of another run that ends beside, what it had is nobody's for a moment; what is left by this one stays.
    wait(lambda: not unused(shared_memory() - before), 20)


# --- torchrun


def test_torchrun_ranks_that_hang_end_and_say_who_waits_for_whom(tmp_path: Path) -> None:
    ended = torchrun(*options("sleep"), "launch.stall_timeout_s=3", cwd=tmp_path)
    assert ended.code != OK
    record = read_record(tmp_path / "run")
    assert record["status"] == "hung" and record["reason"].startswith("rank 0 waits for rank 1 in all_reduce ")
    assert ended.out.count("rank 1 has not come to it") == 1 and "python -m distbench resume=run" in ended.out


def test_torchrun_starts_again_from_the_checkpoint(straight: Path, tmp_path: Path) -> None:
    once = tmp_path / "once"
    ended = torchrun(*options("kill", once=once), cwd=tmp_path, options=["--max-restarts", "1"])
    assert ended.code == OK, ended.said
    assert "rank 1 died without an error" in ended.out
    run = tmp_path / "run"
    assert same(run, straight) and [row["step"] for row in read_record(run)["resumes"]] == [10]


def test_torchrun_that_is_told_to_end_writes_a_checkpoint(tmp_path: Path) -> None:
    words = [word for word in options("nothing") if not word.startswith("steps=")]
    command = start_torchrun(*words, "steps=100000", cwd=tmp_path)
    run = tmp_path / "run"
    until_checkpoint(run)
    os.kill(command.process.pid, signal.SIGTERM)
    command.finish()
    reached = losses(run)[-1][0]
    record = read_record(run)
    assert record["status"] == "interrupted" and record["last_checkpoint"] == f"checkpoints/step_{reached:08d}"
