"""Many short runs in a row in one process: what it holds after the last is what it held after the first few."""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from distbench.drills.base import Case, Drill, DrillError, Promises
from distbench.drills.command import TIMEOUT_S, Command
from distbench.drills.kill import STRATEGIES
from distbench.drills.sampler import shared
from distbench.drills.site import SMALL, Site
from distbench.errors import ExitCode

WARM_UP = 5
"""Runs after which what is made once has been made: imports, caches, pools of memory."""
PATIENCE_S = 20.0
CACHES = "torchinductor_*"
"""Of torch, below the temporary folder: made when it is imported, and there for the next process."""
MAY_GROW = {"memory, MiB": 8.0, "forkserver's memory, MiB": 8.0}
"""Whatever is not named may not. Python's heap is never the same twice; 200 runs that leave 50 kB each are found."""


@dataclass(frozen=True)
class Leaks(Case):
    """One sweep, every strategy in turn."""

    repeats: int

    def __str__(self) -> str:
        return f"{self.repeats * len(STRATEGIES)} runs in one process"

    def run(self, site: Site, folder: Path, promised: Promises) -> dict[str, str]:
        temporary, samples = folder / "tmp", folder / "samples.jsonl"
        temporary.mkdir()
        settings = {**SMALL, "steps": 4, "strategy": ",".join(STRATEGIES), "sweep.repeats": self.repeats}
        words = [
            *("-m", *site.options(settings), f"output_dir={site.root}", f"hydra.sweep.dir={folder / 'sweep'}"),
            "+hydra.callbacks.leaks._target_=distbench.drills.sampler.Sampler",
            f"+hydra.callbacks.leaks.file={samples}",
        ]
        before = names()
        with Command(words, folder / "sweep.txt", {"TMPDIR": str(temporary)}) as command:
            code = command.wait(TIMEOUT_S * (1 + self.repeats / 10))
            gone = command.seconds_until_gone(PATIENCE_S)
        number = self.repeats * len(STRATEGIES)
        promised(code == ExitCode.OK, f"exit code {code}: {command.said[-2000:]}")
        promised.said(f"{number} of {number} runs passed", command.said)
        promised(gone is not None, "something still runs after the sweep's end")
        left = sorted(path.name for path in temporary.iterdir() if not path.match(CACHES))
        promised(not left, f"temporary files after the sweep's end: {left}")
        orphans = unused(names() - before)
        promised(not orphans, f"shared memory after the sweep's end: {sorted(orphans)}")
        rows = [json.loads(line) for line in samples.read_text().splitlines()]
        if len(rows) != number:
            raise DrillError(f"{len(rows)} samples of {number} runs")
        return grown(promised, rows)


def grown(promised: Promises, rows: list[dict[str, float]]) -> dict[str, str]:
    """The medians of the first and of the last tenth of the runs, those apart that come first of all."""
    settled = rows[WARM_UP:] or rows[-1:]
    tenth = max(1, len(settled) // 10)
    found = {}
    for what in settled[0]:
        first, last = (median(row[what] for row in part) for part in (settled[:tenth], settled[-tenth:]))
        promised(last - first <= MAY_GROW.get(what, 0.0), f"{what} has grown from {first:g} to {last:g}")
        found[what] = f"{first:.4g}, then {last:.4g}"
    return found


def names() -> set[str]:
    """Of this machine's shared memory."""
    return {entry.name for entry in Path("/dev/shm").iterdir() if entry.is_file()}


def unused(suspects: set[str]) -> set[str]:
    """Of shared memory: what no process has any more. What another has just made it maps in the next seconds."""
    until = time.monotonic() + PATIENCE_S
    while suspects and time.monotonic() < until:
        time.sleep(0.2)
        used = [shared(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        suspects = (suspects & names()) - set().union(*used)
    return suspects


def draw(rng: random.Random, number: int) -> list[Case]:
    """One case, of as many runs."""
    return [Leaks(-(-number // len(STRATEGIES)))]


DRILL = Drill(
    name="leaks",
    promise=(
        "Runs in a row in one process: no more open files, memory, threads, processes, listening sockets, shared memory or "
        "temporary files after the last tenth of them than after the first, and nothing left at the end."
    ),
    number=200,
    draw=draw,
)
