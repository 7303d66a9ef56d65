"""Options under torch's own names reach torch, and change no number."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from distbench.build import build_trainer
from distbench.config import Config, DDPStrategy, FSDP2Strategy, FSDPStrategy, NoWrap
from distbench.launching.world import World
from distbench.strategies.ddp import ReduceIn
from tests.configs import small
from tests.distributed import run_distributed
from tests.steps import Steps, train_each

DDP = DDPStrategy(bucket_cap_mb=0.002, gradient_as_bucket_view=True, static_graph=True, find_unused_parameters=True)
OPTIONS: dict[str, Any] = {
    "ddp": DDPStrategy(),
    "ddp, small buckets": DDPStrategy(bucket_cap_mb=0.001),
    "ddp, views": DDPStrategy(gradient_as_bucket_view=True),
    "ddp, static graph": DDPStrategy(static_graph=True),
    "ddp, unused": DDPStrategy(find_unused_parameters=True),
    "ddp, no buffers": DDPStrategy(broadcast_buffers=False),
    "fsdp, forward prefetch": FSDPStrategy(forward_prefetch=True),
    "fsdp, unlimited": FSDPStrategy(limit_all_gathers=False),
    "fsdp2, kept": FSDP2Strategy(reshard_after_forward=False),
}


CASES = [("fp32", 1), ("fp32", 3), ("bf16", 1)]
REFUSED = ("ddp, static graph", "fp32", 3)
"""Its first backward must reduce (tests/test_config.py)."""
CELLS = [(name, precision, k) for name in OPTIONS for precision, k in CASES if (name, precision, k) != REFUSED]


@cache
def first_steps() -> dict[tuple[str, str, int], Steps]:
    configs = {
        (name, precision, k): replace(small("ddp", precision=precision, accumulation=k), strategy=OPTIONS[name])
        for name, precision, k in CELLS
    }
    return run_distributed(train_each, 2, configs)[0]


@pytest.mark.parametrize(("name", "precision", "accumulation"), [cell for cell in CELLS if cell[0] != "ddp"])
def test_no_option_changes_a_number(name: str, precision: str, accumulation: int) -> None:
    expected = first_steps()["ddp", precision, accumulation]
    got = first_steps()[name, precision, accumulation]
    assert got.metrics[0].loss == expected.metrics[0].loss
    for key, gradient in expected.gradients.items():
        assert torch.equal(got.gradients[key], gradient), key


def test_a_static_graph_with_every_micro_batch_reduced() -> None:
    synced = small("ddp", accumulation=3, accumulation_sync=True)
    configs = {
        (str(static), "", 0): replace(synced, strategy=DDPStrategy(static_graph=static)) for static in (False, True)
    }
    plain, static = run_distributed(train_each, 2, configs, 2)[0].values()
    for key, gradient in plain.gradients.items():
        assert torch.equal(static.gradients[key], gradient), key


def ddp_of(world: World, config: Config) -> dict[str, object]:
    module = build_trainer(config, world)[0].module
    assert isinstance(module, DistributedDataParallel)
    return {
        "bucket_cap_mb": module.bucket_bytes_cap / 2**20,
        "gradient_as_bucket_view": module.gradient_as_bucket_view,
        "static_graph": module.static_graph,
        "find_unused_parameters": module.find_unused_parameters,
        "broadcast_buffers": module.broadcast_buffers,
    }


@pytest.mark.parametrize("options", [DDPStrategy(), replace(DDP, broadcast_buffers=False)], ids=["default", "others"])
def test_ddp_is_given_its_options(options: DDPStrategy) -> None:
    held = run_distributed(ddp_of, 2, replace(small("ddp"), strategy=options))[0]
    for name, value in held.items():
        assert value == pytest.approx(getattr(options, name), rel=1e-3), name


def after_forward(world: World, configs: dict[str, Config]) -> dict[str, int]:
    """How many of a weight's 13 rows this rank holds once forward is done with the layer."""
    held = {}
    for name, config in configs.items():
        trainer, _ = build_trainer(config, world)
        loss = trainer.forward(trainer.batches.micro_batches(0)[0])
        weight = trainer.module.layers[0].attn.weight
        held[name] = (weight.to_local() if isinstance(weight, DTensor) else weight).shape[0]
        loss.backward()
    return held


def test_reshard_after_forward_is_what_it_says() -> None:
    configs = {
        str(value): replace(small("fsdp2"), strategy=FSDP2Strategy(reshard_after_forward=value))
        for value in (True, False, 2)
    }
    first, *_, last = run_distributed(after_forward, 4, configs)
    assert first == {"True": 4, "False": 13, "2": 7}
    assert last == {"True": 1, "False": 13, "2": 6}


def test_a_model_in_one_piece_is_resharded_too() -> None:
    """torch's own default leaves the root gathered."""
    configs = {
        str(value): replace(small("fsdp2", wrap=NoWrap()), strategy=FSDP2Strategy(reshard_after_forward=value))
        for value in (True, False)
    }
    assert run_distributed(after_forward, 2, configs)[0] == {"True": 7, "False": 13}


@pytest.mark.parametrize(
    ("dtype", "ranks", "before", "after"),
    [
        (torch.bfloat16, 4, 1, 4),
        (torch.float32, 8, 1, 8),
        (torch.float16, 1, 1, 1),
        (torch.float16, 2, 2, 1),
        (torch.float16, 4, 2, 2),
        (torch.float16, 6, 4, 1.5),
        (torch.float16, 64, 8, 8),
    ],
)
def test_where_the_average_is_divided(dtype: torch.dtype, ranks: int, before: float, after: float) -> None:
    """As FSDP does it: in fp16 about the square root on each side of the sum."""
    state = ReduceIn(dtype, ranks)
    assert (state.before, state.after) == (before, after)
