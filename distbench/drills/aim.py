"""Hitting a rank where it shall be hit: in a phase of a step, or inside of a collective."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from distbench.drills.command import Command
from distbench.drills.site import RANKS, STEPS
from distbench.errors import RunFolderError
from distbench.launching.heartbeat import DONE, Beat, rank_files, read_beat
from distbench.runs.folder import RunFolder

COLLECTIVE = "collective"
PHASES = ("data", "forward", "backward", "optimizer", COLLECTIVE, "checkpoint", "writing")
TRAINING = ("data", "count", "forward", "backward", "optimizer", "checkpoint")
POLL_S = 2e-5
"""Phases of the smallest runs last a tenth of a millisecond."""
STUCK_S = 0.2
"""A rank that says nothing for so long while the other is stopped waits for it."""


@dataclass(frozen=True)
class Aim:
    """Where to hit."""

    rank: int
    phase: str
    step: int
    """Or later, where that one is missed."""
    delay_s: float
    """After the phase was seen: the next one may have come by then."""

    @classmethod
    def draw(cls, rng: random.Random, phase: str) -> Aim:
        delay = 0.0 if rng.random() < 0.5 else rng.uniform(0.0, 0.01)
        return cls(rng.randrange(RANKS), phase, rng.randint(1, STEPS - 2), delay)

    def anywhere(self) -> Aim:
        """The same phase of any step."""
        return replace(self, step=1)

    def __str__(self) -> str:
        return f"rank {self.rank} in {self.phase}, step {self.step}"


class Heart:
    """A rank's heartbeat, which can be read for as long as this is open: after the rank's end, and its file's, too."""

    def __init__(self, path: Path) -> None:
        """Raises FileNotFoundError."""
        self._handle = os.open(path, os.O_RDONLY)

    @classmethod
    def of(cls, folder: Path, rank: int, command: Command) -> Heart | None:
        """Once the rank has begun; None where the run has ended."""
        path = rank_files(RunFolder(folder), rank).heartbeat
        while not command.ended():
            try:
                read_beat(path)
                return cls(path)
            except (RunFolderError, FileNotFoundError):  # not there yet, or made a moment ago
                time.sleep(0.005)
        return None

    def beat(self) -> Beat:
        return read_beat(Path(f"/proc/self/fd/{self._handle}"))

    def send(self, number: signal.Signals) -> bool:
        """Whether the rank was there to get it."""
        beat = self.beat()
        if beat.phase == DONE:
            return False
        try:
            os.kill(beat.pid, number)
        except ProcessLookupError:
            return False
        return True

    def __enter__(self) -> Heart:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._handle)


def strike(aim: Aim, hearts: list[Heart], command: Command, number: signal.Signals) -> bool:
    """Send a signal to a rank of a run when it is where it shall be hit. False where it was not there, up to its end."""
    target, other = hearts[aim.rank], hearts[1 - aim.rank]
    if not _wait_for(aim, target, command):
        return False
    if aim.phase != COLLECTIVE:
        time.sleep(aim.delay_s)
        return target.send(number)
    if not other.send(signal.SIGSTOP):
        return False
    try:
        _wait_until_stuck(target, command)
        return target.send(number)
    finally:
        other.send(signal.SIGCONT)


def _wait_for(aim: Aim, target: Heart, command: Command) -> bool:
    phases = TRAINING if aim.phase == COLLECTIVE else (aim.phase,)
    while not command.ended():
        beat = target.beat()
        if beat.phase in phases and (beat.step is None or beat.step >= aim.step):
            return True
        if beat.phase == DONE:
            return False
        time.sleep(POLL_S)
    return False


def _wait_until_stuck(target: Heart, command: Command) -> None:
    beats, since = -1, time.monotonic()
    while not command.ended() and time.monotonic() - since < STUCK_S:
        beat = target.beat()
        if beat.phase == DONE:
            return
        if beat.beats != beats:
            beats, since = beat.beats, time.monotonic()
        time.sleep(POLL_S)
