"""Where each rank is: its step and phase, in a few bytes that it maps, there for others however it ends."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from distbench.errors import RunFolderError
from distbench.runs.folder import RunFolder

LAYOUT = struct.Struct("<8sqqq24s")
"""Magic, process, beats, step (1-based, -1: before the first), phase."""
MAGIC = b"dbheart1"
DONE = "done"
"""The phase of a rank that has nothing more to do."""


@dataclass(frozen=True)
class Beat:
    """What a heartbeat file says."""

    pid: int
    beats: int
    """How often the rank said where it is: one that does not grow is a rank that does not move."""
    step: int | None
    """The optimizer step it is in, 1-based."""
    phase: str

    def __str__(self) -> str:
        return self.phase if self.step is None else f"step {self.step}, {self.phase}"


class Heartbeat:
    """A rank's own. A beat costs about a microsecond: no system call, no lock."""

    def __init__(self, path: Path) -> None:
        self.beats = 0
        self._pid = os.getpid()
        new = path.with_name(f"{path.name}.new")
        with new.open("wb+") as file:
            file.truncate(LAYOUT.size)
            self._memory = mmap.mmap(file.fileno(), LAYOUT.size)
        self.beat("starting")
        new.replace(path)  # a restarted rank's is never empty for who reads it

    def beat(self, phase: str, step: int | None = None) -> None:
        """`step`: the one that the rank is in, 1-based."""
        self.beats += 1
        number = -1 if step is None else step
        # Not `pack_into`, which clears the memory first: who reads it then finds no heartbeat.
        self._memory[:] = LAYOUT.pack(MAGIC, self._pid, self.beats, number, phase.encode())


def read_beat(path: Path) -> Beat:
    """Raises RunFolderError where there is no heartbeat, or something else under its name."""
    try:
        with path.open("rb") as file:
            data = file.read(LAYOUT.size)
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) < LAYOUT.size or not data.startswith(MAGIC):
        raise RunFolderError(f"{path} is not a heartbeat")
    _, pid, beats, step, phase = LAYOUT.unpack(data)
    return Beat(pid, beats, None if step < 0 else step, phase.rstrip(b"\0").decode(errors="replace"))


@dataclass(frozen=True)
class RankFiles:
    """What a rank keeps for others to read while it runs, or when it is asked."""

    heartbeat: Path
    stacks: Path
    collectives: Path


def rank_files(folder: RunFolder, rank: int) -> RankFiles:
    """Below `ranks_folder`."""
    root = ranks_folder(folder)
    return RankFiles(root / f"rank{rank}", root / f"stacks_rank{rank}.txt", root / f"collectives_rank{rank}.json")


def ranks_folder(folder: RunFolder) -> Path:
    """There while ranks run; what is worth keeping of it is moved to the logs."""
    return folder.logs / ".ranks"


def beats(folder: RunFolder, ranks: Iterable[int]) -> dict[int, Beat]:
    """Of those that have started."""
    found = {}
    for rank in ranks:
        with suppress(RunFolderError):  # not there yet, or made a moment ago
            found[rank] = read_beat(rank_files(folder, rank).heartbeat)
    return found
