"""The run folder: the interface between a run and everything that reads it (docs/run-folder.md)."""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distbench.errors import OutputError, RunFolderError
from distbench.runs.files import parse_json, write_atomic, write_json
from distbench.runs.text import detail

if TYPE_CHECKING:
    from distbench.numerics.summary import Summary

SCHEMA = 1
"""Version of record.json. Readers refuse newer ones."""

MAX_RECORD_BYTES = 64 * 2**20


class Status(StrEnum):
    """What became of a run."""

    running = "running"
    passed = "passed"
    gate_failed = "gate_failed"
    oom = "oom"
    crashed = "crashed"
    hung = "hung"
    interrupted = "interrupted"


def now() -> str:
    """UTC time, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class RunFolder:
    """Paths and writers of one run's folder. One writer at a time: the parent, then rank 0, then the parent."""

    path: Path

    @classmethod
    def create(cls, path: Path) -> RunFolder:
        """Make the folder ready for a new run. Raises OutputError if it cannot be written or holds a run already."""
        folder = cls(path)
        if folder.record_path.exists():
            raise OutputError(f"{path} already holds a run; choose another hydra.run.dir")
        try:
            folder.logs.mkdir(parents=True, exist_ok=True)
            folder.tensorboard.mkdir(exist_ok=True)
        except OSError as error:
            raise OutputError(f"cannot write the run folder {path}: {error.strerror}; set output_dir=...") from error
        return folder

    @classmethod
    def reopen(cls, path: Path) -> RunFolder:
        """The folder of a run that is to go on. Raises OutputError where it cannot be written."""
        folder = cls(path)
        if not os.access(path, os.W_OK | os.X_OK):
            raise OutputError(f"cannot write the run folder {path}")
        return folder

    def discard_unused(self) -> None:
        """Remove what was made for a run that was then refused: empty folders and Hydra's own files, nothing else."""
        if self.record_path.exists():
            return
        hydra = self.path / ".hydra"
        for name in ("config.yaml", "hydra.yaml", "overrides.yaml"):
            (hydra / name).unlink(missing_ok=True)
        for folder in (hydra, self.logs, self.tensorboard, self.path):
            with contextlib.suppress(OSError):
                folder.rmdir()

    @property
    def resolved_path(self) -> Path:
        return self.path / "resolved.yaml"

    @property
    def record_path(self) -> Path:
        return self.path / "record.json"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tb"

    @property
    def gradients(self) -> Path:
        return self.path / "gradients"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def write_gradients(self, step: int, summary: Summary) -> None:
        """Write `gradients/step_XXXXXXXX.safetensors` (docs/gradient-summaries.md)."""
        self.gradients.mkdir(exist_ok=True)
        summary.save(self.gradients / f"step_{step:08d}.safetensors", {"run": self.path.name, "step": str(step)})

    def write_resolved(self, tree: dict[str, Any]) -> None:
        import yaml

        write_atomic(self.resolved_path, yaml.safe_dump(tree, sort_keys=False))

    def preview_record(self, **sections: Any) -> dict[str, Any]:
        """The record as it would be with these sections, each replaced whole."""
        record = read_record(self.path) if self.record_path.exists() else {"schema": SCHEMA}
        return {**record, **sections}

    def update_record(self, **sections: Any) -> None:
        """Merge sections into record.json, replacing each whole."""
        write_json(self.record_path, self.preview_record(**sections))


def read_record(path: Path) -> dict[str, Any]:
    """The record of the run folder `path`. Raises RunFolderError where it is missing, damaged or of a newer schema."""
    file = path / "record.json"
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for
            raise RunFolderError(f"{file} is not a regular file; is {path} a run folder?")
        if status.st_size > MAX_RECORD_BYTES:
            raise RunFolderError(f"{file} is larger than any record distbench writes; is this a run folder?")
        record = parse_json(file.read_bytes())
    except OSError as error:
        raise RunFolderError(f"{file} cannot be read: {error.strerror}; is {path} a run folder?") from error
    except (ValueError, RecursionError) as error:
        raise RunFolderError(f"{file} is damaged: {detail(error)}") from error
    if not isinstance(record, dict) or not isinstance(record.get("schema"), int):
        raise RunFolderError(f"{file} is not a distbench record")
    if record["schema"] > SCHEMA:
        raise RunFolderError(
            f"{file} has schema {detail(record['schema'])}, this distbench reads up to {SCHEMA}; upgrade distbench"
        )
    return record


def find_runs(root: Path) -> list[Path]:
    """Every run folder at or below `root`, in name order."""
    return sorted(file.parent for file in root.rglob("record.json"))
