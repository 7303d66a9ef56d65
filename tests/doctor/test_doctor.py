"""`python -m distbench doctor`: what it says of this machine, and of the network between ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distbench.doctor.machine import examine
from distbench.doctor.network import read_network
from distbench.doctor.tables import print_network
from distbench.errors import RunFolderError
from tests.cli import SMALL, Finished, distbench, torchrun

OK, USAGE, GATE = 0, 2, 3
QUICK = ["doctor", "--network", "--largest", "1"]


def network(ended: Finished) -> dict[str, Any]:
    (file,) = (ended.cwd / "outputs").glob("*_network/network.json")
    return read_network(file)


def test_every_line_that_is_not_well_has_a_remedy(tmp_path: Path) -> None:
    sections = dict(examine(tmp_path))
    assert sections.keys() == {"machine", "software", "devices", "backends", "precisions", "meters", "launch"}
    lines = [line for section in sections.values() for line in section]
    assert all(line.said and (line.remedy is None or len(line.remedy) > 10) for line in lines)
    assert {line.what for line in lines if line.good} >= {"cpu", "gloo", "fp32", "launch=local", "torch"}
    ended = distbench("doctor", cwd=tmp_path)
    assert ended.code == OK and not ended.left, "nothing is written"
    for line in lines:
        assert line.what.partition("=")[0] in ended.out


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write anywhere
    lines = dict(examine(tmp_path / "not" / "there"))["machine"]
    (room,) = (line for line in lines if line.what.startswith("output_dir"))
    assert not room.good and "set output_dir=" in str(room.remedy)


def test_the_network_between_two_ranks_and_in_the_records_of_their_runs(tmp_path: Path) -> None:
    ended = distbench(*QUICK, "launch.nproc=2", cwd=tmp_path)
    assert ended.code == OK, ended.said
    found = network(ended)
    assert (found["world_size"], found["backend"], found["pairs"]["between"]) == (2, "gloo", "ranks")
    assert found["lines"].keys() == {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"}
    assert {row["bytes"] for row in found["collectives"]} == {4**n * 1024 for n in range(6)}
    assert "typical" in ended.out and "network.json" in ended.out
    (host,) = found["hosts"]
    assert host["ranks"] == [0, 1] and host["interfaces"] is not None
    run = distbench(*SMALL, "strategy=ddp", "launch.nproc=2", cwd=tmp_path)
    assert run.code == OK, run.said
    topology = run.record["topology"]
    assert topology["hosts"] == [host] and topology["network_reason"] is None
    assert topology["network"]["lines"] == found["lines"] and topology["network"]["measured"] == found["measured"]
    other = distbench(*SMALL, "strategy=ddp", "launch.nproc=3", "global_batch=6", "hydra.run.dir=other", cwd=tmp_path)
    assert other.code == OK, other.said
    topology = json.loads((tmp_path / "other" / "record.json").read_text())["topology"]
    assert topology["network"] is None and "doctor --network" in topology["network_reason"]


def test_under_torchrun(tmp_path: Path) -> None:
    ended = torchrun(*QUICK, cwd=tmp_path)
    assert ended.code == OK, ended.said
    assert network(ended)["world_size"] == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["doctor", "launch.nproc=2"], "launch.nproc=2 goes with doctor --network only"),
        (["doctor", "--network", "launch.nproc=1"], "there is no network with 1 rank"),
        (["doctor", "--network", "launch.nprok=2"], "nprok"),
        (["doctor", "--network", "fast"], "'fast' is no override"),
        (["doctor", "--network", "--largest", "0"], "--largest 0 is no size in MiB"),
        (["doctor", "--network", "launch.nodes=2"], "nothing says that this command runs on each of 2 machines"),
    ],
)
def test_bad_input(words: list[str], message: str, tmp_path: Path) -> None:
    ended = distbench(*words, cwd=tmp_path)
    assert ended.code == USAGE and message in ended.err and "Traceback" not in ended.said
    assert not list(tmp_path.rglob("network.json"))


def test_what_is_slow_or_wrong_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = {"source": "a", "target": "b", "latency": 1e-3, "bandwidth": 1e6, "latency_best": 1e-3, "bandwidth_best": 1e6}
    row = {"op": "all_reduce", "bytes": 1024, "seconds": 1e-3, "low": 1e-3, "high": 1e-3, "algbw": 1e6, "busbw": 1e6}
    found = {
        "world_size": 2,
        "backend": "gloo",
        "device": "cpu",
        "hosts": [{"host": "a", "ranks": [0], "interfaces": []}],
        "collectives": [{**row, "right": False}],
        "lines": {"all_reduce": None},
        "core_wait": 0.6,
        "pairs": {
            "between": "hosts",
            "rounds": 1,
            "of_rounds": 3,
            "typical": {"latency": 1e-4, "bandwidth": 1e8},
            "all": [one],
            "slow": [one],
            "slow_hosts": ["a"],
        },
    }
    print_network(found, tmp_path)
    said = capsys.readouterr().out
    assert "SLOW         a: most of its pairs are" in said and "SLOW         a to b: 1 ms one way" in said
    assert "WRONG VALUES came out of all_reduce" in said and "met 1 of 3 others" in said and "no line" in said
    assert "for 60% of the time" in said


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 99}'])
def test_a_damaged_result_is_told(text: str, tmp_path: Path) -> None:
    file = tmp_path / "network.json"
    file.write_text(text)
    with pytest.raises(RunFolderError, match=r"network\.json"):
        read_network(file)
