"""Ranks as hosts and ranks of a host."""

from __future__ import annotations

import pytest

from distbench.errors import ConfigError
from distbench.launching import mesh
from distbench.launching.mesh import REPLICATE, SHARD, hybrid_mesh, ranks_per_host
from distbench.launching.world import World
from tests.distributed import run_distributed


@pytest.mark.parametrize(
    ("hosts", "per_host"), [("aabb", 2), ("aaaa", 4), ("abcd", 1), ("aaabbbccc", 3), ("a", 1), ("aabbccdd", 2)]
)
def test_ranks_of_each_host(hosts: str, per_host: int) -> None:
    assert ranks_per_host(hosts) == per_host


@pytest.mark.parametrize("hosts", ["aab", "abab", "aabbb", "abb", "aabbaa", "aaba"])
def test_what_is_no_rectangle_is_refused(hosts: str) -> None:
    with pytest.raises(ConfigError, match=r"do not make a mesh of hosts and ranks of a host \(a: \d"):
        ranks_per_host(hosts)


def groups(world: World) -> tuple[list[int], list[int]]:
    mesh.socket.gethostname = lambda: f"host{world.rank // 2}"
    found = hybrid_mesh(world)
    assert found.mesh_dim_names == (REPLICATE, SHARD)
    here = [found.get_group(name) for name in (REPLICATE, SHARD)]
    import torch.distributed as dist

    return tuple(dist.get_process_group_ranks(group) for group in here)  # type: ignore[return-value]


def test_shards_stay_within_a_host_and_replicas_go_across() -> None:
    assert run_distributed(groups, 4) == [([0, 2], [0, 1]), ([1, 3], [0, 1]), ([0, 2], [2, 3]), ([1, 3], [2, 3])]
