"""Wrap policies: what they choose, that torch would choose the same, and that the wrappers then wrapped it."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from distbench.build import build_trainer
from distbench.config import BlockWrap, Config, NoWrap, PatternWrap, SizeWrap
from distbench.errors import ConfigError
from distbench.launching.world import World
from distbench.models.simple import SimpleTransformer
from distbench.wrapping import describe_units, unit_names, unit_rows
from tests.configs import custom, small
from tests.distributed import run_distributed
from tests.models_for_tests import Block, Plain, Tied, TiedBlocks

Policy = SizeWrap | BlockWrap | PatternWrap | NoWrap

# --------------------------------------------------------------------------------------------------------------
# By size: torch's own policy, module for module
# --------------------------------------------------------------------------------------------------------------


def nested() -> nn.Module:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)))
    return nn.Sequential(inner, nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.ModuleList([nn.Linear(4, 2)])}))


def attention() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False)


MODELS = {
    "stack": lambda: SimpleTransformer(3, 8),
    "stack with vocabulary": lambda: SimpleTransformer(2, 8, 32),
    "nested": nested,
    "attention": attention,
}
THRESHOLDS = [1, 8, 20, 36, 64, 72, 100, 200, 288, 500, 640, 1000, 10_000]


def wrapped_by_torch(world: World, thresholds: list[int]) -> dict[tuple[str, int], list[str]]:
    """Names of the modules that FSDP itself wraps with `size_based_auto_wrap_policy`."""
    found = {}
    for model, build in MODELS.items():
        for threshold in thresholds:
            policy = partial(size_based_auto_wrap_policy, min_num_params=threshold)
            module = FullyShardedDataParallel(build(), auto_wrap_policy=policy, device_id=torch.device("cpu"))
            found[model, threshold] = sorted(
                name.replace("_fsdp_wrapped_module.", "")
                for name, unit in module.named_modules()
                if isinstance(unit, FullyShardedDataParallel) and name
            )
    return found


@cache
def torchs_choice() -> dict[tuple[str, int], list[str]]:
    return run_distributed(wrapped_by_torch, 2, THRESHOLDS)[0]


@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("model", MODELS)
def test_size_chooses_what_torchs_policy_chooses(model: str, threshold: int) -> None:
    names = unit_names(SizeWrap(min_num_params=threshold), MODELS[model](), [])
    assert sorted(names) == torchs_choice()[model, threshold]


def test_the_thresholds_tell_policies_apart() -> None:
    """Were all choices alike, the test above would hold little."""
    for model in MODELS:
        assert len({tuple(torchs_choice()[model, threshold]) for threshold in THRESHOLDS}) >= 4


def test_a_small_model_is_one_unit() -> None:
    assert unit_names(SizeWrap(), SimpleTransformer(2, 8), []) == []


# --------------------------------------------------------------------------------------------------------------
# By class, by name, not at all
# --------------------------------------------------------------------------------------------------------------


def test_block_wraps_the_models_own_blocks() -> None:
    model = SimpleTransformer(3, 4)
    assert unit_names(BlockWrap(), model, list(model.block_classes)) == ["layers.0", "layers.1", "layers.2"]


def test_block_wraps_the_named_classes() -> None:
    assert unit_names(BlockWrap(classes=["Block", "GELU"]), Plain(), ["Plain"]) == ["blocks.0", "blocks.1"]


def test_pattern_matches_whole_names() -> None:
    model = SimpleTransformer(2, 4)
    assert unit_names(PatternWrap(patterns=[r"layers\.\d"]), model, []) == ["layers.0", "layers.1"]
    assert unit_names(PatternWrap(patterns=[r"layers\.1\.mlp\.0", r".*\.norm"]), model, []) == [
        "layers.1.mlp.0",
        "layers.0.norm",
        "layers.1.norm",
    ]


def test_inner_modules_come_before_the_outer() -> None:
    names = unit_names(PatternWrap(patterns=[r"layers\.0", r"layers\.0\.mlp", r"layers\.0\.mlp\.0"]), Stack(), [])
    assert names == ["layers.0.mlp.0", "layers.0.mlp", "layers.0"]


class Stack(SimpleTransformer):
    def __init__(self) -> None:
        super().__init__(1, 4)


def test_containers_are_never_units() -> None:
    """They have no forward that could gather them."""
    assert unit_names(PatternWrap(patterns=["layers", r"layers\.0"]), Stack(), []) == ["layers.0"]
    assert unit_names(SizeWrap(min_num_params=300), SimpleTransformer(2, 4), []) == []


def test_none_makes_one_unit() -> None:
    assert unit_names(NoWrap(), Plain(), ["Block"]) == []


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (BlockWrap(), r"does not know this model's block classes; set wrap_policy.classes=\[MyBlock\]"),
        (BlockWrap(classes=["Blok"]), r"classes=\['Blok'\] matches no module of this model; it has Block, Linear"),
        (PatternWrap(patterns=["blok"]), r"\['blok'\] matches no module name; names look like blocks, blocks\.0"),
        (PatternWrap(patterns=["block"]), "matches no module name"),
    ],
)
def test_a_policy_that_matches_nothing_is_refused(policy: Policy, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        unit_names(policy, Plain(), [])


@pytest.mark.parametrize(
    "policy", [BlockWrap(), SizeWrap(min_num_params=1), PatternWrap(patterns=[r"blocks\.\d", "head"])]
)
def test_tied_parameters_are_never_split(policy: Policy) -> None:
    """A module that shares a parameter with the outside stays in the unit that holds both."""
    assert not {"blocks.0", "blocks.1", "blocks.0.linear", "blocks.1.linear"} & set(
        unit_names(policy, TiedBlocks(), ["Block"])
    )
    assert not {"head", "stem"} & set(unit_names(policy, Tied(), ["Block"]))


def test_parameters_tied_within_a_unit_do_not_prevent_it() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Block(), Block()
            self.second.linear.weight = self.first.linear.weight

    model = nn.Sequential(Pair(), Pair())
    assert unit_names(BlockWrap(classes=["Pair", "Block"]), model, []) == ["0", "1"]


# --------------------------------------------------------------------------------------------------------------
# The record's list
# --------------------------------------------------------------------------------------------------------------


def test_units_hold_every_parameter_once() -> None:
    model = SimpleTransformer(2, 4, 16)
    rows = unit_rows(describe_units(model, ["layers.0.mlp", "layers.0", "layers.1"]))
    assert [row["name"] for row in rows] == ["(root)", "layers.0.mlp", "layers.0", "layers.1"]
    assert [row["class"] for row in rows] == [
        "SimpleTransformer",
        "Sequential",
        "SimpleTransformerLayer",
        "SimpleTransformerLayer",
    ]
    listed = [name for row in rows for name in row["parameters"]]
    assert sorted(listed) == sorted(name for name, _ in model.named_parameters())
    assert sum(row["num_parameters"] for row in rows) == sum(p.numel() for p in model.parameters())
    assert all(row["num_bytes"] == 4 * row["num_parameters"] for row in rows)
    assert rows[1]["parameters"] == [f"layers.0.mlp.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")]


POLICIES: dict[str, Policy] = {
    "block": BlockWrap(),
    "none": NoWrap(),
    "size": SizeWrap(min_num_params=150),
    "pattern": PatternWrap(patterns=[r"layers\.0\.mlp", r"layers\.\d"]),
}


Wrapped = tuple[list[dict[str, Any]], dict[str, list[str]]]
"""The record's rows, and what the wrapper's own modules hold: unit name -> parameter names."""


def really_wrapped(world: World, configs: dict[str, Config]) -> dict[str, Wrapped]:
    found = {}
    for name, config in configs.items():
        trainer, facts = build_trainer(config, world)
        kind = FullyShardedDataParallel if config.strategy.name == "fsdp" else FSDPModule
        canonical = trainer.strategy.canonical_name
        units = {
            canonical(f"{path}.").removesuffix("."): (path, unit)
            for path, unit in trainer.module.named_modules()
            if isinstance(unit, kind)
        }
        held: dict[str, list[str]] = {unit: [] for unit in units}
        for path, _ in trainer.module.named_parameters():
            holders = [unit for unit, (prefix, _) in units.items() if not prefix or path.startswith(f"{prefix}.")]
            held[max(holders, key=len)].append(canonical(path))
        found[name] = (facts["units"], held)
    return found


@cache
def wrapped() -> dict[str, Wrapped]:
    configs = {
        f"{strategy} {name}": small(strategy, hidden=4, wrap=policy)
        for strategy in ("fsdp", "fsdp2")
        for name, policy in POLICIES.items()
    }
    configs |= {f"{strategy} tied": custom("TiedBlocks", strategy) for strategy in ("fsdp", "fsdp2")}
    return run_distributed(really_wrapped, 2, configs)[0]


@pytest.mark.parametrize("policy", [*POLICIES, "tied"])
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_the_record_lists_what_was_really_wrapped(strategy: str, policy: str) -> None:
    rows, held = wrapped()[f"{strategy} {policy}"]
    assert {row["name"].replace("(root)", ""): sorted(row["parameters"]) for row in rows} == {
        unit: sorted(parameters) for unit, parameters in held.items()
    }
    expected = {"block": 3, "none": 1, "size": 3, "pattern": 4, "tied": 1}[policy]
    assert len(rows) == expected


def test_both_sharded_strategies_make_the_same_units() -> None:
    for policy in POLICIES:
        assert wrapped()[f"fsdp {policy}"][0] == wrapped()[f"fsdp2 {policy}"][0]
