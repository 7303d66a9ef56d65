"""Checkpoints that are written while the run goes on: the same as those that it waits for, and never unnoticed where they
fail."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from distbench.checkpoint import keeping, saving
from distbench.checkpoint.keeping import LATEST, Keeper
from distbench.checkpoint.manifest import complete
from distbench.checkpoint.sharded import load_shards, save_shards
from distbench.checkpoint.state import STATE
from distbench.config import Checkpoint, Config, OnError, spelled
from distbench.errors import CheckpointError
from distbench.launching.world import World
from distbench.runs.folder import RunFolder, read_record
from distbench.trainer import Observer, StepMetrics, Trainer
from tests.checkpoint.test_sharded import ADAMW, everything, start
from tests.configs import custom
from tests.distributed import run_distributed
from tests.steps import ONE_PROCESS

CHECKPOINT = "step_00000002"


def background(strategy: str, model: str = "Normed", **options: Any) -> Config:
    checkpoint = Checkpoint(every=2, async_=True, **options)
    return custom(model, strategy, optimizer=ADAMW, global_batch=12, steps=9, checkpoint=checkpoint)


def keeper_of(world: World, config: Config, root: Path) -> tuple[Trainer, Any, Keeper]:
    trainer, log = start(world, config)
    folder = RunFolder.create(root) if world.rank == 0 else RunFolder(root)
    if world.rank == 0:
        folder.update_record(status="running")
    return trainer, log, Keeper(config, folder, trainer)


class Gate:
    """Holds the disk until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self._write = saving.write_tensors

    def __call__(self, *arguments: Any) -> Any:
        assert self.open.wait(60)
        return self._write(*arguments)


# --- the same, and the run does not wait


def train_through_a_save(world: World, config: Config, root: Path) -> Any:
    """Losses of the steps after a save that was not on disk before they were done; and of a run that is resumed from it."""
    trainer, log, keeper = keeper_of(world, config, root / "run")
    trainer.run(until=2)
    save_shards(trainer, root, {"config": None})
    saving.write_tensors = gate = Gate()
    keeper.save()
    trainer.run(until=5)
    nothing_yet = complete(root / "run" / "checkpoints")
    gate.open.set()
    keeper.settle()
    keeper.save()  # into the memory of the first
    keeper.settle()
    del trainer
    again, after = start(world, config)
    again.run(until=1)
    after.losses.clear()
    load_shards(again, root / "run" / "checkpoints" / CHECKPOINT)
    again.run(until=5)
    return nothing_yet, log.losses[2:], after.losses


@cache
def trained(strategy: str, ranks: int, root: Path) -> Any:
    folder = root / f"{strategy}{ranks}"
    if ranks == 1:
        write = saving.write_tensors
        try:
            return folder, train_through_a_save(ONE_PROCESS, background(strategy), folder)
        finally:
            saving.write_tensors = write
    return folder, run_distributed(train_through_a_save, ranks, background(strategy), folder)[0]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("background")


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [("single", 1), ("ddp", 2), ("fsdp", 2), ("fsdp", 3), ("fsdp-flat", 2), ("fsdp-no-shard", 2), ("fsdp2", 3)],
)
def test_it_is_the_checkpoint_that_the_run_would_have_waited_for(strategy: str, ranks: int, root: Path) -> None:
    folder, (nothing_yet, went_on, resumed) = trained(strategy, ranks, root)
    assert nothing_yet == [] and len(went_on) == 3
    assert resumed == went_on
    waited, passed = folder / CHECKPOINT, folder / "run" / "checkpoints" / CHECKPOINT
    first, second = everything(waited), everything(passed)
    assert first.keys() == second.keys() and any(key.startswith("O/") for key in first)
    for key, tensor in first.items():
        assert torch.equal(tensor, second[key]), key
    states = [json.loads((checkpoint / STATE).read_text()) for checkpoint in (waited, passed)]
    for state in states:
        state.pop("config")
    assert states[0] == states[1]
    assert {file.name for file in passed.iterdir()} == {file.name for file in waited.iterdir()}
    assert not list((folder / "run" / "checkpoints").glob(".*"))


# --- what becomes of it


def test_one_at_a_time_and_the_wait_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _, keeper = keeper_of(ONE_PROCESS, background("single"), tmp_path)
    trainer.run(until=2)
    monkeypatch.setattr(saving, "write_tensors", gate := Gate())
    keeper.save()
    trainer.run(until=4)
    threading.Timer(0.1, gate.open.set).start()
    keeper.save()
    assert read_record(tmp_path)["last_checkpoint"] == f"checkpoints/{CHECKPOINT}"
    keeper.settle()
    record = read_record(tmp_path)
    assert record["last_checkpoint"] == "checkpoints/step_00000004" and record["checkpoint_error"] is None
    assert record["saving"]["saves"] == 2 and record["saving"]["blocked_seconds"] > 0
    assert record["saving"]["waited_seconds"] > 0.05
    assert (tmp_path / "checkpoints" / LATEST).read_text() == "step_00000004\n"


class Watch(Observer):
    """What the record says after each step."""

    def __init__(self, root: Path, keeper: Keeper) -> None:
        self.root, self.keeper = root, keeper
        self.seen: dict[int, str | None] = {}

    def on_step(self, metrics: StepMetrics, trainer: Trainer) -> None:
        self.keeper.wait()
        self.seen[metrics.step] = read_record(self.root).get("last_checkpoint")


def test_the_record_knows_it_before_the_next_is_due(tmp_path: Path) -> None:
    trainer, _, keeper = keeper_of(ONE_PROCESS, background("single", keep_last=1), tmp_path)
    watch = Watch(tmp_path, keeper)
    trainer.observers = [watch]
    keeper.run(until=7, since=0)
    assert [watch.seen[step] for step in (2, 3, 5, 7)] == [
        None,
        *(f"checkpoints/step_0000000{step}" for step in (2, 4, 6)),
    ]
    assert [path.name for path in complete(tmp_path / "checkpoints")] == ["step_00000007"], "the last one is waited for"
    assert read_record(tmp_path)["last_checkpoint"] == "checkpoints/step_00000007"


def test_a_run_that_fails_still_gets_its_checkpoint(tmp_path: Path) -> None:
    trainer, _, keeper = keeper_of(ONE_PROCESS, background("single"), tmp_path)

    class Fails(Observer):
        def on_step(self, metrics: StepMetrics, trainer: Trainer) -> None:
            if metrics.step == 3:
                raise ArithmeticError

    trainer.observers = [Fails()]
    with pytest.raises(ArithmeticError):
        keeper.run(until=7, since=0)
    assert [path.name for path in complete(tmp_path / "checkpoints")] == [CHECKPOINT]
    assert read_record(tmp_path)["last_checkpoint"] == f"checkpoints/{CHECKPOINT}"


def stopped_at(world: World, config: Config, root: Path) -> str:
    trainer, _, keeper = keeper_of(world, config, root)
    trainer.run(until=2)
    keeper.save()
    trainer.run(until=3)
    return keeper.stopped(passed=True)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_is_stopped_waits_for_all_of_it(ranks: int, tmp_path: Path) -> None:
    if ranks == 1:
        said = [stopped_at(ONE_PROCESS, background("single"), tmp_path)]
    else:
        said = run_distributed(stopped_at, ranks, background("fsdp2"), tmp_path)
    assert said == ["stopped as asked after step 3"] * ranks
    assert [path.name for path in complete(tmp_path / "checkpoints")] == [CHECKPOINT, "step_00000003"]


# --- errors


def fail_in_background(world: World, config: Config, root: Path, failing: int) -> list[str]:
    """What the keeper said when one rank had no room for its shard."""
    trainer, _, keeper = keeper_of(world, config, root)
    trainer.run(until=2)
    keeper.save()
    keeper.settle()
    trainer.run(until=4)
    if world.rank == failing:

        def full(*_: Any) -> Any:
            raise OSError(28, "No space left on device")

        saving.write_tensors = full
    keeper.save()
    keeper.wait(0.5)  # rank 0 does not know yet
    said = []
    try:
        keeper.settle()
    except CheckpointError as error:
        said.append(str(error))
    trainer.run(until=5)
    keeper.settle()
    return said


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("on_error", list(OnError))
def test_an_error_is_every_ranks(on_error: OnError, failing: int, tmp_path: Path) -> None:
    config = background("fsdp2", on_error=on_error)
    said = run_distributed(fail_in_background, 2, config, tmp_path, failing)
    message = f"cannot write .step_00000004.tmp/rank_0000{failing}.safetensors: No space left on device"
    assert said == [[message] if on_error is OnError.stop else []] * 2
    record = read_record(tmp_path)
    assert record["last_checkpoint"] == f"checkpoints/{CHECKPOINT}"
    if on_error is OnError.proceed:
        assert record["checkpoint_error"] == f"step 4: {message}"
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [LATEST, CHECKPOINT]


def test_an_error_of_the_last_one_is_told_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("nobody thought of this")

    monkeypatch.setattr(saving, "write_tensors", broken)
    keeper = keeper_of(ONE_PROCESS, background("single", on_error=OnError.stop), tmp_path)[2]
    with pytest.raises(CheckpointError, match="RuntimeError: nobody thought of this"):
        keeper.run(until=2, since=0)


@pytest.mark.parametrize("async_", [False, True])
def test_an_old_one_that_cannot_be_removed_is_told(
    async_: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = background("single", keep_last=1, on_error=OnError.stop)
    keeper = keeper_of(ONE_PROCESS, replace(config, checkpoint=replace(config.checkpoint, async_=async_)), tmp_path)[2]

    def kept(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(13, "Permission denied", str(path))

    monkeypatch.setattr(keeping.shutil, "rmtree", kept)
    keeper.run(until=4, since=0)
    said = capsys.readouterr().err
    assert "step_00000004 was written: [Errno 13] Permission denied" in said and CHECKPOINT in said
    assert read_record(tmp_path)["last_checkpoint"] == "checkpoints/step_00000004"


def test_what_a_run_left_half_written_is_removed(tmp_path: Path) -> None:
    left = tmp_path / "checkpoints" / ".step_00000003.tmp"
    left.mkdir(parents=True)
    (left / "share_00001.json").write_text("{}")
    (latest := left.parent / ".latest.9yna7cdk.tmp").touch()
    keeper_of(ONE_PROCESS, background("single"), tmp_path)
    assert not left.exists() and not latest.exists()


def test_memory_for_the_copies_is_kept(tmp_path: Path) -> None:
    staging = saving.Staging()
    first = staging.copy({"a": torch.ones(3), "b": torch.ones(2)})
    second = staging.copy({"a": torch.zeros(3), "b": torch.zeros(4)})
    assert second["a"].data_ptr() == first["a"].data_ptr() and torch.equal(second["a"], torch.zeros(3))
    assert torch.equal(second["b"], torch.zeros(4)), "one that has grown"
    assert set(staging.copy({"a": torch.ones(3)})) == {"a"}


def test_the_optimizer_waits_until_its_state_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _, keeper = keeper_of(ONE_PROCESS, background("single"), tmp_path)
    trainer.run(until=2)
    copy, copied, stepped = saving.Staging.copy, threading.Event(), []
    trainer.optimizer.register_step_pre_hook(lambda *_: stepped.append(copied.is_set()))

    def late(staging: saving.Staging, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if all(name.startswith("O/") for name in tensors):
            assert not stepped
            time.sleep(0.1)
            copied.set()
        return copy(staging, tensors)

    monkeypatch.setattr(saving.Staging, "copy", late)
    keeper.save()
    trainer.run(until=3)
    assert stepped == [True]
    keeper.settle()
    assert read_record(tmp_path)["saving"]["blocked_seconds"] > 0.05


def test_the_command_line_says_async() -> None:
    words = ["checkpoint.async=true", "+checkpoint.async=false", "checkpoint.async_=true", "name=checkpoint.async=x"]
    meant = ["checkpoint.async_=true", "+checkpoint.async_=false", "checkpoint.async_=true", "name=checkpoint.async=x"]
    assert spelled(words) == meant
