"""Legal configurations drawn from a seed: every one must pass the gate."""

from __future__ import annotations

import random
from itertools import product

STRATEGIES = ("single", "ddp", "fsdp", "fsdp2")


def draw(seed: int, index: int) -> list[str]:
    """Overrides of the `index`-th configuration of a seed. Each index draws for itself, so one can be run alone."""
    rng = random.Random(f"{seed}/{index}")
    strategy = STRATEGIES[1 + index % 3] if index % 10 else "single"
    ranks = 1 if strategy == "single" else rng.choices((1, 2, 3, 4), (1, 4, 3, 3))[0]
    accumulation = rng.choice((1, 1, 2, 3, 4))
    micro = rng.choice((1, 2, 3))
    overrides = [
        f"strategy={strategy}",
        f"launch.nproc={ranks}",
        f"accumulation={accumulation}",
        f"global_batch={micro * accumulation * ranks}",
        f"accumulation_sync={_bool(accumulation > 1 and rng.random() < 0.3)}",
        f"clip_norm={rng.choice(('1.0', '0.01', 'null'))}",
        f"seed.model={rng.randrange(1000)}",
        f"seed.data={rng.randrange(1000)}",
    ]
    overrides += _precision(rng)
    model, batched_norm, uniform = _model(rng)
    overrides += model
    if batched_norm:
        overrides[3] = f"global_batch={max(2, micro) * accumulation * ranks}"  # one sample has no variance
        overrides += _buffers_as_cast(overrides)
    overrides += _optimizer(rng)
    overrides += _strategy(rng, strategy, ranks, uniform, overrides)
    return overrides


def _bool(value: bool) -> str:
    return str(value).lower()


def _precision(rng: random.Random) -> list[str]:
    name = rng.choices(("fp32", "bf16", "fp16", "fp64", "bf16_autocast", "fp16_autocast"), (40, 30, 10, 7, 8, 5))[0]
    overrides = [f"precision={name}"]
    if name in ("bf16", "fp16") and rng.random() < 0.3:
        overrides.append("precision.reduce_dtype=fp32")
    if name == "bf16" and rng.random() < 0.15:
        overrides.append("precision.param_dtype=bf16")
    if name.startswith("fp16"):
        overrides.append(f"precision.scaler.init_scale={rng.choice((1.0, 1000.0, 1024.0, 65536.0, 16777216.0))}")
        overrides.append(f"precision.scaler.growth_interval={rng.choice((1, 2, 2000))}")
        overrides.append("steps=12")
    return overrides


def _buffers_as_cast(overrides: list[str]) -> list[str]:
    """torch's batch normalisation wants its statistics in the dtype of its weights."""
    return [f"precision.buffer_dtype={name}" for name in ("bf16", "fp16") if f"precision={name}" in overrides]


def _model(rng: random.Random) -> tuple[list[str], bool, bool]:
    """Overrides of model, data and loss; whether it normalises over the batch; whether all its parameters train."""
    kind = rng.choices(("simple", "simple_text", "text", "language", "normed", "mixed"), (30, 12, 6, 22, 12, 18))[0]
    width = rng.choice((13, 16, 17, 29, 37, 64, 67))
    if kind == "simple":
        loss = rng.choice(("mse", "mse", "mse", "sum"))
        layers = rng.choice((1, 2, 3))
        return (
            [f"model.num_layers={layers}", f"model.hidden_dim={width}", "model.seq_len=5", f"loss={loss}"],
            False,
            True,
        )
    if kind in ("simple_text", "text"):
        overrides = [
            "model=simple_text",
            "loss=cross_entropy",
            f"model.num_layers={rng.choice((1, 2))}",
            f"model.hidden_dim={width}",
            "model.seq_len=7",
        ]
        if kind == "text":
            overrides += ["data=text", "data.max_bytes=65536"]
        else:
            overrides += [f"model.vocab_size={rng.choice((11, 31))}", f"data.padding={rng.choice((0.0, 0.5, 0.9))}"]
        return overrides, False, True
    shape = [8] if kind == "language" else [width]
    target = {"language": "LanguageModel", "normed": "Normed", "mixed": "Mixed"}[kind]
    block = {"language": "Block", "normed": "NormedBlock", "mixed": "Linear"}[kind]
    overrides = [
        "model=custom",
        f"model._target_=distbench.faults.models.{target}",
        f"model.block_classes=[{block}]",
        f"model.input_shape={shape}",
        f"model.target_shape={shape}",
    ]
    dropout = rng.choice((0.0, 0.2))
    if kind == "language":
        heads = rng.choice((1, 2))
        even = 2 * (width // 2)
        tied = _bool(rng.random() < 0.6)
        kwargs = f"{{width: {even}, num_heads: {heads}, dropout: {dropout}, tied: {tied}}}"
        overrides += ["model.vocab_size=19", "loss=cross_entropy", f"data.padding={rng.choice((0.0, 0.6))}"]
        return [*overrides, f"+model.kwargs={kwargs}"], False, True
    if kind == "normed":
        return [*overrides, f"+model.kwargs={{width: {width}}}"], True, True
    frozen, unused = rng.random() < 0.6, rng.random() < 0.5
    kwargs = f"{{width: {width}, frozen: {_bool(frozen)}, unused: {_bool(unused)}, dropout: {dropout}}}"
    return [*overrides, f"+model.kwargs={kwargs}"], False, not frozen


def _optimizer(rng: random.Random) -> list[str]:
    name = rng.choice(("adamw", "sgd"))
    overrides = [
        f"optimizer={name}",
        f"optimizer.schedule={rng.choice(('constant', 'linear', 'cosine'))}",
        f"optimizer.warmup_steps={rng.choice((0, 2))}",
        f"optimizer.decay_1d={_bool(rng.random() < 0.6)}",
    ]
    if name == "sgd" and rng.random() < 0.6:
        overrides += ["optimizer.momentum=0.9", f"optimizer.nesterov={_bool(rng.random() < 0.5)}"]
    return overrides


def _strategy(rng: random.Random, strategy: str, ranks: int, uniform: bool, others: list[str]) -> list[str]:
    if strategy == "single":
        return []
    if strategy == "ddp":
        unused = any("unused: true" in o for o in others)
        return [
            f"strategy.bucket_cap_mb={rng.choice((0.001, 0.01, 25.0))}",
            f"strategy.gradient_as_bucket_view={_bool(rng.random() < 0.5)}",
            f"strategy.broadcast_buffers={_bool(rng.random() < 0.7)}",
            f"strategy.find_unused_parameters={_bool(unused or rng.random() < 0.2)}",
        ]
    overrides = _wrap(rng, others)
    overrides.append(f"prefetch={rng.choice(('backward_pre', 'backward_post', 'none'))}")
    overrides.append(f"prefetch.forward={_bool(rng.random() < 0.4)}")
    if strategy == "fsdp2":
        modes = ["true", "false", *(["2"] if ranks == 4 else [])]
        return [*overrides, f"strategy.reshard_after_forward={rng.choice(modes)}"]
    decays_alike = "optimizer.decay_1d=true" in others
    flat = uniform and decays_alike and rng.random() < 0.3
    return [
        *overrides,
        f"strategy.sharding_strategy={rng.choice(('FULL_SHARD', 'FULL_SHARD', 'SHARD_GRAD_OP', 'NO_SHARD'))}",
        f"strategy.use_orig_params={_bool(not flat)}",
        f"strategy.limit_all_gathers={_bool(rng.random() < 0.7)}",
    ]


def _wrap(rng: random.Random, others: list[str]) -> list[str]:
    policy = rng.choice(("block", "block", "none", "size", "pattern"))
    if policy == "size":
        return ["wrap_policy=size", f"wrap_policy.min_num_params={rng.choice((100, 500, 3000))}"]
    if policy == "pattern":
        blocks = "layers" if not any(o == "model=custom" for o in others) else "blocks"
        return ["wrap_policy=pattern", f"wrap_policy.patterns=['{blocks}.0']"]
    return [f"wrap_policy={policy}"]


def grid(strategies: list[str], precisions: list[str], ranks: list[str]) -> list[list[str]]:
    """The small full matrix that the self-test shows beside its faults: with and without accumulation."""
    return [
        [f"strategy={strategy}", f"precision={precision}", f"launch.nproc={size}", f"accumulation={accumulation}"]
        for strategy, precision, size, accumulation in product(strategies, precisions, ranks, (1, 2))
    ]
