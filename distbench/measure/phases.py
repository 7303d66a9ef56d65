"""Where one rank's training thread spends a step: phases by name, and how long it slept in each."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch.profiler import record_function

PREFIX = "distbench."
"""Of the spans that the window makes, in a recording."""


STEP = f"{PREFIX}step"


PHASES = ("data", "forward", "backward", "optimizer")
"""Those that the record splits a step into; the rest of it is `other`."""


class BlockedClock:
    """ns in which this thread was neither running nor waiting for a core: asleep, mostly for a collective.

    Wall time less the thread's CPU time less the scheduler's run delay (Linux, proc_schedstat); so a busy machine is not
    taken for slow communication.
    """

    def __init__(self) -> None:
        self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def __call__(self) -> int:
        delay = int(os.pread(self._file, 64, 0).split()[1])
        return time.perf_counter_ns() - time.thread_time_ns() - delay

    def close(self) -> None:
        os.close(self._file)


def blocked_clock() -> tuple[BlockedClock | None, str | None]:
    """The clock, or why this system has none."""
    try:
        clock = BlockedClock()
        clock()
    except (OSError, IndexError, ValueError) as error:
        return None, f"/proc/thread-self/schedstat cannot be read: {error}"
    return clock, None


class Phases:
    """Seconds and blocked seconds of each phase, summed over a step. Its `span` takes the place of the trainer's."""

    def __init__(self) -> None:
        self.blocked, self.blocked_reason = blocked_clock()
        self.reset()

    def reset(self) -> None:
        self.seconds: dict[str, float] = {}
        self.asleep: dict[str, float] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        blocked = self.blocked() if self.blocked else 0
        start = time.perf_counter_ns()
        with record_function(f"{PREFIX}{name}"):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + (time.perf_counter_ns() - start) / 1e9
        if self.blocked:
            self.asleep[name] = self.asleep.get(name, 0.0) + (self.blocked() - blocked) / 1e9

    def close(self) -> None:
        if self.blocked:
            self.blocked.close()
