"""A disk that has no room for a second checkpoint, or files that may not become as large as one."""

from __future__ import annotations

import os
import random
import resource
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from distbench.checkpoint.manifest import complete
from distbench.checkpoint.saving import UNFINISHED
from distbench.checkpoint.shards import shard_name
from distbench.drills.base import Case, Drill, Promises, Skipped
from distbench.drills.command import POLL_S, Command, run
from distbench.drills.site import RANKS, SMALL, STEPS, Settings, Site, metrics, same, whole
from distbench.errors import ExitCode
from distbench.launching.heartbeat import beats
from distbench.runs.folder import RunFolder, read_record

LARGER: Settings = {"strategy": "fsdp2", **SMALL, "model.hidden_dim": 96}
"""Checkpoints are most of what such a run writes."""
TMPFS, LIMIT = "a full disk", "a limit on the size of files"
WORDS = {TMPFS: "No space left on device", LIMIT: "File too large"}
"""What the kernel says."""


@dataclass(frozen=True)
class FullDisk(Case):
    """One run whose first checkpoint can be written, and no other."""

    how: str
    on_error: str
    background: bool

    def __str__(self) -> str:
        return f"{self.how}{', async' * self.background}, checkpoint.on_error={self.on_error}"

    def run(self, site: Site, folder: Path, promised: Promises) -> dict[str, str]:
        straight = site.straight(LARGER)
        options = {"checkpoint.on_error": self.on_error, "checkpoint.async": str(self.background).lower()}
        words = {**LARGER, **options}
        disk = folder / "disk"
        disk.mkdir()
        with mounted(disk, room(straight)) if self.how == TMPFS else nothing():
            path, log = disk / "run", folder / "run.txt"
            with Command(site.words(words, path), log) as command:
                if self.how == LIMIT:
                    limit(
                        path, (straight / "checkpoints" / f"step_{STEPS:08d}" / shard_name(0)).stat().st_size, command
                    )
                code, said = command.wait(), command.said
            first = self.look(promised, path, straight, code, said)
            if self.how == TMPFS:
                mount(disk, 16 * room(straight), "remount")
            code, said = run([f"resume={path}"], folder / "resumed.txt")
            equal = promised(code == ExitCode.OK, f"resuming ends with {code}: {said}") and same(
                promised, path, straight
            )
        return {"checkpoint left": first or "none", "resumed": "bitwise" if equal else "NO"}

    def look(self, promised: Promises, path: Path, straight: Path, code: int, said: str) -> str | None:
        """After the run: what it said, and what is left. Returns the checkpoint's name."""
        first, record = whole(promised, path / "checkpoints"), read_record(path)
        promised(first is not None, "the first checkpoint is gone")
        left = [file.name for file in (path / "checkpoints").glob(UNFINISHED)]
        promised(not left, f"left half-written: {left}")
        promised("Traceback" not in said, f"a traceback: {said}")
        promised.said(WORDS[self.how], said)
        if self.on_error == "proceed":
            promised(code == ExitCode.OK, f"exit code {code}, not {int(ExitCode.OK)}: {said}")
            promised.said("the run goes on", said)
            problem = str(record["checkpoint_error"])
            promised(WORDS[self.how] in problem, f"the record's checkpoint_error is {problem!r}")
            promised(metrics(path) == metrics(straight), "the steps are not the uninterrupted run's")
        else:
            promised(code != ExitCode.OK, "exit code 0")
            promised(WORDS[self.how] in str(record["reason"]), f"the reason is {record['reason']!r}")
        return None if first is None else first.name


def room(straight: Path) -> int:
    """Bytes for all that a run writes, and for a checkpoint and a half instead of two and the model."""
    checkpoints = straight / "checkpoints"
    shards = sum(size(file) for file in (checkpoints / f"step_{STEPS:08d}").glob("rank_*"))
    return size(straight) - size(checkpoints) + shards * 3 // 2


def size(path: Path) -> int:
    """Bytes on disk of a file, or of all files in a folder."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(512 * file.stat().st_blocks for file in files)


@contextmanager
def nothing() -> Iterator[None]:
    yield


@contextmanager
def mounted(folder: Path, capacity: int) -> Iterator[None]:
    """A tmpfs of so many bytes. Raises Skipped where this user may not mount one."""
    mount(folder, capacity)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def mount(folder: Path, capacity: int, *options: str) -> None:
    if os.getuid() != 0:
        raise Skipped("only root may mount a disk of a certain size")
    words = ["mount", "-t", "tmpfs", "-o", ",".join([*options, f"size={capacity}"]), "tmpfs", str(folder)]
    try:
        done = subprocess.run(words, capture_output=True, text=True)
    except OSError as error:
        raise Skipped(f"a disk of a certain size cannot be mounted: {error}") from error
    if done.returncode != 0:
        raise Skipped(f"a disk of a certain size cannot be mounted: {done.stderr.strip()}")


def limit(path: Path, shard: int, command: Command) -> None:
    """From its first checkpoint on ranks may not write a file as large as their shards, but any other."""
    while not command.ended() and not complete(path / "checkpoints"):
        time.sleep(POLL_S / 10)
    for beat in beats(RunFolder(path), range(RANKS)).values():
        resource.prlimit(beat.pid, resource.RLIMIT_FSIZE, (shard * 9 // 10, resource.RLIM_INFINITY))


def draw(rng: random.Random, number: int) -> list[Case]:
    """Every combination, in random order."""
    cases = [FullDisk(how, on, later) for how in WORDS for on in ("proceed", "stop") for later in (False, True)]
    rng.shuffle(cases)
    return list(cases[:number])


DRILL = Drill(
    name="full_disk",
    promise=(
        "No room for a second checkpoint: the message says so, the first is left as it is, nothing half-written, and the "
        "run goes on or stops, as checkpoint.on_error says; with room again it is resumed to the uninterrupted run's end, "
        "bit for bit."
    ),
    number=8,
    draw=draw,
)
