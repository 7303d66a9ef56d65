"""Who listens where while ranks of one host run: on loopback, and nowhere else."""

from __future__ import annotations

import shutil
import socket
import stat
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import psutil
import pytest

from tests.cli import SMALL, Command, environment

RUN = [*SMALL, "gate=default", "gate.steps=1", "steps=150", "window=off"]
"""Long enough to be looked at, with a baseline's process and a forkserver."""


def other_interface() -> tuple[str, str] | None:
    """Name and IPv4 address of a network interface that is up and is not loopback."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if name in up and address.family is socket.AF_INET and not address.address.startswith("127."):
                return name, address.address
    return None


def renamed() -> list[str]:
    """What makes a command run on a host whose name resolves to a network card, as it does on most; empty where a test may
    not. Without it, Gloo would find loopback by itself where the name resolves to that."""
    interface = other_interface()
    prefix = ["unshare", "--uts", "sh", "-c", f'hostname {interface[1]} && exec "$0" "$@"'] if interface else []
    if prefix and shutil.which("unshare") and subprocess.run([*prefix, "true"], check=False).returncode == 0:
        return prefix
    return []


def listening(*words: str, cwd: Path, env: dict[str, str]) -> dict[str, set[int]]:
    """While a run lasts: address -> the processes of it that have a TCP or UDP socket bound there; for the sockets of a file
    system, their paths."""
    command = Command(*renamed(), sys.executable, "-m", "distbench", *RUN, *words, cwd=cwd, env=env)
    found: dict[str, set[int]] = defaultdict(set)
    while command.process.poll() is None:
        time.sleep(0.05)
        for process in command.alive():
            try:
                connections = process.net_connections(kind="all")
            except psutil.Error:  # ended meanwhile
                continue
            for connection in connections:
                if connection.family is socket.AF_UNIX:
                    found[connection.laddr or "unnamed"].add(process.pid)
                elif connection.status == psutil.CONN_LISTEN or connection.type is socket.SOCK_DGRAM:
                    found[connection.laddr.ip].add(process.pid)
        private(found)
    done = command.finish()
    assert done.code == 0, done.said
    return found


def private(found: dict[str, set[int]]) -> None:
    """The forkserver's socket is in a folder of the user's own, which is gone once the run has ended."""
    for path in (Path(name) for name in found if name.startswith("/")):
        if path.parent.exists():
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700, path


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_on_loopback_only(address: str, tmp_path: Path) -> None:
    env = {key: value for key, value in environment().items() if not key.endswith("_SOCKET_IFNAME")}
    found = listening(f"launch.master_addr={address}", cwd=tmp_path, env=env)
    assert len(found.pop("127.0.0.1", set())) >= 3, "the rendezvous in the parent, Gloo in each rank"
    forkserver = [name for name in found if "/pymp-" in name]
    assert len(forkserver) == 1 and set(found) <= {*forkserver, "unnamed"}


@pytest.mark.skipif(other_interface() is None, reason="this machine has no other interface")
def test_elsewhere_where_told_to(tmp_path: Path) -> None:
    name, address = other_interface() or ("", "")
    assert address in listening(cwd=tmp_path, env={**environment(), "GLOO_SOCKET_IFNAME": name})
