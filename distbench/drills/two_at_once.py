"""Two sweeps, or two runs, in one folder at once."""

from __future__ import annotations

import random
import signal
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import yaml

from distbench.checkpoint.manifest import complete
from distbench.drills.aim import Heart
from distbench.drills.base import Case, Drill, DrillError, Promises
from distbench.drills.command import POLL_S, Command, run
from distbench.drills.site import RANKS, SMALL, Settings, Site, same
from distbench.errors import ExitCode
from distbench.runs.folder import find_runs, read_record

SHORT: Settings = {**SMALL, "steps": 4, "strategy": "ddp,fsdp2"}


@dataclass(frozen=True)
class TwoSweeps(Case):
    """Started one after another by a random time."""

    steps: tuple[int, int]
    delay_s: float

    def __str__(self) -> str:
        cells = "the same cells" if len(set(self.steps)) == 1 else "other cells under the same names"
        return f"two sweeps, {cells}, {self.delay_s:.1f} s apart"

    def run(self, site: Site, folder: Path, promised: Promises) -> dict[str, str]:
        sweep = folder / "sweep"
        place = [f"output_dir={site.root}", f"hydra.sweep.dir={sweep}"]
        with ExitStack() as stack:
            commands = []
            for number, steps in enumerate(self.steps):
                words = ["-m", *site.options({**SHORT, "steps": steps}), *place]
                commands.append(stack.enter_context(Command(words, folder / f"sweep{number}.txt")))
                time.sleep(self.delay_s)
            codes = [command.wait() for command in commands]
        promised(sorted(codes) == [ExitCode.OK, ExitCode.USAGE], f"exit codes {codes}, not 0 of one and 2 of the other")
        first = codes.index(ExitCode.OK) if ExitCode.OK in codes else 0
        promised.said(f"{sweep} already holds a sweep; choose another hydra.sweep.dir", commands[1 - first].said)
        promised.said("2 of 2 runs passed", commands[first].said)
        runs = find_runs(sweep)
        promised(len(runs) == 2, f"{len(runs)} records, not 2")
        for path in runs:
            record = read_record(path)
            promised(record["status"] == "passed", f"the status of {path.name} is {record['status']}")
            steps = record["config"]["steps"]
            promised(steps == self.steps[first], f"{path.name} is a run of {steps} steps, not {self.steps[first]}")
            own_hydra(promised, path)
        return {"the other": f"refused, exit code {codes[1 - first]}", "this one": f"exit code {codes[first]}"}


@dataclass(frozen=True)
class TwoRuns(Case):
    """A run, and while it is held up in its middle another command in its folder."""

    resumes: bool

    def __str__(self) -> str:
        return "a run that is resumed while it runs" if self.resumes else "two runs"

    def run(self, site: Site, folder: Path, promised: Promises) -> dict[str, str]:
        settings = {"strategy": "ddp", **SMALL}
        straight, path = site.straight(settings), folder / "run"
        words = [f"resume={path}"] if self.resumes else site.words({**settings, "steps": 4}, path)
        with ExitStack() as stack:
            command = stack.enter_context(Command(site.words(settings, path), folder / "run.txt"))
            hearts = self._in_its_middle(path, command, stack)
            for heart in hearts:
                heart.send(signal.SIGSTOP)
            try:
                other, said = run(words, folder / "other.txt")
            finally:
                for heart in hearts:
                    heart.send(signal.SIGCONT)
            code = command.wait()
        promised(other == ExitCode.USAGE, f"the other's exit code is {other}, not {int(ExitCode.USAGE)}: {said}")
        promised.said(f"{path} is being written" if self.resumes else f"{path} already holds a run", said)
        promised(code == ExitCode.OK, f"exit code {code}: {command.said}")
        own_hydra(promised, path)
        equal = same(promised, path, straight)
        return {"the other": f"refused, exit code {other}", "this one": "bitwise" if equal else "NOT bitwise"}

    def _in_its_middle(self, path: Path, command: Command, stack: ExitStack) -> list[Heart]:
        """Raises DrillError where it has ended by then."""
        found = [Heart.of(path, rank, command) for rank in range(RANKS)]
        hearts = [stack.enter_context(heart) for heart in found if heart is not None]
        while not command.ended():
            if complete(path / "checkpoints"):
                return hearts
            time.sleep(POLL_S / 10)
        raise DrillError(f"a run that nothing happened to ended with {command.wait()}: {command.said}")


def own_hydra(promised: Promises, path: Path) -> None:
    """What Hydra has written of a run is that run's."""
    file = path / ".hydra" / "config.yaml"
    said = yaml.safe_load(file.read_text())["steps"] if file.is_file() else None
    steps = read_record(path)["config"]["steps"]
    promised(said == steps, f"{file} is of another run: steps={said}, the record says {steps}")


def draw(rng: random.Random, number: int) -> list[Case]:
    """In turn; how far apart is random."""
    cases: list[Case] = []
    for index in range(number):
        kind = index % 4
        delay = rng.choice([0.0, rng.uniform(0.0, 4.0)])
        cases.append(TwoRuns(kind == 1) if kind < 2 else TwoSweeps((4, 4) if kind == 2 else (4, 3), delay))
    return cases


DRILL = Drill(
    name="two_at_once",
    promise=(
        "Two sweeps, or two runs, in one folder at once: one of them is refused with exit code 2 and touches nothing, the "
        "other ends as if it were alone."
    ),
    number=8,
    draw=draw,
)
