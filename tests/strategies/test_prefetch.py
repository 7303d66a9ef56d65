"""Prefetch options change when parameters are gathered, and no number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from distbench.build import build_trainer
from distbench.config import BackwardPrefetch, Config, Prefetch, ShardingStrategy
from distbench.launching.world import World
from distbench.strategies.fsdp import PREFETCH
from tests.configs import small
from tests.distributed import run_distributed
from tests.steps import Steps, train_each

LAYERS = 4
OPTIONS = {
    f"{backward.name}{', forward' if forward else ''}": Prefetch(backward=backward, forward=forward)
    for backward in BackwardPrefetch
    for forward in (False, True)
}


@cache
def first_steps() -> dict[str, Steps]:
    configs = {
        f"{strategy} {name}": small(strategy, layers=LAYERS, prefetch=prefetch)
        for strategy in ("fsdp", "fsdp2")
        for name, prefetch in OPTIONS.items()
    }
    return run_distributed(train_each, 2, configs)[0]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_prefetching_changes_no_number(strategy: str, option: str) -> None:
    expected, got = first_steps()["fsdp pre"], first_steps()[f"{strategy} {option}"]
    assert got.metrics[0].loss == expected.metrics[0].loss
    for name, gradient in expected.gradients.items():
        assert torch.equal(got.gradients[name], gradient), name


# --------------------------------------------------------------------------------------------------------------
# fully_shard has no such option of its own, so what we made of it is observed
# --------------------------------------------------------------------------------------------------------------


ISSUED = {
    "all_gather_single": "gather",
    "all_gather_into_tensor": "gather",
    "reduce_scatter_single": "reduce",
    "reduce_scatter_tensor": "reduce",
}
"""Functions of torch.distributed that fully_shard calls (before torch 2.13 the longer names)."""


@contextmanager
def collectives(events: list[str]) -> Iterator[None]:
    """Note every all-gather and reduce-scatter when it is issued."""
    originals = {name: getattr(dist, name) for name in ISSUED if hasattr(dist, name)}

    def noted(name: str) -> Callable[..., Any]:
        def issue(*args: Any, **kwargs: Any) -> Any:
            events.append(ISSUED[name])
            return originals[name](*args, **kwargs)

        return issue

    for name in originals:
        setattr(dist, name, noted(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def order_of_events(world: World, config: Config) -> tuple[list[str], list[str]]:
    """What happens in forward and in backward: gathers and reductions, and when layer i computes (`layer i`)."""
    trainer, _ = build_trainer(config, world)
    assert isinstance(trainer.module, FSDPModule)
    forward: list[str] = []
    backward: list[str] = []

    def watch(index: int, layer: nn.Module) -> None:
        layer.attn.register_forward_pre_hook(lambda module, args: forward.append(f"layer {index}"))

        def on_output(module: nn.Module, args: Any, output: Tensor) -> None:
            output.register_hook(lambda gradient: backward.append(f"layer {index}"))

        # The gradient of the second linear's output: in the midst of the layer's backward.
        layer.mlp[0].register_forward_hook(on_output)

    for index, layer in enumerate(trainer.module.layers):
        watch(index, layer)
    batch = trainer.batches.micro_batches(0)[0]
    with collectives(forward):
        loss = trainer.forward(batch)
    with collectives(backward), trainer.strategy.backward_sync(trainer.module, True):
        loss.backward()
    return forward, backward


def events(prefetch: Prefetch) -> tuple[list[str], list[str]]:
    config = small("fsdp2", layers=LAYERS, prefetch=prefetch)
    (first, second) = run_distributed(order_of_events, 2, config)
    assert first == second, "ranks issue collectives in different orders"
    return first


# The root holds no parameters of its own in this model, so every gather and reduction is a layer's; backward starts
# with the gather of the last layer.


def test_backward_pre_gathers_the_next_layer_before_this_one_computes() -> None:
    _, backward = events(Prefetch(BackwardPrefetch.pre))
    assert backward == [
        "gather", "gather", "layer 3", "reduce",
        "gather", "layer 2", "reduce",
        "gather", "layer 1", "reduce",
        "layer 0", "reduce",
    ]  # fmt: skip


def test_backward_post_gathers_the_next_layer_between_computing_and_reducing_this_one() -> None:
    _, backward = events(Prefetch(BackwardPrefetch.post))
    assert backward == [
        "gather", "layer 3", "gather", "reduce",
        "layer 2", "gather", "reduce",
        "layer 1", "gather", "reduce",
        "layer 0", "reduce",
    ]  # fmt: skip


def test_no_backward_prefetch_gathers_a_layer_when_it_is_reached() -> None:
    _, backward = events(Prefetch(BackwardPrefetch.none))
    assert backward == [
        "gather", "layer 3", "reduce",
        "gather", "layer 2", "reduce",
        "gather", "layer 1", "reduce",
        "gather", "layer 0", "reduce",
    ]  # fmt: skip


def test_forward_prefetch_gathers_the_next_layer_before_this_one_computes() -> None:
    without, _ = events(Prefetch(forward=False))
    assert without == ["gather", "layer 0", "gather", "layer 1", "gather", "layer 2", "gather", "layer 3"]
    ahead, _ = events(Prefetch(forward=True))
    assert ahead == ["gather", "gather", "layer 0", "gather", "layer 1", "gather", "layer 2", "layer 3"]


# --------------------------------------------------------------------------------------------------------------
# FSDP1 takes the options itself
# --------------------------------------------------------------------------------------------------------------


def options_of(world: World, configs: dict[str, Config]) -> dict[str, list[Any]]:
    found = {}
    for name, config in configs.items():
        module = build_trainer(config, world)[0].module
        found[name] = [module.backward_prefetch, module.limit_all_gathers, module.sharding_strategy.name]
    return found


def test_fsdp_is_given_the_options() -> None:
    configs = {backward.name: small("fsdp", prefetch=Prefetch(backward=backward)) for backward in BackwardPrefetch} | {
        "fsdp-grad-op": small("fsdp-grad-op")
    }
    found = run_distributed(options_of, 2, configs)[0]
    for backward in BackwardPrefetch:
        assert found[backward.name] == [PREFETCH[backward], True, ShardingStrategy.FULL_SHARD.name]
    assert found["fsdp-grad-op"][2] == ShardingStrategy.SHARD_GRAD_OP.name
    assert len({str(value) for value in PREFETCH.values()}) == 3
