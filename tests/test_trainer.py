"""The loop itself, in one process: what a step reports, whom it tells, and where it stops."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from distbench.build import build_trainer
from distbench.config import SGD, Config, DDPStrategy
from distbench.launching.world import World
from distbench.trainer import Backward, Observer, StepMetrics, Trainer, squared_norm
from tests.configs import custom, small
from tests.distributed import RankFailed, run_distributed
from tests.steps import ONE_PROCESS, train


class Notes(Observer):
    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.metrics: list[StepMetrics] = []
        self.gradients: list[Tensor] = []

    def on_gradients(self, backward: Backward, trainer: Trainer) -> None:
        self.events.append(("gradients", backward.step))
        self.gradients.append(torch.cat([g.flatten() for g in trainer.strategy.gradients(trainer.module)]).clone())
        assert backward.count == sum(batch.targets.numel() for batch in backward.batches)

    def on_step(self, metrics: StepMetrics, trainer: Trainer) -> None:
        self.events.append(("step", metrics.step))
        self.metrics.append(metrics)


def test_observers_see_every_step_in_order_and_unclipped_gradients() -> None:
    trainer, _ = build_trainer(small("single", steps=3, clip_norm=1e-3, optimizer=SGD(lr=0.1)), ONE_PROCESS)
    notes = Notes()
    trainer.observers = [notes]
    trainer.run(until=1)
    trainer.run(until=3)
    trainer.run(until=3)
    assert notes.events == [(kind, step) for step in (1, 2, 3) for kind in ("gradients", "step")]
    for metrics, gradient in zip(notes.metrics, notes.gradients, strict=True):
        assert math.isclose(metrics.grad_norm, float(gradient.double().norm()), rel_tol=1e-9)
        assert metrics.grad_norm > 1e-3 and math.isclose(metrics.grad_norm_clipped, 1e-3, rel_tol=1e-2)


def test_watching_changes_nothing() -> None:
    config = small("single", steps=3, optimizer=SGD(lr=0.1, momentum=0.9))
    plain = train(ONE_PROCESS, config, 3).metrics
    watched, _ = build_trainer(config, ONE_PROCESS)
    notes = Notes()
    watched.observers = [notes]
    watched.run(until=3)
    assert [m.loss for m in notes.metrics] == [m.loss for m in plain]


def test_a_step_counts_samples_and_positions() -> None:
    sequence = train(ONE_PROCESS, small("single")).metrics[0]
    assert (sequence.samples, sequence.tokens) == (12, 12 * 3)
    flat = custom("Plain", "single")
    assert train(ONE_PROCESS, flat).metrics[0].samples == 12
    assert 0 <= sequence.data_seconds <= sequence.step_seconds


def test_every_step_has_its_own_samples() -> None:
    """Without training, losses differ by the samples alone, and a step's are the same whenever it is asked for."""
    losses = [m.loss for m in train(ONE_PROCESS, small("single", optimizer=SGD(lr=0.0)), 4).metrics]
    assert len(set(losses)) == 4
    trainer, _ = build_trainer(small("single", optimizer=SGD(lr=0.0)), ONE_PROCESS)
    trainer.step = 2
    assert trainer.train_step().loss == losses[2] and trainer.step == 3


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(6, 6), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear(x))


def test_dropout_is_drawn_from_the_samples_id() -> None:
    """So that the world size does not change it: micro-batches that start at the same sample draw the same."""
    config = custom("Dropping", "single", accumulation=4)
    config.model._target_ = f"{__name__}.Dropping"
    config.model.block_classes = []
    expected = train(ONE_PROCESS, config).metrics[0].loss
    torch.manual_seed(12345)
    assert train(ONE_PROCESS, config).metrics[0].loss == expected
    halves = run_distributed(loss_of, 2, replace(config, accumulation=2, strategy=DDPStrategy()))
    assert halves == [pytest.approx(expected, rel=1e-6)] * 2


def loss_of(world: World, config: Config) -> float:
    return train(world, config).metrics[0].loss


def test_a_loss_that_is_not_finite_is_reported_and_not_hidden() -> None:
    metrics = train(ONE_PROCESS, small("single", optimizer=SGD(lr=1e30), clip_norm=1e30), 4).metrics
    assert math.isfinite(metrics[0].loss) and not math.isfinite(metrics[-1].loss)
    assert not metrics[-1].skipped, "only a loss scaler may skip"


def test_ranks_that_start_from_other_weights_are_refused() -> None:
    with pytest.raises(RankFailed, match=r"NonDeterministicStart: ranks built different initial weights \(rank 0: "):
        run_distributed(loss_of, 2, custom("RandomStart"))


@pytest.mark.parametrize("tensors", [[], [torch.zeros(0)], [torch.tensor([3.0]), torch.zeros(0), torch.tensor(4.0)]])
def test_squared_norm(tensors: list[Tensor]) -> None:
    total = squared_norm(tensors, torch.device("cpu"))
    assert total.dtype is torch.float64 and total.item() == (25.0 if len(tensors) == 3 else 0.0)


def test_squared_norm_is_summed_in_fp64() -> None:
    """In fp32 the small ones would vanish, or the sum would overflow."""
    assert squared_norm([torch.tensor([1.0]), torch.full((4,), 2.0**-13)], torch.device("cpu")).item() == 1 + 2.0**-24
    assert squared_norm([torch.full((4,), 1e30)], torch.device("cpu")).item() == pytest.approx(4e60)
    assert squared_norm([torch.full((2,), 200.0, dtype=torch.float16)], torch.device("cpu")).item() == 80_000


def test_data_of_another_seed_is_other_data() -> None:
    config = small("single")
    other = small("single")
    other.seed.data += 1
    assert train(ONE_PROCESS, config).metrics[0].loss != train(ONE_PROCESS, other).metrics[0].loss
