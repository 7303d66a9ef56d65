"""A sweep's folder: whose it is, which cell runs which experiment, and which earlier one a command goes on in."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TextIO

from distbench.checkpoint import lock
from distbench.config import Config, digest, effective
from distbench.errors import ConfigError
from distbench.hydra_edge import quoted
from distbench.runs.files import write_json

OWN = ".experiments"
"""In a sweep's folder: a file for each experiment, with the name of the cell that runs it; the sweep's command; its lock."""
COMMAND = "command.json"
RESUME, FOLDER, OUTPUT = "sweep.resume=", "hydra.sweep.dir=", "output_dir="

_held: list[TextIO] = []
"""The lock of the sweep that this process runs."""


def begin(path: Path, argv: list[str], resume: bool) -> bool:
    """Make the folder this sweep's own: cells of two would be given the same names in it, and run in each other's.

    Returns whether an earlier run of the same command began it. Raises ConfigError where it is another sweep's or cannot be
    written, OutputError where its sweep still runs.
    """
    own = path / OWN
    earlier = resume and own.is_dir()
    try:
        own.mkdir(parents=True, exist_ok=earlier)
    except FileExistsError:
        raise ConfigError(
            f"{path} already holds a sweep; choose another hydra.sweep.dir, or go on with it: sweep.resume=true"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}; set output_dir=...") from error
    _held.append(lock.take(own))
    write_json(own / COMMAND, {"command": _command(argv)})
    return earlier


def claim(path: Path, config: Config, cell: Path) -> str | None:
    """The name of another cell that runs this effective experiment in the same repeat; else it is claimed for `cell`.

    Exclusive creation, so that cells of one sweep may run in different processes or on different hosts.
    """
    own = path / OWN
    own.mkdir(exist_ok=True)
    file = own / f"{digest(effective(config))}_{config.sweep.repeat}"
    try:
        handle = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        owner = file.read_text()
        return None if owner == cell.name else owner or "an earlier cell"
    with os.fdopen(handle, "w") as opened:
        opened.write(cell.name)
    return None


def with_folder(argv: list[str]) -> list[str]:
    """The command line of a sweep that asks to go on (`sweep.resume=true`), with the folder of the newest sweep of the same
    command; as it is where there is none. Raises ConfigError where it names a folder that is another command's."""
    if (_last(argv, RESUME) or "false").lower() != "true":
        return argv
    named = _last(argv, FOLDER)
    if named is not None:
        _refuse_other(Path(named), argv)
        return argv
    root = Path(_last(argv, OUTPUT) or "outputs")
    same = [folder for folder in _sweeps(root) if _command_of(folder) == _command(argv)]
    if not same:
        print(f"sweep.resume=true: no sweep of this command in {root} yet, so it begins", flush=True)
        return argv
    newest = max(same, key=lambda folder: (folder / OWN / COMMAND).stat().st_mtime)
    return [*argv, f"{FOLDER}{quoted(newest)}"]


def _last(argv: list[str], key: str) -> str | None:
    """What a key is set to, where it is."""
    return next((word.removeprefix(key) for word in reversed(argv) if word.startswith(key)), None)


def _sweeps(root: Path) -> list[Path]:
    return sorted(file.parent.parent for file in root.glob(f"*/{OWN}/{COMMAND}"))


def _command(argv: list[str]) -> list[str]:
    """What makes two command lines the same sweep: the order of words is none of it, where it lies neither."""
    return sorted(word for word in argv if not word.startswith((RESUME, FOLDER)))


def _command_of(folder: Path) -> list[str] | None:
    try:
        found = json.loads((folder / OWN / COMMAND).read_text())["command"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, list) else None


def _refuse_other(folder: Path, argv: list[str]) -> None:
    theirs, ours = _command_of(folder), _command(argv)
    if theirs is None or theirs == ours:
        return
    differing = [f"without {word}" for word in theirs if word not in ours]
    differing += [f"with {word}" for word in ours if word not in theirs]
    raise ConfigError(
        f"sweep.resume=true: {folder} is of another command ({', '.join(differing[:4])}); choose another {FOLDER}..."
    )
