"""Sweeps of several-node jobs on a real Slurm: what becomes of them, however they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from distbench.runs.folder import find_runs, read_record
from tests.cli import CUSTOM, REPOSITORY, Command, Finished, distbench
from tests.cluster.slurm import Slurm, cluster, until, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="distbench[slurm] not installed")

OK, CRASHED = 0, 4
ON_SLURM = ["-m", "hydra/launcher=distbench_slurm", "+launch.slurm.partition=main", "launch.nodes=2", "launch.nproc=1"]
SMALL = ["model.hidden_dim=6", "model.num_layers=2", "model.seq_len=3", "gate.fp64_reference=false", "window=off"]
LONG = [*SMALL, "strategy=fsdp2", "launch.threads_per_rank=1", "steps=60", "checkpoint.every=1000", "optimizer.lr=0.01"]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    # Sockets' paths are short.
    with cluster(tmp_path_factory.mktemp("s"), nodes=2) as up:
        yield up


def start(slurm: Slurm, *words: str, cwd: Path) -> Command:
    env = {**slurm.env, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "200"}
    return Command(sys.executable, "-m", "distbench", *words, cwd=cwd, env=env)


def sweep(slurm: Slurm, *words: str, cwd: Path) -> Finished:
    return start(slurm, *ON_SLURM, *words, cwd=cwd).finish()


def running(cwd: Path, step: int) -> Path:
    """The one run, once it has done so many steps."""

    def there() -> Path | None:
        for run in find_runs(cwd / "outputs") if (cwd / "outputs").exists() else []:
            log = run / "metrics.jsonl"
            if log.exists() and len(log.read_text().splitlines()) >= step:
                return run
        return None

    found = until(there, 120.0)
    assert found is not None, "the run did not come so far"
    return found


def losses(run: Path) -> list[tuple[int, float, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows]


def test_a_sweep_of_two_node_jobs_of_which_one_fails(slurm: Slurm, tmp_path: Path) -> None:
    """Four cells: two numbers of nodes, a model that works and one that does not."""
    models = "model._target_=tests.models_for_tests.Plain,tests.models_for_tests.Raises"
    words = [*ON_SLURM[:3], "launch.nproc=1", "launch.nodes=1,2", *CUSTOM, models]
    ended = start(slurm, *words, cwd=tmp_path).finish()
    assert ended.code == CRASHED, ended.said
    records = {run.name.partition("_")[2]: read_record(run) for run in ended.runs}
    assert len(records) == 4 and "2 of 4 runs passed" in ended.out
    for name, record in records.items():
        works = name.endswith("Plain")
        assert record["status"] == ("passed" if works else "crashed"), name
        nodes = 2 if "nodes=2" in name else 1
        assert record["batch"]["world_size"] == nodes
        if works:
            assert [rank["host"] for rank in record["topology"]["ranks"]] == ["node1", "node2"][:nodes]
        else:
            assert "ArithmeticError: the user's own mistake" in record["reason"]
    assert (ended.runs[0].parent / "decision.json").exists()
    command = records[next(iter(records))]["run"]["command"]
    assert command.startswith("python -m distbench -m hydra/launcher=distbench_slurm"), "what the user typed"


def test_a_job_that_is_asked_to_end_is_queued_again_and_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    command = start(slurm, *ON_SLURM, *LONG, cwd=tmp_path)
    run = running(tmp_path, 10)
    ((job, _),) = slurm.queue()
    slurm.call("scancel", "--signal=USR2", job)
    ended = command.finish()
    assert ended.code == OK, ended.said
    record = read_record(run)
    assert record["status"] == "passed" and [row["step"] for row in record["resumes"]] != []
    assert (
        record["resumes"][0]["step"] >= 10
        and record["resumes"][0]["environment"]["variables"]["SLURM_RESTART_COUNT"] == "1"
    )
    (tmp_path / "here").mkdir()
    straight = distbench(*LONG, cwd=tmp_path / "here")
    assert straight.code == OK, straight.said
    assert losses(run) == losses(straight.run) and len(losses(run)) == 60, "bit for bit as if nothing had happened"


def test_a_job_whose_time_is_up_goes_on_in_the_next_as_often_as_asked(slurm: Slurm, tmp_path: Path) -> None:
    """Slurm counts time in minutes. It asks for a checkpoint 75 s before two are over, or a little earlier: on a crowded
    machine a job needs most of the rest to begin."""
    limits = ["launch.slurm.time_min=2", "launch.slurm.signal_s=75", "launch.slurm.requeues=1"]
    ended = sweep(slurm, *LONG, *limits, "steps=1000000", cwd=tmp_path)
    assert ended.code != OK, ended.said
    (run,) = ended.runs
    record = read_record(run)
    assert record["status"] == "interrupted", record["reason"]
    (resumed,) = record["resumes"]
    first, last = resumed["step"], int(record["last_checkpoint"].rpartition("_")[2])
    assert 0 < first < last and len(losses(run)) == last, "both times it left a checkpoint of its last step"
    assert not slurm.queue(), "and it is not queued a second time"


def test_a_rank_that_is_killed_is_named(slurm: Slurm, tmp_path: Path) -> None:
    command = start(slurm, *ON_SLURM, *LONG, "steps=5000", cwd=tmp_path)
    run = running(tmp_path, 10)
    pid = read_record(run)["topology"]["ranks"][1]["pid"]
    os.kill(pid, signal.SIGKILL)
    ended = command.finish()
    record = read_record(run)
    assert record["status"] == "crashed" and record["reason"].startswith(
        "rank 1 died without an error: killed by signal 9"
    )
    assert "[0]" in ended.out and ": crashed" in ended.out
    failure = json.loads((run / "logs" / "failure.json").read_text())["first"]
    assert failure["rank"] == 1 and failure["ended_with_it"] == [0] and failure["ranks"].keys() == {"0", "1"}


def test_a_node_that_is_gone(slurm: Slurm, tmp_path: Path) -> None:
    """Slurm ends the job and queues it again, on whatever there is then."""
    command = start(slurm, *ON_SLURM, *LONG, "steps=60", cwd=tmp_path)
    running(tmp_path, 5)
    host = slurm.hosts[1]
    slurm.stop_daemon(f"slurmd.{host.name}", signal.SIGKILL)
    slurm.call("scontrol", "update", f"nodename={host.name}", "state=down", "reason=test")
    assert until(lambda: [state for _, state in slurm.queue()] == ["PENDING"], 60.0), slurm.queue()
    subprocess.run(host.command("slurmd", "-c", "-N", host.name), env=slurm.env, check=True)
    ended = command.finish()
    assert ended.code == OK, ended.said
    (run,) = ended.runs
    assert read_record(run)["status"] == "passed" and len(losses(run)) == 60


@pytest.mark.parametrize("file", ["srun", "torchrun"])
def test_the_files_for_those_without_hydras_launcher(slurm: Slurm, tmp_path: Path, file: str) -> None:
    """One run on two nodes; the one through torchrun is asked to end, is queued again and goes on."""
    script = REPOSITORY / "launch" / "slurm" / f"{file}.sbatch"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**slurm.env, "PYTHONPATH": str(REPOSITORY), "NPROC": "1", "RUN": "outputs/run", "PATH": path}
    words = [*LONG, "launch=torchrun", "checkpoint.every=10"] if file == "torchrun" else [*LONG, "launch.nproc=1"]
    submit = ["sbatch", "--parsable", "--nodes=2", "--chdir", str(tmp_path), str(script), *words]
    job = subprocess.run(submit, env=env, capture_output=True, text=True, check=True).stdout.strip()
    if file == "torchrun":
        running(tmp_path, 5)
        slurm.call("scancel", "--signal=USR1", job)
    ended = until(lambda: not slurm.queue(), 200.0)
    said = "".join(log.read_text() for log in tmp_path.glob("*.out"))
    assert ended, said
    record = read_record(tmp_path / "outputs" / "run")
    assert record["status"] == "passed", said
    assert {rank["host"] for rank in record["topology"]["ranks"]} == {"node1", "node2"}
    assert len(losses(tmp_path / "outputs" / "run")) == 60
    assert len(record["resumes"]) == (file == "torchrun")
