"""SIGKILL to a random rank at a random point of a run, as a scheduler, the kernel or a person does it."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from distbench.checkpoint.manifest import step_of
from distbench.drills.aim import COLLECTIVE, PHASES, Aim, Heart, strike
from distbench.drills.base import Case, Drill, DrillError, Promises, Try
from distbench.drills.command import Command, run
from distbench.drills.site import RANKS, SMALL, Settings, Site, first_failure, same, whole
from distbench.errors import ExitCode
from distbench.launching.heartbeat import Beat
from distbench.runs.folder import Status, read_record

STRATEGIES = ("ddp", "fsdp", "fsdp2")
ATTEMPTS = 8
"""Runs that may end before their rank was where it shall be hit."""
GONE_S = 20.0
"""`launch.grace_s`, and the forkserver's and Python's own end on a crowded machine."""


@dataclass(frozen=True)
class Kill(Case):
    """One rank of one run."""

    strategy: str
    background: bool
    """`checkpoint.async`."""
    aim: Aim

    def __str__(self) -> str:
        return f"{self.strategy}{', async' * self.background}: {self.aim}"

    @property
    def settings(self) -> Settings:
        return {"strategy": self.strategy, **SMALL}

    def run(self, site: Site, folder: Path, promised: Promises) -> dict[str, str]:
        straight = site.straight(self.settings)
        words = {**self.settings, "checkpoint.async": str(self.background).lower()}
        died, beat, gone = hit(site, words, folder, self.aim, signal.SIGKILL, promised)
        reason = f"rank {self.aim.rank} died without an error: killed by signal 9 (SIGKILL)"
        blamed(promised, died, self.aim.rank, beat, Status.crashed, reason)
        found = whole(promised, died / "checkpoints")
        equal = goes_on(site, words, died, found, straight, promised)
        return {
            "was in": COLLECTIVE if self.aim.phase == COLLECTIVE else beat.phase,
            "checkpoint": "none yet" if found is None else f"step {step_of(found)}",
            "gone after": "never" if gone is None else f"{gone:.1f} s",
            "bitwise": "yes" if equal else "NO",
        }


def hit(
    site: Site, settings: Settings, folder: Path, aim: Aim, number: signal.Signals, promised: Promises
) -> tuple[Path, Beat, float | None]:
    """Run until a rank gets a signal, and to the run's end. Returns the run's folder, where the rank was, and after how many
    seconds nothing of the run was left. Raises DrillError where no run could be hit."""
    for attempt in range(ATTEMPTS):
        path = folder / f"run{attempt or ''}"
        aimed = aim if attempt == 0 else aim.anywhere()
        with ExitStack() as stack:
            command = stack.enter_context(Command(site.words(settings, path), folder / f"{path.name}.txt"))
            found = [Heart.of(path, rank, command) for rank in range(RANKS)]
            hearts = [stack.enter_context(heart) for heart in found if heart is not None]
            if len(hearts) < RANKS or not strike(aimed, hearts, command, number):
                code = command.wait()
                promised(code == ExitCode.OK, f"a run that nothing happened to ended with {code}: {command.said}")
                continue
            at = time.monotonic()
            code = command.wait()
            promised(code == ExitCode.CRASHED, f"exit code {code}, not {int(ExitCode.CRASHED)}: {command.said}")
            left = command.seconds_until_gone(GONE_S)
            promised(left is not None, f"still running {GONE_S:.0f} s after the command's end: {command.alive()}")
            return path, hearts[aim.rank].beat(), None if left is None else time.monotonic() - at
    raise DrillError(f"{aim} was never there to be hit, in {ATTEMPTS} runs")


def blamed(promised: Promises, folder: Path, rank: int, beat: Beat, status: Status, reason: str) -> None:
    """Record and `failure.json` say what happened, to whom and where."""
    record, failure = read_record(folder), first_failure(folder)
    promised(record["status"] == status, f"the run's status is {record['status']}, not {status}")
    promised(reason in str(record["reason"]), f"the reason is {record['reason']!r}, not {reason!r}")
    said = (failure["rank"], failure["step"], failure["phase"])
    promised(said == (rank, beat.step, beat.phase), f"failure.json names (rank, step, phase) {said}, it was {beat}")
    promised(record["finished"] is not None, "the record does not say when it ended")


def goes_on(
    site: Site, settings: Settings, died: Path, checkpoint: Path | None, straight: Path, promised: Promises
) -> bool:
    """Resume a run from its newest checkpoint, or start it again where there is none: it ends as if nothing had happened."""
    log = died.with_name("resumed.txt")
    code, said = run([f"resume={died}"], log)
    if checkpoint is None:
        promised(code == ExitCode.USAGE, f"resume= without a checkpoint ends with {code}, not {int(ExitCode.USAGE)}")
        promised.said("there is no complete checkpoint", said)
        died = died.with_name("again")
        code, said = run(site.words(settings, died), log)
    if not promised(code == ExitCode.OK, f"resuming ends with {code}: {said}"):
        return False
    leftover = [path.name for path in (died / "checkpoints").glob(".*")]
    promised(not leftover, f"left half-written: {leftover}")
    return same(promised, died, straight)


def draw(rng: random.Random, number: int) -> list[Case]:
    """Every phase equally often, everything else at random."""
    phases = [PHASES[index % len(PHASES)] for index in range(number)]
    rng.shuffle(phases)
    return [Kill(rng.choice(STRATEGIES), rng.random() < 0.5, Aim.draw(rng, phase)) for phase in phases]


def table(tries: Sequence[Try]) -> list[str]:
    """A row for each strategy and place where ranks were when they died."""
    lines = [
        "| rank was in | strategy | kills | with a checkpoint | bitwise as uninterrupted | all gone after: median, most | "
        "as promised |",
        "|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], list[Try]] = {}
    for one in tries:
        if one.found and isinstance(one.case, Kill):
            groups.setdefault((one.found["was in"], one.case.strategy), []).append(one)
    for place, strategy in sorted(groups, key=lambda key: (_order(key[0]), key[1])):
        lines.append(f"| {place} | {strategy} | {_figures(groups[place, strategy])} |")
    lines.append(f"| **all** | | {_figures(tries)} |")
    return lines


def _order(place: str) -> int:
    return PHASES.index(place) if place in PHASES else len(PHASES)


def _figures(tries: Sequence[Try]) -> str:
    found = [one.found for one in tries if one.found]
    with_checkpoint = sum(one["checkpoint"] != "none yet" for one in found)
    equal = sum(one["bitwise"] == "yes" for one in found)
    seconds = [float(one["gone after"].split()[0]) for one in found if one["gone after"] != "never"]
    times = f"{median(seconds):.1f} s, {max(seconds):.1f} s" if seconds else "never"
    kept = sum(not one.broken for one in tries)
    return f"{len(tries)} | {with_checkpoint} | {equal} of {len(tries)} | {times} | {kept} of {len(tries)}"


DRILL = Drill(
    name="kill",
    promise=(
        "SIGKILL to a random rank: exit code 4, the rank named with its step and phase, nobody left, no damaged checkpoint, "
        "and a run that goes on to the uninterrupted run's end, bit for bit."
    ),
    number=100,
    draw=draw,
    table=table,
)
