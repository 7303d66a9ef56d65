"""Memory by kind: torch's MemTracker where that can run, and the same model's known sizes where it cannot."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from distbench.build import build_trainer, set_determinism
from distbench.config import AdamW, Config, DDPStrategy
from distbench.launching.world import World
from distbench.measure.kinds import Block, Seen, kind_of, memory_by_kind, paired, time_of_peak
from distbench.measure.recorder import Change
from distbench.strategies.torch_fsdp2 import FSDPModule
from distbench.trainer import Trainer
from tests.configs import small
from tests.distributed import run_distributed

NUM_PARAMETERS = 3 * (9 * 16 * 16 + 8 * 16)
"""Three layers of width 16: Linear(d, d), Linear(d, 4d), Linear(4d, d) and a LayerNorm."""
ACTIVATIONS = {"fp32": 205056, "bf16": 108672}
"""Measured once: the same for every strategy, since each rank has the same samples."""
SLACK = 64
"""Bytes of small tensors that MemTracker does not see or sees twice."""


def config(strategy: str, precision: str, **changes: Any) -> Config:
    return small(
        strategy, hidden=16, layers=3, optimizer=AdamW(), steps=100, precision=precision, global_batch=64, **changes
    )


def tracked_by_torch(trainer: Trainer) -> dict[str, int]:
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed._tools.mem_tracker import MemTracker

    trainer.optimizer.zero_grad(set_to_none=True)
    if isinstance(trainer.module, FSDPModule):
        tracker: Any = FSDPMemTracker(trainer.module, trainer.optimizer)
    else:
        tracker = MemTracker()
        tracker.track_external(trainer.module, trainer.optimizer)
    with tracker:
        trainer.train_step()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    return {str(getattr(kind, "value", kind)): size for kind, size in peak.items()}


def look(world: World, wanted: Config, torch_too: bool) -> tuple[dict[str, int], dict[str, int]]:
    set_determinism(wanted, 1)
    trainer = build_trainer(wanted, world)[0]
    trainer.run(until=3)
    return memory_by_kind(trainer), tracked_by_torch(trainer) if torch_too else {}


@cache
def found(
    strategy: str, precision: str, ranks: int, torch_too: bool = False, accumulation: int = 1
) -> tuple[dict[str, int], dict[str, int]]:
    """In processes of its own, that hold nothing else."""
    return run_distributed(look, ranks, config(strategy, precision, accumulation=accumulation), torch_too)[0]


@pytest.mark.parametrize(
    ("strategy", "precision", "ranks"),
    [
        ("single", "fp32", 1),
        ("ddp", "fp32", 2),
        ("fsdp-flat", "fp32", 2),
        ("fsdp-flat", "bf16", 2),
        ("fsdp2", "fp32", 2),
        ("fsdp2", "bf16", 2),
        ("fsdp2-keep", "fp32", 2),
    ],
)
def test_the_sum_is_the_memory_trackers(strategy: str, precision: str, ranks: int) -> None:
    ours, torchs = found(strategy, precision, ranks, torch_too=True)
    # fully_shard's gathers overlap, when they do, by one unit; MemTracker's step knows no overlap.
    overlap = 4 * NUM_PARAMETERS // 3 if strategy.startswith("fsdp2") else 0
    assert torchs["Total"] - SLACK <= sum(ours.values()) <= torchs["Total"] + overlap + SLACK
    assert ours["optimizer_state"] == torchs.get("Optstate", torchs.get("OptState"))
    gathered = ours.get("gathered_parameters", 0)
    assert ours["parameters"] + gathered == torchs.get("Parameter", 0) + torchs.get("Sharded Param", 0) + torchs.get(
        "Unsharded Param", 0
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "fsdp-flat", "fsdp-no-shard", "fsdp2", "fsdp2-keep"])
def test_known_sizes(strategy: str, precision: str) -> None:
    ranks = 1 if strategy == "single" else 2
    ours, _ = found(strategy, precision, ranks)
    shards = 1 if strategy in ("single", "ddp", "fsdp-no-shard") else 2
    assert ours["parameters"] == 4 * NUM_PARAMETERS // shards
    assert ours["optimizer_state"] == pytest.approx(2 * ours["parameters"], abs=200), "and a step counter each"
    share = 2 if strategy == "single" else 1
    assert ours["activations"] == pytest.approx(share * ACTIVATIONS[precision], rel=0.01)
    if precision == "bf16" and strategy in ("single", "ddp"):
        assert ours["gathered_parameters"] == 2 * NUM_PARAMETERS, "the cast copies"
    assert ours.get("communication", 0) == (4 * NUM_PARAMETERS if strategy == "ddp" else ours.get("communication", 0))


def test_buckets_that_gradients_are_views_of_are_gradients() -> None:
    wanted = replace(config("ddp", "fp32"), strategy=DDPStrategy(gradient_as_bucket_view=True))
    ours, _ = run_distributed(look, 2, wanted, False)[0]
    assert ours["gradients"] == 4 * NUM_PARAMETERS and "communication" not in ours


def test_gradients_that_wait_for_the_next_micro_batch_are_counted() -> None:
    ours, _ = run_distributed(look, 2, config("ddp", "fp32", accumulation=2), False)[0]
    assert ours["gradients"] == 4 * NUM_PARAMETERS
    assert ours["activations"] == pytest.approx(ACTIVATIONS["fp32"] / 2, rel=0.01)


@pytest.mark.parametrize("accumulation", [2, 4])
@pytest.mark.parametrize(
    ("strategy", "precision"), [("ddp", "bf16"), ("ddp", "fp16"), ("fsdp", "bf16"), ("fsdp2", "bf16")]
)
def test_activations_that_lie_where_the_last_micro_batch_had_cast_copies(
    strategy: str, precision: str, accumulation: int
) -> None:
    ours, _ = found(strategy, precision, 2, accumulation=accumulation)
    assert ours["activations"] == ACTIVATIONS["bf16"] // accumulation
    if strategy == "ddp":
        assert ours["gathered_parameters"] == 2 * NUM_PARAMETERS, "the cast copies of one micro-batch"
        assert ours["gradients"] == 4 * NUM_PARAMETERS


def test_torchs_tracker_agrees_over_micro_batches() -> None:
    ours, torchs = found("fsdp2", "bf16", 2, torch_too=True, accumulation=2)  # the only one whose tracker can
    overlap = 4 * NUM_PARAMETERS // 3
    assert torchs["Total"] - SLACK <= sum(ours.values()) <= torchs["Total"] + overlap + SLACK
    assert ours["parameters"] + ours["gathered_parameters"] == torchs["Sharded Param"] + torchs["Unsharded Param"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2-keep"])
def test_copies_that_autocast_makes_are_activations(strategy: str) -> None:
    halves, quarters = (found(strategy, "bf16_autocast", 2, accumulation=k)[0]["activations"] for k in (2, 4))
    norms = 3 * 2 * 16
    assert 2 * quarters - halves == 2 * (NUM_PARAMETERS - norms), "what does not go with the batch"


def change(time: int, address: int, size: int, *scopes: str) -> Change:
    return Change(time, address, size, "cpu", scopes)


def test_a_block_that_is_made_again_was_freed_before() -> None:
    changes = [
        change(1, 7, 100),
        change(2, 7, 40),
        change(3, 8, 30),
        change(4, 8, -30),
        change(5, 9, -5),
        change(6, 6, 1),
    ]
    blocks = paired([Block(9, 5, kind="buffers"), Block(6, 2, kind="other")], changes)
    assert [(b.address, b.start, b.end, b.missed) for b in blocks] == [
        (9, 0, 5, False),
        (6, 0, 6, True),
        (7, 1, 2, True),
        (7, 2, None, False),
        (8, 3, 4, False),
        (6, 6, None, False),
    ]
    assert time_of_peak(blocks) == 1, "107 bytes then, 77 at 3"


def test_the_innermost_mark_says_the_kind() -> None:
    seen = Seen(gradients={3}, copies=[{4}, {5}])
    forward = "distbench.forward"
    cases = {
        ("FullyShardedDataParallel.forward", forward): "activations",
        (forward, "FSDP::pre_forward (layers.0)", "FSDP::all_gather (layers.0)"): "communication",
        (forward, "FSDP::pre_forward (layers.0)", "FSDP::all_gather_copy_out (layers.0)"): "gathered_parameters",
        ("distbench.backward", "FSDP::post_backward_reduce (layers.0)"): "communication",
        (forward, "FullyShardedDataParallel.forward", "FullyShardedDataParallel._pre_forward"): "gathered_parameters",
        ("distbench.backward",): "other",
    }
    for scopes, kind in cases.items():
        assert kind_of(Block(1, 8, 10, scopes), seen, [20, 40], optimizing=50) == kind
    assert kind_of(Block(3, 8, 10, ("distbench.backward",)), seen, [20, 40], optimizing=50) == "gradients"
    assert kind_of(Block(3, 8, 10, ("distbench.backward",), end=20), seen, [20, 40], optimizing=50) == "other"
    assert kind_of(Block(4, 8, 10, (forward,)), seen, [20, 40], optimizing=50) == "gathered_parameters"


def test_a_copy_is_one_as_long_as_it_lives() -> None:
    forward, seen = ("distbench.forward",), Seen(copies=[{4}, {5}])
    lives = {
        (4, 10, None): "gathered_parameters",
        (4, 10, 30): "gathered_parameters",
        (4, 31, None): "activations",  # made where the first micro-batch's copy was, in the second one's forward
        (5, 10, 30): "activations",
        (5, 31, 45): "gathered_parameters",
    }
    for (address, start, end), kind in lives.items():
        assert kind_of(Block(address, 8, start, forward, end=end), seen, [20, 40], optimizing=50) == kind
