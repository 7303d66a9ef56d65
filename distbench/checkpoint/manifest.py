"""What a checkpoint's folder holds: the name, size and digest of each file. A folder is a checkpoint once this is in it."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from distbench.errors import CheckpointError
from distbench.runs.files import write_json

MANIFEST = "manifest.json"
SCHEMA = 1
STEP = re.compile(r"step_(\d{8,})")
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""Of a file in the folder itself: a manifest names nothing outside it."""
CHUNK = 1 << 22
MAX_BYTES = 1 << 26
"""Of a manifest, and of train_state.json: both are small."""


@dataclass(frozen=True)
class Entry:
    """One file."""

    name: str
    size: int
    xxh3_128: str

    @classmethod
    def of(cls, file: Path) -> Entry:
        """Read a file back, as it is on disk."""
        digest = xxhash.xxh3_128()
        size = 0
        with file.open("rb") as handle:
            while chunk := handle.read(CHUNK):
                digest.update(chunk)
                size += len(chunk)
        return cls(file.name, size, digest.hexdigest())

    def verify(self, folder: Path) -> None:
        """Raises CheckpointError where the file is not the one that was written."""
        file = folder / self.name
        if file.is_symlink() or not file.is_file():
            raise CheckpointError(f"{file} is missing")
        if (size := file.stat().st_size) != self.size:
            raise CheckpointError(
                f"{file} has {size:,} bytes, the manifest says {self.size:,}: it is truncated or another"
            )
        if Entry.of(file) != self:
            raise CheckpointError(f"{file} is damaged: its digest is not the manifest's")


def write_manifest(folder: Path, entries: list[Entry]) -> None:
    """The last file to be written into a folder that nobody knows yet."""
    write_json(folder / MANIFEST, {"schema": SCHEMA, "files": [asdict(entry) for entry in entries]})


def read_manifest(folder: Path) -> list[Entry]:
    """The files that a checkpoint is made of. Raises CheckpointError where it is damaged, foreign or newer."""
    file = folder / MANIFEST
    tree = read_small(file)
    try:
        schema, rows = int(tree["schema"]), tree["files"]
        entries = [Entry(str(row["name"]), int(row["size"]), str(row["xxh3_128"])) for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file} is damaged: {type(error).__name__}: {error}") from error
    if schema > SCHEMA:
        raise CheckpointError(f"{file} has schema {schema}, this distbench reads up to {SCHEMA}; upgrade distbench")
    for entry in entries:
        if not NAME.fullmatch(entry.name):
            raise CheckpointError(f"{file} names {entry.name[:80]!r}, which is no file of its folder")
    if len({entry.name for entry in entries}) != len(entries):
        raise CheckpointError(f"{file} names a file twice")
    return entries


def read_small(file: Path) -> dict[str, Any]:
    """A JSON object from a small file. Raises CheckpointError."""
    try:
        if file.is_symlink() or not file.is_file():
            raise CheckpointError(f"{file} is missing: {file.parent} is not a complete checkpoint")
        if file.stat().st_size > MAX_BYTES:
            raise CheckpointError(f"{file} is larger than any that distbench writes")
        tree = json.loads(file.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error
    if not isinstance(tree, dict):
        raise CheckpointError(f"{file} is damaged: not an object")
    return tree


def complete(checkpoints: Path) -> list[Path]:
    """Folders of complete checkpoints to resume from, by step."""
    found = [
        folder
        for folder in (checkpoints.iterdir() if checkpoints.is_dir() else [])
        if STEP.fullmatch(folder.name) and (folder / MANIFEST).is_file()
    ]
    return sorted(found, key=step_of)


def step_of(folder: Path) -> int:
    """The step that a checkpoint's folder is named after."""
    match = STEP.fullmatch(folder.name)
    if match is None:
        raise CheckpointError(f"{folder} is not named step_XXXXXXXX")
    return int(match[1])
