"""Who may write a run folder: one run at a time, told apart by a lock that the kernel takes back from who dies."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from typing import TextIO

from distbench.errors import OutputError

LOCK = ".lock"


def take(folder: Path) -> TextIO:
    """For the process that is about to go on in a run folder. Raises OutputError where a run writes there.

    Held as long as the file that is returned is open. Rank 0 of the same run joins it.
    """
    file = _open(folder)
    _lock(file, folder, fcntl.LOCK_EX)  # nobody else's
    file.truncate(0)
    _sign(file)
    _lock(file, folder, fcntl.LOCK_SH)
    return file


def join(folder: Path) -> TextIO:
    """For rank 0, which writes while the process that started it waits. Raises as `take` does."""
    file = _open(folder)
    _lock(file, folder, fcntl.LOCK_SH)
    if not os.fstat(file.fileno()).st_size:
        _sign(file)
    return file


def _sign(file: TextIO) -> None:
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()


def _open(folder: Path) -> TextIO:
    try:
        return (folder / LOCK).open("a+")
    except OSError as error:
        raise OutputError(f"cannot write {folder / LOCK}: {error.strerror}") from error


def _lock(file: TextIO, folder: Path, kind: int) -> None:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        who = file.read(200)
        file.close()
        raise OutputError(f"{folder} is being written{who and f' by {who}'}: wait for that run, or stop it") from None
    except OSError:
        pass  # a file system without locks: nobody is told apart
