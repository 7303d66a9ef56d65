"""A precision means the same over all strategies; the scaler's verdict is the world's."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from distbench.build import EffectiveDtypes, build_trainer
from distbench.config import SGD, Config, LossScaler, NoWrap, Precision
from distbench.errors import UserModelError
from distbench.launching.world import World
from distbench.precision import CastParameters, PrecisionPolicy, Scaler
from distbench.preflight import preset
from distbench.trainer import StepMetrics, Trainer
from tests.configs import custom, small
from tests.distributed import run_distributed
from tests.steps import ONE_PROCESS, Steps, replay, train, train_each

CPU = torch.device("cpu")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WRAPPED = ["ddp", "fsdp", "fsdp-flat", "fsdp-no-shard", "fsdp2"]


def precision(name: str, **changes: object) -> Precision:
    return replace(preset(name), **changes)


LOW = {
    "bf16": precision("bf16"),
    "bf16, reduced in fp32": precision("bf16", reduce_dtype="fp32"),
    "fp16": precision("fp16"),
    "fp16, reduced in fp32": precision("fp16", reduce_dtype="fp32"),
    "fp32, reduced in bf16": precision("fp32", reduce_dtype="bf16"),
}
AUTOCAST = ["bf16_autocast", "fp16_autocast"]


# --------------------------------------------------------------------------------------------------------------
# The same gradients
# --------------------------------------------------------------------------------------------------------------


@cache
def two_ranks() -> dict[str, Steps]:
    """First steps of every strategy in every low precision, with one and with three micro-batches."""
    chosen = {**LOW, **{name: precision(name) for name in AUTOCAST}}
    configs = {
        f"{strategy}, {name}, {k}": small(strategy, precision=chosen[name], accumulation=k)
        for strategy in WRAPPED
        for name in chosen
        for k in (1, 3)
    }
    return run_distributed(train_each, 2, configs)[0]


@pytest.mark.parametrize("name", LOW)
@pytest.mark.parametrize("strategy", WRAPPED)
def test_a_cast_precision_is_the_replay_bit_for_bit(strategy: str, name: str) -> None:
    """Fp32 parameters cast to the compute dtype, each rank's gradient cast to the reduction dtype, averaged in it."""
    got = two_ranks()[f"{strategy}, {name}, 1"]
    assert not got.metrics[0].skipped
    scale = got.metrics[0].scale
    assert scale == (65536.0 if name.startswith("fp16") else 1.0)
    # The scale is a power of two, but a scaled gradient is subnormal less often: the replay must scale its loss, too.
    first, second = replay(small("single", precision=LOW[name]), 2, scale).gradients
    dtype = DTYPES[LOW[name].reduce_dtype]
    for key, gradient in got.gradients.items():
        a, b = first[key].to(dtype), second[key].to(dtype)
        mean = a / 2 + b / 2 if dtype is torch.float16 else (a + b) / 2
        assert torch.equal(gradient, mean.float() / scale), key


@pytest.mark.parametrize("name", AUTOCAST)
@pytest.mark.parametrize("strategy", WRAPPED[1:])
def test_autocast_is_the_same_everywhere(strategy: str, name: str) -> None:
    expected, got = two_ranks()[f"ddp, {name}, 1"], two_ranks()[f"{strategy}, {name}, 1"]
    assert got.metrics[0].loss == expected.metrics[0].loss
    for key, gradient in expected.gradients.items():
        assert torch.equal(got.gradients[key], gradient), key


@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("strategy", ["fsdp-flat", "fsdp-no-shard", "fsdp2"])
def test_micro_batches_of_sharded_strategies_add_up_alike(strategy: str, name: str) -> None:
    """FSDP adds unreduced micro-batches up in the compute dtype, fully_shard in the reduction dtype: here the same."""
    expected, got = two_ranks()[f"fsdp, {name}, 3"], two_ranks()[f"{strategy}, {name}, 3"]
    for key, gradient in expected.gradients.items():
        assert torch.equal(got.gradients[key], gradient), key


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_autocast_is_another_precision_than_casting(name: str) -> None:
    """The names stand for two things, and the comparison above can tell them apart."""
    cast, auto = two_ranks()[f"ddp, {name}, 1"].gradients, two_ranks()[f"ddp, {name}_autocast, 1"].gradients
    assert any(not torch.equal(cast[key], auto[key]) for key in cast)


# --------------------------------------------------------------------------------------------------------------
# Effective dtypes
# --------------------------------------------------------------------------------------------------------------

EFFECTIVE = {
    # precision: parameters, compute, gradients, reduction
    "fp64": ("fp64", "fp64", "fp64", "fp64"),
    "fp32": ("fp32", "fp32", "fp32", "fp32"),
    "bf16": ("fp32", "bf16", "fp32", "bf16"),
    "fp16": ("fp32", "fp16", "fp32", "fp16"),
    "bf16_autocast": ("fp32", "bf16", "fp32", "fp32"),
}


def read_dtypes(world: World, configs: dict[str, Config]) -> dict[str, dict[str, str | None]]:
    read = {}
    for name, config in configs.items():
        trainer, _ = build_trainer(config, world)
        read[name] = dtypes_of_first_step(trainer)
    return read


def dtypes_of_first_step(trainer: Trainer) -> dict[str, str | None]:
    dtypes = EffectiveDtypes(trainer)
    trainer.observers = [dtypes]
    trainer.run(until=1)
    return dtypes.seen


@cache
def all_dtypes() -> dict[str, dict[str, str | None]]:
    momentum = SGD(lr=0.1, momentum=0.9)
    return run_distributed(
        read_dtypes,
        2,
        {
            f"{strategy}, {name}": small(strategy, precision=name, optimizer=momentum)
            for strategy in ("ddp", "fsdp", "fsdp-flat", "fsdp2")
            for name in EFFECTIVE
        },
    )[0]


@pytest.mark.parametrize("name", EFFECTIVE)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp-flat", "fsdp2"])
def test_dtypes_are_as_declared(strategy: str, name: str) -> None:
    read = all_dtypes()[f"{strategy}, {name}"]
    parameters, compute, gradients, reduction = EFFECTIVE[name]
    assert read == {
        "parameters": parameters,
        "compute": compute,
        "gradients": gradients,
        "reduce": reduction,
        "optimizer_state": parameters,
        "buffers": None,
    }


def test_dtypes_are_read_back_and_not_copied_from_the_config() -> None:
    trainer, _ = build_trainer(small("single", precision="fp32"), ONE_PROCESS)
    trainer.module.double()
    trainer.policy = PrecisionPolicy(preset("fp64"), CPU)
    dtypes = dtypes_of_first_step(trainer)
    assert (dtypes["parameters"], dtypes["compute"], dtypes["gradients"]) == ("fp64", "fp64", "fp64")
    assert dtypes["reduce"] is None, "one process reduces nothing"


# --------------------------------------------------------------------------------------------------------------
# Loss scaling
# --------------------------------------------------------------------------------------------------------------


def scaling(strategy: str, **scaler: float) -> Config:
    """Only the first output feature has large gradients, so that only rank 0's shard overflows."""
    chosen = precision("fp16", scaler=LossScaler(enabled=True, **scaler))  # type: ignore[arg-type]
    return custom("Lopsided", strategy, precision=chosen, optimizer=SGD(lr=1e-3), wrap=NoWrap(), steps=16)


def watch_overflow(world: World, config: Config, steps: int) -> tuple[list[StepMetrics], list[bool], list[float]]:
    """Metrics, whether this rank's own gradients were finite, and the sum of its weights before each step."""
    trainer, _ = build_trainer(config, world)
    metrics, finite, weights = [], [], []
    for _ in range(steps):
        local = [trainer.strategy.local(parameter.detach()) for parameter in trainer.module.parameters()]
        weights.append(sum(float(tensor.double().sum()) for tensor in local))
        metrics.append(trainer.train_step())
        finite.append(all(bool(g.isfinite().all()) for g in trainer.strategy.gradients(trainer.module)))
    return metrics, finite, weights


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp2"])
def test_an_overflow_on_one_rank_is_every_ranks(strategy: str) -> None:
    """The step is skipped on all ranks, the scale backs off until it fits, and then the model trains."""
    steps, start = 16, 2.0**16
    ranks = run_distributed(watch_overflow, 2, scaling(strategy, init_scale=start), steps)
    verdicts = [[m.skipped for m in metrics] for metrics, _, _ in ranks]
    assert verdicts[0] == verdicts[1]
    skipped = verdicts[0].count(True)
    assert 0 < skipped < steps - 2 and verdicts[0] == [True] * skipped + [False] * (steps - skipped)
    if strategy != "ddp":
        assert any(finite[0] for _, finite, _ in ranks), "both ranks overflowed: nothing had to be agreed"
    for metrics, _, weights in ranks:
        assert [m.scale for m in metrics] == [start / 2**i for i in range(skipped)] + [start / 2**skipped] * (
            steps - skipped
        )
        assert len(set(weights[: skipped + 1])) == 1, "a skipped step changed the weights"
        assert len(set(weights[skipped:])) == steps - skipped
        assert metrics[-1].loss < metrics[skipped].loss


def test_the_schedule_waits_for_a_skipped_step() -> None:
    config = scaling("single", init_scale=2.0**16)
    config.optimizer.warmup_steps = 4
    metrics = train(ONE_PROCESS, config, 16).metrics
    first = next(i for i, m in enumerate(metrics) if not m.skipped)
    assert first > 0
    assert [m.lr for m in metrics[: first + 1]] == [1e-3 / 4] * (first + 1) and metrics[first + 1].lr == 2e-3 / 4


def test_the_scale_grows_after_enough_good_steps() -> None:
    config = small("single", precision=precision("fp16", scaler=LossScaler(True, 8.0, 4.0, 0.5, 2)))
    assert [m.scale for m in train(ONE_PROCESS, config, 5).metrics] == [8.0, 8.0, 32.0, 32.0, 128.0]


def test_an_overflow_starts_the_count_again() -> None:
    scaler = Scaler(LossScaler(enabled=True, init_scale=8.0, growth_interval=2))
    scales = []
    for finite in (True, False, True, True):
        scaler.update(finite)
        scales.append(scaler.scale)
    assert scales == [8.0, 4.0, 4.0, 8.0]


def test_a_disabled_scaler_changes_nothing() -> None:
    scaler = Scaler(LossScaler(enabled=False, init_scale=8.0))
    gradient = torch.ones(3)
    scaler.unscale([gradient])
    scaler.update(finite=False)
    assert scaler.scale == 1.0 and gradient.tolist() == [1.0, 1.0, 1.0]


# --------------------------------------------------------------------------------------------------------------
# The policy's parts
# --------------------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Floating-point and integer parameters and buffers, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2)
        self.second.weight = self.first.weight
        self.index = nn.Parameter(torch.arange(2), requires_grad=False)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("count", torch.tensor(0))
        self.seen: list[tuple[torch.dtype, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((self.first.weight.dtype, self.first.weight is self.second.weight))
        assert self.index.dtype is torch.int64
        return self.second(self.first(x))[:, self.index]


def test_cast_parameters_casts_once_and_gives_gradients_in_the_masters_dtype() -> None:
    model = Mixed()
    output = CastParameters(model, torch.bfloat16)(torch.ones(1, 2, dtype=torch.bfloat16))
    assert output.dtype is torch.bfloat16 and model.seen == [(torch.bfloat16, True)]
    output.sum().backward()
    assert model.first.weight.grad is not None and model.first.weight.grad.dtype is torch.float32
    assert model.first.weight.dtype is torch.float32, "the master was replaced"


@pytest.mark.parametrize("reentrant", [False, True])
def test_forward_runs_again_in_backward_with_the_same_cast_parameters(reentrant: bool) -> None:
    plain, checkpointed = nn.Linear(3, 3), nn.Linear(3, 3)
    checkpointed.load_state_dict(plain.state_dict())
    inputs = torch.randn(2, 3, dtype=torch.bfloat16, requires_grad=True)
    dtypes = []

    def forward(x: Tensor) -> Tensor:
        dtypes.append(checkpointed.weight.dtype)
        return nn.functional.linear(x, checkpointed.weight, checkpointed.bias).tanh()

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = checkpointed

        def forward(self, x: Tensor) -> Tensor:
            assert all(p.dtype is torch.bfloat16 for p in self.parameters())
            return checkpoint(forward, x, use_reentrant=reentrant)

    cast = CastParameters(Twice(), torch.bfloat16)
    output = cast(inputs)
    assert [p.dtype for p in cast.parameters()] == [torch.float32] * 2, "an optimizer would see the cast ones"
    output.sum().backward()
    CastParameters(plain, torch.bfloat16)(inputs).tanh().sum().backward()
    assert dtypes == [torch.bfloat16] * 2
    assert torch.equal(checkpointed.weight.grad, plain.weight.grad)
    assert isinstance(checkpointed.weight, nn.Parameter), "not released after backward"


@pytest.mark.parametrize(
    ("chosen", "parameters", "buffers"),
    [
        (precision("fp32"), torch.float32, torch.float32),
        (precision("bf16"), torch.float32, torch.float32),
        (precision("bf16", buffer_dtype="bf16"), torch.float32, torch.bfloat16),
        (precision("fp64"), torch.float64, torch.float64),
    ],
    ids=["fp32", "bf16", "bf16 buffers", "fp64"],
)
def test_prepare(chosen: Precision, parameters: torch.dtype, buffers: torch.dtype) -> None:
    model = PrecisionPolicy(chosen, CPU).prepare(Mixed())
    assert isinstance(model, Mixed)
    assert model.first.weight.dtype is parameters and model.first.weight is model.second.weight
    assert model.mean.dtype is buffers
    assert model.index.dtype is torch.int64 and model.count.dtype is torch.int64


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("fp32", torch.float32, torch.float32),
        ("bf16", torch.bfloat16, torch.float32),
        ("fp16", torch.float16, torch.float32),
        ("fp64", torch.float64, torch.float64),
        ("bf16_autocast", torch.bfloat16, torch.float32),
    ],
)
def test_forward_casts_inputs_and_gives_wide_outputs(name: str, inside: torch.dtype, outside: torch.dtype) -> None:
    policy = PrecisionPolicy(preset(name), CPU)
    model = policy.prepare(nn.Linear(2, 2))
    seen: list[torch.dtype] = []
    model.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    output = policy.forward(policy.cast(model), torch.ones(1, 2, dtype=policy.data_dtype))
    assert seen == [inside] and output.dtype is outside


def test_token_ids_are_not_cast() -> None:
    policy = PrecisionPolicy(preset("bf16"), CPU)
    model = policy.prepare(nn.Embedding(4, 2))
    assert policy.forward(policy.cast(model), torch.tensor([3])).shape == (1, 2)


def test_a_model_that_returns_no_tensor_is_refused() -> None:
    class Pair(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return x, x

    with pytest.raises(UserModelError, match="returned a tuple; it must return one tensor"):
        PrecisionPolicy(preset("fp32"), CPU).forward(Pair(2, 2), torch.ones(1, 2))


def test_a_buffer_of_two_modules_stays_one() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    shared = torch.zeros(2)
    for module in model:
        module.register_buffer("mean", shared)
    PrecisionPolicy(precision("fp64"), CPU).prepare(model)
    assert model[0].mean is model[1].mean and model[0].mean.dtype is torch.float64


def test_gradients_of_cast_parameters_come_as_backward_goes() -> None:
    """What DDP's overlap lives on; and the cast parameters go with them."""
    layers = [nn.Linear(2, 2) for _ in range(3)]
    order: list[str] = []

    def watch(index: int, layer: nn.Linear) -> None:
        layer.weight.register_post_accumulate_grad_hook(lambda _: order.append(f"gradient {index}"))
        layer.register_forward_hook(lambda module, args, y: y.register_hook(lambda _: seen(index)) and None)

    def seen(index: int) -> None:
        left = [i for i, layer in enumerate(layers) if not isinstance(layer.weight, nn.Parameter)]
        order.append(f"output {index}, cast {left}")

    for index, layer in enumerate(layers):
        watch(index, layer)
    CastParameters(nn.Sequential(*layers), torch.bfloat16)(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    assert order == [
        *("output 2, cast [0, 1, 2]", "gradient 2"),
        *("output 1, cast [0, 1]", "gradient 1"),
        *("output 0, cast [0]", "gradient 0"),
    ]
