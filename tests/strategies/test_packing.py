"""Where weights lie in their buffers: the baseline's replay packs them as FSDP1's flat parameter does."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from distbench.build import build_trainer
from distbench.config import Config, CustomModel, FSDPStrategy, NoWrap, SimpleModel, SyntheticData
from distbench.launching.world import World
from distbench.numerics.baseline import Replay
from distbench.preflight import preset
from distbench.strategies.fsdp import FSDP
from tests.configs import small
from tests.distributed import run_distributed

Layout = dict[str, tuple[int, tuple[int, ...], torch.dtype]]
"""Name -> (elements into its buffer, strides, dtype) of what forward computes with."""


def watch(model: nn.Module, layout: Layout) -> None:
    """Fill `layout` in the next forward."""

    def note(name: str, module: nn.Module, args: object) -> None:
        # FSDP1 with use_orig_params=false registers none: its views are plain attributes.
        for key in {*module._parameters, *(key for key, value in vars(module).items() if isinstance(value, Tensor))}:
            used = getattr(module, key)
            if key == "_flat_param":
                continue
            layout[f"{name}.{key}" if name else key] = (used.storage_offset(), used.stride(), used.dtype)

    for name, module in model.named_modules():
        if "FullyShardedDataParallel" not in type(module).__name__:
            module.register_forward_pre_hook(partial(note, name))


def of_torch(world: World, configs: dict[str, Config]) -> dict[str, Layout]:
    found: dict[str, Layout] = {}
    for name, config in configs.items():
        trainer, _ = build_trainer(config, world)
        layout: Layout = {}
        watch(trainer.module, layout)
        trainer.forward(trainer.batches.micro_batches(0)[0])
        found[name] = {trainer.strategy.canonical_name(key): value for key, value in layout.items()}
    return found


def of_the_replay(config: Config) -> Layout:
    replay = Replay(config, FSDP.reduction(config), torch.device("cpu"))
    layout: Layout = {}
    watch(replay.models[0], layout)
    batch = replay.batches[0].micro_batches(0)[0]
    replay.policy.forward(replay.modules[0], batch.inputs)
    return layout


def cases() -> dict[str, Config]:
    made = {}
    for flat in (False, True):
        strategy = FSDPStrategy(use_orig_params=not flat)
        for precision in ("fp32", "bf16", "bf16_autocast"):
            simple = replace(small("fsdp", precision=precision), strategy=strategy)
            made[f"simple {flat} {precision}"] = simple
            made[f"one unit {flat} {precision}"] = replace(simple, wrap_policy=NoWrap())
            model = CustomModel(
                _target_="tests.numerics.odd_models.FrozenBlocks",
                block_classes=["Linear"],
                input_shape=[6],
                target_shape=[6],
            )
            data = SyntheticData(input_shape=[6], target_shape=[6])
            made[f"frozen {flat} {precision}"] = replace(simple, model=model, data=data)
            tied = replace(model, _target_="tests.models_for_tests.Tied", block_classes=["Linear"])
            made[f"tied {flat} {precision}"] = replace(simple, model=tied, data=data)
    return made


CASES = cases()


@pytest.fixture(scope="module")
def wrapped() -> dict[str, Layout]:
    return run_distributed(of_torch, 2, CASES)[0]


@pytest.mark.parametrize("name", CASES)
def test_the_replay_packs_weights_as_torch_does(name: str, wrapped: dict[str, Layout]) -> None:
    expected = wrapped[name]
    assert any(offset for offset, _, _ in expected.values())
    assert of_the_replay(CASES[name]) == expected


@pytest.mark.parametrize(
    ("hidden", "vocabulary", "shared"), [(64, None, True), (48, 32, True), (20, None, False), (64, 19, False)]
)
def test_sizes_that_fill_cache_lines_share_the_baseline_of_ddp(
    hidden: int, vocabulary: int | None, shared: bool
) -> None:
    config = small("fsdp", hidden=hidden)
    assert isinstance(config.model, SimpleModel)
    config.model.vocab_size = vocabulary
    assert (FSDP.reduction(config).packed is None) is shared


def test_padding_is_counted_in_what_forward_computes_in() -> None:
    packed = {name: FSDP.reduction(replace(small("fsdp"), precision=preset(name))).packed for name in ("fp32", "bf16")}
    assert packed == {"fp32": 4, "bf16": 8}
    flat = replace(small("fsdp"), strategy=FSDPStrategy(use_orig_params=False))
    assert FSDP.reduction(flat).packed == 1
