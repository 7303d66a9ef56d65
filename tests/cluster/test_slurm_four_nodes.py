"""A real Slurm of four nodes: not beside the other one, whose hosts have the same names."""

from __future__ import annotations

from pathlib import Path

import pytest

from distbench.runs.folder import read_record
from tests.cluster.slurm import cluster, why_not
from tests.cluster.test_slurm import OK, ON_SLURM, SMALL, start

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def test_a_sweep_on_four_nodes(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    """Two cells of two nodes at once, and one of all four."""
    words = [
        *ON_SLURM[:3],
        "launch.nproc=1",
        "launch.nodes=2,4",
        "strategy=ddp,fsdp2",
        *SMALL,
        "steps=3",
        "global_batch=8",
    ]
    with cluster(tmp_path_factory.mktemp("s"), nodes=4) as slurm:
        ended = start(slurm, *words, cwd=tmp_path).finish()
    assert ended.code == OK, ended.said
    records = [read_record(run) for run in ended.runs]
    assert [record["gate"]["passed"] for record in records] == [True] * 4
    hosts = [[host["host"] for host in record["topology"]["hosts"]] for record in records]
    assert sorted(map(len, hosts)) == [2, 2, 4, 4] and ["node1", "node2", "node3", "node4"] in hosts
    for names, record in zip(hosts, records, strict=True):
        assert names == sorted(names), "ranks are in the order of the nodes"
        assert [rank["host"] for rank in record["topology"]["ranks"]] == names
