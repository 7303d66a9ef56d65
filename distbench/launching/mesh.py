"""Ranks in two dimensions: hosts, and the ranks of each."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from distbench.errors import ConfigError
from distbench.launching.world import World

REPLICATE, SHARD = "replicate", "shard"


def hybrid_mesh(world: World) -> DeviceMesh:
    """(hosts, ranks of a host): shard within a host, where links are fast, and replicate between hosts. A collective.

    Raises ConfigError where hosts have different numbers of ranks. As HSDP wants it (Zhao et al., arXiv:2304.11277, 3.2.2).
    """
    per_host = ranks_per_host(world.gather(socket.gethostname()))
    return init_device_mesh(world.device.type, (world.size // per_host, per_host), mesh_dim_names=(REPLICATE, SHARD))


def ranks_per_host(hosts: Sequence[object]) -> int:
    """Of the hosts of all ranks, in rank order. Raises ConfigError where they do not make a rectangle."""
    first = next((rank for rank, host in enumerate(hosts) if host != hosts[0]), len(hosts))
    rows = [hosts[start : start + first] for start in range(0, len(hosts), first)]
    if any(len(set(row)) > 1 or len(row) < first for row in rows) or len({row[0] for row in rows}) < len(rows):
        counts = ", ".join(f"{host}: {sum(other == host for other in hosts)}" for host in dict.fromkeys(hosts))
        raise ConfigError(
            f"ranks do not make a mesh of hosts and ranks of a host ({counts}); start as many ranks on each host, in the "
            "order of the hosts"
        )
    return first
