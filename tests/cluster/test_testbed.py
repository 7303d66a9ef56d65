"""Hosts of our own on this machine: what runs there, what their link does, and that nothing of them stays."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distbench.config import Config, Link, threads_per_rank
from distbench.doctor.network import read_network
from distbench.errors import ConfigError
from distbench.launching import testbed
from distbench.runs.folder import find_runs, read_record
from tests.cli import CUSTOM, Command, Finished, distbench, start, start_warm
from tests.cluster.slurm import until

OK, USAGE, CRASHED, INTERRUPTED = 0, 2, 4, 5
ON_TESTBED = ["launch=testbed", "launch.testbed.nodes=2"]
SMALL = ["model.hidden_dim=6", "model.num_layers=2", "model.seq_len=3", "gate.fp64_reference=false", "window=off"]
MEASURED = ["window=quick", "steps=13", "gate.fp64_reference=false", "checkpoint=off"]

has_hosts = pytest.mark.skipif(testbed.why_not(True) is not None, reason=str(testbed.why_not(True)))


def hosts_of(record: dict[str, Any]) -> list[str]:
    return [rank["host"] for rank in record["topology"]["ranks"]]


def links() -> set[str]:
    """Of this machine's own network, those that are called as ours are in theirs; named namespaces."""
    listed = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout
    names = {line.split()[0].partition("@")[0] for line in listed.splitlines()}
    named = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {name for name in names | set(named.split()) if name.startswith(("node", "relay", "switch", "probe"))}


def well(ended: Finished, code: int = OK) -> Finished:
    """And nothing is left of it: `finish` has seen to its processes."""
    assert ended.code == code, ended.said
    assert not links()
    return ended


@has_hosts
def test_a_sweep_on_two_hosts_at_200_mbit(tmp_path: Path) -> None:
    words = [*ON_TESTBED, "launch.testbed.rate=200mbit", "strategy=ddp,fsdp2", "model.hidden_dim=256", *MEASURED]
    ended = well(distbench("-m", *words, cwd=tmp_path))
    records = {read_record(run)["config"]["strategy"]["name"]: read_record(run) for run in ended.runs}
    assert records.keys() == {"ddp", "fsdp2"}
    for record in records.values():
        assert record["status"] == "passed" and record["gate"]["passed"] is True
        assert hosts_of(record) == ["node1", "node2"]
        assert record["config"]["launch"]["testbed"] == {"rate": "200mbit", "delay_ms": 0.0}
        audit = record["window"]["bytes"]
        assert audit["ledger"] == audit["formula"] and not audit["warnings"]
        # 54 bytes of headers in 9014, and acknowledgements.
        assert audit["interface"] == pytest.approx(audit["ledger"], rel=0.03)
    gradients = next(row for row in records["ddp"]["window"]["collectives"] if row["dtype"] == "float32")
    assert gradients["wire_bytes"] / gradients["transfer"] == pytest.approx(200e6 / 8, rel=0.1)


@has_hosts
def test_delay_is_in_every_collective(tmp_path: Path) -> None:
    """A ring's all-reduce of few bytes is two messages one after the other at least, one to reduce, one to tell."""
    delay = 20.0
    words = [*ON_TESTBED, "launch.testbed.nodes=3", f"launch.testbed.delay_ms={delay}", "launch.testbed.rate=1gbit"]
    ended = well(distbench(*words, "global_batch=6", *MEASURED, cwd=tmp_path))
    assert hosts_of(ended.record) == ["node1", "node2", "node3"]
    scalars = next(row for row in ended.record["window"]["collectives"] if row["dtype"] == "float64")
    assert scalars["transfer"] >= 2 * delay / 1e3
    assert not ended.record["window"]["bytes"]["warnings"]


@has_hosts
def test_the_doctor_between_hosts_and_in_the_record_of_a_run_over_the_same_link(tmp_path: Path) -> None:
    link = [*ON_TESTBED, "launch.testbed.rate=500mbit"]
    well(distbench("doctor", "--network", "--largest", "1", *link, cwd=tmp_path))
    (file,) = (tmp_path / "outputs").glob("*_network/network.json")
    found = read_network(file)
    assert [host["host"] for host in found["hosts"]] == ["node1", "node2"] and found["pairs"]["between"] == "hosts"
    assert found["pairs"]["typical"]["bandwidth"] == pytest.approx(500e6 / 8, rel=0.15)
    for rate, known in (("500mbit", True), ("400mbit", False)):
        run = tmp_path / f"at{rate}"
        words = [*ON_TESTBED, f"launch.testbed.rate={rate}", *SMALL, "steps=3", f"hydra.run.dir={run}"]
        well(distbench(*words, cwd=tmp_path))
        assert (read_record(run)["topology"]["network"] is not None) == known


@has_hosts
def test_a_run_that_crashes_takes_its_hosts_with_it_and_the_next_has_new_ones(tmp_path: Path) -> None:
    models = "model._target_=tests.models_for_tests.Raises,tests.models_for_tests.Plain"
    ended = well(distbench("-m", *ON_TESTBED, *CUSTOM, models, cwd=tmp_path), CRASHED)
    raises, plain = (read_record(run) for run in ended.runs)
    assert raises["status"] == "crashed" and "ArithmeticError: the user's own mistake" in raises["reason"]
    assert plain["status"] == "passed" and hosts_of(plain) == ["node1", "node2"]
    assert raises["run"]["command"].startswith("python -m distbench -m launch=testbed"), "what the user typed"


@has_hosts
def test_what_only_its_first_host_can_refuse_leaves_nothing(tmp_path: Path) -> None:
    ended = well(distbench(*ON_TESTBED, *CUSTOM, "model._target_=tests.models_for_tests.NoSuch", cwd=tmp_path), USAGE)
    assert "NoSuch" in ended.err and "Traceback" not in ended.said and not ended.left


def begun(command: Command, cwd: Path) -> Path:
    """The one run, once it trains."""

    def there() -> Path | None:
        for run in find_runs(cwd / "outputs") if (cwd / "outputs").exists() else []:
            log = run / "metrics.jsonl"
            if log.exists() and len(log.read_text().splitlines()) > 3:
                return run
        return None

    run = until(there, 120.0)
    assert run is not None, command.finish().said
    return run


LONG = [*ON_TESTBED, *SMALL, "steps=100000", "checkpoint.every=50000", "checkpoint.final=false"]


@has_hosts
def test_ctrl_c_writes_a_checkpoint_and_the_run_goes_on_from_it(tmp_path: Path) -> None:
    command = start_warm(*LONG, cwd=tmp_path)
    run = begun(command, tmp_path)
    command.signal(signal.SIGINT)
    ended = well(command.finish(), INTERRUPTED)
    assert "stopping after this step" in ended.out and "go on        python -m distbench resume=" in ended.out
    record = read_record(run)
    steps = len((run / "metrics.jsonl").read_text().splitlines())
    assert record["status"] == "interrupted" and (run / "checkpoints" / f"step_{steps:08d}").is_dir()
    ended = well(distbench(f"resume={run}", f"steps={steps + 3}", cwd=tmp_path))
    assert read_record(run)["status"] == "passed" and hosts_of(ended.record) == ["node1", "node2"]


@has_hosts
@pytest.mark.parametrize("delay", [0, 1])
def test_sigkill_leaves_nothing_and_the_next_start_works(delay: int, tmp_path: Path) -> None:
    command = start_warm(*LONG, f"launch.testbed.delay_ms={delay}", cwd=tmp_path)
    begun(command, tmp_path)
    hosts = {Path(f"/proc/{process.pid}/ns/net").readlink() for process in command.alive()}
    assert len(hosts) == 4, "this machine, two hosts, and what is between them"
    (own,) = (process for process in command.alive() if process.pid == command.process.pid)
    own.send_signal(signal.SIGKILL)
    assert until(lambda: not [p for p in command.alive() if p.pid != own.pid], 20.0), command.alive()
    well(command.finish(), -signal.SIGKILL)
    (tmp_path / "next").mkdir()
    well(distbench(*ON_TESTBED, *SMALL, "steps=3", "checkpoint=off", cwd=tmp_path / "next"))


def test_without_root_it_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    words = ["distbench", *ON_TESTBED, "launch.testbed.rate=1gbit"]
    as_user = f"import os, runpy, sys; os.geteuid = lambda: 1000; sys.argv = {words}"
    code = f"{as_user}; runpy.run_module('distbench', run_name='__main__')"
    ended = Command(sys.executable, "-c", code, cwd=tmp_path).finish()
    assert ended.code == USAGE and not ended.left
    assert ended.err == (
        "distbench: launch=testbed makes hosts out of network namespaces: that needs root; use launch=local\n"
    )


def test_a_sweep_without_the_tools_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    ended = start("-m", *ON_TESTBED, "strategy=ddp,fsdp2", cwd=tmp_path, env=environment).finish()
    assert ended.code == USAGE and not ended.left
    assert "launch=testbed makes hosts" in ended.err


@pytest.mark.parametrize(
    ("launch", "said"),
    [
        (testbed.TestbedLaunch(nodes=1), "launch.nodes=1 must be from 2"),
        (testbed.TestbedLaunch(testbed=Link(rate="1")), "launch.testbed.rate='1' is not a speed"),
        (testbed.TestbedLaunch(testbed=Link(rate="0gbit")), "is not a speed"),
        (testbed.TestbedLaunch(testbed=Link(rate="1gbps")), "is not a speed"),
        (testbed.TestbedLaunch(testbed=Link(delay_ms=-1.0)), "launch.testbed.delay_ms=-1.0 must be"),
        (testbed.TestbedLaunch(testbed=Link(delay_ms=float("nan"))), "launch.testbed.delay_ms=nan must be"),
    ],
)
def test_links_that_cannot_be(launch: testbed.TestbedLaunch, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testbed, "why_not", lambda delay: None)
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        testbed.check(launch)


@pytest.mark.parametrize(
    ("what", "value", "said"), [("TUN", Path("/none"), "needs /none"), ("TOOLS", ("nix",), "nix not")]
)
def test_what_is_missing_here(what: str, value: object, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testbed, what, value)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("sys.platform", "linux")
    testbed.why_not.cache_clear()
    try:
        assert said in str(testbed.why_not(True))
    finally:
        testbed.why_not.cache_clear()


def test_one_of_several_machines_makes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    with pytest.raises(ConfigError, match="SLURM_STEP_ID says this is one of several"):
        testbed.check(testbed.TestbedLaunch())


def test_speeds() -> None:
    assert [testbed.bits_per_second(rate) for rate in ("100mbit", "2.5gbit", "800kbit", "5bit", "fast", "-1gbit")] == [
        *(1e8, 2.5e9, 8e5, 5.0, None, None)
    ]


def test_hosts_share_this_machines_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    config = Config()
    config.launch = testbed.TestbedLaunch(nodes=2)
    assert threads_per_rank(config, 1) == 4 and threads_per_rank(config, 2) == 2
