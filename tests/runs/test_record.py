"""A sweep's run folders from the outside: everything a reader needs is there, and true."""

from __future__ import annotations

import json
import math
import os
import socket
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from distbench.config import digest, effective, from_container, not_applicable, to_container
from distbench.models.build import build_model, weights_digest
from distbench.models.simple import parameter_count
from distbench.runs.folder import read_record
from tests.cli import SMALL, Finished, start
from tests.steps import gamma

STRATEGIES = ["single", "ddp", "fsdp", "fsdp2"]
PRECISIONS = ["fp32", "bf16"]
CELLS = [(strategy, precision) for strategy in STRATEGIES for precision in PRECISIONS]
every_cell = pytest.mark.parametrize(("strategy", "precision"), CELLS)
STEPS, LAYERS, HIDDEN = 3, 2, 6


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    words = [f"strategy={','.join(STRATEGIES)}", f"precision={','.join(PRECISIONS)}", *SMALL, f"steps={STEPS}"]
    own = ["seed.model=3", "seed.data=4", "accumulation=2", "name=mine", "clip_norm=null", "optimizer=sgd"]
    ended = start("-m", *words, *own, cwd=tmp_path_factory.mktemp("sweep")).finish()
    assert ended.code == 0, ended.said
    return ended


@pytest.fixture
def run(sweep: Finished, strategy: str, precision: str) -> Path:
    (found,) = [run for run in sweep.runs if f"strategy={strategy}," in f"{run.name.replace('_', ',')},"
                and f"precision={precision}" in run.name]  # fmt: skip
    return found


@pytest.fixture
def record(run: Path) -> dict[str, Any]:
    return read_record(run)


def test_the_table_has_every_cell(sweep: Finished) -> None:
    assert len(sweep.runs) == len(CELLS)
    assert f"{len(CELLS)} of {len(CELLS)} runs passed" in sweep.out
    assert sweep.runs[0].parent.name.endswith("_mine_sweep")


@every_cell
def test_the_folder_holds_what_it_should_and_nothing_else(run: Path, strategy: str, precision: str) -> None:
    ranks = 1 if strategy == "single" else 2
    found = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    events = {name for name in found if name.startswith("tb/events.out.tfevents.")}
    assert events
    summaries = {f"gradients/step_{step:08d}.safetensors" for step in range(1, STEPS + 1)}
    assert found - events - summaries == {
        "resolved.yaml",
        "record.json",
        "metrics.jsonl",
        f"checkpoints/step_{STEPS:08d}/model.safetensors",
        *(f"logs/rank{rank}.log" for rank in range(ranks)),
        *(f".hydra/{name}.yaml" for name in ("config", "hydra", "overrides")),
    }


@every_cell
def test_what_was_run_can_be_run_again(run: Path, record: dict[str, Any], strategy: str, precision: str) -> None:
    tree = yaml.safe_load((run / "resolved.yaml").read_text())
    config = from_container(tree)
    assert to_container(config) == tree == record["config"]
    assert (config.strategy.name, config.precision.name, config.steps, config.name) == (strategy, precision, 3, "mine")
    assert record["effective"] == digest(effective(config))
    assert record["not_applicable"] == not_applicable(config)
    command = record["run"]["command"]
    assert command.startswith("python -m distbench -m strategy=single,ddp,fsdp,fsdp2 precision=fp32,bf16 gate=off ")
    assert record["run"]["name"] == run.name


@every_cell
def test_the_record_is_complete(record: dict[str, Any], strategy: str, precision: str) -> None:
    ranks = 1 if strategy == "single" else 2
    assert (record["schema"], record["status"], record["reason"], record["warnings"]) == (1, "passed", None, [])
    started, finished = (datetime.fromisoformat(record[key]) for key in ("started", "finished"))
    assert started <= finished and started.utcoffset() is not None
    assert record["seeds"] == {"model": 3, "data": 4}
    per_rank = 8 // ranks
    assert record["batch"] == {
        "global_batch": 8,
        "world_size": ranks,
        "accumulation": 2,
        "per_rank": per_rank,
        "micro_batch": per_rank // 2,
        "text": f"{per_rank // 2} x 2 x {ranks} = 8",
    }
    environment = record["environment"]
    assert environment["packages"]["torch"] == version("torch") and environment["cores"] == len(os.sched_getaffinity(0))
    assert environment["git"] is None, "the sweep ran outside any repository"
    assert record["model"] == {
        "num_parameters": parameter_count(LAYERS, HIDDEN, None),
        "num_trainable": parameter_count(LAYERS, HIDDEN, None),
        "num_tensors": 8 * LAYERS,
    }


@every_cell
def test_the_topology_is_the_processes(record: dict[str, Any], strategy: str, precision: str) -> None:
    topology = record["topology"]
    single = strategy == "single"
    assert (topology["world_size"], topology["backend"]) == ((1, None) if single else (2, "gloo"))
    assert [row["rank"] for row in topology["ranks"]] == list(range(topology["world_size"]))
    assert len({row["pid"] for row in topology["ranks"]} | {record["run"]["pid"]}) == topology["world_size"] + 1
    share = max(1, len(os.sched_getaffinity(0)) // topology["world_size"])
    for row in topology["ranks"]:
        assert (row["host"], row["device"], row["threads"]) == (socket.gethostname(), "cpu", share)


@every_cell
def test_dtypes_and_units_are_read_back(record: dict[str, Any], strategy: str, precision: str) -> None:
    assert record["dtypes"] == {
        "parameters": "fp32",
        "compute": precision,
        "gradients": "fp32",
        "reduce": None if strategy == "single" else precision,
        "optimizer_state": None,  # SGD without momentum
        "buffers": None,
    }
    units = {row["name"]: row["num_parameters"] for row in record["units"]}
    a_layer = parameter_count(1, HIDDEN, None)
    sharded = strategy.startswith("fsdp")
    assert units == ({"(root)": 0, "layers.0": a_layer, "layers.1": a_layer} if sharded else {})


@every_cell
def test_weights_start_from_the_seed(record: dict[str, Any], strategy: str, precision: str) -> None:
    config = from_container(record["config"])
    assert record["initial_weights"] == weights_digest(build_model(config.model, seed=3))


@every_cell
def test_metrics_read_back_to_the_same_bits(run: Path, record: dict[str, Any], strategy: str, precision: str) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    result = record["result"]
    assert (result["first_loss"], result["last_loss"]) == (rows[0]["loss"], rows[-1]["loss"])
    assert (result["first_grad_norm"], result["last_grad_norm"]) == (rows[0]["grad_norm"], rows[-1]["grad_norm"])
    assert (result["steps"], result["skipped_steps"]) == (STEPS, 0)
    for row in rows:
        assert row["tokens"] == 8 * 3 and row["samples"] == 8 and row["lr"] == 0.01 and row["scale"] == 1.0
        assert row["tokens_per_second"] == row["tokens"] / row["step_seconds"]
        assert 0 <= row["data_seconds"] <= row["step_seconds"]
    assert rows[-1]["loss"] < rows[0]["loss"]
    # The loss is a sum of fp32 sums taken in fp64: written in full, it does not fit into fp32.
    assert any(torch.tensor(row["loss"], dtype=torch.float32).item() != row["loss"] for row in rows)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_strategy_trained_the_same(sweep: Finished, precision: str) -> None:
    """With two micro-batches. In fp32 two ranks agree to the last bit over strategies, and with one process within
    rounding; in bf16 DDP adds micro-batches up in fp32 and FSDP in bf16, so only the sharded ones are held together."""
    found = {}
    for strategy in STRATEGIES:
        (run,) = [
            run
            for run in sweep.runs
            if read_record(run)["config"]["strategy"]["name"] == strategy
            and read_record(run)["config"]["precision"]["name"] == precision
        ]
        record = read_record(run)
        found[strategy] = (record["result"]["first_loss"], load_file(run / record["checkpoint"]))
        plain = build_model(from_container(record["config"]).model, seed=99)
        plain.load_state_dict(found[strategy][1], strict=True)
    alike = ["ddp", "fsdp", "fsdp2"] if precision == "fp32" else ["fsdp", "fsdp2"]
    for strategy in alike[1:]:
        assert found[strategy][0] == found[alike[0]][0]
        for name, tensor in found[alike[0]][1].items():
            assert torch.equal(found[strategy][1][name], tensor), (strategy, name)
    if precision == "fp32":
        assert math.isclose(found["single"][0], found["ddp"][0], rel_tol=gamma(200, 2.0**-24))
        for name, tensor in found["single"][1].items():
            # Three steps of lr 0.01 along gradients of at most order one.
            assert (found["ddp"][1][name] - tensor).abs().max() <= gamma(500, 2.0**-24), name
