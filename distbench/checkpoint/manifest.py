"""What a checkpoint's folder holds: the name, size and digest of each file. A folder is a checkpoint once this is in it."""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distbench.checkpoint.format import Source, is_count
from distbench.errors import CheckpointError
from distbench.runs.files import parse_json, write_json
from distbench.runs.text import detail

MANIFEST = "manifest.json"
MODEL = "model.safetensors"
"""The plain model, where there is one: beside the checkpoint's own files, and not one of them."""
SCHEMA = 1
STEP = re.compile(r"step_(\d{8,})")
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""Of a file in the folder itself: a manifest names nothing outside it."""
MAX_BYTES = 1 << 26
"""Of a manifest, and of train_state.json: both are small."""


@dataclass(frozen=True)
class Entry:
    """One file."""

    name: str
    size: int
    xxh3_128: str
    """Of what the kernel was given to write, in hex."""

    @classmethod
    def of(cls, file: Path) -> Entry:
        """Of a file that is there."""
        with Source(file) as source:
            return cls(file.name, source.size, source.digest())

    def check_size(self, file: Path, size: int) -> None:
        """Raises CheckpointError where a file of this size is not the one that was written."""
        if size != self.size:
            raise CheckpointError(
                f"{file} has {size:,} bytes, the manifest says {self.size:,}: it is truncated or another"
            )

    def check_digest(self, file: Path, digest: str) -> None:
        """Raises CheckpointError where a file of this digest is not the one that was written."""
        if digest != self.xxh3_128:
            raise CheckpointError(f"{file} is damaged: its digest is not the manifest's")

    def verify(self, folder: Path) -> None:
        """Read the whole file and hold it against this. Raises CheckpointError."""
        with Source(folder / self.name) as source:
            self.check_size(source.path, source.size)
            self.check_digest(source.path, source.digest())


def write_manifest(folder: Path, entries: list[Entry]) -> None:
    """The last file to be written into a folder that nobody knows yet."""
    write_json(folder / MANIFEST, {"schema": SCHEMA, "files": [asdict(entry) for entry in entries]})


def read_manifest(folder: Path) -> list[Entry]:
    """The files that a checkpoint is made of. Raises CheckpointError where it is damaged, foreign or newer."""
    file = folder / MANIFEST
    tree = read_small(file)
    schema, rows = tree.get("schema"), tree.get("files")
    if not isinstance(schema, int) or not isinstance(rows, list):
        raise CheckpointError(f"{file} is damaged: it has no schema, or no list of files")
    if schema > SCHEMA:
        raise CheckpointError(
            f"{file} has schema {detail(schema)}, this distbench reads up to {SCHEMA}; upgrade distbench"
        )
    entries = [_entry(file, row) for row in rows]
    if len({entry.name for entry in entries}) != len(entries):
        raise CheckpointError(f"{file} names a file twice")
    return entries


def _entry(file: Path, row: Any) -> Entry:
    match row:
        case {"name": str(name), "size": size, "xxh3_128": str(digest)} if is_count(size):
            if not NAME.fullmatch(name):
                raise CheckpointError(f"{file} names {detail(repr(name))}, which is no file of its folder")
            return Entry(name, size, digest)
    raise CheckpointError(f"{file} is damaged: {detail(repr(row))} is no name, size and digest")


def read_small(file: Path) -> dict[str, Any]:
    """A JSON object from a small file. Raises CheckpointError."""
    if not os.path.lexists(file):
        raise CheckpointError(f"{file} is missing: {file.parent} is not a complete checkpoint")
    with Source(file) as source:
        if source.size > MAX_BYTES:
            raise CheckpointError(f"{file} is larger than any that distbench writes")
        data = bytes(source.read(0, source.size))
    try:
        tree = parse_json(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: {detail(error)}") from error
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


def model_metadata(step: int) -> dict[str, str]:
    """Of a plain model's file."""
    return {"format": "pt", "step": str(step)}
