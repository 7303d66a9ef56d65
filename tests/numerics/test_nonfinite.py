"""A step that is not finite: found where it was made, on whatever rank, and then stopped, skipped or recorded."""

from __future__ import annotations

import io
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from distbench.build import build_trainer, set_determinism
from distbench.config import SGD, AdamW, BlockWrap, Config, DDPStrategy, Gate, LossKind, LossScaler, NoWrap, OnNonfinite
from distbench.data.batches import SampleSource
from distbench.errors import NonFiniteError
from distbench.faults.base import Fault
from distbench.launching.world import World
from distbench.losses import Loss
from distbench.numerics.cache import BaselineEntry
from distbench.numerics.nonfinite import MAX_EVENTS, Call, Guard
from distbench.preflight import preset
from distbench.runs.folder import RunFolder, read_record
from distbench.trainer import Trainer
from tests.cli import distbench
from tests.configs import STRATEGIES, custom
from tests.distributed import run_distributed
from tests.gates import in_world, make_baseline
from tests.models_for_tests import FEATURES, Block, Hidden, Normed, Plain
from tests.steps import ONE_PROCESS

SHARDED = ["ddp", "fsdp", "fsdp-flat", "fsdp2"]
BAD = -1000.0
"""What a sample is filled with that models here cannot take; others are drawn from a normal distribution."""
STEP, SAMPLE = 2, 20
"""Of 12 samples a step: the second step (1-based) has it, in rank 1's first micro-batch of 3."""


# --- models that cannot take every sample


class Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x + 50)


class Logs(Plain):
    """Not a number in `tail.0`, in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.tail = nn.Sequential(Log(), nn.Linear(FEATURES, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(super().forward(x) * 0 + x)


class Divides(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (x[..., :1] - BAD)


class Divided(Plain):
    """Infinite in `blocks.0` itself: its own linear layer is finite."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = Divides()


class Length(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().sum(-1, keepdim=True).sqrt()


class Lengths(Plain):
    """Finite in forward, infinite in the backward of `length`, where a sample is all zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, FEATURES, bias=False)
        self.length = Length()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return super().forward(x + self.length(x))


class Gain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 1000


class Overflows(Plain):
    """Infinite in `gain`, in fp16."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = Gain()

    def forward(self, x: Tensor) -> Tensor:
        return self.gain(super().forward(x) * 0 + x)


class Scores(nn.Module):
    """-inf above the diagonal, on purpose."""

    def forward(self, x: Tensor) -> Tensor:
        scores = x.unsqueeze(-1) + x.unsqueeze(-2)
        return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)


class Masked(Logs):
    """Infinities that a softmax takes care of, before what is at fault."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.softmax = Scores(), nn.Softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.softmax(self.scores(x.clamp(-2, 2))).mean(-1))


class InPlace(Plain):
    """Not a number in `log_`, which overwrites its input."""

    class Log_(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.add_(50).log_()

    def __init__(self) -> None:
        super().__init__()
        self.log_ = InPlace.Log_()

    def forward(self, x: Tensor) -> Tensor:
        return self.log_(super().forward(x) * 0 + x)


class Biased(nn.Module):
    """A gradient of 6e4 from each micro-batch of 3, of which fp16 holds one, but not two."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.bias) * 1e4


class Checkpointed(Lengths):
    """Runs its blocks, and `length`, again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.log, self.reentrant = Log(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + checkpoint(self.length, x, use_reentrant=self.reentrant)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(checkpoint(self.log, x - 3 * x.detach().abs(), use_reentrant=self.reentrant))


class Squashed(Plain):
    """Finite for infinite inputs, which its gradients are not."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tanh(x * self.gain))


class Shifted(Plain):
    """An infinite loss with finite gradients, from the first step on."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1e20


class AlwaysLog(Plain):
    """Not a number from the first step on."""

    def __init__(self) -> None:
        super().__init__()
        self.tail = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Sequential(Log()))

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(super().forward(x)) + torch.log(-1 - super().forward(x).square())


# --- one run


@dataclass
class Poisoned:
    """A source of samples one of which is filled with a value, or has such a target."""

    source: SampleSource
    value: float | None = BAD
    target: float | None = None
    index: int = SAMPLE

    def sample(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.source.sample(index)
        if index == self.index:
            inputs = inputs if self.value is None else torch.full_like(inputs, self.value)
            targets = targets if self.target is None else torch.full_like(targets, self.target)
        return inputs, targets


class Poison(Fault):
    """The same for the command line."""

    def __init__(self, **kwargs: Any) -> None:
        self.kwargs = kwargs

    def install(self, trainer: Trainer) -> None:
        trainer.batches.source = Poisoned(trainer.batches.source, **self.kwargs)


@dataclass
class Case:
    """What to run: the model, and how a sample or a weight is spoiled."""

    config: Config
    poison: dict[str, Any] | None = field(default_factory=dict)
    spoil: Callable[[Trainer], None] | None = None
    steps: int = 4
    guarded: bool = True
    refused: int | None = None
    """Without a guard: the step that the optimizer must not take."""


@dataclass
class Ran:
    """What became of it, on rank 0."""

    error: str | None
    events: list[dict[str, Any]]
    said: list[str]
    skipped: list[bool]
    losses: list[float]
    weights: dict[str, Tensor]
    files: dict[str, tuple[dict[str, str], dict[str, Tensor]]]

    @property
    def event(self) -> dict[str, Any]:
        (event,) = self.events
        return event

    @property
    def cause(self) -> dict[str, Any]:
        return self.event["cause"]


def run(world: World, case: Case, path: Path) -> Ran:
    """Train without a gate. A collective."""
    config = replace(case.config, steps=case.steps)
    set_determinism(config, 1)
    trainer, _ = build_trainer(config, world)
    if case.poison is not None:
        trainer.batches.source = Poisoned(trainer.batches.source, **case.poison)
    folder, console = RunFolder(path), io.StringIO() if world.rank == 0 else None
    if world.rank == 0:
        path.mkdir(parents=True)
        folder.update_record(status="running")
    guard = Guard(config, folder, console)
    if case.guarded:
        guard.begin(trainer)
    elif case.refused is not None:
        trainer.refuses = lambda trainer, *_: trainer.step + 1 == case.refused
    metrics, error = [], None
    try:
        for step in range(case.steps):
            if case.spoil is not None and step + 1 == STEP:
                case.spoil(trainer)
            metrics.append(trainer.train_step())
    except NonFiniteError as raised:
        error = str(raised)
    errors = world.gather(error)
    assert errors == [error] * world.size, "all ranks raise the same, or none does"
    weights = trainer.strategy.full_state(trainer.module) if error is None else {}
    files = {}
    for file in sorted((path / "nonfinite").glob("*")):
        with safe_open(file, "pt") as opened:
            files[file.name] = opened.metadata(), {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    world.barrier()
    return Ran(
        error,
        read_record(path).get("nonfinite", []) if case.guarded else [],
        console.getvalue().splitlines() if console else [],
        [m.skipped for m in metrics],
        [m.loss for m in metrics],
        {name: value.clone() for name, value in weights.items()},
        files,
    )


def run_each(world: World, cases: Mapping[str, Case], root: Path) -> dict[str, Ran]:
    """Several in one world, so that one start of processes serves many."""
    return {name: run(world, case, root / name) for name, case in cases.items()}


def model(name: str, strategy: str, **changes: Any) -> Config:
    """Two micro-batches a rank and step; the model is this file's."""
    precision = changes.pop("precision", "fp32")
    kwargs = changes.pop("kwargs", {})
    options = {"accumulation": 2, "optimizer": SGD(lr=0.01), "clip_norm": 1.0, **changes}
    config = custom(
        "Plain", strategy, precision=preset(precision) if isinstance(precision, str) else precision, **options
    )
    config.model._target_, config.model.kwargs = f"{__name__}.{name}", kwargs
    return config


def alone(case: Case, path: Path) -> Ran:
    return run(ONE_PROCESS, case, path)


def nan_on_rank_1(trainer: Trainer) -> None:
    """In the last element of a weight, as far as rank 1 holds it."""
    if trainer.world.rank == trainer.world.size - 1:
        slot = [s for s in trainer.strategy.slots(trainer.module) if s.name == "blocks.1.linear.weight" and s.numel][-1]
        slot.cut(trainer.strategy.local(slot.parameter.detach()))[-1] = math.nan


def unscaled(scale: float | None = None) -> Any:
    """fp16 without a loss scaler, or one that starts at a scale."""
    enabled = scale is not None
    return replace(preset("fp16"), scaler=LossScaler(enabled=enabled, init_scale=scale or 1.0, growth_interval=100))


# --- where it was made


def found_in(strategy: str) -> dict[str, tuple[Case, dict[str, Any]]]:
    forward = {"kind": "forward", "micro_batch": 0, "samples": [18, 19, 20]}
    log = {**forward, "module": "tail.0", "module_class": "Log"}
    length = {"kind": "backward", "module": "length", "module_class": "Length", "operation": "SqrtBackward0"}
    odd = {"module": None, "micro_batch": 0, "samples": [SAMPLE]}
    return {
        "log": (Case(model("Logs", strategy)), log),
        "log bf16": (Case(model("Logs", strategy, precision="bf16")), log),
        "log autocast": (Case(model("Logs", strategy, precision="bf16_autocast")), log),
        "log fp16": (Case(model("Logs", strategy, precision="fp16")), log),
        "second micro-batch": (
            Case(model("Logs", strategy), poison={"index": 22}),
            {**log, "micro_batch": 1, "samples": [21, 22, 23]},
        ),
        "synced micro-batches": (Case(model("Logs", strategy, accumulation_sync=True), poison={"index": 23}), {
            **log, "micro_batch": 1, "samples": [21, 22, 23]
        }),
        "one micro-batch": (
            Case(model("Logs", strategy, accumulation=1)),
            {**log, "samples": [18, 19, 20, 21, 22, 23]},
        ),
        "one unit": (Case(model("Logs", strategy, wrap=NoWrap())), log),
        "between modules": (
            Case(model("Divided", strategy, wrap=BlockWrap(classes=["Block", "Divides"]))),
            {**forward, "module": "blocks.0", "module_class": "Divides"},
        ),
        "masked": (Case(model("Masked", strategy)), log),
        "in place": (Case(model("InPlace", strategy)), {**forward, "module": "log_", "module_class": "Log_"}),
        "overflow": (
            Case(model("Overflows", strategy, precision="fp16"), poison={"value": 100.0}),
            {**forward, "module": "gain", "module_class": "Gain"},
        ),
        "backward": (Case(model("Lengths", strategy), poison={"value": 0.0}), {**length, "samples": [18, 19, 20]}),
        "backward bf16": (Case(model("Lengths", strategy, precision="bf16"), poison={"value": 0.0}), length),
        "backward, second micro-batch": (
            Case(model("Lengths", strategy), poison={"value": 0.0, "index": 23}),
            {**length, "micro_batch": 1},
        ),
        **{
            f"checkpointed {'reentrant ' * reentrant}{name}": (
                Case(model("Checkpointed", strategy, kwargs={"reentrant": reentrant}), poison={"value": value}),
                cause,
            )
            for reentrant in (False, True)
            for name, value, cause in (
                ("forward", BAD, {**log, "module": "log"}),
                ("backward", 0.0, {"kind": "backward", "module": "", "operation": "CheckpointFunctionBackward"}
                 if reentrant else length),
            )
        },
        "inputs": (Case(model("Logs", strategy), poison={"value": math.nan}), {**odd, "kind": "inputs"}),
        "inputs in fp16": (Case(model("Logs", strategy, precision="fp16"), poison={"value": 1e5}), {**odd, "kind": "cast"}),
        "targets": (
            Case(model("Logs", strategy), poison={"value": None, "target": math.inf}),
            {**odd, "kind": "targets"},
        ),
        "loss": (
            Case(model("Logs", strategy), poison={"value": None, "target": 1e20}),
            {**odd, "kind": "loss", "samples": [18, 19, 20]},
        ),
        "parameter": (
            Case(model("Logs", strategy), poison=None, spoil=nan_on_rank_1),
            {"kind": "parameter", "parameter": "blocks.1.linear.weight", "module": None},
        ),
    }  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Ran]]:
    done: dict[str, dict[str, Ran]] = {}

    def of(strategy: str) -> dict[str, Ran]:
        if strategy not in done:
            cases = {name: case for name, (case, _) in found_in(strategy).items()}
            done[strategy] = run_distributed(run_each, 2, cases, tmp_path_factory.mktemp(strategy))[0]
        return done[strategy]

    return of


@pytest.mark.parametrize("strategy", SHARDED)
@pytest.mark.parametrize("name", found_in("ddp"))
def test_the_first_module_is_named(name: str, strategy: str, found: Callable[[str], dict[str, Ran]]) -> None:
    """On rank 1, which has the sample; rank 0's numbers are finite."""
    ran, (_, expected) = found(strategy)[name], found_in(strategy)[name]
    event, cause = ran.event, ran.cause
    assert {key: cause[key] for key in expected} == expected, event["text"]
    assert event["step"] == STEP and event["reason"] is None
    backward = cause["kind"] == "backward"
    assert event["what"] == ("gradient norm" if backward else "loss") and event["value"] in ("nan", "inf")
    if name == "parameter":
        # Under ddp rank 0's copy is whole still: its loss is finite, rank 1's is not.
        assert event["ranks"] == [1] and len(event["files"]) == 2
    else:
        assert event["ranks"] == [1]
        assert event["files"] == [f"nonfinite/step_{STEP:08d}_rank_00001.safetensors"]
    assert ran.error is not None and event["text"] in ran.error and len(ran.losses) == STEP - 1
    for word in (
        f"step {STEP}",
        event["what"],
        cause["text"],
        "on rank 1 of 2",
        event["files"][0],
        "on_nonfinite=skip",
    ):
        assert word in ran.error


@pytest.mark.parametrize("name", [name for name in found_in("single") if name != "parameter"])
def test_the_first_module_is_named_in_one_process(name: str, tmp_path: Path) -> None:
    """With the micro-batches of two ranks, the second of which sees it."""
    case, expected = found_in("single")[name]
    accumulation = case.config.accumulation
    ran = alone(replace(case, config=replace(case.config, accumulation=2 * accumulation)), tmp_path / "run")
    expected["micro_batch"] = expected.get("micro_batch", 0) + accumulation
    assert {key: ran.cause[key] for key in expected} == expected
    assert ran.error is not None and "on rank" not in ran.error


def fails_at(call: int) -> type[Plain]:
    """Not a number in its so manieth forward, and never again."""

    class Once(Plain):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Once.calls += 1
            return super().forward(x) * (math.nan if Once.calls == call else 1.0)

    return Once


def once() -> nn.Module:
    return fails_at(3)()


def test_what_does_not_come_again_has_no_cause(tmp_path: Path) -> None:
    """Counted outside of what is put back: two forwards a step, so the second step's first."""
    ran = alone(Case(model("once", "single"), poison=None), tmp_path / "run")
    assert ran.event["cause"] is None and ran.event["ranks"] is None and len(ran.event["files"]) == 1
    assert ran.event["reason"] == "it did not come again when the step was run again"
    assert ran.error is not None and ran.event["reason"] in ran.error


class OnceInBackward(torch.autograd.Function):
    """Infinite in its third backward, and never again."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        OnceInBackward.calls += 1
        return gradient * (math.inf if OnceInBackward.calls == 3 else 1.0)


class InBackward(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return OnceInBackward.apply(super().forward(x))


def test_a_gradient_that_does_not_come_again_has_no_cause(tmp_path: Path) -> None:
    """And is not said to come of a sum."""
    OnceInBackward.calls = 0
    ran = alone(Case(model("InBackward", "single"), poison=None), tmp_path / "run")
    assert (ran.event["what"], ran.event["cause"], ran.event["step"]) == ("gradient norm", None, 2)
    assert ran.event["reason"] == "it did not come again when the step was run again"
    assert ran.event["gradients"] and ran.event["text"].endswith(f"gradient of {ran.event['gradients'][0]}")


@pytest.mark.parametrize("view", [False, True])
def test_the_step_is_recorded_as_it_was_not_as_it_came_again(view: bool, tmp_path: Path) -> None:
    """With gradients that are views of DDP's buckets, into which the second backward writes."""
    config = model("once", "ddp", on_nonfinite=OnNonfinite.record)
    config = replace(config, strategy=DDPStrategy(gradient_as_bucket_view=view))
    ran = run_distributed(run, 2, Case(config, poison=None, steps=2), tmp_path / "run")[0]
    assert ran.event["cause"] is None and all(value.isnan().all() for value in ran.weights.values())


def test_infinite_inputs_of_a_finite_loss(tmp_path: Path) -> None:
    ran = alone(Case(model("Squashed", "single"), poison={"value": math.inf}), tmp_path / "run")
    assert (ran.event["what"], ran.cause["kind"], ran.cause["samples"]) == ("gradient norm", "inputs", [SAMPLE])
    assert ran.event["gradients"] == ["gain"]


def test_looking_back_at_the_gate_leaves_no_trace(tmp_path: Path) -> None:
    config = model("Shifted", "single", optimizer=AdamW(lr=0.01), on_nonfinite=OnNonfinite.record, gate=Gate(steps=2))
    config = in_world(replace(config, steps=3), 1)
    entry = BaselineEntry(str(make_baseline(config, tmp_path)), reused=False)
    states = []
    for looks in (True, False):
        folder = RunFolder(tmp_path / f"looks {looks}")
        folder.path.mkdir()
        folder.update_record(status="running")
        set_determinism(config, 1)
        trainer, _ = build_trainer(config, ONE_PROCESS)
        guard = Guard(config, folder, None)
        trainer.observers = [guard]
        trainer.run(until=2)
        guard.begin(trainer, entry if looks else None)
        assert [event["step"] for event in read_record(folder.path)["nonfinite"]] == [1] * looks
        trainer.run(until=3)
        state = trainer.optimizer.state_dict()["state"]
        states.append(
            [*trainer.strategy.full_state(trainer.module).values(), *(v for s in state.values() for v in s.values())]
        )
    assert len(states[0]) == 4 * len(trainer.optimizer.state)
    assert all(a.isfinite().all() and torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_three_ranks(tmp_path: Path) -> None:
    """The sample is the third one's."""
    config = model("Logs", "fsdp2", on_nonfinite=OnNonfinite.skip)
    ran = run_distributed(run, 3, Case(config, poison={"index": 23}), tmp_path / "run")[0]
    assert ran.event["ranks"] == [2] and ran.cause["samples"] == [22, 23] and "on rank 2 of 3" in ran.event["text"]


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp-flat"])
def test_a_sum_of_finite_gradients(strategy: str, tmp_path: Path) -> None:
    """FSDP1 adds up micro-batches in fp16."""
    config = model("Biased", strategy, precision=unscaled(), loss=Loss(LossKind.sum), wrap=NoWrap())
    ran = run_distributed(run, 2, Case(config, poison=None), tmp_path / "run")[0]
    assert (ran.event["what"], ran.cause["kind"], ran.event["gradients"]) == ("gradient norm", "sum", ["bias"])
    assert "sum over micro-batches and ranks" in ran.event["text"] and ran.event["text"].endswith("gradient of bias")
    assert ran.event["step"] == 1 and ran.event["ranks"] is None and len(ran.event["files"]) == 2
    once_a_step = run_distributed(run, 2, Case(replace(config, accumulation=1, global_batch=6), None), tmp_path / "1")[
        0
    ]
    assert once_a_step.events == []


def test_a_norm_that_fp64_does_not_hold(tmp_path: Path) -> None:
    config = custom("Plain", "single", precision=preset("fp64"), loss=Loss(LossKind.sum))
    config.model._target_, config.model.kwargs = "tests.numerics.odd_models.Scaled", {"scale": 1e200}
    ran = alone(Case(config, poison=None), tmp_path / "run")
    assert (ran.event["value"], ran.cause["kind"], ran.event["gradients"]) == ("inf", "sum", [])
    assert "every gradient is finite, the sum of their squares is not" in ran.event["text"]


def test_the_innermost_maker() -> None:
    """Of calls (finite inputs, finite output, calls inside), as a module made of others sees them."""

    def call(name: str, inputs: bool, output: bool, *inside: Call) -> Call:
        return Call(name, "", inputs, 0, finite_output=output, calls=list(inside))

    good, passes, heals = call("good", True, True), call("passes", False, False), call("heals", False, True)
    makes = call("makes", True, False)
    for inside, expected in (
        ([], "root"),
        ([good, good], "root"),
        ([good, makes, passes], "makes"),
        ([makes, call("later", True, False)], "makes"),
        ([good, passes, makes], "root"),
        ([makes, heals, good], "root"),
        ([call("mask", True, False), heals, makes, passes], "makes"),
        ([passes, heals, makes], "makes"),
        ([good, call("outer", True, False, good, makes)], "makes"),
    ):
        assert call("root", True, False, *inside).maker().name == expected


# --- what becomes of it

POLICIES: dict[str, Config] = {
    "plain": model("Logs", "ddp"),
    "synced": model("Logs", "ddp", accumulation_sync=True),
    "view": replace(model("Logs", "ddp"), strategy=DDPStrategy(gradient_as_bucket_view=True)),
    "static": replace(model("Logs", "ddp", accumulation=1), strategy=DDPStrategy(static_graph=True)),
    "unused": replace(model("Logs", "ddp"), strategy=DDPStrategy(find_unused_parameters=True)),
    **{strategy: model("Logs", strategy) for strategy in STRATEGIES if strategy not in ("single", "ddp")},
    "fp16": model("Logs", "fsdp", precision=unscaled(1024.0)),
    "fp16 ddp": replace(
        model("Logs", "ddp", precision=unscaled(1024.0)), strategy=DDPStrategy(gradient_as_bucket_view=True)
    ),
    "bf16": model("Logs", "fsdp2", precision="bf16"),
    "adamw": model("Logs", "fsdp", optimizer=AdamW(lr=0.01)),
    "buffers": model("NormedLogs", "ddp"),
    "attributes": model("HiddenLogs", "fsdp2"),
    "dropout": model("DroppingLogs", "fsdp"),
}


class NormedLogs(Normed):
    """Batch normalisation beside what fails."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clamp(-3, 3)) + torch.log(x + 50) * 0


class HiddenLogs(Hidden):
    """Counts its calls, and computes with the number."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clamp(-3, 3)) + torch.log(x + 50) * 0


class DroppingLogs(Logs):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.3)


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    """Skipped steps (of a loss and gradients that are not finite), recorded ones (of an infinite loss with finite
    gradients, which clipping makes small), and each without a guard, so without the pass that looks for the cause."""
    cases = {}
    for name, config in POLICIES.items():
        skip, record = (replace(config, on_nonfinite=OnNonfinite[policy]) for policy in ("skip", "record"))
        infinite: dict[str, Any] = {"value": None, "target": 1e20}
        cases[f"{name} skip"] = Case(skip)
        cases[f"{name} skip alone"] = Case(skip, guarded=False, refused=STEP)
        cases[f"{name} record"] = Case(record, infinite)
        cases[f"{name} record alone"] = Case(record, infinite, guarded=False)
    return run_distributed(run_each, 2, cases, tmp_path_factory.mktemp("policies"))[0]


@pytest.mark.parametrize("policy", ["skip", "record"])
@pytest.mark.parametrize("name", POLICIES)
def test_looking_for_the_cause_leaves_no_trace(name: str, policy: str, policies: dict[str, Ran]) -> None:
    """Weights, losses, buffers and everything else go on to the bit as if nobody had looked."""
    watched, plain = policies[f"{name} {policy}"], policies[f"{name} {policy} alone"]
    assert watched.error is None and [event["step"] for event in watched.events] == [STEP]
    assert watched.cause["kind"] == ("forward" if policy == "skip" else "loss") and watched.event["ranks"] == [1]
    assert watched.skipped == plain.skipped
    assert repr(watched.losses) == repr(plain.losses) and not math.isfinite(watched.losses[STEP - 1])
    assert watched.weights.keys() == plain.weights.keys() and watched.weights
    for key, value in plain.weights.items():
        assert torch.equal(watched.weights[key].nan_to_num(), value.nan_to_num()), key
        assert "running" in key or value.isfinite().all()
    if policy == "skip":
        assert watched.skipped == [False, True, False, False]


def test_an_overflow_of_the_scaled_gradient_is_the_scalers_business(tmp_path: Path) -> None:
    """A loss that is finite, however large, with gradients that are not."""
    scaled = model("Logs", "single", precision=unscaled(2.0**40))
    for config, poison in ((scaled, None), (model("Logs", "single", precision="fp16"), {"target": 6e4, "value": None})):
        ran = alone(Case(config, poison=poison, steps=3), tmp_path / str(poison))
        assert ran.error is None and ran.events == [] and any(ran.skipped) and all(map(math.isfinite, ran.losses))
    ran = alone(Case(replace(scaled, precision=unscaled()), poison={"value": 1e5}), tmp_path / "loss")
    assert ran.error is not None


def test_a_loss_that_is_not_finite_is_no_business_of_the_scaler(tmp_path: Path) -> None:
    """It backs off, as its gradients are not finite either, and the policy has its say."""
    config = model("Logs", "single", precision=unscaled(1024.0), on_nonfinite=OnNonfinite.record)
    ran = alone(Case(config), tmp_path / "run")
    assert ran.said[-1].endswith("; not taken")
    assert [event["step"] for event in ran.events] == [STEP] and ran.skipped == [False, True, False, False]


def test_a_clean_run_is_never_flagged(tmp_path: Path) -> None:
    for name, precision in (("plain", "fp32"), ("low", "bf16"), ("scaled", "fp16")):
        for models in ("Logs", "Masked", "Lengths"):
            ran = alone(Case(model(models, "single", precision=precision), poison=None), tmp_path / name / models)
            assert (ran.error, ran.events, ran.said, ran.files) == (None, [], [], {})


def test_the_batch_is_kept_as_it_was(tmp_path: Path) -> None:
    case = Case(model("Logs", "ddp", optimizer=SGD(lr=0.0)))
    ran = run_distributed(run, 2, case, tmp_path / "run")[0]
    ((name, (facts, tensors)),) = ran.files.items()
    assert name == f"step_{STEP:08d}_rank_00001.safetensors"
    assert {key: json.loads(value) for key, value in facts.items() if key != "format"} == {
        "step": STEP, "rank": 1, "seed": 1, "samples": [[18, 19, 20], [21, 22, 23]]
    }  # fmt: skip
    assert sorted(tensors) == ["inputs.0", "inputs.1", "targets.0", "targets.1"]
    assert tensors["inputs.0"][2].eq(BAD).all() and tensors["inputs.1"].isfinite().all()
    trainer, _ = build_trainer(replace(case.config, strategy=STRATEGIES["single"]), ONE_PROCESS)
    assert trainer.module(tensors["inputs.0"]).isnan().any(dim=1).tolist() == [False, False, True]
    assert not trainer.module(tensors["inputs.1"]).isnan().any()


def test_a_batch_that_cannot_be_kept_changes_nothing_else(tmp_path: Path) -> None:
    def in_the_way(trainer: Trainer) -> None:
        (tmp_path / "run" / "nonfinite").touch()

    config = model("Logs", "single", on_nonfinite=OnNonfinite.skip)
    ran = alone(Case(config, spoil=in_the_way), tmp_path / "run")
    assert ran.skipped == [False, True, False, False]
    assert ran.event["files"] == [] and "cannot write nonfinite/step_00000002_rank_00000" in ran.event["problem"]
    stopped = alone(Case(model("Logs", "single"), spoil=lambda _: (tmp_path / "other" / "nonfinite").touch()),
                    tmp_path / "other")  # fmt: skip
    assert stopped.error is not None and "its batch is not kept: cannot write nonfinite/" in stopped.error


def test_the_first_events_are_told_and_the_first_one_explained(tmp_path: Path) -> None:
    """Weights are not numbers any more once such a step was taken, so every step from there on is an event."""
    config = model("Logs", "ddp", on_nonfinite=OnNonfinite.record, global_batch=12)
    ran = run_distributed(run, 2, Case(config, steps=MAX_EVENTS + 5), tmp_path / "run")[0]
    assert [event["step"] for event in ran.events] == list(range(STEP, STEP + MAX_EVENTS))
    assert ran.events[0]["cause"]["module"] == "tail.0" and ran.events[0]["ranks"] == [1]
    for event in ran.events[1:]:
        assert event["cause"] is None and event["reason"] == "looked for at the first event only"
        assert event["ranks"] == [0, 1] and len(event["files"]) == 2, "both ranks' own losses are not finite now"
    assert len(ran.files) == 1 + 2 * (MAX_EVENTS - 1)
    assert len(ran.said) == 1 + MAX_EVENTS + 1
    assert ran.said[0] == "distbench: step 2: the loss is nan; looking for where it was made"
    assert ran.said[1].startswith("distbench: step 2: the loss is nan: made by tail.0 (Log)")
    assert ran.said[1].endswith("; taken as it is")
    assert ran.said[-1].endswith("of these only metrics.jsonl tells")
    assert len(ran.losses) == MAX_EVENTS + 5 and not any(ran.skipped)


def test_later_events_name_the_ranks_that_saw_them(tmp_path: Path) -> None:
    config = model("Logs", "ddp", on_nonfinite=OnNonfinite.skip)
    ran = run_distributed(run, 2, Case(config, spoil=poisons_step_3_on_rank_0), tmp_path / "run")[0]
    assert [(event["step"], event["ranks"]) for event in ran.events] == [(2, [1]), (3, [0])]
    assert ran.skipped == [False, True, True, False]
    assert sorted(ran.files) == ["step_00000002_rank_00001.safetensors", "step_00000003_rank_00000.safetensors"]


def poisons_step_3_on_rank_0(trainer: Trainer) -> None:
    trainer.batches.source = Poisoned(trainer.batches.source, index=24)


def test_steps_after_the_last_are_only_looked_at(tmp_path: Path) -> None:
    """The window's tracked steps."""
    trainer, _ = build_trainer(replace(model("Logs", "single"), steps=STEP - 1), ONE_PROCESS)
    trainer.batches.source = Poisoned(trainer.batches.source)
    folder = RunFolder(tmp_path)
    folder.update_record(status="running")
    Guard(replace(model("Logs", "single"), steps=STEP - 1), folder, None).begin(trainer)
    trainer.run(until=STEP)
    assert read_record(tmp_path)["nonfinite"] == []


def test_a_resumed_run_keeps_what_was_before(tmp_path: Path) -> None:
    config = replace(model("Logs", "single", on_nonfinite=OnNonfinite.skip), steps=4)
    trainer, _ = build_trainer(config, ONE_PROCESS)
    trainer.step = 3
    folder = RunFolder(tmp_path)
    folder.update_record(status="running", nonfinite=[{"step": 2}, {"step": 3}, {"step": 4}])
    Guard(config, folder, None).begin(trainer)
    assert read_record(tmp_path)["nonfinite"] == [{"step": 2}, {"step": 3}]


# --- by the command line

LOGS = [
    *("model=custom", f"model._target_={__name__}.Logs", "model.block_classes=[Block]"),
    *("model.input_shape=[6]", "model.target_shape=[6]", "gate.steps=1", "gate.fp64_reference=false", "window=off"),
    *("steps=6", "global_batch=8", f"fault._target_={__name__}.Poison", "+fault.kwargs.index=38"),
]
"""The gate passes; the fifth step's samples are 32 to 39, of which rank 1 has the last four."""


def test_stop(tmp_path: Path) -> None:
    ended = distbench(*LOGS, "strategy=fsdp", "checkpoint.every=2", cwd=tmp_path)
    assert ended.code == 4, ended.said
    record, text = (
        ended.record,
        "step 5: the loss is nan: made by tail.0 (Log), in forward from finite inputs, on rank 1 of 2",
    )
    assert record["status"] == "crashed" and f"NonFiniteError: {text}" in record["reason"]
    assert record["gate"]["passed"] and [event["step"] for event in record["nonfinite"]] == [5]
    assert f"distbench: {text}, micro-batch 0 (samples 36 to 39)" in ended.out
    assert "last checkpoint: checkpoints/step_00000004" in ended.out and "Traceback" not in ended.said
    assert not (ended.run / "checkpoints" / "step_00000005").exists()
    (command,) = re.findall(r"to look at its batch: python (-c) \"(.*)\"", ended.out)
    shown = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True)
    assert shown.returncode == 0 and "-1.0000e+03" in shown.stdout
    assert [json.loads(line)["step"] for line in (ended.run / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3, 4]


def test_skip_in_the_window(tmp_path: Path) -> None:
    window = ["window=default", "window.measured=2", "window.reference=1", "window.repeats=1", "window.warm_up=1"]
    ended = distbench(*LOGS, *window, "steps=8", "strategy=ddp", "on_nonfinite=skip", cwd=tmp_path)
    assert ended.code == 0, ended.said
    assert ended.record["window"] is not None and ended.record["result"]["skipped_steps"] == 1
    assert [event["step"] for event in ended.record["nonfinite"]] == [5]
    assert "(samples 36 to 39); not taken" in ended.out
    rows = [json.loads(line) for line in (ended.run / "metrics.jsonl").read_text().splitlines()]
    assert (
        [row["step"] for row in rows if row["skipped"]] == [row["step"] for row in rows if row["loss"] == "nan"] == [5]
    )


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_gate_that_passes_what_is_not_finite_on_both_sides(policy: str, tmp_path: Path) -> None:
    """Nothing differs, so it is the guard's to say, right after; from the baseline's state, since weights are gone."""
    words = [word for word in LOGS if "_target_" not in word and "fault" not in word]
    words += [f"model._target_={__name__}.AlwaysLog", "gate.steps=2", f"on_nonfinite={policy}", "optimizer=adamw"]
    ended = distbench(*words, "strategy=fsdp2", "steps=4", cwd=tmp_path)
    record = ended.record
    assert record["gate"]["passed"] and "bitwise" in record["gate"]["text"]
    assert [event["step"] for event in record["nonfinite"]] == ([1] if policy == "stop" else [1, 3, 4])
    cause = record["nonfinite"][0]["cause"]
    assert (cause["module"], cause["module_class"], cause["kind"]) == ("", "AlwaysLog", "forward")
    assert "step 1: in the gate, as in its baseline, the loss is nan: made by the model itself (AlwaysLog)" in ended.out
    assert ended.code == (4 if policy == "stop" else 0), ended.said
    assert record["status"] == ("crashed" if policy == "stop" else "passed")


def test_another_policy_is_refused(tmp_path: Path) -> None:
    ended = distbench("on_nonfinite=ignore", cwd=tmp_path)
    assert ended.code == 2 and ended.left == []
    assert "on_nonfinite=ignore is not one of stop, skip, record" in ended.err
