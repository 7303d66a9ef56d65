"""Where drills are held: small runs, the same ones uninterrupted to compare with, and what their folders must be like."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distbench.checkpoint.keeping import LATEST
from distbench.checkpoint.manifest import complete, read_manifest
from distbench.checkpoint.state import STATE
from distbench.drills.base import DrillError, Promises
from distbench.drills.command import run
from distbench.errors import CheckpointError, ExitCode, RunFolderError
from distbench.runs.folder import read_record

STEPS, RANKS = 20, 2
Settings = Mapping[str, Any]
SMALL: Settings = {
    "model.num_layers": 2,
    "model.hidden_dim": 16,
    "model.seq_len": 4,
    "steps": STEPS,
    "checkpoint.every": 3,
    "gate.fp64_reference": "false",
    "window": "off",
    "logging.progress": "false",
    "device": "cpu",
    "launch.nproc": RANKS,
    "launch.timeout_s": 120,
}
"""A run of a few seconds, most of which starts Python."""

TIMES = ("data_seconds", "step_seconds", "tokens_per_second")
"""In which two runs that are the same differ."""
RESULTS = ("steps", "first_loss", "last_loss", "first_grad_norm", "last_grad_norm", "skipped_steps")
"""What the record sums up."""


class Site:
    """A folder with a baseline cache, and the runs that nothing happened to."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._straight: dict[tuple[str, ...], Path] = {}

    @staticmethod
    def options(settings: Settings) -> list[str]:
        """Groups first: they replace the values of theirs."""
        return [f"{key}={settings[key]}" for key in sorted(settings, key=lambda key: ("." in key, key))]

    def words(self, settings: Settings, folder: Path, output: Path | None = None) -> list[str]:
        """The command line of a run in `folder`. `output`: where its baseline is; here, if nowhere else."""
        return [*self.options(settings), f"output_dir={output or self.root}", f"hydra.run.dir={folder}"]

    def straight(self, settings: Settings) -> Path:
        """The uninterrupted run of these settings, made when it is first asked for."""
        key = tuple(self.options(settings))
        if key not in self._straight:
            folder = self.root / f"uninterrupted_{len(self._straight)}"
            code, said = run(self.words(settings, folder), folder.with_suffix(".txt"))
            if code != ExitCode.OK:
                raise DrillError(f"a run that nothing happened to ended with {code}: {said}")
            self._straight[key] = folder
        return self._straight[key]


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The steps of a run, without their times. Raises RunFolderError."""
    file = folder / "metrics.jsonl"
    try:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{file} is damaged: {error}") from error
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def same(promised: Promises, folder: Path, straight: Path) -> bool:
    """Whether a run ended as the uninterrupted one did, bit for bit: every step's numbers, the model, and of the last
    checkpoint the shards and what is beside them."""
    broken = len(promised.broken)
    record, other = read_record(folder), read_record(straight)
    promised(record["status"] == "passed", f"the run's status is {record['status']}: {record['reason']}")
    mine, theirs = metrics(folder), metrics(straight)
    steps = [row["step"] for row in mine]
    promised(steps == [row["step"] for row in theirs], f"the logged steps are {steps}")
    odd = next((a["step"] for a, b in zip(mine, theirs, strict=False) if a != b), None)
    promised(odd is None, f"step {odd} is not the uninterrupted run's")
    for key in RESULTS:
        here, there = record["result"][key], other["result"][key]
        promised(here == there, f"the record's {key} is {here}, not {there}")
    for key in ("checkpoint", "last_checkpoint"):
        promised(record[key] == other[key] is not None, f"{key} is {record[key]}, not {other[key]}")
    last, reference = folder / other["last_checkpoint"], straight / other["last_checkpoint"]
    for file in sorted(reference.glob("*.safetensors")):
        equal = (last / file.name).is_file() and (last / file.name).read_bytes() == file.read_bytes()
        promised(equal, f"{file.parent.name}/{file.name} is not the uninterrupted run's")
    promised(_state(last) == _state(reference), f"{last.name}/{STATE} is not the uninterrupted run's")
    return len(promised.broken) == broken


def _state(checkpoint: Path) -> dict[str, Any] | None:
    """What is beside the tensors, but for the config, which says where the run was resumed from."""
    if not (checkpoint / STATE).is_file():
        return None
    tree: dict[str, Any] = json.loads((checkpoint / STATE).read_text())
    return tree | {"config": None}


def whole(promised: Promises, checkpoints: Path) -> Path | None:
    """The newest complete checkpoint, or None where there is none: every file of all of them must be the one that was
    written, and `latest` name one of them."""
    found = complete(checkpoints)
    for folder in found:
        try:
            for entry in read_manifest(folder):
                entry.verify(folder)
        except CheckpointError as error:
            promised(False, f"a complete checkpoint is damaged: {error}")
    latest = checkpoints / LATEST
    if latest.exists():
        name = latest.read_text().strip()
        promised(name in {folder.name for folder in found}, f"latest names {name!r}, which is no complete checkpoint")
    return found[-1] if found else None


def first_failure(folder: Path) -> dict[str, Any]:
    """Of `logs/failure.json`. Raises RunFolderError."""
    file = folder / "logs" / "failure.json"
    try:
        tree: dict[str, Any] = json.loads(file.read_text())["first"]
    except (OSError, ValueError, KeyError) as error:
        raise RunFolderError(f"{file} is damaged, or missing: {error}") from error
    return tree
