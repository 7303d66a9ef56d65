"""From a run folder to a run that goes on: what may differ, what is forgotten, where the trainer is put."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from distbench.checkpoint import lock
from distbench.checkpoint.manifest import MANIFEST, complete, step_of
from distbench.config import OUTSIDE, Config, digest, effective, to_container, world_size
from distbench.errors import ConfigError
from distbench.launching.failure import put_aside
from distbench.runs.environment import environment, launch_command
from distbench.runs.files import write_atomic
from distbench.runs.folder import RunFolder, Status, now, read_record

MAY_DIFFER = {
    *("steps", "checkpoint", "logging", "on_nonfinite", "decide", "name", "output_dir", "resume", "sweep"),
    *(f"launch.{key}" for key in ("name", "nodes", "nproc", *OUTSIDE)),
}
"""Keys of a config that a resumed run may set anew, and `window` until it is measured. Every other would make it another
experiment, or the record would say that it was measured otherwise than it was. Ranks are counted elsewhere."""


def checkpoint_of(path: Path, what: str) -> Path:
    """The newest complete checkpoint of a run folder, or the checkpoint that `path` is. Raises ConfigError.

    `what`: the setting that named it.
    """
    if not path.is_dir():
        raise ConfigError(f"{what}={path}: no such folder")
    if (path / MANIFEST).is_file():
        return path
    if found := complete(path) or complete(path / "checkpoints"):
        return found[-1]
    raise ConfigError(f"{what}={path}: there is no complete checkpoint; checkpoint.every=N writes one every N steps")


def resumed_sections(config: Config, folder: RunFolder, step: int) -> dict[str, Any]:
    """The record's sections that a resume changes, and everything after `step`, its checkpoint's, forgotten.

    Raises ConfigError where it was of another experiment, and OutputError where it is still being written. From here on this
    process holds the folder, to its end.
    """
    record = read_record(folder.path)
    measured = record.get("window") is not None
    free = MAY_DIFFER if measured else MAY_DIFFER | {"window"}
    differing = _differing(to_container(config), record.get("config") or {}, free)
    if differing:
        raise ConfigError(
            f"resume={folder.path} is of another experiment: {'; '.join(differing[:3])}; a new run may start from it with "
            f"start_from={folder.path}"
        )
    if (ranks := (record.get("batch") or {}).get("world_size")) != world_size(config):
        raise ConfigError(
            f"resume={folder.path} ran on {ranks} ranks, now there are {world_size(config)}; a new run may start from it "
            f"with start_from={folder.path}"
        )
    _go_back_to(folder, step)
    before, here = record.get("environment") or {}, environment()
    other = {key: value for key, value in here.items() if value != before.get(key)}
    entry = {"step": step, "at": now(), "command": launch_command(), "environment": other}
    resumes = [*(record.get("resumes") or []), entry]
    return {
        "status": Status.running.value,
        "reason": None,
        "finished": None,
        "run": {**(record.get("run") or {}), "pid": os.getpid()},
        "config": to_container(config),
        "effective": digest(effective(config)),
        "environment": before if measured else here,  # where the window was measured
        "resumes": resumes,
    }


def restarted(config: Config, folder: RunFolder, reason: str) -> Config:
    """The config that a run whose ranks died goes on with, and its folder made ready: from its newest complete checkpoint,
    or from the start where there is none."""
    found = complete(folder.checkpoints)
    step = step_of(found[-1]) if found else 0
    record = read_record(folder.path)
    sections: dict[str, Any] = {
        "restarts": [*(record.get("restarts") or []), {"step": step, "at": now(), "reason": reason}]
    }
    _go_back_to(folder, step)
    if step == 0:
        sections |= {"gate": None, "window": None, "window_reason": None}
    folder.update_record(**sections)
    return replace(config, resume=str(folder.path) if found else None)


def start_over(folder: RunFolder) -> None:
    """Make the folder of a run that ended before its first checkpoint ready for it to begin again. Raises OutputError where
    it still runs."""
    _go_back_to(folder, 0)


def _go_back_to(folder: RunFolder, step: int) -> None:
    """Nobody else's, what the attempt before left put aside, what will be done again forgotten. Raises as `_hold` does."""
    _hold(folder)
    put_aside(folder)
    _forget_after(folder, step)
    if step == 0:
        shutil.rmtree(folder.tensorboard, ignore_errors=True)


_held: dict[Path, TextIO] = {}
"""Locks of the folders that this process goes on in: at most one, for as long as it lives."""


def _hold(folder: RunFolder) -> None:
    """Raises OutputError where another run writes there."""
    if folder.path not in _held:
        _held[folder.path] = lock.take(folder.path)


def _differing(here: dict[str, Any], there: dict[str, Any], free: set[str], prefix: str = "") -> list[str]:
    found: list[str] = []
    for key in here.keys() | there.keys():
        path, a, b = prefix + key, here.get(key), there.get(key)
        if path in free:
            continue
        if isinstance(a, dict) and isinstance(b, dict):
            found += _differing(a, b, free, f"{path}.")
        elif a != b:
            found.append(f"{path}={a} instead of {b}")
    return sorted(found)


def _forget_after(folder: RunFolder, step: int) -> None:
    """Drop the lines of steps that will be done again."""
    if not folder.metrics_path.exists():
        return
    kept = []
    for line in folder.metrics_path.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            break  # torn by a crash
        if row["step"] <= step:
            kept.append(line)
    write_atomic(folder.metrics_path, "".join(f"{line}\n" for line in kept))
