"""Damage to the cached baseline that a run's numerics are held against."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distbench.drills.base import Case, Drill, Promises
from distbench.drills.command import run
from distbench.drills.damage import WAYS, contents
from distbench.drills.site import SMALL, Site, metrics
from distbench.errors import ExitCode, RunFolderError

SETTINGS = {**SMALL, "strategy": "ddp", "steps": 4}
CACHE = ".baselines"
KINDS = ("manifest", "baseline", "state", "step", "summary", "weights")
"""How the names of an entry's files begin."""


@dataclass(frozen=True)
class CacheDamage(Case):
    """One file of the entry."""

    kind: str
    how: str
    seed: float

    def __str__(self) -> str:
        return f"{self.kind} file {self.how}"

    def run(self, site: Site, folder: Path, promised: Promises) -> dict[str, str]:
        straight, path = site.straight(SETTINGS), folder / "run"
        key = str(baseline_of(straight)["folder"])
        entry = folder / CACHE / key
        shutil.copytree(site.root / CACHE / key, entry)
        good = tensors(entry)
        rng = random.Random(self.seed)
        file = rng.choice(sorted(entry.glob(f"{self.kind}*")))
        WAYS[self.how](file, rng)
        code, said = run(site.words(SETTINGS, path, folder), folder / "run.txt")
        promised(code == ExitCode.OK, f"exit code {code}: {said}")
        found = baseline_of(path)
        promised(found["folder"] == key, f"the baseline is {found['folder']}, not {key}")
        promised(not found["reused"], f"a baseline with {file.name} {self.how} was used")
        promised(metrics(path) == metrics(straight), "the steps are not those of the run with the good baseline")
        promised(tensors(entry) == good, "the baseline that was computed is another")
        return {"baseline": "reused" if found["reused"] else "computed again"}


def baseline_of(folder: Path) -> dict[str, Any]:
    """What gate.json says of its baseline. Raises RunFolderError."""
    file = folder / "gate.json"
    try:
        tree: dict[str, Any] = json.loads(file.read_text())["baseline"]
    except (OSError, ValueError, KeyError) as error:
        raise RunFolderError(f"{file} is damaged, or missing: {error}") from error
    return tree


def tensors(entry: Path) -> dict[str, bytes]:
    """All of it that is the same however often it is computed."""
    return {name: data for name, data in contents(entry).items() if name.endswith(".safetensors")}


def draw(rng: random.Random, number: int) -> list[Case]:
    """Every way for every kind of file, in random order; of which file and byte, is random."""
    pairs = [(kind, how) for kind in KINDS for how in WAYS]
    rng.shuffle(pairs)
    return [CacheDamage(kind, how, rng.random()) for kind, how in pairs[:number]]


DRILL = Drill(
    name="cache",
    promise=(
        "Damage to a file of the cached baseline: the next run finds it, computes the baseline again, to the same bits, and "
        "passes its gate."
    ),
    number=len(KINDS) * len(WAYS),
    draw=draw,
)
