"""The first step of DDP, FSDP and FSDP2 at several world sizes against one process on the same global batch.

Two references. `replay` plays the ranks one after another in one process; from it a distributed step may differ only
by the order of one summation, which has a proven bound (and with two ranks no freedom at all). `single` runs the whole
batch through the unwrapped trainer: other shapes, so other kernels, but the same mathematics.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch

from distbench.config import Config
from distbench.models.build import build_model, weights_digest
from tests.configs import small
from tests.distributed import run_distributed
from tests.steps import ONE_PROCESS, Replay, Steps, gamma, replay, train, train_each

DISTRIBUTED = ["ddp", "fsdp", "fsdp2"]
PRECISIONS = ["fp64", "fp32"]
UNIT_ROUNDOFF = {"fp64": 2.0**-53, "fp32": 2.0**-24}
CASES: dict[str, dict[str, Any]] = {
    "hidden 13": {"hidden": 13},
    "hidden 13, 3 micro-batches": {"hidden": 13, "accumulation": 3},
    "hidden 13, 3 micro-batches, each reduced": {"hidden": 13, "accumulation": 3, "accumulation_sync": True},
    "hidden 67": {"hidden": 67},
    "hidden 67, 3 micro-batches": {"hidden": 67, "accumulation": 3},
    "hidden 67, 3 micro-batches, each reduced": {"hidden": 67, "accumulation": 3, "accumulation_sync": True},
    "hidden 2: ranks with empty shards": {"hidden": 2},
}
every_run = pytest.mark.parametrize(
    ("strategy", "ranks", "precision"),
    [(strategy, ranks, precision) for strategy in DISTRIBUTED for ranks in (2, 4) for precision in PRECISIONS],
)
every_case = pytest.mark.parametrize("case", CASES)


def config_of(case: str, strategy: str, precision: str) -> Config:
    return small(strategy, precision=precision, **CASES[case])


@cache
def distributed(strategy: str, ranks: int, precision: str) -> list[dict[str, Steps]]:
    """Every case's first step on every rank; one start of processes serves them all."""
    configs = {case: config_of(case, strategy, precision) for case in CASES}
    return run_distributed(train_each, ranks, configs)


@cache
def single(case: str, precision: str) -> Steps:
    return train(ONE_PROCESS, config_of(case, "single", precision))


@cache
def replayed(case: str, ranks: int, precision: str) -> Replay:
    return replay(config_of(case, "single", precision), ranks)


@every_case
@every_run
def test_gradients_are_the_replayed_ranks(strategy: str, ranks: int, precision: str, case: str) -> None:
    """Within gamma_m times the sum of magnitudes: m counts every addition and every reduction on an element's way."""
    config = config_of(case, strategy, precision)
    got = distributed(strategy, ranks, precision)[0][case].gradients
    reference = replayed(case, ranks, precision)
    mean, k = reference.mean(), config.accumulation
    assert got.keys() == mean.keys()
    reductions = k if config.accumulation_sync else 1  # DDP reduces the running sum again with each micro-batch
    roundings = reductions * (ranks - 1) + (k - 1)
    own = ranks + k  # the reference's additions
    bound = gamma(roundings, UNIT_ROUNDOFF[precision]) + gamma(own, UNIT_ROUNDOFF["fp64"])
    if config.accumulation_sync:
        bound += gamma(k - 1, UNIT_ROUNDOFF[precision])  # the replay adds micro-batches up before it averages
    for name, gradient in got.items():
        error = (gradient.double() - mean[name]).abs()
        assert (error <= bound * reference.magnitudes[name]).all(), name


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if not case.get("accumulation_sync")])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_two_ranks_leave_no_freedom(strategy: str, precision: str, case: str) -> None:
    """Two terms commute, so their mean is the replay's bit for bit (unless micro-batches are reduced one by one)."""
    got = distributed(strategy, 2, precision)[0][case].gradients
    first, second = replayed(case, 2, precision).gradients
    for name, gradient in got.items():
        assert torch.equal(gradient, (first[name] + second[name]) / 2), name


@every_case
@every_run
def test_gradients_are_those_of_one_process(strategy: str, ranks: int, precision: str, case: str) -> None:
    """Within the roundings on the longest way from a weight to its gradient, times the sum of magnitudes."""
    config = config_of(case, strategy, precision)
    got = distributed(strategy, ranks, precision)[0][case].gradients
    expected = single(case, precision).gradients
    assert got.keys() == expected.keys()
    tolerance = gamma(longest_way(config), UNIT_ROUNDOFF[precision])
    magnitudes = replayed(case, ranks, precision).magnitudes
    for name, gradient in got.items():
        error = (gradient.double() - expected[name].double()).abs()
        assert (error <= tolerance * magnitudes[name]).all(), name


def longest_way(config: Config) -> int:
    """Roundings on the longest way: every inner product of forward and backward, and the sum over the batch."""
    d, layers = config.model.hidden_dim, config.model.num_layers
    a_layer = d + d + 4 * d + 16  # attention stand-in, up, down; GELU, normalisation and residuals in a handful
    return 2 * layers * a_layer + config.global_batch * config.model.seq_len


@every_case
@every_run
def test_losses_are_those_of_one_process(strategy: str, ranks: int, precision: str, case: str) -> None:
    config = config_of(case, strategy, precision)
    metrics = [rank[case].metrics[0] for rank in distributed(strategy, ranks, precision)]
    assert len({m.loss for m in metrics}) == 1 and len({m.grad_norm for m in metrics}) == 1, "ranks disagree"
    expected = single(case, precision).metrics[0].loss
    tolerance = gamma(longest_way(config), UNIT_ROUNDOFF[precision]) * expected  # a sum of squares: no cancellation
    assert abs(metrics[0].loss - expected) <= tolerance
    exact = sum(replayed(case, ranks, precision).losses)
    assert math.isclose(metrics[0].loss, exact, rel_tol=ranks * config.accumulation * 2.0**-52)


@every_case
@every_run
def test_the_norm_is_that_of_the_whole_gradient(strategy: str, ranks: int, precision: str, case: str) -> None:
    """Shards are counted once, replicas not N times."""
    steps = distributed(strategy, ranks, precision)[0][case]
    whole = math.sqrt(sum(float(g.double().square().sum()) for g in steps.gradients.values()))
    elements = sum(g.numel() for g in steps.gradients.values())
    assert math.isclose(steps.metrics[0].grad_norm, whole, rel_tol=elements * 2.0**-52)


@every_case
def test_every_world_starts_from_the_same_weights_and_samples(case: str) -> None:
    config = config_of(case, "single", "fp32")
    weights = {single(case, "fp32").facts["initial_weights"], weights_digest(build_model(config.model, 1))}
    samples = {single(case, "fp32").samples}
    for strategy in DISTRIBUTED:
        for ranks in (2, 4):
            for rank in distributed(strategy, ranks, "fp32"):
                weights.add(rank[case].facts["initial_weights"])
                samples.add(rank[case].samples)
    assert len(weights) == 1
    assert len(samples) == 1


def test_other_seeds_give_other_weights_and_samples() -> None:
    """The digests above can tell."""
    case = "hidden 13"
    config = config_of(case, "single", "fp32")
    config.seed.model, config.seed.data = 5, 6
    other = train(ONE_PROCESS, config)
    assert other.facts["initial_weights"] != single(case, "fp32").facts["initial_weights"]
    assert other.samples != single(case, "fp32").samples


@cache
def variants(ranks: int) -> dict[str, Steps]:
    names = ["fsdp", "fsdp-flat", "fsdp-grad-op", "fsdp-no-shard", "fsdp2", "fsdp2-keep"]
    configs = {
        f"{name} {k}": small(name, accumulation=k, precision=precision)
        for name in names
        for k, precision in ((1, "fp32"), (3, "fp32"), (1, "bf16"))
    }
    return run_distributed(train_each, ranks, configs)[0]


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("variant", ["fsdp-flat", "fsdp-grad-op", "fsdp-no-shard", "fsdp2", "fsdp2-keep"])
def test_how_a_model_is_sharded_changes_no_bit(variant: str, accumulation: int) -> None:
    plain, other = variants(2)[f"fsdp {accumulation}"], variants(2)[f"{variant} {accumulation}"]
    assert other.metrics[0].loss == plain.metrics[0].loss
    assert other.gradients.keys() == plain.gradients.keys()
    for name, gradient in plain.gradients.items():
        assert torch.equal(other.gradients[name], gradient), name


def test_three_ranks() -> None:
    """A mean over three is rounded where FSDP and DDP divide: at most twice."""
    configs = {strategy: small(strategy) for strategy in DISTRIBUTED}
    got = run_distributed(train_each, 3, configs)[0]
    reference = replay(small("single"), 3)
    mean = reference.mean()
    bound = gamma(2 + 2, 2.0**-24) + gamma(3, 2.0**-53)
    for strategy in DISTRIBUTED:
        for name, gradient in got[strategy].gradients.items():
            error = (gradient.double() - mean[name]).abs()
            assert (error <= bound * reference.magnitudes[name]).all(), (strategy, name)


@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_clipping_is_by_the_global_norm(strategy: str) -> None:
    limit = 1e-2
    configs = {"free": small(strategy), "clipped": small(strategy, clip_norm=limit)}
    got = run_distributed(train_each, 2, configs)[0]
    norm = got["free"].metrics[0].grad_norm
    assert norm > limit, "nothing would be clipped"
    clipped = got["clipped"].metrics[0]
    assert clipped.grad_norm == norm and math.isclose(clipped.grad_norm_clipped, limit, rel_tol=1e-3)
    coefficient = limit / (norm + 1e-6)
    for name, gradient in got["free"].gradients.items():
        assert torch.equal(got["clipped"].gradients[name], gradient * coefficient), name
