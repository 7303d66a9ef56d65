"""What a host says of itself."""

from __future__ import annotations

import socket
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from distbench.launching import hosts
from distbench.launching.hosts import gpus, host_facts, hosts_of, infiniband, interfaces, numa_nodes
from distbench.launching.interfaces import interface_to
from distbench.launching.world import World
from tests.distributed import run_distributed

Card = namedtuple("Card", "isup speed mtu")
Address = namedtuple("Address", "family address")


def test_this_one() -> None:
    facts = host_facts()
    assert facts["host"] == socket.gethostname() and all(card["name"] != "lo" for card in facts["interfaces"])
    if facts["numa"] is not None:
        assert facts["numa"][0]["node"] == 0 and facts["numa"][0]["cpus"]


def test_cards_that_are_up(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = {
        "lo": Card(True, 0, 65536),
        "eth1": Card(True, 0, 9000),
        "eth0": Card(True, 25000, 1500),
        "x": Card(False, 1, 1),
    }
    addresses = {"eth0": [Address(socket.AF_INET6, "fe80::1"), Address(socket.AF_INET, "10.0.0.1")]}
    monkeypatch.setattr(psutil, "net_if_stats", lambda: cards)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    assert interfaces() == [
        {"name": "eth0", "address": "10.0.0.1", "mbit_per_second": 25000, "mtu": 1500},
        {"name": "eth1", "address": None, "mbit_per_second": None, "mtu": 9000},
    ]


def test_rdma_and_numa_as_the_kernel_says_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "rate").write_text("100 Gb/sec (4X EDR)\n")
    monkeypatch.setattr(hosts, "INFINIBAND", tmp_path)
    assert infiniband() == [{"name": "mlx5_0/1", "rate": "100 Gb/sec (4X EDR)", "state": None}]
    for number in (0, 2, 10):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(f"{number}-{number + 1}\n")
    monkeypatch.setattr(hosts, "NODES", tmp_path)
    assert numa_nodes() == [{"node": n, "cpus": f"{n}-{n + 1}"} for n in (0, 2, 10)]
    monkeypatch.setattr(hosts, "NODES", tmp_path / "none")
    assert numa_nodes() is None


def test_gpus_as_the_documentation_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = SimpleNamespace(name="G", total_memory=80, pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    (tmp_path / "0000:3b:00.0").mkdir()
    (tmp_path / "0000:3b:00.0" / "numa_node").write_text("1\n")
    monkeypatch.setattr(hosts, "PCI", tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: about)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: a < b)
    assert gpus() == [
        {"index": 0, "name": "G", "memory_bytes": 80, "pci": "0000:3b:00.0", "numa_node": 1, "peers": [1]},
        {"index": 1, "name": "G", "memory_bytes": 80, "pci": "0000:3b:00.0", "numa_node": 1, "peers": []},
    ]
    for odd in ("-1", ""):
        (tmp_path / "0000:3b:00.0" / "numa_node").write_text(odd)
        assert gpus()[0]["numa_node"] is None, "a machine without them says -1"


def two_hosts(world: World) -> object:
    hosts.socket.gethostname = lambda: f"host{world.rank % 2}"
    return [(host["host"], host["ranks"], "interfaces" in host) for host in hosts_of(world)]


def test_hosts_of_a_world() -> None:
    assert run_distributed(two_hosts, 3)[2] == [("host0", [0, 2], True), ("host1", [1], True)]


def test_the_card_that_reaches_an_address() -> None:
    assert interface_to("127.0.0.1") == "lo"
    assert interface_to("no.such.host.invalid") is None
