"""Transfer and wait over a real link of known bandwidth: two network namespaces with a shaped pair of interfaces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli import environment

BYTES_PER_SECOND = 12.5e6
"""100 Mbit/s: 9.5 MB of gradients take 0.8 s, beside which a busy machine's scheduling is little."""
NAMES = (f"db{os.getpid()}a", f"db{os.getpid()}b")
MODEL = ["model.hidden_dim=256", "global_batch=2", "gate=off", "checkpoint=off", "window=quick", "window.track=false"]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def link() -> Iterator[None]:
    """10.77.0.1 and 10.77.0.2, each in a namespace of its own, both called `eth0`."""
    try:
        for name in NAMES:
            ip("netns", "add", name)
        ip("link", "add", "eth0", "netns", NAMES[0], "type", "veth", "peer", "name", "eth0", "netns", NAMES[1])
        for number, name in enumerate(NAMES, start=1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "mtu", "9000", "up")
            shape = ["tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", "tbf"]
            rate = f"{int(BYTES_PER_SECOND * 8)}bit"
            subprocess.run([*shape, "rate", rate, "burst", "64kb", "latency", "400ms"], check=True, capture_output=True)
        yield
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no shaped network namespaces here: {getattr(error, 'stderr', None) or error}")
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def run(cwd: Path, *words: str) -> dict[str, Any]:
    """Two ranks, one in each namespace, as a launcher on two hosts would start them; the record."""
    ranks = []
    for rank, name in enumerate(NAMES):
        joined = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        joined |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"}
        command = ["ip", "netns", "exec", name, sys.executable, "-m", "distbench", "strategy=ddp", *MODEL, *words]
        out = subprocess.PIPE
        ranks.append(
            subprocess.Popen(command, cwd=cwd, env=environment() | joined, stdout=out, stderr=subprocess.STDOUT)
        )
    said = [process.communicate(timeout=240)[0].decode() for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(said)
    (record,) = cwd.glob("outputs/*/record.json")
    return dict(json.loads(record.read_text()))


def gradients(record: dict[str, Any]) -> dict[str, Any]:
    return next(row for row in record["window"]["collectives"] if row["dtype"] == "float32")


def test_a_slow_link_is_transfer_at_its_bandwidth(link: None, tmp_path: Path) -> None:
    record = run(tmp_path, "steps=12")
    row = gradients(record)
    assert row["wire_bytes"] / row["transfer"] == pytest.approx(BYTES_PER_SECOND, rel=0.1)
    assert row["wait"] < 0.5 * row["transfer"]
    audit = record["window"]["bytes"]
    assert audit["ledger"] == audit["formula"]
