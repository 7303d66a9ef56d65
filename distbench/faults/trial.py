"""One run of the self-test: composed as the command line does, run in this process, and read back from its files."""

from __future__ import annotations

import contextlib
import io
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distbench.composing import compose
from distbench.runs.folder import RunFolder, Status, read_record

BASE = (
    "steps=3",
    "global_batch=8",
    "checkpoint=off",
    "logging.progress=false",
    "gate.fp64_reference=false",
    "launch.timeout_s=60",
)
SMALL_MODEL = ("model.num_layers=2", "model.hidden_dim=13", "model.seq_len=5")
"""Odd sizes: nothing divides by the number of ranks."""


@dataclass
class Trial:
    """What one run said."""

    overrides: list[str]
    status: str
    reason: str | None
    seconds: float
    folder: Path
    gate: dict[str, Any] = field(default_factory=dict)
    """gate.json; empty where there is none."""

    @property
    def command(self) -> str:
        """The same run, as one types it."""
        return "python -m distbench " + " ".join(f"'{o}'" if set(o) & set(" {}[]'") else o for o in self.overrides)

    @property
    def first_failure(self) -> dict[str, Any] | None:
        return next((check for check in self.gate.get("checks", []) if not check["passed"]), None)


def overrides_of(own: list[str]) -> list[str]:
    """A trial's overrides: the small model and the short run, then its own, which come last and so win."""
    small = () if any(o.startswith("model=custom") for o in own) else SMALL_MODEL
    groups = [o for o in own if "." not in o.split("=")[0]]
    return [*groups, *(o for o in [*BASE, *small] if o.split("=")[0] not in _keys(own)), *_values(own)]


def _keys(overrides: list[str]) -> set[str]:
    return {o.split("=")[0] for o in overrides}


def _values(overrides: list[str]) -> list[str]:
    return [o for o in overrides if "." in o.split("=")[0]]


def run_trial(own: list[str], out: Path, name: str) -> Trial:
    """Run one trial quietly in `out/name`. A crash is a result, a refused configuration an error (ConfigError)."""
    from distbench.errors import DistbenchError
    from distbench.experiment import run

    overrides = overrides_of(own)
    config = compose([*overrides, f"output_dir={out}"])
    folder = RunFolder.create(out / name)
    started = time.perf_counter()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            outcome = run(config, folder)
        if outcome.status is Status.interrupted:
            raise KeyboardInterrupt
        record = read_record(folder.path)
        status, reason = str(record["status"]), record["reason"]
    except DistbenchError as error:
        status, reason = "refused", str(error)
    trial = Trial(overrides, status, reason, time.perf_counter() - started, folder.path)
    with contextlib.suppress(OSError, ValueError):
        trial.gate = json.loads((folder.path / "gate.json").read_text())
    return trial
