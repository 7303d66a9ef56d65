"""What a rank does when it is told to stop, or asked where it is."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from distbench.runs.files import write_json

STOP = signal.SIGUSR1
"""Asks a rank to end after its step."""
DUMP = signal.SIGRTMIN + 10 if sys.platform == "linux" else signal.SIGUSR2
"""Asks a rank for its stacks and its collectives. Schedulers use SIGUSR1 and SIGUSR2 for purposes of their own."""


def requests() -> tuple[signal.Signals, ...]:
    """What asks a run to end after its step: ours, and a scheduler's, which it sends to every process of a job."""
    return (STOP, signal.SIGUSR2, *([signal.SIGTERM] if "SLURM_STEP_ID" in os.environ else []))


@contextmanager
def ignored(numbers: Iterable[signal.Signals]) -> Iterator[None]:
    """Without effect on what is started meanwhile, and on this process for that moment. In the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


PR_SET_PDEATHSIG = 1
"""prctl(2)."""


@dataclass
class StopRequest:
    """Whether this process was told to end early."""

    received: signal.Signals | None = None

    @classmethod
    def on(cls, *numbers: signal.Signals) -> StopRequest:
        """From now on these signals ask, instead of ending the process."""
        request = cls()
        for number in numbers:
            signal.signal(number, request._note)
        return request

    def __call__(self) -> bool:
        return self.received is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number)


def answer_dumps(stacks: Path, collectives: Path) -> None:
    """Write this process's Python stacks and the flight recorder's collectives to these files at each DUMP: the stacks even
    where native code holds the interpreter, the collectives while the main thread waits in one."""
    # Python's own handler runs only when the main thread is back in Python. The byte that its C part leaves in a pipe is
    # there at once, for a thread that waits for it.
    signal.signal(DUMP, lambda number, frame: None)
    faulthandler.register(DUMP, file=stacks.open("w"), all_threads=True, chain=True)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_dump_when_asked, args=(reader, collectives), name="dump", daemon=True).start()


def _dump_when_asked(reader: int, file: Path) -> None:
    from distbench.measure import flight  # torch, which who only sends signals does without

    while numbers := os.read(reader, 64):
        if DUMP in numbers:
            write_json(file, flight.dump())


def end_with_parent() -> None:
    """From now on the kernel kills this process when the one that started it is gone, however that ended. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def send(number: int, processes: Iterable[int]) -> None:
    """To all that there still are."""
    for pid in processes:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
