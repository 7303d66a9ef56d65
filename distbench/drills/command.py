"""The command line as a user types it, in a session of its own, so that everything it starts can be found, and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from distbench.drills.base import DrillError
from distbench.launching.signals import send
from distbench.launching.watch import is_gone, process_state

TIMEOUT_S = 300.0
"""For one command on a crowded machine; none takes a tenth of it on an idle one."""
POLL_S = 0.01


class Command:
    """`python -m distbench ...`, started. What it says goes to a file. A context manager: nothing of it outlives this."""

    def __init__(self, words: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        """`environment`: beside this process's."""
        self.words, self.log = list(words), log
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "distbench", *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def ended(self) -> bool:
        return self.process.poll() is not None

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """Its exit code. Raises DrillError where it does not end."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise DrillError(f"it has not ended after {timeout_s:.0f} s: {self}") from None

    def seconds_until_gone(self, patience_s: float) -> float | None:
        """Until nothing that it started runs any more; None where something still does."""
        began = time.monotonic()
        while self.alive():
            if time.monotonic() - began > patience_s:
                return None
            time.sleep(POLL_S)
        return time.monotonic() - began

    def alive(self) -> list[int]:
        """Processes of the session that run."""
        return [pid for pid in session(self.process.pid) if not is_gone(process_state(pid))]

    def __str__(self) -> str:
        return " ".join(["python -m distbench", *self.words])

    def __enter__(self) -> Command:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        send(signal.SIGKILL, self.alive())
        self.process.wait()


def run(words: Sequence[str], log: Path) -> tuple[int, str]:
    """A command to its end: exit code, and what it said. Raises DrillError where it does not end."""
    with Command(words, log) as command:
        return command.wait(), command.said


def session(leader: int) -> Iterator[int]:
    """Processes of a session, those that have ended but were not waited for among them."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getsid(int(entry.name)) == leader:
                    yield int(entry.name)
            except ProcessLookupError:
                continue
