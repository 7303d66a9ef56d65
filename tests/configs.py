"""Small configs for tests, made of the dataclasses themselves; `overrides` composes them as the command line does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from distbench.config import (
    SGD,
    BlockWrap,
    Config,
    CustomModel,
    DDPStrategy,
    FSDP2Strategy,
    FSDPStrategy,
    LocalLaunch,
    Loss,
    LossKind,
    NoWrap,
    Precision,
    Prefetch,
    Seeds,
    ShardingStrategy,
    SimpleModel,
    SingleStrategy,
    SyntheticData,
)
from distbench.preflight import preset

STRATEGIES: dict[str, Any] = {
    "single": SingleStrategy(),
    "ddp": DDPStrategy(),
    "fsdp": FSDPStrategy(),
    "fsdp-flat": FSDPStrategy(use_orig_params=False),
    "fsdp-grad-op": FSDPStrategy(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
    "fsdp-no-shard": FSDPStrategy(sharding_strategy=ShardingStrategy.NO_SHARD),
    "fsdp2": FSDP2Strategy(),
    "fsdp2-keep": FSDP2Strategy(reshard_after_forward=False),
}
"""The strategies with the options that change how a model is held, by a short name."""


def small(
    strategy: str = "ddp",
    *,
    hidden: int = 13,
    layers: int = 2,
    precision: str | Precision = "fp32",
    accumulation: int = 1,
    accumulation_sync: bool = False,
    wrap: Any = None,
    prefetch: Prefetch | None = None,
    **changes: Any,
) -> Config:
    """One step's worth of a tiny SimpleTransformer: sequences of 3, 12 samples, SGD, no clipping."""
    shape = [3, hidden]
    config = Config(
        model=SimpleModel(num_layers=layers, hidden_dim=hidden, seq_len=3, input_shape=shape, target_shape=shape),
        strategy=STRATEGIES[strategy],
        precision=precision if isinstance(precision, Precision) else preset(precision),
        wrap_policy=wrap or BlockWrap(),
        prefetch=prefetch or Prefetch(),
        data=SyntheticData(input_shape=shape, target_shape=shape),
        loss=Loss(LossKind.mse),
        optimizer=SGD(lr=0.0),
        launch=LocalLaunch(timeout_s=120.0),
        seed=Seeds(model=1, data=2),
        steps=1,
        global_batch=12,
        accumulation=accumulation,
        accumulation_sync=accumulation_sync,
        clip_norm=None,
    )
    return replace(config, **changes)


def custom(target: str, strategy: str = "ddp", *, features: int = 6, **changes: Any) -> Config:
    """`small`, but the model is `tests.models_for_tests.<target>`, from `features` numbers to as many."""
    model = CustomModel(
        _target_=f"tests.models_for_tests.{target}",
        block_classes=["Block"],
        input_shape=[features],
        target_shape=[features],
    )
    data = SyntheticData(input_shape=[features], target_shape=[features])
    return small(strategy, model=model, data=data, **changes)


__all__ = ["STRATEGIES", "NoWrap", "custom", "small"]
