"""The gate: no clean run is flagged, every check fails on the fault it is there for, and gating changes no run."""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from distbench.config import (
    SGD,
    AdamW,
    Config,
    CustomModel,
    DDPStrategy,
    Gate,
    Loss,
    LossKind,
    LossScaler,
    NoWrap,
    Precision,
    Schedule,
    SyntheticData,
)
from distbench.preflight import preset
from tests.configs import small
from tests.distributed import run_distributed
from tests.gates import Gated, gated_each, in_world, make_baseline

STRATEGIES = ["ddp", "fsdp", "fsdp2"]
GATE = Gate(steps=3, fp64_reference=False)
NUM_STEPS = 5
"""Two more than the gate's, to see that it left the run where it was."""

ADAMW = AdamW(lr=1e-2, schedule=Schedule.cosine, warmup_steps=2, decay_1d=False)
NESTEROV = SGD(lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1, schedule=Schedule.linear)


def precision(name: str, **changes: Any) -> Precision:
    return replace(preset(name), **changes)


SKIPPING = precision("fp16", scaler=LossScaler(enabled=True, init_scale=2.0**17, growth_interval=2))
"""The first steps overflow and are skipped; later on the scale grows again."""

PRECISIONS = {
    "fp32": preset("fp32"),
    "bf16": preset("bf16"),
    "fp16": SKIPPING,
}
MORE_PRECISIONS = {
    "bf16 throughout": precision("bf16", param_dtype="bf16"),
    "bf16 parameters, reduced in fp32": precision("bf16", param_dtype="bf16", reduce_dtype="fp32"),
    "bf16, reduced in fp32": precision("bf16", reduce_dtype="fp32"),
    "fp32, reduced in bf16": precision("fp32", reduce_dtype="bf16"),
    "fp16, odd scale": precision("fp16", scaler=LossScaler(enabled=True, init_scale=1000.0)),
    "bf16 autocast": preset("bf16_autocast"),
    "fp64": preset("fp64"),
}
ACCUMULATIONS = {"1": (1, False), "3": (3, False), "3 synced": (3, True)}


def base(strategy: str, ranks: int, **changes: Any) -> Config:
    """A model of one layer whose sizes divide by nothing."""
    config = small(strategy, hidden=5, layers=1, global_batch=6 * ranks, steps=NUM_STEPS, gate=GATE, **changes)
    return in_world(config, ranks)


def modelled(strategy: str, ranks: int, target: str, **kwargs: Any) -> Config:
    """A model of the catalogue's: attention, embedding, tied head, batch normalisation, dropout, frozen, unused."""
    language = target.endswith("LanguageModel")
    features = 6 if "odd_models" in target else 5
    shape = [8] if language else [features]
    vocabulary = 19 if language else None
    model = CustomModel(
        _target_=target,
        kwargs=kwargs,
        block_classes=["Block", "NormedBlock", "Linear"],
        input_shape=shape,
        target_shape=shape,
        vocab_size=vocabulary,
    )
    data = SyntheticData(input_shape=shape, target_shape=shape, vocab_size=vocabulary, padding=0.6 if language else 0.0)
    loss = Loss(LossKind.cross_entropy if language else LossKind.mse)
    return base(strategy, ranks, model=model, data=data, loss=loss, optimizer=ADAMW, clip_norm=0.5)


def matrix(ranks: int) -> dict[str, Config]:
    """Legal configurations. What is not crossed is spread over the rest."""
    cases: dict[str, Config] = {}
    optimizers = itertools.cycle([(ADAMW, 0.05), (NESTEROV, None), (ADAMW, None), (NESTEROV, 0.5)])
    for strategy, (name, chosen), (micro, (k, synced)) in itertools.product(
        STRATEGIES, PRECISIONS.items(), ACCUMULATIONS.items()
    ):
        optimizer, clip = next(optimizers)
        cases[f"{strategy} {name} {micro}"] = base(
            strategy,
            ranks,
            precision=chosen,
            accumulation=k,
            accumulation_sync=synced,
            optimizer=optimizer,
            clip_norm=clip,
        )
    for strategy, (name, chosen) in zip(itertools.cycle(STRATEGIES), MORE_PRECISIONS.items(), strict=False):
        cases[f"{strategy} {name}"] = base(strategy, ranks, precision=chosen, accumulation=3, optimizer=NESTEROV)
    cases["fsdp2 fp32, reduced in bf16"] = base(
        "fsdp2", ranks, precision=MORE_PRECISIONS["fp32, reduced in bf16"], accumulation=3, optimizer=ADAMW
    )
    for strategy, (micro, (k, synced)) in itertools.product(["fsdp-flat", "fsdp-no-shard"], ACCUMULATIONS.items()):
        chosen = preset("bf16" if synced else "fp32")
        decayed_alike = replace(ADAMW, decay_1d=True)
        cases[f"{strategy} {micro}"] = base(
            strategy, ranks, precision=chosen, accumulation=k, accumulation_sync=synced, optimizer=decayed_alike
        )
    return cases | models(ranks)


def models(ranks: int) -> dict[str, Config]:
    """The same for models that wrappers find hard."""
    cases: dict[str, Config] = {}
    catalogue, here = "distbench.faults.models", "tests.models_for_tests"
    unused = DDPStrategy(find_unused_parameters=True)
    for strategy in STRATEGIES:
        plain: dict[str, Config] = {
            "language": modelled(strategy, ranks, f"{catalogue}.LanguageModel", width=6, num_layers=1, dropout=0.2),
            "normed": modelled(strategy, ranks, f"{catalogue}.Normed", width=5),
            "mixed": modelled(strategy, ranks, f"{catalogue}.Mixed", width=5, unused=strategy == "ddp", dropout=0.1),
            "tied": modelled(strategy, ranks, f"{here}.Tied", features=5),
            "frozen units": modelled(strategy, ranks, "tests.numerics.odd_models.FrozenBlocks"),
            "tiny": base(strategy, ranks, optimizer=ADAMW),
        }
        if strategy == "ddp":
            plain["mixed"] = replace(plain["mixed"], strategy=unused)
            plain["normed, own buffers"] = replace(plain["normed"], strategy=DDPStrategy(broadcast_buffers=False))
            plain["odd"] = modelled(strategy, ranks, "tests.numerics.odd_models.Odd")
            plain["sometimes"] = replace(
                modelled(strategy, ranks, "tests.numerics.odd_models.Sometimes"), strategy=unused, accumulation=3
            )
        small_shards = base(strategy, ranks, wrap=NoWrap(), optimizer=ADAMW)
        small_shards.model.hidden_dim, small_shards.data.input_shape = 2, [3, 2]
        small_shards.data.target_shape = small_shards.model.input_shape = small_shards.model.target_shape = [3, 2]
        plain["tiny"] = small_shards  # fewer rows than ranks: some hold nothing
        for index, (name, config) in enumerate(plain.items()):
            if name in ("language", "mixed", "normed"):
                config = replace(config, accumulation=(1, 3)[index % 2])
            if strategy == "fsdp2" and name in ("language", "tied"):
                config = replace(config, precision=preset("bf16"))
            cases[f"{strategy} {name}"] = config
    return cases


@cache
def root() -> Path:
    return Path(tempfile.mkdtemp(prefix="distbench-baselines-"))


@cache
def runs(ranks: int) -> dict[str, tuple[Gated, Gated]]:
    """Every case of the matrix, gated and ungated, as rank 0 saw it."""
    cases = matrix(ranks)
    gated = {name: (config, make_baseline(config, root())) for name, config in cases.items()}
    found = run_distributed(gated_each, ranks, {**gated}, timeout_s=600)[0]
    ungated = run_distributed(gated_each, ranks, {name: (config, None) for name, config in cases.items()}, timeout_s=600)
    return {name: (found[name], ungated[0][name]) for name in cases}
