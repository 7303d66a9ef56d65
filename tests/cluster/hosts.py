"""Hosts on one machine: network namespaces on a bridge, each with an address and a name of its own. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

BRIDGE, NETWORK = "dbtbr", "10.83.7"
CONTROLLER = f"{NETWORK}.254"


def why_not() -> str | None:
    """Why there can be no hosts here; None: there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in ("ip", "tc", "nsenter", "unshare") if shutil.which(tool) is None]:
        return f"{', '.join(missing)} not installed"
    made = subprocess.run(["ip", "netns", "add", "dbtprobe"], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"ip netns: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", "dbtprobe"], check=True)
    return None


@dataclass(frozen=True)
class Host:
    """One of them. Numbers begin at 1."""

    number: int
    root: Path

    @property
    def name(self) -> str:
        return f"node{self.number}"

    @property
    def address(self) -> str:
        return f"{NETWORK}.{self.number}"

    def command(self, *words: str) -> list[str]:
        """The words of a command that runs on this host: its network, its name, its /etc/hosts. (Not `ip netns exec`, which
        hides /sys/fs/cgroup: slurmd does not start without.)"""
        script = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'
        return [
            *("nsenter", f"--net=/run/netns/dbt{self.number}", "unshare", "--uts", "--mount", "sh", "-c", script, "sh"),
            *(self.name, str(self.root / "hosts"), *words),
        ]


@contextmanager
def hosts(root: Path, count: int, rate: str | None = None) -> Iterator[list[Host]]:
    """Make so many, each with a link of `rate` (as tc has it, `1gbit`), and remove them."""
    _remove()
    found = [Host(number, root) for number in range(1, count + 1)]
    names = [f"{CONTROLLER} {os.uname().nodename}", *(f"{host.address} {host.name}" for host in found)]
    root.mkdir(parents=True, exist_ok=True)
    (root / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
    _ip(f"link add {BRIDGE} type bridge", f"addr add {CONTROLLER}/24 dev {BRIDGE}", f"link set {BRIDGE} up")
    try:
        for host in found:
            space, outer = f"dbt{host.number}", f"dbtv{host.number}"
            _ip(
                f"netns add {space}",
                f"link add {outer} type veth peer name eth0 netns {space}",
                f"link set {outer} master {BRIDGE} up",
                f"-n {space} addr add {host.address}/24 dev eth0",
                f"-n {space} link set eth0 up",
                f"-n {space} link set lo up",
            )
            if rate is not None:
                for words in (["-n", space, "qdisc", "add", "dev", "eth0"], ["qdisc", "add", "dev", outer]):
                    shape = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
                    subprocess.run(["tc", *words, *shape], check=True)
        yield found
    finally:
        _remove()


def _ip(*commands: str) -> None:
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True, capture_output=True)


def _remove() -> None:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    for line in listed.splitlines():
        if line.startswith("dbt"):
            subprocess.run(["ip", "netns", "del", line.split()[0]], check=False)
    links = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout
    for line in links.splitlines():
        if line.startswith("dbt"):  # a namespace's end takes its links with it, but not at once
            name = line.split()[0].partition("@")[0]
            subprocess.run(["ip", "link", "del", name], check=False, capture_output=True)
