"""Several machines, one run: the command runs once on each, the first leads, the others follow (docs/cluster.md).

The leader composes, checks and writes; it tells the others of each attempt through a store of its own, as it is to be run,
and hears from each what became of its ranks. Followers never decide anything.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distbench.config import AUTO, Config, TestbedLaunch, from_container, joined_world, num_nodes, to_container
from distbench.errors import ConfigError, DistbenchError, ExitCode, OutputError
from distbench.launching import local
from distbench.launching.heartbeat import Beat, ranks_folder
from distbench.launching.jobs import RUN
from distbench.launching.stalls import Stall
from distbench.launching.watch import keep_evidence
from distbench.runs.folder import RunFolder

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from distbench.numerics.cache import BaselineEntry

VARIABLES = ("DISTBENCH_NODE", "DISTBENCH_NODES", "DISTBENCH_MASTER_ADDR", "DISTBENCH_MASTER_PORT")
"""Which node this is, of how many, and where the first is found: for who starts the commands without Slurm."""
START_S = 300.0
"""How long a node waits for the others to be there: clusters start their tasks within seconds, containers take minutes."""
SEEN_S = 60.0
"""How long a node looks for what another has just written to the shared folder: NFS caches names for up to a minute."""
REPORT_S = 60.0
"""How long the leader waits, once its own ranks are gone, for what the other nodes have to say."""
GONE_S = 10.0
"""How long the leader waits, at the very end, for the others to have read that it is over."""
TOKEN = "token"
"""A file of the leader's in the folder of the ranks: who reads it there sees the same folder."""
FIRST_PORT, NUM_PORTS = 20000, 10000


@dataclass(frozen=True)
class Node:
    """One machine of a run."""

    rank: int = 0
    count: int = 1
    address: str = "127.0.0.1"
    """Of the first node."""
    port: int = 0

    @property
    def leads(self) -> bool:
        return self.rank == 0


def here(config: Config) -> Node:
    """Which of the run's machines this is. Raises ConfigError where it should be one of several and is not."""
    if isinstance(config.launch, TestbedLaunch):
        return Node()  # it makes its machines itself
    nodes, found = num_nodes(config), told()
    if found is not None and found.count != nodes:
        raise ConfigError(
            f"launch.nodes={nodes}, but this command runs on {found.count} machines; make the two the same"
        )
    if found is None and nodes > 1:
        raise ConfigError(
            f"launch.nodes={nodes}, but nothing says that this command runs on each of {nodes} machines; start it with "
            "hydra/launcher=distbench_slurm, with srun (one task a node) or with torchrun (docs/cluster.md)"
        )
    if found is None or found.count == 1:
        port = getattr(config.launch, "master_port", AUTO)
        return Node(address=getattr(config.launch, "master_addr", "127.0.0.1"), port=0 if port == AUTO else int(port))
    return found


def told() -> Node | None:
    """As the environment says it; None where it says nothing, and where torchrun has made ranks already."""
    return None if joined_world() is not None else of_variables(os.environ) or of_slurm(os.environ)


def of_variables(environment: Mapping[str, str]) -> Node | None:
    """As VARIABLES say it."""
    if not all(name in environment for name in VARIABLES):
        return None
    rank, count, address, port = (environment[name] for name in VARIABLES)
    try:
        return Node(int(rank), int(count), address, int(port))
    except ValueError as error:
        raise ConfigError(f"{', '.join(VARIABLES)}: {error}") from error


def of_slurm(environment: Mapping[str, str]) -> Node | None:
    """Of a step of Slurm's with one task a node; None outside of one. Raises ConfigError for another kind of step."""
    if "SLURM_STEP_ID" not in environment or "SLURM_NODEID" not in environment:
        return None
    nodes = environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES", "1")
    tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS", nodes)
    if tasks != nodes:
        raise ConfigError(
            f"this step of Slurm's has {tasks} tasks on {nodes} nodes; distbench starts its ranks itself: one task a node, "
            "srun --ntasks-per-node=1"
        )
    names = environment.get("SLURM_STEP_NODELIST") or environment["SLURM_NODELIST"]
    # Several jobs may share a host; one job has one run at a time.
    job = f"{environment.get('SLURM_JOB_ID')}.{environment['SLURM_STEP_ID']}"
    port = FIRST_PORT + zlib.crc32(job.encode()) % NUM_PORTS
    return Node(int(environment["SLURM_NODEID"]), int(nodes), _first_of(names), port)


@cache
def _first_of(names: str) -> str:
    """Of a list of hosts in Slurm's brackets."""
    listed = subprocess.run(["scontrol", "show", "hostnames", names], capture_output=True, text=True, check=True)
    return listed.stdout.split()[0]


# --------------------------------------------------------------------------------------------------------------
# What the nodes tell each other
# --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """What became of a node's ranks in one attempt."""

    node: int
    host: str
    exit_codes: dict[int, int] = field(default_factory=dict)
    """Of the ranks that did not end well."""
    beats: dict[int, Beat] = field(default_factory=dict)
    stall: Stall | None = None
    out_of_memory: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Report:
        tree = json.loads(text)
        stall = tree["stall"]
        if stall is not None:
            stall = Stall(**{**stall, "beat": Beat(**stall["beat"]), "lines": tuple(stall["lines"])})
        codes = {int(rank): code for rank, code in tree["exit_codes"].items()}
        beats = {int(rank): Beat(**beat) for rank, beat in tree["beats"].items()}
        return cls(**{**tree, "stall": stall, "exit_codes": codes, "beats": beats})


class Meeting:
    """One attempt's place in the store, the same for all nodes: its agents meet there under `run_id`."""

    def __init__(self, node: Node, store: TCPStore, run_id: str, job: str) -> None:
        self.node, self.store, self.run_id, self.job = node, store, run_id, job

    def fail(self) -> None:
        """Let the other nodes know that ranks have ended here."""
        self.store.set(f"{self.run_id}/failed", str(self.node.rank))

    def failed(self) -> bool:
        """Whether ranks of any node have ended, or the leader is gone."""
        try:
            return bool(self.store.check([f"{self.run_id}/failed"]))
        except RuntimeError:
            return True

    def report(self, own: Report) -> None:
        self.store.set(f"{self.run_id}/report{own.node}", own.to_json())

    def reports(self) -> dict[int, Report | None]:
        """Of nodes 1 and on; None of one that says nothing within REPORT_S."""
        keys = {rank: f"{self.run_id}/report{rank}" for rank in range(1, self.node.count)}
        there = {rank: wait(self.store, key, REPORT_S) for rank, key in keys.items()}
        return {rank: None if text is None else Report.from_json(text) for rank, text in there.items()}


def wait(store: TCPStore, key: str, seconds: float) -> str | None:
    """What a key holds, once it is there; None where that takes too long, or the store is gone."""
    try:
        store.wait([key], timedelta(seconds=seconds))
        return store.get(key).decode()
    except RuntimeError:
        return None


def listen(address: str, port: int) -> TCPStore:
    """A store that this process serves, on a port that stays taken from the moment it is chosen.

    The socket is ours: with port 0, torch 2.13 forgets a server whose port an earlier run of this process had.
    """
    from torch.distributed import TCPStore

    listener = socket.create_server((address, port))
    return TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )


class Leader:
    """The first node's side. On one machine there is nobody to tell."""

    def __init__(self, node: Node, job: str = RUN) -> None:
        self.node, self.job = node, job
        self._store: TCPStore | None = None
        self._attempts = 0

    def begin(self, config: Config, folder: RunFolder, baseline: BaselineEntry | None) -> Meeting:
        """A new attempt, told to all nodes. Raises OutputError where one does not see the run folder, NodeMissing where one
        does not come."""
        keep_evidence(folder)  # of an attempt before
        ranks_folder(folder).mkdir(parents=True)
        if self._store is None or self.node.count == 1:
            self._store = listen(self.node.address, self.node.port)
        meeting = Meeting(self.node, self._store, secrets.token_hex(8), self.job)
        if self.node.count == 1:
            return meeting
        (ranks_folder(folder) / TOKEN).write_text(meeting.run_id)
        self._tell(
            {
                "run_id": meeting.run_id,
                "job": self.job,
                "config": to_container(config),
                "folder": str(folder.path.resolve()),
                "baseline": None if baseline is None else asdict(baseline),
            }
        )
        for rank in range(1, self.node.count):
            answer = wait(self._store, f"{meeting.run_id}/here{rank}", START_S)
            if answer is None:
                raise NodeMissing(f"node {rank} of {self.node.count} did not come within {START_S:.0f} s")
            if answer:
                raise OutputError(answer)
        return meeting

    def _tell(self, message: dict[str, Any]) -> None:
        assert self._store is not None
        self._store.set(f"attempt{self._attempts}", json.dumps(message))
        self._attempts += 1

    def end(self) -> None:
        """There will be no other attempt: let the others go."""
        if self.node.count == 1:
            return
        if self._store is None:
            self._store = listen(self.node.address, self.node.port)
        self._tell({"over": True})
        for rank in range(1, self.node.count):
            wait(self._store, f"gone{rank}", GONE_S)  # the store is this process's own, and ends with it


class NodeMissing(DistbenchError):
    """A machine of the run that did not start."""

    exit_code = ExitCode.CRASHED


def follow(node: Node) -> None:
    """Any node but the first: run its ranks, as often as the leader says. Raises NodeMissing where that is not there."""
    local.warm_up()
    try:
        take_part(node)
    finally:
        local.cool_down()


def take_part(node: Node) -> None:
    """As `follow`, in a process that goes on to live."""
    from torch.distributed import TCPStore

    limit, number = timedelta(seconds=START_S), 0
    try:
        store = TCPStore(node.address, node.port, is_master=False, wait_for_workers=False, timeout=limit)
        while True:
            store.wait([f"attempt{number}"], timedelta(days=365))
            message: dict[str, Any] = json.loads(store.get(f"attempt{number}"))
            if "over" in message:
                store.set(f"gone{node.rank}", "")
                return
            _attempt(Meeting(node, store, message["run_id"], message["job"]), message)
            number += 1
    except RuntimeError as error:
        place = f"{node.address}:{node.port}"
        raise NodeMissing(f"node 0 of {node.count} ({place}) is not there: {str(error).splitlines()[0]}") from error


def _attempt(meeting: Meeting, message: dict[str, Any]) -> None:
    from distbench.numerics.cache import BaselineEntry

    node, host = meeting.node, socket.gethostname()
    config, folder = from_container(message["config"]), RunFolder(Path(message["folder"]))
    baseline = None if message["baseline"] is None else BaselineEntry(**message["baseline"])
    unseen = _unseen(folder, meeting.run_id, baseline)
    meeting.store.set(f"{meeting.run_id}/here{node.rank}", unseen or "")
    if unseen is not None:
        return
    found = Report(node.rank, host)
    try:
        local.run_ranks(config, folder, baseline, meeting)
    except local.RanksFailed as failed:
        found = Report(node.rank, host, dict(failed.ranks), dict(failed.beats), failed.stall, failed.out_of_memory)
    except local.Interrupted:
        pass  # the leader was asked, too, and says so
    meeting.report(found)


def start_ranks(config: Config, folder: RunFolder, baseline: BaselineEntry | None, leader: Leader) -> None:
    """Run the config's ranks on all nodes and wait for them. Raises RanksFailed and Interrupted as `local.run_ranks` does,
    and what `Leader.begin` raises; no rank of this machine outlives this call."""
    meeting = leader.begin(config, folder, baseline)
    failed: local.RanksFailed | None = None
    try:
        local.run_ranks(config, folder, baseline, meeting)
    except local.RanksFailed as error:
        failed = error
    finally:
        reports = meeting.reports()
        keep_evidence(folder)
    if failed := _together(failed, reports, leader.node.count):
        raise failed


def _together(
    own: local.RanksFailed | None, reports: Mapping[int, Report | None], nodes: int
) -> local.RanksFailed | None:
    """What all nodes saw, as one failure; None where nobody saw one."""
    there = [report for report in reports.values() if report is not None]
    lost = [rank for rank, report in reports.items() if report is None]
    if own is None and not lost and not any(report.exit_codes or report.stall for report in there):
        return None
    failed = own or local.RanksFailed([])
    stalls = [report.stall for report in there if report.stall and report.stall.rank in report.beats]
    if failed.stall is None or failed.stall.rank not in failed.beats:  # who is on another host is seen better there
        failed.stall = next(iter(stalls), failed.stall)
    for report in there:
        failed.ranks = sorted([*failed.ranks, *report.exit_codes.items()])
        failed.beats = {**failed.beats, **report.beats}
        failed.out_of_memory = failed.out_of_memory or report.out_of_memory
    failed.lost = [f"node {rank} of {nodes}" for rank in lost]
    return failed


def _unseen(folder: RunFolder, token: str, baseline: BaselineEntry | None) -> str | None:
    """What a node does not see of what the leader wrote."""
    host, file = socket.gethostname(), ranks_folder(folder) / TOKEN
    if not _appears(lambda: file.read_text() == token):
        return (
            f"host {host} does not see the run folder {folder.path}: all nodes need one shared file system; set "
            "output_dir=... to a folder on it"
        )
    if baseline is not None and not _appears(lambda: Path(baseline.path).exists()):
        return f"host {host} does not see the baseline {baseline.path}; set output_dir=... to a shared folder"
    return None


def _appears(there: Callable[[], bool]) -> bool:
    until = time.monotonic() + SEEN_S
    while True:
        try:
            if there():
                return True
        except OSError:
            pass
        if time.monotonic() > until:
            return False
        time.sleep(0.2)
