"""What users' models do to wrappers: tied weights, frozen and unused parameters, buffers that forward changes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from distbench.config import SGD, Config, DDPStrategy
from distbench.models.build import build_model
from distbench.preflight import preset
from tests.configs import custom
from tests.distributed import RankFailed, run_distributed
from tests.steps import ONE_PROCESS, Steps, gamma, train, train_each

WRAPPED = ["ddp", "fsdp", "fsdp-flat", "fsdp-grad-op", "fsdp-no-shard", "fsdp2", "fsdp2-keep"]
MODELS = ["Plain", "Tied", "TiedBlocks", "FrozenBlock", "Frozen", "Unused", "Normed"]
MIXED = ("Frozen", "fsdp-flat")
"""One flat parameter cannot be frozen in part: refused before ranks start (tests/test_preflight.py)."""
CELLS = [(model, strategy) for model in MODELS for strategy in WRAPPED if (model, strategy) != MIXED]
every_cell = pytest.mark.parametrize(("model", "strategy"), CELLS)


def config_of(model: str, strategy: str) -> Config:
    config = custom(model, strategy, optimizer=SGD(lr=0.5, momentum=0.9))
    if strategy == "ddp" and model == "Unused":
        config = replace(config, strategy=DDPStrategy(find_unused_parameters=True))
    return config


@cache
def trained(world_size: int = 2) -> dict[str, Steps]:
    """Every model under every strategy for two steps, in one start of processes."""
    configs = {f"{model} {strategy}": config_of(model, strategy) for model, strategy in CELLS}
    return run_distributed(train_each, world_size, configs, 2)[0]


@cache
def plain(model: str) -> nn.Module:
    return build_model(config_of(model, "single").model, seed=1)


@every_cell
def test_every_strategy_trains_the_same_model(model: str, strategy: str) -> None:
    """With two ranks to the last bit: losses, and all of the state dict, buffers and tied names among it."""
    expected, got = trained()[f"{model} ddp"], trained()[f"{model} {strategy}"]
    assert [m.loss for m in got.metrics] == [m.loss for m in expected.metrics]
    assert got.metrics[1].loss < got.metrics[0].loss
    assert got.weights.keys() == plain(model).state_dict().keys()
    for name, tensor in expected.weights.items():
        assert torch.equal(got.weights[name], tensor), name


@pytest.mark.parametrize("model", [model for model in MODELS if model != "Normed"])
def test_ddp_is_one_process(model: str) -> None:
    """And so, by the test above, is every other. (Normed sees other batches: each rank normalises by its own.)"""
    got = trained()[f"{model} ddp"]
    expected = train(ONE_PROCESS, config_of(model, "single"), 2)
    for name, tensor in expected.weights.items():
        # Two steps of lr 0.5 with gradients of at most order one, over sums of a few dozen terms.
        assert (got.weights[name] - tensor).abs().max() <= gamma(200, 2.0**-24) * max(1.0, float(tensor.abs().max()))


@pytest.mark.parametrize("strategy", WRAPPED)
@pytest.mark.parametrize(
    ("model", "first", "second"),
    [("Tied", "head.weight", "stem.weight"), ("TiedBlocks", "blocks.0.linear.weight", "blocks.1.linear.weight")],
)
def test_tied_weights_stay_tied(model: str, first: str, second: str, strategy: str) -> None:
    weights = trained()[f"{model} {strategy}"].weights
    assert torch.equal(weights[first], weights[second])
    assert not torch.equal(weights[first], plain(model).state_dict()[first]), "it was not trained"


@pytest.mark.parametrize("strategy", [strategy for strategy in WRAPPED if ("Frozen", strategy) != MIXED])
def test_frozen_parameters_stay_as_they_were(strategy: str) -> None:
    start = plain("Frozen").state_dict()
    weights = trained()[f"Frozen {strategy}"].weights
    frozen = {"blocks.1.linear.weight", "blocks.1.linear.bias", "head.bias"}
    assert {name for name in start if torch.equal(weights[name], start[name])} == frozen
    assert trained()[f"Frozen {strategy}"].gradients.keys() == start.keys() - frozen


@pytest.mark.parametrize("strategy", WRAPPED)
def test_unused_parameters_stay_as_they_were(strategy: str) -> None:
    start = plain("Unused").state_dict()
    got = trained()[f"Unused {strategy}"]
    assert torch.equal(got.weights["spare.weight"], start["spare.weight"])
    if strategy.startswith("fsdp2") or strategy == "ddp":
        assert "spare.weight" not in got.gradients
    else:  # FSDP1's flat parameter has one gradient, with zeros for what was not used
        assert not got.gradients["spare.weight"].any()


def test_ddp_says_which_option_an_unused_parameter_needs() -> None:
    config = replace(config_of("Unused", "ddp"), strategy=DDPStrategy())
    with pytest.raises(RankFailed, match="find_unused_parameters=True"):
        run_distributed(train_each, 2, {"": config}, 2)


@pytest.mark.parametrize("strategy", WRAPPED)
def test_buffers_are_rank_0s(strategy: str) -> None:
    weights = trained()[f"Normed {strategy}"].weights
    assert weights["norm.num_batches_tracked"].item() == 2
    assert weights["norm.running_mean"].any()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp2"])
def test_batch_norm_in_low_precision(strategy: str) -> None:
    """FSDP1 alone would by itself keep it in fp32; here a precision means the same for all."""
    expected, got = low_precision()["ddp"], low_precision()[strategy]
    for name, tensor in expected.weights.items():
        assert torch.equal(got.weights[name], tensor), name


@cache
def low_precision() -> dict[str, Steps]:
    precision = replace(preset("bf16"), buffer_dtype="bf16")
    configs = {name: replace(config_of("Normed", name), precision=precision) for name in ("ddp", "fsdp", "fsdp2")}
    return run_distributed(train_each, 2, configs, 2)[0]
