"""The window on real ranks: bytes by two ways, memory by two meters, waits where they belong."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

import pytest

from distbench.build import build_trainer, set_determinism
from distbench.config import (
    AdamW,
    BlockWrap,
    Config,
    DDPStrategy,
    FSDP2Strategy,
    Loss,
    LossKind,
    NoWrap,
    SimpleModel,
    SizeWrap,
    SyntheticData,
    TextData,
    Window,
)
from distbench.launching.world import World
from distbench.measure.flops import closed_form
from distbench.measure.measuring import own_traffic
from distbench.measure.predicted import predict_memory
from distbench.measure.section import section
from distbench.measure.tracked import track
from distbench.measure.window import Window as Measuring
from distbench.measure.window import planned
from distbench.trainer import Observer, StepMetrics, Trainer
from tests.configs import small
from tests.distributed import run_distributed
from tests.steps import ONE_PROCESS

WINDOW = Window(measured=4, reference=2, repeats=1)


def measured(world: World, config: Config, slow: dict[int, float], data: float = 0.0) -> dict[str, Any]:
    """The record's section. `slow`: seconds that a rank sleeps in each forward; `data`: that loading takes."""
    set_determinism(config, 1)
    trainer = build_trainer(config, world)[0]
    around = trainer.batches.micro_batches
    loaded: list[float] = []

    def loading(step: int) -> Any:
        start = time.perf_counter()
        time.sleep(data)  # at least; on a busy machine longer
        batches = around(step)
        loaded.append(time.perf_counter() - start)
        return batches

    if data:
        trainer.batches.micro_batches = loading  # type: ignore[method-assign]
    if seconds := slow.get(world.rank):
        trainer.module.register_forward_pre_hook(lambda *_: time.sleep(seconds))
    trainer.run(until=3)
    found = Measuring(config.window, trainer, None).measure(1, config.window.repeats)
    syncs = config.accumulation if config.accumulation_sync else 1
    promised = trainer.strategy.expected_traffic(trainer.module, config.accumulation, syncs)
    tracked = track(trainer) if config.window.track else None
    ranks, tracks = world.gather(found), world.gather(tracked)
    backend = world.backend if world.size > 1 else None
    loads = world.gather(loaded[4 + 1 : 4 + 1 + config.window.measured])
    found_section = section(
        config,
        ranks,
        tracks if config.window.track else [],
        world.gather(predict_memory(config, trainer)),
        [*promised, *own_traffic(config, world.size)],
        (None, "unknown"),
        [1e9] * world.size,
        backend,
    )
    return {**found_section, "loads": [statistics.median(rank) if rank else 0.0 for rank in loads]}


def config(strategy: str, **changes: Any) -> Config:
    return small(strategy, hidden=13, layers=3, optimizer=AdamW(), steps=100, window=WINDOW, **changes)


SYNCED: dict[str, Any] = {"accumulation": 3, "accumulation_sync": True}
AUDITED: list[tuple[str, int, dict[str, Any]]] = [
    ("ddp", 2, {}),
    ("ddp", 3, {}),
    ("ddp", 4, {"accumulation": 3}),
    ("ddp", 2, SYNCED),
    ("ddp", 2, {"precision": "fp16"}),
    ("ddp", 3, {"precision": "bf16"}),
    ("ddp", 2, {"strategy_options": DDPStrategy(find_unused_parameters=True)}),
    ("ddp", 2, {"strategy_options": DDPStrategy(bucket_cap_mb=0.001, gradient_as_bucket_view=True)}),
    ("fsdp", 2, {}),
    ("fsdp", 3, {"accumulation": 2}),
    ("fsdp", 4, {"precision": "bf16"}),
    ("fsdp", 2, SYNCED),
    ("fsdp", 3, {"wrap": SizeWrap(min_num_params=300)}),
    ("fsdp", 2, {"wrap": NoWrap()}),
    ("fsdp-flat", 3, {}),
    ("fsdp-grad-op", 2, {}),
    ("fsdp-grad-op", 2, {"accumulation": 3}),
    ("fsdp-grad-op", 2, SYNCED),
    ("fsdp-no-shard", 3, {}),
    ("fsdp2", 2, {}),
    ("fsdp2", 3, {"accumulation": 2}),
    ("fsdp2", 4, {"precision": "fp16"}),
    ("fsdp2", 2, SYNCED),
    ("fsdp2", 2, {"wrap": NoWrap()}),
    ("fsdp2", 4, {"wrap": SizeWrap(min_num_params=300)}),
    ("fsdp2-keep", 3, {}),
    ("fsdp2-keep", 2, {"accumulation": 3}),
    ("fsdp2", 4, {"strategy_options": FSDP2Strategy(reshard_after_forward=2)}),
    ("fsdp2", 4, {"strategy_options": FSDP2Strategy(reshard_after_forward=2), "precision": "bf16"}),
]


@pytest.mark.parametrize(("strategy", "ranks", "changes"), AUDITED, ids=lambda value: str(value)[:60])
def test_the_ledger_is_the_formula(strategy: str, ranks: int, changes: dict[str, Any]) -> None:
    changes = {"wrap": BlockWrap(), **changes}
    options = changes.pop("strategy_options", None)
    wanted = config(strategy, **changes)
    if options is not None:
        wanted = replace(wanted, strategy=options)
    found = run_distributed(measured, ranks, wanted, {})[0]
    audit = found["bytes"]
    assert audit["warnings"] == [] and audit["ledger"] == audit["formula"] > 0, audit
    assert found["accepted"] or found["reason"]
    ops = {row["op"] for row in found["collectives"]}
    if strategy.startswith("fsdp") and strategy != "fsdp-no-shard":
        assert {"all_gather", "reduce_scatter"} <= ops, (
            "Gloo's all-reduce is told from the reduce-scatter it stands for"
        )
        row = next(row for row in found["collectives"] if row["op"] == "reduce_scatter")
        assert row["backend_op"] == "all_reduce" and row["wire_bytes"] == 2 * row["logical_bytes"]
    for row in found["collectives"]:
        assert row["transfer"] > 0 and row["wait"] >= 0 and row["calls"] >= 1


def test_a_no_sync_that_does_nothing_is_named() -> None:
    wanted = config("ddp", accumulation=3)
    found = run_distributed(unsynced_spoiled, 2, wanted)[0]
    assert found["bytes"]["ledger"] > found["bytes"]["formula"]
    assert "gradients are reduced more often than configured" in found["bytes"]["warnings"][0]


def unsynced_spoiled(world: World, wanted: Config) -> dict[str, Any]:
    from contextlib import nullcontext

    from distbench.strategies.ddp import DDP

    DDP.backward_sync = lambda self, module, sync: nullcontext()  # type: ignore[method-assign]
    return measured(world, wanted, {})


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("strategy", "ranks"), [("single", 1), ("ddp", 3), ("fsdp", 2), ("fsdp-flat", 3), ("fsdp2", 2), ("fsdp2-keep", 2)]
)
def test_the_tensor_peak_is_the_sum_of_its_kinds(strategy: str, ranks: int, precision: str) -> None:
    """Which is the memory tracker's: test_kinds.py. How far fully_shard's gathers overlap is not the same in each step, so
    there one unit's may be in the one figure and not in the other."""
    found = run_distributed(measured, ranks, config(strategy, precision=precision), {})[0]
    rank = found["memory_by_kind"].pop("rank")
    assert rank == found["memory_predicted"]["rank"] == found["memory"]["peak_allocated"]["rank"]
    tracked = sum(found["memory_by_kind"].values())
    unit = (9 * 13 * 13 + 8 * 13) * (4 if precision == "fp32" else 2)
    slack = 1.1 * unit if strategy.startswith("fsdp2") else 0.01 * tracked
    assert found["memory"]["peak_allocated"]["bytes"] == pytest.approx(tracked, abs=slack)


def test_a_slow_loader_is_data_wait_and_nothing_else() -> None:
    found = run_distributed(measured, 2, config("ddp"), {}, 0.02)[0]
    assert min(found["loads"]) >= 0.02
    assert found["data_wait"]["median"] == pytest.approx(found["loads"][found["data_wait"]["rank"]], abs=0.002)
    assert found["split"]["data"] == pytest.approx(found["loads"][found["split"]["rank"]], abs=0.002)
    assert found["exposed_comm"]["median"] < 0.015


def test_a_slow_rank_is_wait_on_the_others_and_not_transfer() -> None:
    found = run_distributed(measured, 2, config("ddp"), {1: 0.05})[0]
    gradients = next(row for row in found["collectives"] if row["dtype"] == "float32")
    assert gradients["wait"] > 0.04 and gradients["transfer"] < 0.02
    waits = [row["exposed_comm"] for row in found["ranks"]]
    assert waits[0] > 0.04, "rank 0 waits for the slow one"


def test_flops_are_the_closed_form() -> None:
    found = run_distributed(measured, 2, config("fsdp2", accumulation=2), {})[0]
    assert found["flops"]["per_step"] == found["flops"]["closed_form"] > 0
    assert found["mfu"]["value"] is None and found["mfu"]["reason"] == "unknown"
    assert found["mfu_calibrated"]["value"] == pytest.approx(
        found["flops"]["per_step"] / found["step_time"]["median"] / 2e9
    )


@pytest.mark.parametrize("vocab", [None, 19])
def test_flops_and_activations_are_of_what_the_data_has(vocab: int | None) -> None:
    """`model.seq_len` says what a model's own shapes default to; the samples may be longer or shorter."""
    shape = [7] if vocab else [7, 13]
    changes: dict[str, Any] = {"loss": Loss(LossKind.cross_entropy)} if vocab else {}
    wanted = config("single", data=SyntheticData(input_shape=shape, target_shape=shape, vocab_size=vocab), **changes)
    wanted = replace(wanted, model=SimpleModel(num_layers=3, hidden_dim=13, seq_len=3, vocab_size=vocab))
    found = run_distributed(measured, 1, wanted, {})[0]
    assert found["flops"]["meter"].startswith("torch") and found["flops"]["per_step"] == found["flops"]["closed_form"]
    activations = found["memory_predicted"]["activations"]
    assert activations == (None if vocab else (11 * 3 + 4) * 12 * 7 * 13 * 4)


def test_the_closed_form_of_text_has_the_texts_length() -> None:
    model = SimpleModel(num_layers=2, hidden_dim=8, seq_len=32, vocab_size=256)
    wanted = replace(small("single"), model=model, data=TextData(path="books", seq_len=16))
    drawn = replace(wanted, data=SyntheticData(input_shape=[16], target_shape=[16], vocab_size=256))
    assert closed_form(wanted) == closed_form(drawn) == 12 * 16 * (54 * 2 * 8 * 8 + 6 * 8 * 256)


def test_one_process_communicates_nothing_on_its_only_rank_too() -> None:
    found = run_distributed(measured, 1, config("single"), {})[0]
    assert found["comm_busy"]["median"] is None
    assert (found["ranks"][0]["comm_busy"], found["ranks"][0]["exposed_comm"]) == (None, None)


class Ear(Observer):
    def __init__(self) -> None:
        self.heard: list[int] = []

    def on_step(self, metrics: StepMetrics, trainer: Trainer) -> None:
        self.heard.append(metrics.step)


def test_steps_are_training_steps_and_observers_hear_of_each_once() -> None:
    trainer = build_trainer(config("single"), ONE_PROCESS)[0]
    trainer.observers = [ear := Ear()]
    Measuring(WINDOW, trainer, None).measure(2, 2)
    assert ear.heard == list(range(1, 1 + 2 + 2 * (1 + 4 + 2))) and trainer.step == ear.heard[-1]


def test_observers_hear_of_the_steps_of_an_interrupted_window(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build_trainer(config("single"), ONE_PROCESS)[0]
    trainer.observers = [ear := Ear()]
    step = trainer.train_step

    def interrupted() -> StepMetrics:
        if trainer.step == 8:  # two to warm up, one absorbed, four metered, one for reference
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(trainer, "train_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Measuring(WINDOW, trainer, None).measure(2, 2)
    assert ear.heard == list(range(1, 9))


@pytest.mark.parametrize(
    ("done", "steps", "expected"),
    [(3, 40, (1, 3)), (3, 15, (1, 1)), (3, 26, (1, 2)), (1, 40, (2, 3)), (3, 14, (0, 0)), (0, 3, (0, 0))],
)
def test_windows_take_what_steps_there_are(done: int, steps: int, expected: tuple[int, int]) -> None:
    warm_up, repeats, reason = planned(Window(), done, steps)
    assert (warm_up, repeats) == expected
    assert (reason is None) == (repeats > 0)
    if reason:
        need = int(reason.rpartition("steps=")[2].split()[0])
        assert planned(Window(), done, need)[1] == 1 and planned(Window(), done, need - 1)[1] == 0
