"""The shadow optimizer: no flagged clean update over the worst of values, and no missed wrong one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from distbench.config import SGD, AdamW, Config, LossScaler, Schedule
from distbench.numerics.shadow import ENOUGH_MOVED, ShadowOptimizer
from distbench.optim import build_optimizer, build_schedule
from distbench.precision import Scaler
from distbench.strategies.slots import Slot
from distbench.trainer import Trainer, squared_norm
from tests.configs import small

SIZES = {"weight": (7, 11), "bias": (11,), "empty": (0,)}


class Pieces:
    """A strategy whose parameters lie in one flat tensor, at odd offsets, as FSDP's do: other kernels than the shadow's
    own pieces (vector bodies against scalar tails)."""

    def __init__(self, flat: nn.Parameter) -> None:
        self.flat = flat

    def local(self, tensor: Tensor) -> Tensor:
        return tensor

    def slots(self, module: Any) -> list[Slot]:
        found, offset = [], 0
        for name, shape in SIZES.items():
            numel = math.prod(shape)
            found.append(Slot(name, shape, self.flat, offset, numel, 0, max(numel, 1), max(numel, 1)))
            offset += numel
        return found


@dataclass
class Run:
    """A trainer, as far as the shadow looks at it, on one flat parameter."""

    trainer: Trainer
    shadow: ShadowOptimizer
    config: Config
    flat: nn.Parameter

    def step(self, gradient: Tensor, **spoil: Any) -> dict[str, float]:
        """Clip and step as the trainer does; what the shadow says to it."""
        self.flat.grad = gradient.clone()
        self.shadow.take_gradients(self.trainer)
        total = float(squared_norm([gradient], torch.device("cpu")))
        norm = math.sqrt(total) if math.isfinite(total) else total
        clip = self.config.clip_norm
        coefficient = 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
        if coefficient < 1.0:
            self.flat.grad.mul_(coefficient)
        for change in spoil.get("before", []):
            change(self)
        if not (self.trainer.scaler.enabled and not math.isfinite(norm)):
            self.trainer.optimizer.step()
            self.trainer.schedule.step()
        for change in spoil.get("after", []):
            with torch.no_grad():
                change(self)
        return self.shadow.check_update(self.trainer, norm)


def start(
    optimizer: AdamW | SGD,
    values: Tensor | None = None,
    clip: float | None = None,
    dtype: torch.dtype = torch.float32,
    scaled: bool = False,
) -> Run:
    numel = sum(math.prod(shape) for shape in SIZES.values())
    values = torch.randn(numel, generator=torch.Generator().manual_seed(1)) if values is None else values
    flat = nn.Parameter(values.to(dtype))
    config = small("single", optimizer=optimizer, clip_norm=clip, steps=6)
    built = build_optimizer(optimizer, [("flat", flat)], {"flat": 2})
    fake = SimpleNamespace(
        module=nn.Module(),
        strategy=Pieces(flat),
        optimizer=built,
        schedule=build_schedule(optimizer, built, 6),
        scaler=Scaler(LossScaler(enabled=scaled)),
    )
    trainer: Any = fake
    return Run(trainer, ShadowOptimizer(config, trainer), config, flat)


def values(kind: str, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    numel = sum(math.prod(shape) for shape in SIZES.values())
    normal = torch.randn(numel, generator=generator, dtype=torch.float64)
    tiny, largest = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    return {
        "normal": normal,
        "zeros": torch.where(normal > 0, 0.0, normal),
        "subnormal": normal * tiny / 64,
        "small": normal * 1e-12,
        "range": normal * 2.0 ** torch.randint(-60, 40, (numel,), generator=generator),
        "large": normal * math.sqrt(largest) / 1e3,
        "huge": normal * largest / 8,
        "infinite": torch.where(normal > 1, math.inf, normal),
        "nan": torch.where(normal > 1, math.nan, normal),
    }[kind].to(dtype)


KINDS = ["normal", "zeros", "subnormal", "small", "range", "large", "huge", "infinite", "nan"]

optimizers = st.one_of(
    st.builds(
        AdamW,
        lr=st.sampled_from([0.0, 1e-8, 1e-3, 1.0]),
        betas=st.sampled_from([[0.9, 0.95], [0.0, 0.0], [0.9, 0.999], [0.0, 0.999]]),
        eps=st.sampled_from([0.0, 1e-8, 1e-30, 1.0]),
        weight_decay=st.sampled_from([0.0, 0.1, 100.0]),
        schedule=st.sampled_from(Schedule),
        warmup_steps=st.sampled_from([0, 2]),
    ),
    st.builds(
        SGD,
        lr=st.sampled_from([0.0, 1e-8, 1e-2, 10.0]),
        momentum=st.sampled_from([0.5, 0.9, 0.999]),
        nesterov=st.booleans(),
        weight_decay=st.sampled_from([0.0, 0.1, 100.0]),
        schedule=st.sampled_from(Schedule),
        warmup_steps=st.sampled_from([0, 2]),
    ),
    st.builds(SGD, lr=st.sampled_from([0.0, 1e-2]), weight_decay=st.sampled_from([0.0, 0.1])),
)


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    optimizer=optimizers,
    weights=st.sampled_from(KINDS[:6]),
    gradients=st.lists(st.sampled_from(KINDS), min_size=5, max_size=5),
    clip=st.sampled_from([None, 1.0, 1e-6, 1e6]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.float16]),
    scaled=st.booleans(),
    seed=st.integers(0, 2**16),
)
@example(AdamW(eps=0.0), "zeros", ["subnormal"] * 5, None, torch.float32, False, 0)
@example(AdamW(eps=0.0, lr=1.0), "normal", ["normal", "small"] * 2 + ["nan"], 1.0, torch.float32, False, 1)
@example(SGD(lr=1e-2, momentum=0.9), "zeros", ["normal", "infinite"] * 2 + ["huge"], 1.0, torch.float32, False, 2)
def test_no_clean_update_is_flagged(
    optimizer: AdamW | SGD,
    weights: str,
    gradients: list[str],
    clip: float | None,
    dtype: torch.dtype,
    scaled: bool,
    seed: int,
) -> None:
    run = start(optimizer, values(weights, dtype, seed), clip, dtype, scaled)
    for step, kind in enumerate(gradients):
        assert run.step(values(kind, dtype, seed + step + 1)) == {}, (step, kind)


# --------------------------------------------------------------------------------------------------------------
# Wrong updates
# --------------------------------------------------------------------------------------------------------------

ADAMW = AdamW(lr=1e-3, weight_decay=0.1)
MOMENTUM = SGD(lr=1e-2, momentum=0.9, weight_decay=0.1)


def normal(seed: int) -> Tensor:
    return values("normal", torch.float32, seed)


def groups(run: Run, key: str, factor: float) -> None:
    for group in run.trainer.optimizer.param_groups:
        group[key] *= factor


WRONG: dict[str, dict[str, Any]] = {
    "one element": {"after": [lambda run: run.flat.data[3:4].mul_(1 + 1e-5)]},
    "one element is infinite": {"after": [lambda run: run.flat.data[3:4].fill_(math.inf)]},
    "one element is NaN": {"after": [lambda run: run.flat.data[3:4].fill_(math.nan)]},
    "decay": {"before": [lambda run: groups(run, "weight_decay", 0.0)]},
    "learning rate": {"before": [lambda run: groups(run, "lr", 1.001)]},
    "rounded to bf16": {"after": [lambda run: run.flat.data.copy_(run.flat.data.bfloat16())]},
    "clipped": {"before": [lambda run: run.flat.grad.mul_(0.5)]},
    "stepped twice": {"before": [lambda run: run.trainer.optimizer.step()]},
}


@pytest.mark.parametrize("optimizer", [ADAMW, MOMENTUM], ids=["adamw", "sgd"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_update_is_flagged(wrong: str, optimizer: AdamW | SGD) -> None:
    if wrong == "clipped" and optimizer is ADAMW:
        optimizer = AdamW(lr=1e-3, weight_decay=0.1, eps=1.0)  # otherwise Adam does not know the scale
    run = start(optimizer)
    assert run.step(normal(1)) == {}
    flagged = run.step(normal(2), **WRONG[wrong])
    assert "weight" in flagged and all(ratio > 1 for ratio in flagged.values())
    if wrong.startswith("one"):
        assert set(flagged) == {"weight"}


@pytest.mark.parametrize("optimizer", [ADAMW, MOMENTUM], ids=["adamw", "sgd"])
def test_lost_moments_are_flagged_at_the_next_step(optimizer: AdamW | SGD) -> None:
    run = start(optimizer)
    assert run.step(normal(1), after=[lambda run: run.trainer.optimizer.state.clear()]) == {}
    assert set(run.step(normal(2))) == {"weight", "bias"}


def test_a_schedule_that_stands_still_is_flagged() -> None:
    run = start(AdamW(lr=1e-3, schedule=Schedule.linear))
    assert run.step(normal(1)) == {}
    run.trainer.schedule.step()
    assert run.step(normal(2)) != {}


def test_an_update_below_the_weights_resolution_is_seen_as_a_whole() -> None:
    """bf16 weights: 4 u |p| is more than any element's update, but not than all of them."""
    for dtype, lr in ((torch.bfloat16, 3e-3), (torch.bfloat16, 1e-2)):
        run = start(AdamW(lr=lr, weight_decay=0.0), dtype=dtype)
        held = run.flat.detach().clone()
        moved = run.step(normal(1).to(dtype), after=[lambda run, held=held: run.flat.data.copy_(held)])
        assert "weight" in moved
    assert math.prod(SIZES["weight"]) > ENOUGH_MOVED


def test_a_skipped_step_must_move_nothing() -> None:
    run = start(ADAMW, scaled=True)
    infinite = values("infinite", torch.float32, 1)
    assert run.step(infinite) == {}
    assert "weight" in run.step(infinite, after=[lambda run: run.flat.data.mul_(1.001)])
    assert start(ADAMW, scaled=True).step(normal(1)) == {}


def test_plain_sgd_moves_what_the_optimizer_holds() -> None:
    run = start(ADAMW)
    before = run.flat.detach().clone()
    run.flat.grad = values("subnormal", torch.float32, 3)
    assert run.shadow.plain_sgd_moves(run.trainer) == []
    assert torch.equal(run.flat, before), "put back"
    run.flat.grad = values("infinite", torch.float32, 3)
    assert run.shadow.plain_sgd_moves(run.trainer) == []
    dead = nn.Parameter(before.clone())
    run.trainer.optimizer.param_groups[0]["params"] = [dead]
    run.flat.grad = normal(3) * 1e-20
    assert run.shadow.plain_sgd_moves(run.trainer) == ["weight", "bias"]


@pytest.mark.parametrize("key", ["lr", "weight_decay", "betas", "eps"])
def test_groups_have_the_configs_settings(key: str) -> None:
    run = start(ADAMW)
    assert run.shadow.other_settings(run.trainer) == []
    group = run.trainer.optimizer.param_groups[0]
    group[key] = (0.5, 0.5) if key == "betas" else group[key] * 2 + 1e-9
    assert run.shadow.other_settings(run.trainer) == list(SIZES)
    run.trainer.optimizer.param_groups.clear()
    assert run.shadow.other_settings(run.trainer) == list(SIZES)
