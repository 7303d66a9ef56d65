"""What a host has that communication depends on: network cards, NUMA nodes, GPUs and how they reach each other.

Facts as the system tells them; what it does not tell is null.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import psutil
import torch

from distbench.launching.world import World

LOOPBACK = "lo"
NODES = Path("/sys/devices/system/node")
INFINIBAND = Path("/sys/class/infiniband")
PCI = Path("/sys/bus/pci/devices")


def hosts_of(world: World) -> list[dict[str, Any]]:
    """In the order of their first ranks: `host_facts`, and its ranks. A collective."""
    names = world.gather(socket.gethostname())
    facts = world.gather(host_facts() if names.index(names[world.rank]) == world.rank else None)
    return [
        {**facts[names.index(name)], "ranks": [rank for rank, other in enumerate(names) if other == name]}
        for name in dict.fromkeys(names)
    ]


def host_facts() -> dict[str, Any]:
    """Of this host, for the record's `topology.hosts`."""
    return {
        "host": socket.gethostname(),
        "interfaces": interfaces(),
        "infiniband": infiniband(),
        "numa": numa_nodes(),
        "gpus": gpus(),
    }


def interfaces() -> list[dict[str, Any]]:
    """Network cards that are up, without loopback. `mbit_per_second` as the driver says it: virtual cards say what they
    like, and a switch between may be slower."""
    addresses, cards = psutil.net_if_addrs(), psutil.net_if_stats()
    found = []
    for name, card in sorted(cards.items()):
        ip = next((entry.address for entry in addresses.get(name, []) if entry.family == socket.AF_INET), None)
        if card.isup and name != LOOPBACK:
            found.append({"name": name, "address": ip, "mbit_per_second": card.speed or None, "mtu": card.mtu})
    return found


def infiniband() -> list[dict[str, Any]]:
    """Ports of RDMA cards, InfiniBand or RoCE, in the kernel's words: `100 Gb/sec (4X EDR)`, `4: ACTIVE`."""
    return [
        {"name": f"{port.parents[1].name}/{port.name}", "rate": _text(port / "rate"), "state": _text(port / "state")}
        for port in sorted(INFINIBAND.glob("*/ports/*"))
    ]


def numa_nodes() -> list[dict[str, Any]] | None:
    """Their processors, in the kernel's list format."""
    found = sorted(NODES.glob("node[0-9]*"), key=lambda path: int(path.name.removeprefix("node")))
    return [{"node": int(p.name.removeprefix("node")), "cpus": _text(p / "cpulist")} for p in found] or None


def gpus() -> list[dict[str, Any]]:
    """CUDA devices that this process sees: memory, NUMA node of their PCI slot, and whom each reaches without the host.

    Written from the documentation; it was run without a GPU only (docs/gpu.md).
    """
    number = torch.cuda.device_count()
    return [_gpu(index, number) for index in range(number)]


def _gpu(index: int, number: int) -> dict[str, Any]:
    about = torch.cuda.get_device_properties(index)
    place = [getattr(about, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    slot = None if None in place else f"{place[0]:04x}:{place[1]:02x}:{place[2]:02x}.0"
    node = None if slot is None else _text(PCI / slot / "numa_node")
    return {
        "index": index,
        "name": about.name,
        "memory_bytes": about.total_memory,
        "pci": slot,
        "numa_node": int(node) if node is not None and node.isdecimal() else None,  # -1: there are none
        "peers": [
            other for other in range(number) if other != index and torch.cuda.can_device_access_peer(index, other)
        ],
    }


def _text(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except OSError:
        return None
