"""Statistics for TensorBoard: the same numbers from every strategy, at the steps asked for."""

from __future__ import annotations

import pytest
import torch

from distbench.build import build_trainer
from distbench.config import SGD, Config
from distbench.launching.world import World
from distbench.runs.statistics import Statistics
from tests.configs import small
from tests.distributed import run_distributed
from tests.steps import ONE_PROCESS

Written = dict[int, dict[str, float]]


def watch(world: World, config: Config, every: int) -> Written:
    trainer = build_trainer(config, world)[0]
    written: Written = {}
    write = written.__setitem__
    blocks: list[str] = []
    trainer.observers = [Statistics(every, blocks, trainer, (lambda v, s: write(s, v)) if world.rank == 0 else None)]
    trainer.run(until=config.steps)
    return written


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp-flat", "fsdp2"])
def test_whole_tensors_whatever_the_sharding(strategy: str) -> None:
    alone = watch(ONE_PROCESS, small("single", steps=5, optimizer=SGD(lr=0.1)), every=2)
    first, other = run_distributed(watch, 2, small(strategy, steps=5, optimizer=SGD(lr=0.1)), every=2)
    assert list(first) == list(alone) == [1, 2, 4] and other == {}
    for step, values in alone.items():
        assert set(first[step]) == set(values)
        for tag, value in values.items():
            if not tag.startswith("activation"):  # each rank has samples of its own
                assert first[step][tag] == pytest.approx(value, rel=1e-4, abs=1e-9), tag
    assert {"activation_rms/layers.0", "activation_max/layers.1", "gradient_rms/layers.0.attn.weight"} <= set(first[1])


def test_values_are_what_they_say() -> None:
    config = small("single", steps=1)
    trainer = build_trainer(config, ONE_PROCESS)[0]
    values: dict[str, float] = {}
    trainer.observers = [Statistics(1, [], trainer, lambda found, _: values.update(found))]
    weight = trainer.module.get_parameter("layers.0.attn.weight").detach().clone()
    outputs: list[torch.Tensor] = []
    trainer.module.get_submodule("layers.1").register_forward_hook(lambda *args: outputs.append(args[2].detach()))
    trainer.run(until=1)
    assert values["weight_rms/layers.0.attn.weight"] == pytest.approx(weight.square().mean().sqrt().item())
    assert values["weight_max/layers.0.attn.weight"] == weight.abs().max().item()
    assert values["activation_rms/layers.1"] == pytest.approx(outputs[0].square().mean().sqrt().item())
    assert values["activation_max/layers.1"] == outputs[0].abs().max().item()


def test_named_classes_are_watched() -> None:
    config = small("single", steps=1)
    trainer = build_trainer(config, ONE_PROCESS)[0]
    values: dict[str, float] = {}
    trainer.observers = [Statistics(1, ["Linear"], trainer, lambda found, _: values.update(found))]
    trainer.run(until=1)
    assert {tag for tag in values if tag.startswith("activation_rms")} == {
        f"activation_rms/layers.{layer}.{name}" for layer in (0, 1) for name in ("attn", "mlp.0", "mlp.2")
    }
