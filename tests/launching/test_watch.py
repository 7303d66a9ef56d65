"""Ranks seen from outside: heartbeats, who waits for whom, who outlives whom. Without torch, without a process group."""

from __future__ import annotations

import errno
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distbench.errors import RunFolderError
from distbench.launching import local
from distbench.launching import watch as watching
from distbench.launching.heartbeat import DONE, LAYOUT, Beat, Heartbeat, beats, rank_files, ranks_folder, read_beat
from distbench.launching.signals import DUMP, send
from distbench.launching.stalls import Seen, explain
from distbench.launching.watch import Limits, Watch, keep_evidence, process_state
from distbench.runs.folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder.create(tmp_path)
    ranks_folder(folder).mkdir(parents=True)
    return folder


# --- heartbeats


def test_a_heartbeat_says_where_a_rank_is(folder: RunFolder) -> None:
    path = rank_files(folder, 0).heartbeat
    heart = Heartbeat(path)
    assert read_beat(path).phase == "starting" and str(read_beat(path)) == "starting"
    heart.beat("forward", 7)
    first = read_beat(path)
    assert (first.step, first.phase, str(first)) == (7, "forward", "step 7, forward")
    heart.beat("forward", 7)
    assert read_beat(path).beats == first.beats + 1, "the same place again is a sign of life"
    heart.beat("a phase of a very long name that has no room")
    assert read_beat(path).phase == "a phase of a very long n" and read_beat(path).step is None
    assert beats(folder, range(3)).keys() == {0}


@pytest.mark.parametrize("content", [b"", b"dbheart1", b"\0" * LAYOUT.size, b"x" * 500])
def test_what_is_no_heartbeat_is_refused(content: bytes, folder: RunFolder) -> None:
    path = rank_files(folder, 0).heartbeat
    path.write_bytes(content)
    with pytest.raises(RunFolderError, match="is not a heartbeat"):
        read_beat(path)
    with pytest.raises(RunFolderError, match="cannot be read"):
        read_beat(path / "nothing")
    assert beats(folder, [0]) == {}


def test_a_heartbeat_is_there_whenever_it_is_read(folder: RunFolder) -> None:
    path = rank_files(folder, 0).heartbeat
    Heartbeat(path)
    script = (
        "import sys, pathlib; from distbench.launching.heartbeat import Heartbeat\n"
        "heart = Heartbeat(pathlib.Path(sys.argv[1]))\n"
        "for step in range(1_000_000): heart.beat('forward', step)"
    )
    beating = subprocess.Popen([sys.executable, "-c", script, str(path)])
    while beating.poll() is None:
        found = read_beat(path)  # raises where there is none
    assert beating.returncode == 0 and found.phase == "forward"


# --- who waits for whom

STACK = """Thread 0x00007f52d1efc6c0 (most recent call first):
  File "/x/lib/python3.11/threading.py", line 982 in run

Current thread 0x00007f52d2a3db80 (most recent call first):
  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/home/me/net.py", line 9 in forward
  File "/home/me/main.py", line 1 in main
"""


def entry(
    number: int, ended: bool = False, operation: str = "all_reduce", shape: int = 4, group: str = "0"
) -> dict[str, Any]:
    found = {"group": group, "number": number, "operation": operation, "dtype": "Float"}
    return {**found, "shapes": [[shape]], "ended": ended}


def seen(
    *entries: dict[str, Any],
    idle: float = 5.0,
    state: str | None = "S",
    phase: str = "backward",
    answers: bool = True,
    groups: dict[str, list[int]] | None = None,
) -> Seen:
    collectives = {"groups": groups or {"0": [0, 1, 2]}, "entries": list(entries), "reason": None}
    return Seen(Beat(1, 9, 3, phase), idle, state, collectives if answers else None, STACK if answers else "")


def test_who_has_not_come_to_a_collective() -> None:
    stall = explain({0: seen(entry(5)), 1: seen(entry(4, ended=True), phase="data"), 2: seen(entry(5))})
    assert stall.rank == 1 and stall.beat.phase == "data"
    assert stall.message == (
        "ranks 0, 2 wait for rank 1 in all_reduce 5 of group 0 (Float 4); rank 1 has not come to it: it is in step 3, data, "
        "at net.py:9 in forward"
    )
    assert (
        len(stall.lines) == 3
        and "rank 2: step 3, backward, at net.py:9 in forward, since 5 s, in all_red" in stall.lines[2]
    )


def test_who_is_still_in_an_earlier_one() -> None:
    stall = explain({0: seen(entry(5)), 1: seen(entry(4)), 2: seen(entry(5))})
    assert stall.rank == 1 and "rank 1 is still in all_reduce 4" in stall.message


def test_who_is_in_another_at_the_same_place() -> None:
    stall = explain({0: seen(entry(5)), 1: seen(entry(5, operation="all_gather")), 2: seen(entry(5))})
    assert stall.rank == 1 and stall.message == (
        "ranks are in different collectives at the same place: ranks 0, 2 in all_reduce 5 of group 0 (Float 4); rank 1 in "
        "all_gather 5 of group 0 (Float 4)"
    )
    assert explain({0: seen(entry(5, shape=3)), 1: seen(entry(5)), 2: seen(entry(5))}).rank == 0


def test_a_stopped_process_explains_it_all() -> None:
    stall = explain({0: seen(entry(5)), 1: seen(state="T", answers=False), 2: seen(entry(5))})
    assert stall.rank == 1 and stall.message == "rank 1 is stopped (SIGSTOP), in step 3, backward"
    assert stall.lines[1].endswith("its process is stopped")


def test_all_in_one_collective_is_no_ranks_fault() -> None:
    stall = explain({rank: seen(entry(5), idle=5 + rank) for rank in range(3)})
    assert (
        stall.message == "all ranks are in all_reduce 5 of group 0 (Float 4), for 7 s: a link or a device, not a rank"
    )


def test_nobody_in_a_collective() -> None:
    stall = explain({0: seen(idle=4), 1: seen(idle=9, answers=False, phase="data")})
    assert stall.rank == 1 and stall.message == "rank 1 has not moved for 9 s, in step 3, data"
    assert stall.lines[1].endswith("it does not answer: native code holds its interpreter")


def test_groups_have_members_of_their_own() -> None:
    groups = {"0": [0, 1, 2], "1": [1, 2]}
    ranks = {0: seen(groups=groups), 1: seen(entry(2, group="1"), groups=groups), 2: seen(groups=groups)}
    assert explain(ranks).message.startswith("rank 1 waits for rank 2 in all_reduce 2 of group 1")


def test_a_member_on_another_host_is_said_to_be_there() -> None:
    assert explain({0: seen(entry(5)), 1: seen(entry(5))}).message.endswith("; rank 2 is on another host")


# --- processes


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    found = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) for _ in range(2)]
    yield found
    for process in found:
        process.kill()
        process.wait()


def pretend(folder: RunFolder, rank: int, pid: int, phase: str = "forward") -> None:
    rank_files(folder, rank).heartbeat.write_bytes(LAYOUT.pack(b"dbheart1", pid, 1, 2, phase.encode()))


def test_who_outlives_another_is_ended(folder: RunFolder, sleepers: list[subprocess.Popen[bytes]]) -> None:
    for rank, process in enumerate(sleepers):
        pretend(folder, rank, process.pid)
    with Watch(folder, range(2), Limits(stall=None, grace=0.6)) as watch:
        time.sleep(1.0)
        assert [process.poll() for process in sleepers] == [None, None], "both live, and may stay where they are"
        sleepers[0].kill()
        sleepers[0].wait()
        assert sleepers[1].wait(timeout=20) == -9
    assert watch.stall is None and watch.last_beats.keys() == {0, 1}


@pytest.mark.parametrize("what", ["nothing can be written", "the folder is gone"])
def test_who_stands_still_is_ended_whatever_can_be_written(
    what: str, folder: RunFolder, sleepers: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(watching, "write_json", full)
    monkeypatch.setattr(watching, "send", lambda number, pids: send(signal.SIGKILL, pids) if number != DUMP else None)
    monkeypatch.setattr(watching, "ANSWER_S", 0.1)
    for rank, process in enumerate(sleepers):
        pretend(folder, rank, process.pid)
    with Watch(folder, range(2), Limits(stall=1.0, grace=0.5)) as watch:
        time.sleep(0.6)
        if what == "the folder is gone":
            shutil.rmtree(folder.path)
        assert [process.wait(timeout=20) for process in sleepers] == [-9, -9]
    assert watch.stall is not None and watch.last_beats.keys() == {0, 1}


def test_who_is_done_ends_nobody(folder: RunFolder, sleepers: list[subprocess.Popen[bytes]]) -> None:
    pretend(folder, 0, sleepers[0].pid, DONE)
    pretend(folder, 1, sleepers[1].pid)
    sleepers[0].kill()
    sleepers[0].wait()
    with Watch(folder, range(2), Limits(stall=None, grace=0.1)):
        time.sleep(1.0)
        assert sleepers[1].poll() is None


def test_a_process_has_a_state(sleepers: list[subprocess.Popen[bytes]]) -> None:
    process = sleepers[0]
    assert process_state(process.pid) in ("R", "S", "D")
    process.kill()
    until = time.monotonic() + 20
    while process_state(process.pid) != "Z":
        assert time.monotonic() < until
    process.wait()
    assert process_state(process.pid) == "gone"


def test_evidence_is_kept_and_the_rest_is_not(folder: RunFolder) -> None:
    files = rank_files(folder, 1)
    Heartbeat(files.heartbeat)
    files.stacks.write_text("")
    files.collectives.write_text("{}")
    (folder.logs / ".failure_rank0.json.abc.tmp").touch()
    keep_evidence(folder)
    assert [path.name for path in folder.logs.iterdir()] == ["collectives_rank1.json"]
    keep_evidence(folder)


def test_the_kernel_counts_its_out_of_memory_kills(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert local.out_of_memory_kills() >= 0
    for text, count in (("nr_free 3\noom_kill 4\n", 4), ("nr_free 3\n", 0), ("what is this\n", 0)):
        (tmp_path / "vmstat").write_text(text)
        monkeypatch.setattr(local, "Path", lambda _: tmp_path / "vmstat")
        assert local.out_of_memory_kills() == count
