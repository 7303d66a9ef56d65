"""Losses are normalised once, by the global count."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch.nn import functional as F

from distbench.config import Config, Loss, LossKind, SimpleModel, SyntheticData
from distbench.data.batches import Batch, build_source
from distbench.errors import UserModelError
from distbench.losses import LossFunction
from tests.configs import small
from tests.distributed import run_distributed
from tests.steps import ONE_PROCESS, Steps, gamma, train, train_each

VOCABULARY, PADDING = 7, 3


def batch(targets: torch.Tensor) -> Batch:
    return Batch(range(len(targets)), torch.zeros(len(targets)), targets)


def test_mean_squared_error_is_torchs() -> None:
    loss, outputs, targets = LossFunction(Loss(LossKind.mse)), torch.randn(4, 5), torch.randn(4, 5)
    mean = loss.sum(outputs, targets) / loss.count([batch(targets)], ONE_PROCESS)
    torch.testing.assert_close(mean, F.mse_loss(outputs, targets), rtol=2**-22, atol=0)


def test_cross_entropy_is_torchs_over_real_tokens() -> None:
    loss = LossFunction(Loss(LossKind.cross_entropy, ignore_index=PADDING))
    outputs, targets = torch.randn(4, 5, VOCABULARY), torch.randint(VOCABULARY, (4, 5))
    mean = loss.sum(outputs, targets) / loss.count([batch(targets[:1]), batch(targets[1:])], ONE_PROCESS)
    expected = F.cross_entropy(outputs.reshape(-1, VOCABULARY), targets.reshape(-1), ignore_index=PADDING)
    torch.testing.assert_close(mean, expected, rtol=2**-20, atol=0)


def test_sum_is_the_articles() -> None:
    loss, outputs = LossFunction(Loss(LossKind.sum)), torch.randn(4, 5)
    assert loss.sum(outputs, torch.zeros(1)) == outputs.sum()
    assert loss.count([batch(torch.zeros(4, 5))], ONE_PROCESS) == 1


def test_a_batch_of_padding_alone_divides_by_one() -> None:
    loss = LossFunction(Loss(LossKind.cross_entropy, ignore_index=PADDING))
    assert loss.count([batch(torch.full((2, 3), PADDING))], ONE_PROCESS) == 1


@pytest.mark.parametrize(
    ("kind", "outputs", "targets"),
    [
        (LossKind.mse, (4, 6), (4, 1)),
        (LossKind.mse, (4, 3, 2), (4, 3)),
        (LossKind.cross_entropy, (4, 7), (4, 2)),
        (LossKind.cross_entropy, (4, 2, 7), (2, 4)),
    ],
)
def test_other_shapes_are_refused(kind: LossKind, outputs: tuple[int, ...], targets: tuple[int, ...]) -> None:
    """Broadcasting would train on another loss than the one that is named."""
    with pytest.raises(UserModelError, match=r"outputs have shape \(4, .*targets of shape .*set model\.target_shape"):
        LossFunction(Loss(kind)).sum(torch.zeros(outputs), torch.zeros(targets, dtype=torch.int64))


# --------------------------------------------------------------------------------------------------------------
# Over ranks that hold different numbers of tokens
# --------------------------------------------------------------------------------------------------------------


def tokens(strategy: str, accumulation: int) -> Config:
    """Token ids, one of which is padding: micro-batches and ranks hold different numbers of real ones."""
    return small(
        strategy,
        precision="fp64",
        accumulation=accumulation,
        model=SimpleModel(num_layers=1, hidden_dim=5, vocab_size=VOCABULARY),
        data=SyntheticData(input_shape=[3], target_shape=[3], vocab_size=VOCABULARY),
        loss=Loss(LossKind.cross_entropy, ignore_index=PADDING),
    )


def summed(strategy: str, accumulation: int) -> Config:
    return replace(small(strategy, precision="fp64", accumulation=accumulation), loss=Loss(LossKind.sum))


LOSSES = {"cross_entropy": tokens, "sum": summed}


@cache
def distributed(ranks: int) -> dict[str, Steps]:
    configs = {
        f"{loss} {strategy} {k}": build(strategy, k)
        for loss, build in LOSSES.items()
        for strategy in ("ddp", "fsdp", "fsdp2")
        for k in (1, 3)
    }
    return run_distributed(train_each, ranks, configs)[0]


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp2"])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_division_of_the_batch_changes_nothing(loss: str, strategy: str, ranks: int, accumulation: int) -> None:
    got = distributed(ranks)[f"{loss} {strategy} {accumulation}"]
    expected = train(ONE_PROCESS, LOSSES[loss]("single", 1))
    tolerance = gamma(1000, 2.0**-53)
    assert abs(got.metrics[0].loss - expected.metrics[0].loss) <= tolerance * max(1.0, abs(expected.metrics[0].loss))
    for name, gradient in expected.gradients.items():
        error = (got.gradients[name] - gradient).abs().max()
        assert error <= tolerance * max(1.0, float(gradient.abs().max())), name


def test_ranks_and_micro_batches_do_hold_different_numbers_of_tokens() -> None:
    """Otherwise a mean of means would pass the test above."""
    config = tokens("single", 3)
    source = build_source(config.data, config.seed)
    counts = [int((source.sample(index)[1] != PADDING).sum()) for index in range(config.global_batch)]
    halves = {sum(counts[:6]), sum(counts[6:])}
    micro = {sum(counts[i : i + 2]) for i in range(0, 12, 2)}
    assert len(halves) == 2 and len(micro) > 1
