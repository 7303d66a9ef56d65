"""Waiting for a core is seen, and told."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from distbench.measure import cores
from distbench.measure.cores import queued, waited
from distbench.runs.candidates import _cores


def seconds_waited(threads: int) -> float:
    """While this one and `threads` more, which need no lock of Python's, want one core."""
    import hashlib

    data, stop = bytes(1 << 20), threading.Event()

    def other() -> None:
        while not stop.is_set():
            hashlib.sha256(data)  # outside the interpreter's lock

    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(mine)})
    started = [threading.Thread(target=other) for _ in range(threads)]
    for thread in started:
        thread.start()
    before = queued()
    for _ in range(200):
        hashlib.sha256(data)
    found = waited(before, queued())
    stop.set()
    for thread in started:
        thread.join()
    os.sched_setaffinity(0, mine)
    assert found is not None
    return found


@pytest.mark.skipif(not queued(), reason="no schedstat here")
def test_threads_that_share_a_core_wait_for_it() -> None:
    assert seconds_waited(3) > 0.1, "200 MiB of SHA-256 on a third of a core and less"


def test_a_system_that_does_not_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "TASKS", tmp_path / "none")
    assert queued() == {} and waited({}, {}) is None and waited({"1": 5}, {"2": 7}) is None
    monkeypatch.setattr(cores, "TASKS", tmp_path)
    for name, text in (("1", "10 20 3\n"), ("2", ""), ("3", "a b c")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "schedstat").write_text(text)
    assert queued() == {"1": 20}
    assert waited({"1": 5_000_000_000, "9": 1}, {"1": 20_000_000_000, "2": 0}) == 15.0


def test_it_is_told_beside_a_candidate() -> None:
    assert _cores({"core_wait": {"share": 0.43}}) == (
        "cores were short: a thread could run and had none for 43% of a step",
    )
    for share in (0.1, None, "nan", float("nan"), 7.0, True):
        assert _cores({"core_wait": {"share": share}}) == ()
    assert _cores({}) == ()
