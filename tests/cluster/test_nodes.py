"""Commands on several hosts, started by hand: which host is slow, and torchrun's ways to meet."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from distbench.doctor.network import read_network
from distbench.launching.nodes import VARIABLES
from distbench.runs.folder import read_record
from tests.cli import REPOSITORY, Command, Finished, environment
from tests.cluster.hosts import Host, hosts, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

OK = 0
SMALL = ["model.hidden_dim=6", "model.num_layers=2", "model.seq_len=3", "gate.fp64_reference=false", "window=off"]


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[Host]]:
    with hosts(tmp_path / "hosts", 3, "1gbit") as up:
        yield up


def on_each(machines: list[Host], words: list[str], cwd: Path, env: dict[str, str] | None = None) -> list[Finished]:
    """A command on each host, as the variables say which; `{node}` and `{host}` in its words are the host's own."""
    started = []
    for rank, host in enumerate(machines):
        told = dict(zip(VARIABLES, (str(rank), str(len(machines)), machines[0].address, "29711"), strict=True))
        own = {**environment(), **(told if env is None else env), "PYTHONPATH": str(REPOSITORY)}
        filled = [word.format(node=rank, host=host.address) for word in words]
        started.append(Command(*host.command(sys.executable, *filled), cwd=cwd, env=own))
    return [command.finish() for command in started]


def test_the_slow_host_is_named(three: list[Host], tmp_path: Path) -> None:
    for words in (["-n", "dbt2", "qdisc", "replace", "dev", "eth0"], ["qdisc", "replace", "dev", "dbtv2"]):
        subprocess.run(
            ["tc", *words, "root", "tbf", "rate", "200mbit", "burst", "256kb", "latency", "50ms"], check=True
        )
    words = ["-m", "distbench", "doctor", "--network", "--largest", "1", "launch.nodes=3", "launch.nproc=1"]
    leader, *others = on_each(three, words, tmp_path)
    assert leader.code == OK, leader.said
    assert [other.code for other in others] == [OK, OK], [other.said for other in others]
    (file,) = (tmp_path / "outputs").glob("*_network/network.json")
    found = read_network(file)
    assert [host["host"] for host in found["hosts"]] == ["node1", "node2", "node3"]
    pairs = found["pairs"]
    assert pairs["between"] == "hosts" and pairs["slow_hosts"] == ["node2"]
    assert {frozenset((d["source"], d["target"])) for d in pairs["slow"]} == {
        frozenset(("node1", "node2")),
        frozenset(("node2", "node3")),
    }
    rate = {(d["source"], d["target"]): d["bandwidth"] for d in pairs["all"]}
    assert rate["node1", "node3"] == pytest.approx(1e9 / 8, rel=0.15)
    assert rate["node1", "node2"] == pytest.approx(200e6 / 8, rel=0.15)
    assert "SLOW         node2: most of its pairs are" in leader.out


@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_torchrun_on_two_hosts(rendezvous: str, three: list[Host], tmp_path: Path) -> None:
    meeting = {
        "static": ["--node-rank={node}", f"--master-addr={three[0].address}", "--master-port=29712"],
        "c10d": ["--rdzv-backend=c10d", f"--rdzv-endpoint={three[0].address}:29713", "--rdzv-id=1"],
    }[rendezvous]
    launcher = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", *meeting]
    env = {"GLOO_SOCKET_IFNAME": "eth0"}
    words = [*launcher, "-m", "distbench", *SMALL, "strategy=fsdp2", "steps=4", "hydra.run.dir=run"]
    for ended in on_each(three[:2], words, tmp_path, env):
        assert ended.code == OK, ended.said
    record = read_record(tmp_path / "run")
    assert record["status"] == "passed" and record["gate"]["passed"] is True
    # c10d gives out ranks as hosts come.
    assert sorted(rank["host"] for rank in record["topology"]["ranks"]) == ["node1", "node2"]
    assert [host["ranks"] for host in record["topology"]["hosts"]] == [[0], [1]]
    assert all(host["interfaces"][0]["name"] == "eth0" for host in record["topology"]["hosts"])


def test_two_terminals(three: list[Host], tmp_path: Path) -> None:
    script = str(REPOSITORY / "launch" / "two_terminals.sh")
    env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PORT": "29714", "NPROC": "1"}
    words = [*SMALL, "strategy=ddp", "steps=4", "hydra.run.dir=run"]
    started = [
        Command(
            *host.command("bash", script, str(node), "node1", *words),
            cwd=tmp_path,
            env={**environment(), **env, "PYTHONPATH": str(REPOSITORY)},
        )
        for node, host in enumerate(three[:2])
    ]
    for ended in [command.finish() for command in started]:
        assert ended.code == OK, ended.said
    record = read_record(tmp_path / "run")
    assert record["status"] == "passed"
    assert [rank["host"] for rank in record["topology"]["ranks"]] == ["node1", "node2"]
