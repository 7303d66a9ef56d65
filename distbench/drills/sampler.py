"""What a sweep's process holds at the end of each cell, seen from inside: a Hydra callback of the `leaks` drill."""

from __future__ import annotations

import gc
import json
import multiprocessing.forkserver
import os
import tempfile
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from distbench.drills.command import session

PAGE = os.sysconf("SC_PAGE_SIZE")
MIB = 2**20


class Sampler(Callback):
    """Appends a line of JSON to `file`: what there is, and how much."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        gc.collect()  # when Python would do it by itself depends on what else it does
        with self.file.open("a") as file:
            file.write(json.dumps(sample()) + "\n")


def sample() -> dict[str, float]:
    """Of this process, its forkserver, and everything in its session."""
    own, server = os.getpid(), getattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", None)
    processes = list(session(os.getsid(0)))
    found = {
        "open files": entries("/proc/self/fd"),
        "memory, MiB": memory(own),
        "threads": entries("/proc/self/task"),
        "processes": len(processes),
        "listening sockets": len(listening() & set().union(*map(sockets, processes))),
        "shared memory": len(set().union(*map(shared, processes))),
        "temporary files": sum(1 for _ in Path(tempfile.gettempdir()).rglob("*")),
    }
    if server is not None:
        found["forkserver's open files"] = entries(f"/proc/{server}/fd")
        found["forkserver's memory, MiB"] = memory(server)
    return found


def entries(folder: str) -> int:
    return sum(1 for _ in Path(folder).iterdir())


def memory(pid: int) -> float:
    """Resident, MiB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE / MIB


def listening() -> set[str]:
    """Inodes of this machine's TCP sockets that listen."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                found.add(fields[9])
    return found


def sockets(pid: int) -> set[str]:
    """Inodes of a process's sockets; of one that has just ended none."""
    found = set()
    try:
        for handle in Path(f"/proc/{pid}/fd").iterdir():
            target = str(handle.readlink())
            if target.startswith("socket:["):
                found.add(target[8:-1])
    except OSError:
        return set()
    return found


def shared(pid: int) -> set[str]:
    """Names in /dev/shm that a process maps; of one that has just ended none."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {line.partition("/dev/shm/")[2] for line in lines if "/dev/shm/" in line}
