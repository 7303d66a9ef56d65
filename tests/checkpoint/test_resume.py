"""Resuming as a user does it: the command, the folder afterwards, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from distbench.checkpoint.keeping import Keeper
from distbench.checkpoint.manifest import complete
from distbench.config import Checkpoint
from distbench.runs.folder import RunFolder, read_record
from tests.cli import SMALL, distbench, start_warm
from tests.configs import small
from tests.steps import ONE_PROCESS

OK, USAGE, INTERRUPTED = 0, 2, 5
RUN = [*SMALL[:-1], "gate=default", "gate.fp64_reference=false", "strategy=fsdp2", "checkpoint.every=2", "window=off"]


def losses(run: Path) -> list[tuple[int, float, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows]


def done(root: Path, steps: int) -> Path:
    ended = distbench(*RUN, f"steps={steps}", "hydra.run.dir=run", cwd=root)
    assert ended.code == OK, ended.said
    return root / "run"


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps that nobody interrupted."""
    return done(tmp_path_factory.mktemp("straight"), 8)


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return done(tmp_path_factory.mktemp("half"), 4)


def copied(half: Path, root: Path) -> Path:
    shutil.copytree(half, root / "run")
    return root / "run"


def test_a_resumed_run_is_the_run_that_was_not_interrupted(straight: Path, half: Path, tmp_path: Path) -> None:
    run = copied(half, tmp_path)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": 1.0, "grad_norm": 1.0}\n{"step": 6, "lo')  # it went on, and died
    _elsewhere(run)
    both = [start_warm("resume=run", "steps=8", cwd=tmp_path) for _ in range(2)]
    ended, refused = sorted((command.finish() for command in both), key=lambda finished: finished.code)
    assert ended.code == OK, ended.said
    assert refused.code == USAGE and ("is being written by" in refused.err or "is at step 8" in refused.err), (
        refused.said
    )
    assert losses(run) == losses(straight) and len(losses(run)) == 8
    record, other = read_record(run), read_record(straight)
    assert record["status"] == "passed" and record["gate"]["passed"] and record["finished"]
    assert [(row["step"], row["environment"]) for row in record["resumes"]] == [
        (4, {"host": other["environment"]["host"]})
    ]
    assert other["resumes"] == [] and record["environment"] == other["environment"], "no window was measured before"
    assert record["last_checkpoint"] == "checkpoints/step_00000008" and record["checkpoint"] == other["checkpoint"]
    mine, theirs = load_file(run / record["checkpoint"]), load_file(straight / other["checkpoint"])
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    for key in ("first_loss", "last_loss", "first_grad_norm", "steps", "skipped_steps"):
        assert record["result"][key] == other["result"][key], key
    assert (run / "checkpoints" / "latest").read_text() == "step_00000008\n"
    assert [path.name for path in complete(run / "checkpoints")] == ["step_00000006", "step_00000008"]


def _elsewhere(run: Path, **sections: Any) -> dict[str, Any]:
    """The record, as if it was begun on another host."""
    record = read_record(run)
    record |= {"environment": record["environment"] | {"host": "elsewhere"}, **sections}
    (run / "record.json").write_text(json.dumps(record))
    return record


def test_a_window_keeps_what_it_was_measured_with(tmp_path: Path) -> None:
    quick = ["window=quick", "steps=14", "checkpoint.every=14", "hydra.run.dir=run"]
    ended = distbench(*RUN[:-2], *quick, cwd=tmp_path)
    assert ended.code == OK, ended.said
    run = tmp_path / "run"
    topology = {"world_size": 2, "backend": "gloo", "ranks": [{"device_name": "another"}] * 2}
    before = _elsewhere(run, topology=topology)
    ended = distbench("resume=run", "steps=15", "window.measured=9", cwd=tmp_path)
    assert ended.code == USAGE and "is of another experiment: window.measured=9 instead of " in ended.err
    ended = distbench("resume=run", "steps=15", cwd=tmp_path)
    assert ended.code == OK, ended.said
    record = read_record(run)
    for key in ("window", "environment", "topology", "gate"):
        assert record[key] == before[key] is not None, key
    assert record["config"]["window"] == before["config"]["window"]
    assert record["resumes"][0]["environment"].keys() == {"host"}


def test_and_so_is_one_that_did_not_wait_for_its_checkpoints(straight: Path, tmp_path: Path) -> None:
    words = [*RUN, "steps=4", "checkpoint.async=true", "checkpoint.on_error=stop", "hydra.run.dir=run"]
    ended = distbench(*words, cwd=tmp_path)
    assert ended.code == OK, ended.said
    run = tmp_path / "run"
    record = read_record(run)
    assert record["config"]["checkpoint"]["async_"] and record["saving"]["saves"] == 2
    assert [path.name for path in complete(run / "checkpoints")] == ["step_00000003", "step_00000004"]
    shutil.rmtree(run / "checkpoints" / "step_00000004")  # the one that was written under the steps after it
    ended = distbench("resume=run", "steps=8", cwd=tmp_path)
    assert ended.code == OK, ended.said
    assert losses(run) == losses(straight)
    mine, theirs = (load_file(path / "checkpoints" / "step_00000008" / "model.safetensors") for path in (run, straight))
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_another_strategy_starts_from_it(half: Path, tmp_path: Path) -> None:
    words = [word for word in RUN if not word.startswith(("strategy", "checkpoint"))]
    ended = distbench(*words, f"start_from={half}", "strategy=ddp", "steps=6", "hydra.run.dir=new", cwd=tmp_path)
    assert ended.code == OK, ended.said
    assert [step for step, *_ in losses(tmp_path / "new")] == [5, 6], "the gate's steps are not the run's"
    assert "gate PASSED (bitwise" in ended.out
    record = read_record(tmp_path / "new")
    record["config"]["start_from"] = "not/here/any/more"
    (tmp_path / "new" / "record.json").write_text(json.dumps(record))
    again = distbench("resume=new", "steps=7", "checkpoint.every=1", cwd=tmp_path)
    assert again.code == USAGE and "there is no complete checkpoint" in again.err, (
        "what it once started from is not read"
    )
    early = distbench(*words, f"start_from={half}", "strategy=ddp", "steps=4", cwd=tmp_path)
    assert early.code == USAGE and "is at step 4 of steps=4; add steps=... to train on" in early.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["resume=run"], "is at step 4 of steps=4; add steps=... to train on"),
        (["resume=run", "steps=8", "seed.data=3"], "is of another experiment: seed.data=3 instead of 0; a new run may"),
        (["resume=run", "steps=8", "gate.steps=2"], "is of another experiment: gate.steps=2 instead of 3"),
        (["resume=run", "steps=8", "launch.threads_per_rank=3"], "is of another experiment: launch.threads_per_rank=3"),
        (["resume=run", "steps=8", "launch.nproc=1"], "ran on 2 ranks, now there are 1; a new run may start from it"),
        (["resume=nope"], "is no run folder: it has no record.json"),
        (["resume=run", "-m"], "-m does not go with resume="),
        (["resume=run", "checkpoint=off"], "checkpoint=off does not go with resume="),
        (["resume=run", "strategy=ddp"], "may start from it with start_from="),
        (["resume=run", "stepz=9"], "Key 'stepz' not in 'Config' Did you mean steps?"),
        (["resume=run", "steps=x"], "x"),
        (["start_from=nope"], "start_from=nope: no such folder"),
        ([*RUN, "start_from=run", "steps=8", "model.hidden_dim=16"], "is of another model: layers.0.attn.bias is"),
        ([*RUN, "start_from=run", "steps=8", "optimizer=sgd"], "has the state of AdamW, the run's optimizer is SGD"),
    ],
)
def test_refusals_change_nothing(half: Path, tmp_path: Path, words: list[str], message: str) -> None:
    run = copied(half, tmp_path)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    ended = distbench(*words, cwd=tmp_path)
    assert ended.code == USAGE, ended.said
    assert message in ended.err and "Traceback" not in ended.said
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert not list(tmp_path.glob("outputs/*/record.json")), "no run was begun"


def test_a_damaged_checkpoint_is_named(half: Path, tmp_path: Path) -> None:
    run = copied(half, tmp_path)
    shard = run / "checkpoints" / "step_00000004" / "rank_00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    ended = distbench("resume=run", "steps=8", cwd=tmp_path)
    assert ended.code == USAGE and "rank_00001.safetensors is damaged" in ended.said
    assert complete(run / "checkpoints"), "nothing was thrown away"


def test_an_interrupted_run_says_how_to_go_on_and_does(straight: Path, tmp_path: Path) -> None:
    """And while it runs nobody else goes on in its folder."""
    long = [*RUN, "steps=100000", "hydra.run.dir=run", "logging.progress=false"]
    command = start_warm(*long, cwd=tmp_path)
    run, until = tmp_path / "run", time.monotonic() + 120
    while not complete(run / "checkpoints") and time.monotonic() < until:
        time.sleep(0.05)
    second = distbench("resume=run", "steps=200000", cwd=tmp_path)
    assert second.code == USAGE and "is being written by process" in second.err, second.said
    assert len(read_record(run)["resumes"]) == 0 and command.process.poll() is None
    os.kill(command.process.pid, signal.SIGINT)
    ended = command.finish()
    assert ended.code == INTERRUPTED and "python -m distbench resume=run" in ended.out, ended.said
    saved = read_record(run)["last_checkpoint"]
    reached = int(saved.rpartition("_")[2])
    again = distbench("resume=run", f"steps={reached + 2}", cwd=tmp_path)
    assert again.code == OK, again.said
    assert [step for step, *_ in losses(run)] == list(range(1, reached + 3))
    assert losses(run)[:8] == losses(straight)[: min(8, reached + 2)]


# --- which are written and kept


def kept(root: Path, options: Checkpoint, until: int, since: int = 0, at: int = 0) -> list[str]:
    from distbench.build import build_trainer, set_determinism

    config = small("single", steps=until, checkpoint=options)
    set_determinism(config, 1)
    trainer = build_trainer(config, ONE_PROCESS)[0]
    folder = RunFolder.create(root)
    trainer.run(until=at)
    Keeper(config, folder, trainer).run(until, since)
    assert trainer.step == until
    return [path.name.removeprefix("step_000000") for path in complete(root / "checkpoints")]


def test_the_last_ones_are_kept_and_every_nth(tmp_path: Path) -> None:
    assert kept(tmp_path / "none", Checkpoint(), 9) == []
    assert kept(tmp_path / "two", Checkpoint(every=2), 9) == ["08", "09"]
    assert kept(tmp_path / "nth", Checkpoint(every=2, keep_last=1, keep_every=4), 11) == ["04", "08", "11"]


def test_what_is_linked_is_left_alone(tmp_path: Path) -> None:
    """Neither followed, nor removed, nor counted, nor written into."""
    kept(tmp_path / "other", Checkpoint(every=2, keep_last=9), 6)
    elsewhere = tmp_path / "other" / "checkpoints"
    before = {path: path.read_bytes() for path in elsewhere.rglob("*") if path.is_file()}
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for step in (2, 6):
        (tmp_path / "run" / "checkpoints" / f"step_0000000{step}").symlink_to(elsewhere / f"step_0000000{step}")
    assert kept(tmp_path / "run", Checkpoint(every=2, keep_last=2), 8) == ["02", "04", "06", "08"]
    assert {path: path.read_bytes() for path in elsewhere.rglob("*") if path.is_file()} == before


def test_one_that_fell_due_under_the_gate_is_made_up_for(tmp_path: Path) -> None:
    assert kept(tmp_path / "a", Checkpoint(every=2, keep_last=9), 8, since=0, at=5) == ["05", "06", "08"]
    assert kept(tmp_path / "b", Checkpoint(every=5, keep_last=9), 8, since=0, at=4) == ["05", "08"]
    assert kept(tmp_path / "c", Checkpoint(every=3, keep_last=9), 8, since=4, at=5) == ["06", "08"]


def test_a_plain_model_outlives_the_shards_beside_it(tmp_path: Path) -> None:
    from distbench.checkpoint.save import save_model

    folder = RunFolder.create(tmp_path)
    kept(tmp_path / "x", Checkpoint(every=2), 2)
    shutil.copytree(tmp_path / "x" / "checkpoints", tmp_path / "checkpoints")
    name = save_model(folder, 2, {})
    assert {path.name for path in (tmp_path / name).parent.iterdir()} == {
        *("model.safetensors", "manifest.json", "train_state.json", "rank_00000.safetensors")
    }


def test_a_checkpoint_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from distbench.checkpoint import saving
    from distbench.config import OnError
    from distbench.errors import CheckpointError

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "write_tensors", full)
    assert kept(tmp_path / "a", Checkpoint(every=2), 4) == []
    said = capsys.readouterr().err
    assert said.count("No space left on device; the run goes on") == 2
    assert "No space left on device" in read_record(tmp_path / "a")["checkpoint_error"]
    with pytest.raises(CheckpointError, match="No space left on device"):
        kept(tmp_path / "b", Checkpoint(every=2, on_error=OnError.stop), 4)
