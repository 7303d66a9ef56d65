"""Hosts on this machine and the link between them: `launch=testbed` (docs/cluster.md).

A host is a process with a network, a name and an /etc/hosts of its own, which does what the command does on a machine of a
cluster. Namespaces have no name, and links no end outside of them: once the processes are gone, and they go with this one
however it ends, the kernel has removed everything. The network of this machine itself is not touched.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import IO, Any

from distbench.config import Config, Link, TestbedLaunch, to_container
from distbench.errors import ConfigError, DistbenchError
from distbench.experiment import Outcome
from distbench.launching.jobs import RUN
from distbench.launching.nodes import VARIABLES
from distbench.launching.signals import requests
from distbench.runs.environment import launch_command
from distbench.runs.folder import RunFolder, Status, now, read_record

NETWORK, MAX_HOSTS = "10.77.0", 250
"""The same for every testbed: it is to be seen in its own namespaces only."""
PORT = 29500
MTU = 9000
"""Bytes. Jumbo frames, as clusters have them: headers are below one percent of what a link carries."""
TOOLS = ("ip", "tc", "nsenter", "unshare", "mount")
TUN = Path("/dev/net/tun")
RATE = re.compile(r"(\d+(?:\.\d+)?)(k|m|g|)bit")
UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
BURST_BYTES, BURST_S = 64 * 1024, 1e-3
"""A link that was idle may send so much at once, or what it carries in so much time: timers are no finer."""
QUEUE_MS = 400
"""What does not fit into a link's queue is dropped. Senders on the same machine notice a full queue before."""
FOLLOWERS_S = 10.0
"""How long hosts have to end after the first of them."""

PROBE = (
    "ip link add probe0 type veth peer name probe1 && ip link add probe2 type bridge && "
    "tc qdisc add dev probe0 root tbf rate 1mbit burst 64kb latency 50ms && mount --bind /etc/hosts /etc/hosts"
)
HOST = (
    'ip link set lo up && file=$(mktemp) && echo "$1" >"$file" && mount --bind "$file" /etc/hosts && rm "$file" && '
    'shift && exec "$@"'
)
"""A host's first steps, in its namespaces: its /etc/hosts, then the words that it becomes."""
SWITCH = "ip link add switch type bridge && ip link set switch up && echo up && exec cat"
"""The namespace that all links meet in lives as long as somebody holds its standard input."""


class HostFailed(DistbenchError):
    """A run on hosts of ours was refused, or one of them has ended without a word."""

    def __init__(self, message: str, exit_code: int = DistbenchError.exit_code) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[assignment]


# --------------------------------------------------------------------------------------------------------------
# Refusals
# --------------------------------------------------------------------------------------------------------------


def check(launch: TestbedLaunch) -> None:
    """Refuse what cannot be made, or not here, before anything is. Raises ConfigError."""
    link = launch.testbed
    if not 2 <= launch.nodes <= MAX_HOSTS:
        raise ConfigError(f"launch.nodes={launch.nodes} must be from 2 to {MAX_HOSTS} with launch=testbed")
    if link.rate is not None and not bits_per_second(link.rate):
        raise ConfigError(
            f"launch.testbed.rate={link.rate!r} is not a speed; write launch.testbed.rate=1gbit, 100mbit, 2.5gbit or null"
        )
    if not 0 <= link.delay_ms <= 10_000:
        raise ConfigError(f"launch.testbed.delay_ms={link.delay_ms} must be from 0 to 10000 milliseconds")
    told = [name for name in (*VARIABLES, "SLURM_STEP_ID", "RANK") if name in os.environ]
    if told:
        raise ConfigError(f"launch=testbed makes its hosts itself, but {told[0]} says this is one of several; unset it")
    if why := why_not(link.delay_ms > 0):
        raise ConfigError(f"launch=testbed makes hosts out of network namespaces: {why}; use launch=local")


@cache
def why_not(delay: bool = False) -> str | None:
    """Why there can be no hosts here, or no `delay` between them; None: there can. Leaves nothing behind."""
    if sys.platform != "linux":
        return "that needs Linux"
    if os.geteuid() != 0:
        return "that needs root"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(missing)} not found (packages iproute2 and util-linux)"
    if delay and not TUN.is_char_device():
        return f"launch.testbed.delay_ms needs {TUN}, which is not here"
    script = PROBE + (" && ip tuntap add probe3 mode tun" if delay else "")
    tried = subprocess.run(_apart("sh", "-c", script), capture_output=True, text=True, check=False)
    return f"not allowed here ({' '.join(tried.stderr.split())})" if tried.returncode else None


def bits_per_second(rate: str) -> float | None:
    """Of a speed in tc's words; None of what is none."""
    found = RATE.fullmatch(rate)
    return float(found[1]) * UNITS[found[2]] if found else None


# --------------------------------------------------------------------------------------------------------------
# Hosts
# --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Host:
    """One of them. Numbers begin at 1."""

    number: int
    process: subprocess.Popen[bytes]
    answers: IO[bytes]

    @property
    def name(self) -> str:
        return name(self.number)

    def do(self, request: dict[str, Any]) -> None:
        """Its part of a run (launching/testbed_host.py)."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{json.dumps(request)}\n".encode())
        self.process.stdin.flush()

    def answer(self, within_s: float | None = None) -> dict[str, Any] | None:
        """What it says next; None where it has ended, or says nothing in time."""
        ready, _, _ = select.select([self.answers], [], [], within_s)
        line = self.answers.readline() if ready else b""
        return dict(json.loads(line)) if line else None


def name(number: int) -> str:
    return f"node{number}"


def address(number: int) -> str:
    return f"{NETWORK}.{number}"


_kept: list[Host] = []
"""Of the run before, in a sweep: what they have imported serves for the next."""
_made = ExitStack()


def _hosts(number_of: int) -> list[Host]:
    """So many, which wait for something to do. Raises HostFailed."""
    if len(_kept) != number_of or any(host.process.poll() is not None for host in _kept):
        release()
        atexit.unregister(release)
        atexit.register(release)
        _kept.extend(_made.enter_context(_host(number, number_of)) for number in range(1, number_of + 1))
        for host in _kept:
            if host.answer() is None:
                raise HostFailed(f"{host.name} of the testbed did not start: exit code {host.process.wait()}")
    return list(_kept)


def release() -> None:
    """End the hosts that are kept, and all that runs on them."""
    _kept.clear()
    _made.close()


@contextmanager
def _host(number: int, number_of: int) -> Iterator[Host]:
    names = ["127.0.0.1 localhost", *(f"{address(other)} {name(other)}" for other in range(1, number_of + 1))]
    reader, writer = os.pipe()
    words = [sys.executable, "-m", "distbench.launching.testbed_host", name(number), str(writer)]
    own = {key: value for key, value in os.environ.items() if not key.endswith("SOCKET_IFNAME")}
    own.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # that no name server knows these addresses
    with os.fdopen(reader, "rb") as answers:
        try:
            command = _apart("sh", "-c", HOST, "sh", "\n".join(names), *words)
            process = _start(command, stdin=subprocess.PIPE, pass_fds=[writer], env=own)
        finally:
            os.close(writer)
        with _ended(process):
            yield Host(number, process, answers)


@contextmanager
def _linked(hosts: list[Host], link: Link) -> Iterator[None]:
    """Each can reach the others meanwhile, through its `eth0`."""
    with _relay(hosts, link) if link.delay_ms else _switch(hosts):
        for host in hosts:
            _set_up(host.process.pid, "eth0", link.rate, address(host.number))
        try:
            yield
        finally:  # at once: with a namespace that nobody is in any more it would go a little later
            for host in hosts:
                with suppress(HostFailed):
                    _inside(host.process.pid, "ip link del eth0")


@contextmanager
def _switch(hosts: list[Host]) -> Iterator[None]:
    """A bridge that each host has a cable to."""
    process = _start(_apart("sh", "-c", SWITCH), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with _ended(process):
        _wait_until_up(process)
        for host in hosts:
            _inside(
                process.pid,
                f"ip link add eth0 netns {host.process.pid} type veth peer name {host.name}",
                f"ip link set {host.name} master switch",
            )
            _set_up(process.pid, host.name)
        yield


@contextmanager
def _relay(hosts: list[Host], link: Link) -> Iterator[None]:
    """A process that holds what each host sends to another for `delay_ms` (launching/relay.py)."""
    rate = bits_per_second(link.rate) if link.rate is not None else 0.0
    ends = [f"{address(host.number)}={host.process.pid}" for host in hosts]
    words = [sys.executable, "-m", "distbench.launching.relay", str(link.delay_ms / 1e3), str(rate), *ends]
    process = _start(_apart(*words), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    with _ended(process):
        _wait_until_up(process)
        yield


def _set_up(pid: int, device: str, rate: str | None = None, own: str | None = None) -> None:
    """A link's end in the network of process `pid`: no chatter of IPv6's on it, its speed, its address."""
    commands = [f"ip link set {device} addrgenmode none mtu {MTU} up"]
    if own is not None:
        commands.append(f"ip addr add {own}/24 dev {device}")
    if rate is not None:
        bits = bits_per_second(rate)
        assert bits is not None
        burst = max(BURST_BYTES, int(bits / 8 * BURST_S))
        commands.append(f"tc qdisc add dev {device} root tbf rate {rate} burst {burst} latency {QUEUE_MS}ms")
    _inside(pid, *commands)


def _inside(pid: int, *commands: str) -> None:
    """Run these in the network of process `pid`. Raises HostFailed with what they say."""
    words = ["nsenter", "--target", str(pid), "--net", "sh", "-c", " && ".join(commands)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HostFailed(f"the testbed's link cannot be made: {done.stderr.strip()}")


def _apart(*words: str) -> list[str]:
    """A command with a network, a host name and mounts of its own."""
    return ["unshare", "--net", "--uts", "--mount", *words]


def _start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Not in the terminal's foreground: what Ctrl-C means, this process decides."""
    sys.stdout.flush()
    return subprocess.Popen(command, process_group=0, **options)


@contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """What it has started itself ends with it."""
    try:
        yield
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(OSError):  # what it had not read
                    stream.close()


def _wait_until_up(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    if process.stdout.readline().strip() != b"up":
        raise HostFailed(f"the testbed's link cannot be made: exit code {process.wait()}")


# --------------------------------------------------------------------------------------------------------------
# One run
# --------------------------------------------------------------------------------------------------------------


def run(config: Config, folder: RunFolder, job: str = RUN) -> Outcome:
    """One job of `jobs.JOBS` on hosts of its own. The first leads, as the first machine of a cluster does. Raises as that
    does."""
    launch = config.launch
    assert isinstance(launch, TestbedLaunch)
    try:
        hosts = _hosts(launch.nodes)
        with _linked(hosts, launch.testbed), _passed_on(hosts[0].process) as asked:
            outcome = _run(config, folder, hosts, asked, job)
    except BaseException:
        release()
        raise
    if outcome.status not in (Status.passed, Status.gate_failed):
        release()
    return outcome


_ports = count(PORT)


def _run(config: Config, folder: RunFolder, hosts: list[Host], asked: list[int], job: str) -> Outcome:
    node = {"count": len(hosts), "address": address(1), "port": next(_ports)}
    request = {"node": node, "command": launch_command()}
    leader, *followers = hosts
    for host in followers:
        host.do(request)
    leader.do({**request, "job": job, "config": to_container(config), "folder": str(folder.path)})
    answer = leader.answer()
    if answer is not None and not all(host.answer(FOLLOWERS_S) for host in followers):
        release()
    if answer is not None and "status" in answer:
        return Outcome(Status(answer["status"]), answer["exit_code"])
    if answer is not None and "refused" in answer:
        raise HostFailed(answer["refused"], answer["exit_code"])
    status, reason = Status.crashed, f"{leader.name} of the testbed has ended without a word"
    if asked:
        status, reason = Status.interrupted, "stopped by the user"
    if folder.record_path.exists() and read_record(folder.path)["status"] == Status.running:
        folder.update_record(status=status.value, reason=reason, finished=now())
    if asked:
        raise KeyboardInterrupt
    raise HostFailed(reason)


@contextmanager
def _passed_on(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """What asks this process to end asks that one; whoever asks a third time has it killed. The signals that came."""
    asked: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        asked.append(number)
        process.send_signal(number if len(asked) < 3 else signal.SIGKILL)

    before = {number: signal.signal(number, pass_on) for number in {signal.SIGINT, signal.SIGTERM, *requests()}}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
