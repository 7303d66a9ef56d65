"""SIGSTOP to a random rank: it stays, answers nothing, and the others wait for it."""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass
from pathlib import Path

from distbench.checkpoint.manifest import step_of
from distbench.drills.aim import Aim
from distbench.drills.base import Case, Drill, Promises
from distbench.drills.kill import STRATEGIES, blamed, goes_on, hit
from distbench.drills.site import SMALL, Site, whole
from distbench.runs.folder import Status

PHASES = ("data", "forward", "backward", "optimizer", "checkpoint")
LIMIT_S = 5
"""`launch.stall_timeout_s`: no phase of a small run takes so long."""


@dataclass(frozen=True)
class Freeze(Case):
    """One rank of one run."""

    strategy: str
    aim: Aim

    def __str__(self) -> str:
        return f"{self.strategy}: {self.aim}"

    def run(self, site: Site, folder: Path, promised: Promises) -> dict[str, str]:
        settings = {"strategy": self.strategy, **SMALL}
        straight = site.straight(settings)
        words = {**settings, "launch.stall_timeout_s": LIMIT_S}
        stopped, beat, gone = hit(site, words, folder, self.aim, signal.SIGSTOP, promised)
        blamed(
            promised, stopped, self.aim.rank, beat, Status.hung, f"rank {self.aim.rank} is stopped (SIGSTOP), in {beat}"
        )
        found = whole(promised, stopped / "checkpoints")
        equal = goes_on(site, words, stopped, found, straight, promised)
        return {
            "was in": beat.phase,
            "checkpoint": "none yet" if found is None else f"step {step_of(found)}",
            f"all gone after, of which {LIMIT_S} s are the limit": "never" if gone is None else f"{gone:.1f} s",
            "bitwise": "yes" if equal else "NO",
        }


def draw(rng: random.Random, number: int) -> list[Case]:
    """Every phase equally often, everything else at random."""
    phases = [PHASES[index % len(PHASES)] for index in range(number)]
    rng.shuffle(phases)
    return [Freeze(rng.choice(STRATEGIES), Aim.draw(rng, phase)) for phase in phases]


DRILL = Drill(
    name="freeze",
    promise=(
        "SIGSTOP to a random rank: status hung, the rank named with its step and phase, nobody left, and a run that goes on "
        "to the uninterrupted run's end, bit for bit."
    ),
    number=10,
    draw=draw,
)
