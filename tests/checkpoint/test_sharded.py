"""Checkpoints to train on from: exact where nothing changed, the same bits where ranks or strategy did."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from distbench.build import build_trainer, set_determinism
from distbench.checkpoint.manifest import MANIFEST, complete, read_manifest
from distbench.checkpoint.sharded import load_shards, save_shards
from distbench.checkpoint.shards import Shards
from distbench.checkpoint.state import STATE, read_state
from distbench.checkpoint.tensors import dtype_of, memory
from distbench.config import SGD, AdamW, Config, CustomModel, Loss, LossKind, LossScaler, Schedule, TextData
from distbench.errors import CheckpointError
from distbench.launching.world import World
from distbench.preflight import preset
from distbench.trainer import Observer, StepMetrics, Trainer
from tests.cli import REPOSITORY
from tests.configs import STRATEGIES, custom, small
from tests.distributed import run_distributed
from tests.steps import ONE_PROCESS

ADAMW = AdamW(lr=1e-2, schedule=Schedule.cosine, warmup_steps=2)
NESTEROV = SGD(lr=1e-2, momentum=0.9, nesterov=True)
SKIPPING = replace(preset("fp16"), scaler=LossScaler(enabled=True, init_scale=2.0**18, growth_interval=2))
HALF, WHOLE = 3, 6


class Log(Observer):
    def __init__(self) -> None:
        self.losses: list[tuple[int, float, float, float]] = []

    def on_step(self, metrics: StepMetrics, trainer: Trainer) -> None:
        self.losses.append((metrics.step, metrics.loss, metrics.lr, metrics.scale))


def start(world: World, config: Config) -> tuple[Trainer, Log]:
    set_determinism(config, 1)
    trainer, log = build_trainer(config, world)[0], Log()
    trainer.observers = [log]
    return trainer, log


def everything(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole."""
    shards, found, targets = Shards(folder, read_state(folder)), {}, []
    for name, whole in shards.tensors.items():
        found[name] = torch.empty(whole.shape, dtype=dtype_of(whole))
        flat = found[name].reshape(-1)
        view = lambda first, last, flat=flat: memory(flat[first:last])  # noqa: E731
        targets += shards.targets(name, 0, whole.numel, view, lambda count: None)
    shards.read(targets, verify=lambda rank: True)
    for name, (form, data) in shards.read_own(0, "B/").items():
        found[f"B/{name}"] = torch.frombuffer(data, dtype=dtype_of(form)).view(form.shape)
    return found


def straight_and_resumed(world: World, configs: dict[str, Config], root: Path) -> dict[str, Any]:
    """Losses of a run of six steps, and of the last three by a trainer that never saw the first three."""
    found = {}
    for name, config in configs.items():
        folder = root / name.replace("/", "_")
        trainer, log = start(world, config)
        trainer.run(until=HALF)
        half = save_shards(trainer, folder / "straight", {})
        trainer.run(until=WHOLE)
        save_shards(trainer, folder / "straight", {})
        del trainer
        again, after = start(world, config)
        again.run(until=1)  # wrappers settle, as they had in the run that goes on
        after.losses.clear()
        load_shards(again, half)
        again.run(until=WHOLE)
        save_shards(again, folder / "resumed", {})
        found[name] = (log.losses[HALF:], after.losses)
    return found


def reading(strategy: str) -> Config:
    """A language model with dropout over this repository's own documentation."""
    sequence = [8]
    model = CustomModel(
        _target_="tests.models_for_tests.ByteModel",
        block_classes=["Block"],
        input_shape=sequence,
        target_shape=sequence,
    )
    data = TextData(path=str(REPOSITORY / "docs"), glob="*.md", seq_len=8)
    return small(strategy, model=model, data=data, loss=Loss(LossKind.cross_entropy), optimizer=ADAMW, accumulation=2)


def cases(ranks: int) -> dict[str, Config]:
    made: dict[str, Config] = {}
    for strategy in STRATEGIES:
        if strategy == "single":
            continue
        for precision in ("fp32", "bf16"):
            made[f"{strategy} {precision}"] = small(strategy, precision=precision, optimizer=ADAMW, clip_norm=0.5)
        made[f"{strategy} fp16 skipping"] = small(strategy, precision=SKIPPING, optimizer=ADAMW)
        made[f"{strategy} accumulated"] = small(strategy, accumulation=3, optimizer=NESTEROV)
        made[f"{strategy} buffers"] = custom("Normed", strategy, optimizer=ADAMW)
        made[f"{strategy} tied"] = custom("Tied", strategy, optimizer=ADAMW)
        made[f"{strategy} text and dropout"] = reading(strategy)
    return {name: replace(config, global_batch=6 * ranks, steps=WHOLE) for name, config in made.items()}


@cache
def resumed(ranks: int, root: Path) -> dict[str, Any]:
    return run_distributed(straight_and_resumed, ranks, cases(ranks), root)[0]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", cases(2))
def test_a_resume_is_exact(name: str, ranks: int, root: Path) -> None:
    straight, after = resumed(ranks, root / str(ranks))[name]
    assert after == straight and len(after) == WHOLE - HALF
    folder = root / str(ranks) / name
    first, second = (everything(folder / half / f"step_{WHOLE:08d}") for half in ("straight", "resumed"))
    assert first.keys() == second.keys() and any(key.startswith("O/") for key in first)
    for key, tensor in first.items():
        assert torch.equal(tensor, second[key]), key


# --- other ranks, other strategies


def save_after(world: World, config: Config, folder: Path) -> None:
    trainer, _ = start(world, config)
    trainer.run(until=2)
    save_shards(trainer, folder, {})


def load_and_save(world: World, config: Config, source: Path, folder: Path) -> list[tuple[int, float, float, float]]:
    trainer, log = start(world, config)
    trainer.run(until=1)
    log.losses.clear()
    load_shards(trainer, source)
    save_shards(trainer, folder, {})
    trainer.run(until=4)
    return log.losses


WRITERS = [("ddp", 2), ("fsdp", 3), ("fsdp-flat", 2), ("fsdp-no-shard", 2), ("fsdp2", 4), ("single", 1)]
READERS = [("single", 1), ("ddp", 3), ("fsdp", 2), ("fsdp-flat", 4), ("fsdp2", 3)]


def language(strategy: str) -> Config:
    """Every kind of state: moments, a step counter each, buffers."""
    return custom("Normed", strategy, optimizer=replace(ADAMW, decay_1d=True), global_batch=12, steps=4)


@cache
def written(strategy: str, ranks: int, root: Path) -> Path:
    folder = root / f"{strategy}{ranks}"
    if ranks == 1:
        save_after(ONE_PROCESS, language(strategy), folder)
    else:
        run_distributed(save_after, ranks, language(strategy), folder)
    return folder / "step_00000002"


@pytest.mark.parametrize(("writer", "writers"), WRITERS)
@pytest.mark.parametrize(("reader", "readers"), READERS)
def test_other_ranks_and_strategies_read_the_same_bits(
    writer: str, writers: int, reader: str, readers: int, root: Path
) -> None:
    source = written(writer, writers, root)
    folder = root / f"{writer}{writers}-{reader}{readers}"
    if readers == 1:
        losses = load_and_save(ONE_PROCESS, language(reader), source, folder)
    else:
        losses = run_distributed(load_and_save, readers, language(reader), source, folder)[0]
    assert [step for step, *_ in losses] == [3, 4], "it goes on where the other was"
    before, after = everything(source), everything(folder / "step_00000002")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert torch.equal(tensor, after[key]), key


# --- what is not right


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_after(ONE_PROCESS, small("single", optimizer=ADAMW, steps=4), tmp_path)
    return tmp_path / "step_00000002"


def load(folder: Path, config: Config | None = None) -> Trainer:
    trainer, _ = start(ONE_PROCESS, config or small("single", optimizer=ADAMW, steps=4))
    load_shards(trainer, folder)
    return trainer


SHARD = "rank_00000.safetensors"


def flip(folder: Path) -> None:
    data = bytearray((folder / SHARD).read_bytes())
    data[-5] ^= 1
    (folder / SHARD).write_bytes(data)


def swap(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    names = [row["name"] for row in manifest["files"]]
    manifest["files"][0]["name"], manifest["files"][1]["name"] = names[1], names[0]
    (folder / MANIFEST).write_text(json.dumps(manifest))


def rename(folder: Path, name: str) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"][0]["name"] = name
    (folder / MANIFEST).write_text(json.dumps(manifest))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a bit": (flip, "is damaged: its digest is not the manifest's"),
    "truncated": (lambda f: (f / SHARD).write_bytes((f / SHARD).read_bytes()[:-9]), "it is truncated or another"),
    "missing": (lambda f: (f / SHARD).unlink(), "is missing"),
    "swapped": (swap, "it is truncated or another"),
    "state": (lambda f: (f / STATE).write_text("{}"), "bytes, the manifest says"),
    "no manifest": (lambda f: (f / MANIFEST).unlink(), "is not a complete checkpoint"),
    "torn manifest": (lambda f: (f / MANIFEST).write_text('{"schema": 1, "fil'), "is damaged"),
    "foreign manifest": (lambda f: (f / MANIFEST).write_text("[]"), "not an object"),
    "newer manifest": (lambda f: (f / MANIFEST).write_text('{"schema": 2, "files": []}'), "upgrade distbench"),
    "outside": (lambda f: rename(f, "../x"), "which is no file of its folder"),
    "absolute": (lambda f: rename(f, "/etc/passwd"), "which is no file of its folder"),
    "a link": (lambda f: ((f / SHARD).rename(f.parent / "x"), (f / SHARD).symlink_to(f.parent / "x")), "is missing"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_told_and_nothing_is_loaded(name: str, saved: Path) -> None:
    damage, message = DAMAGES[name]
    damage(saved)
    with pytest.raises(CheckpointError, match=message.replace("(", r"\(")):
        load(saved)


def test_another_model_or_optimizer_is_refused(saved: Path) -> None:
    with pytest.raises(CheckpointError, match=r"layers.2.attn.bias is missing, the model's is \(13,\) float32"):
        load(saved, small("single", layers=3, optimizer=ADAMW, steps=4))
    with pytest.raises(
        CheckpointError, match=r"is \(13, 13\) float32, the model's is \(9, 9\) float32; .* and \d+ more"
    ):
        load(saved, small("single", hidden=9, optimizer=ADAMW, steps=4))
    with pytest.raises(CheckpointError, match="has the state of AdamW, the run's optimizer is SGD"):
        load(saved, small("single", optimizer=NESTEROV, steps=4))


def test_what_is_there(saved: Path) -> None:
    for entry in read_manifest(saved):
        entry.verify(saved)
    assert {entry.name for entry in read_manifest(saved)} == {SHARD, STATE}
    state = read_state(saved)
    assert (state.step, state.updates, state.optimizer) == (2, 2, "AdamW")
    assert complete(saved.parent) == [saved]
    (saved.parent / ".step_00000009.tmp").mkdir()
    (saved.parent / "step_00000003").mkdir()
    assert complete(saved.parent) == [saved], "nothing that was not finished"
    assert b"pickle" not in (saved / SHARD).read_bytes()


def failing(world: World, config: Config, folder: Path) -> str:
    """Rank 1 has no room for its shard."""
    from distbench.checkpoint import saving

    trainer, _ = start(world, config)
    trainer.run(until=1)
    save_shards(trainer, folder, {})
    trainer.run(until=2)

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    if world.rank == 1:
        saving.write_tensors = full
    try:
        save_shards(trainer, folder, {})
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_full_disk_on_one_rank_leaves_what_was_there(tmp_path: Path) -> None:
    said = run_distributed(failing, 2, small("fsdp2", optimizer=ADAMW, steps=4), tmp_path)
    assert said == ["cannot write .step_00000002.tmp/rank_00001.safetensors: No space left on device"] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"], "nothing half-written stays"
    read_state(tmp_path / "step_00000001")
