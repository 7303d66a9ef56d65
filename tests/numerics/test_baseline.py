"""The replay is what a correct distributed run computes: bit for bit with two ranks, whatever the model."""

from __future__ import annotations

import itertools
import json
import math
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from distbench.build import set_determinism
from distbench.config import (
    SGD,
    Config,
    CustomModel,
    DDPStrategy,
    Gate,
    Loss,
    LossKind,
    LossScaler,
    NoWrap,
    PatternWrap,
    SyntheticData,
)
from distbench.errors import BaselineError, UserModelError
from distbench.losses import LossFunction
from distbench.models.build import build_model
from distbench.numerics.baseline import (
    MAX_SKIPPED,
    Baseline,
    Replay,
    Replayed,
    compute_baseline,
    fp64,
    noise_floor,
)
from distbench.numerics.digests import tensor_digest
from distbench.preflight import preset
from distbench.strategies import strategy_class
from tests.configs import custom, small
from tests.distributed import run_distributed
from tests.gates import CPU, in_world
from tests.steps import Steps, train_each

STRATEGIES = ["ddp", "fsdp", "fsdp2"]
MODELS = "distbench.faults.models"


def language(strategy: str, **changes: Any) -> Config:
    """Embedding, attention, dropout, a tied head, and targets of which most are padding: ranks hold unequal counts."""
    model = CustomModel(
        _target_=f"{MODELS}.LanguageModel",
        kwargs={"width": 6, "num_layers": 1, "dropout": 0.3},
        block_classes=["Block"],
        input_shape=[8],
        target_shape=[8],
        vocab_size=19,
    )
    data = SyntheticData(input_shape=[8], target_shape=[8], vocab_size=19, padding=0.9)
    return small(strategy, model=model, data=data, loss=Loss(LossKind.cross_entropy), **changes)


def cases() -> dict[str, Config]:
    found: dict[str, Config] = {}
    attention = PatternWrap(patterns=["attention", r"blocks\.\d"])
    for strategy, name, (k, synced) in itertools.product(
        STRATEGIES, ("fp32", "bf16", "fp16"), ((1, False), (3, False), (3, True))
    ):
        found[f"{strategy}, {name}, {k}{' synced' if synced else ''}"] = small(
            strategy, hidden=7, layers=1, precision=preset(name), accumulation=k, accumulation_sync=synced
        )
    unused = DDPStrategy(find_unused_parameters=True)
    for strategy in STRATEGIES:
        found[f"{strategy}, language"] = language(strategy, accumulation=3)
        found[f"{strategy}, language in bf16"] = language(strategy, precision=preset("bf16"))
        found[f"{strategy}, normed"] = custom("Normed", strategy, accumulation=3)
        found[f"{strategy}, tied"] = custom("Tied", strategy)
        found[f"{strategy}, tied blocks"] = custom("TiedBlocks", strategy)
        found[f"{strategy}, frozen"] = custom("FrozenBlock", strategy)
        found[f"{strategy}, unused"] = custom("Unused", strategy)
        found[f"{strategy}, checkpointed"] = custom("Checkpointed", strategy)
        found[f"{strategy}, checkpointed in bf16"] = custom("Checkpointed", strategy, precision="bf16", accumulation=3)
        for precision in ("fp32", "bf16", "bf16_autocast"):
            found[f"{strategy}, reused in {precision}"] = custom("Reused", strategy, precision=precision)
        found[f"{strategy}, attention"] = custom("SelfAttention", strategy, wrap=attention)
        if strategy != "ddp":  # broadcasts buffers before forward, and into an expanded one it cannot
            found[f"{strategy}, many buffers"] = custom("ManyBuffers", strategy, accumulation=3, precision="bf16")
        found[f"{strategy}, hidden state"] = custom("Hidden", strategy, accumulation=3)
        found[f"{strategy}, sum"] = small(strategy, hidden=7, layers=1, loss=Loss(LossKind.sum))
    for variant in ("fsdp-flat", "fsdp-grad-op", "fsdp-no-shard", "fsdp2-keep"):
        found[f"{variant}, reused"] = custom("Reused", variant)
        found[f"{variant}, reused in bf16_autocast"] = custom("Reused", variant, precision="bf16_autocast")
        found[f"{variant}, attention in bf16"] = custom("SelfAttention", variant, wrap=attention, precision="bf16")
    found["ddp, unused"] = replace(found["ddp, unused"], strategy=unused)
    own = replace(found["ddp, normed"], strategy=DDPStrategy(broadcast_buffers=False))
    return {**found, "ddp, normed, own buffers": own}


def step_replayed(config: Config, ranks: int = 2) -> tuple[Replay, Replayed]:
    config = in_world(config, ranks)
    set_determinism(config, 1)
    replay = Replay(config, strategy_class(config.strategy.name).reduction(config), CPU)
    return replay, replay.gradients()


@cache
def distributed() -> dict[str, Steps]:
    return run_distributed(train_each, 2, cases())[0]


@pytest.mark.parametrize("case", cases())
def test_two_ranks_compute_the_replay(case: str) -> None:
    """Read from the wrapper by tests/steps.py, and not by the gate."""
    got = distributed()[case]
    _, replayed = step_replayed(cases()[case])
    assert got.gradients.keys() >= replayed.reduced.keys()
    for name, gradient in got.gradients.items():
        if name in replayed.reduced:
            assert torch.equal(gradient, replayed.reduced[name]), name
        else:
            assert not gradient.any(), f"{name} has a gradient that no rank computed"
    assert got.metrics[0].loss == pytest.approx(replayed.loss, rel=1e-14)
    assert got.metrics[0].scale == replayed.scale


def test_ranks_of_the_language_model_hold_unequal_counts() -> None:
    """Else its token weighting would not be tested."""
    config = in_world(cases()["ddp, language"], 2)
    replay, replayed = step_replayed(config)
    counts = [replay.loss.local_count(batches.micro_batches(0)) for batches in replay.batches]
    assert counts[0] != counts[1] and sum(counts) == replayed.count


@pytest.mark.parametrize(
    ("strategy", "precision", "changes", "refused"),
    [
        ("fsdp2", "fp32", {"accumulation": 2}, True),
        ("fsdp", "bf16", {"accumulation": 2}, True),
        ("fsdp", "fp32", {"accumulation": 2}, False),
        ("fsdp2", "fp32", {"accumulation": 2, "accumulation_sync": True}, False),
        ("fsdp2", "fp32", {"accumulation": 2, "wrap": NoWrap()}, False),
        ("ddp", "bf16", {"accumulation": 2}, False),
    ],
)
def test_a_unit_called_twice_is_refused_where_its_reduction_is_not_replayed(
    strategy: str, precision: str, changes: dict[str, Any], refused: bool
) -> None:
    config = custom("Reused", strategy, precision=precision, **changes)
    with pytest.raises(UserModelError, match=r"blocks\.0 is called several times") if refused else nullcontext():
        step_replayed(config)


# --------------------------------------------------------------------------------------------------------------
# What it computes, by hand
# --------------------------------------------------------------------------------------------------------------


def by_hand(config: Config, ranks: int) -> tuple[dict[str, Tensor], float]:
    """The whole batch in one process and one backward, in fp64: what all of this is about."""
    model = build_model(config.model, config.seed.model).double()
    loss = LossFunction(config.loss)
    replay, _ = step_replayed(config, ranks)
    total = torch.zeros((), dtype=torch.float64)
    batches = [batch for own in replay.batches for batch in own.micro_batches(0)]
    for batch in batches:
        inputs = batch.inputs.double() if batch.inputs.is_floating_point() else batch.inputs
        targets = batch.targets.double() if batch.targets.is_floating_point() else batch.targets
        total = total + loss.sum(model(inputs), targets)
    total = total / loss.total(loss.local_count(own.micro_batches(0)) for own in replay.batches)
    total.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, float(total.detach())


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("case", ["simple", "language", "tied", "frozen", "unused"])
def test_the_mean_is_the_gradient_of_the_global_loss(case: str, ranks: int) -> None:
    """In fp64 it agrees with autograd over the whole batch to about its last digits."""
    configs = {
        "simple": small("ddp", hidden=7, layers=1, global_batch=12),
        "language": language("ddp"),
        "tied": custom("Tied", "ddp"),
        "frozen": custom("Frozen", "ddp"),
        "unused": custom("Unused", "ddp"),
    }
    config = replace(configs[case], precision=preset("fp64"), accumulation=2)
    if case == "language":
        config.model.kwargs = {"width": 6, "num_layers": 1, "dropout": 0.0}
    expected, loss = by_hand(config, ranks)
    _, replayed = step_replayed(config, ranks)
    assert replayed.loss == pytest.approx(loss, rel=1e-12)
    assert replayed.mean.keys() == expected.keys()
    assert set(replayed.nones) == {n for n, _ in build_model(config.model, 1).named_parameters()} - expected.keys()
    for name, gradient in expected.items():
        assert torch.allclose(replayed.mean[name], gradient, rtol=1e-9, atol=1e-13), name
        assert (replayed.magnitude[name].double() >= replayed.mean[name].abs() * (1 - 1e-12)).all()


def test_dropout_follows_the_samples_and_not_the_ranks() -> None:
    """Two ranks of one micro-batch draw what one rank of two draws: random state is keyed on the first sample's id."""
    one = step_replayed(replace(language("ddp"), accumulation=4), 1)[1]
    two = step_replayed(replace(language("ddp"), accumulation=2), 2)[1]
    assert two.loss == pytest.approx(one.loss, rel=1e-12)
    for name, mean in one.mean.items():
        assert torch.allclose(two.mean[name], mean, rtol=1e-4, atol=1e-7), name
    other = replace(language("ddp"), accumulation=4)
    other.model.kwargs = {**other.model.kwargs, "dropout": 0.31}
    assert step_replayed(other, 1)[1].loss != one.loss, "dropout was off"


@pytest.mark.parametrize("broadcast", [True, False])
def test_buffers_are_each_ranks_own_or_rank_0s(broadcast: bool) -> None:
    config = replace(custom("Normed", "ddp"), strategy=DDPStrategy(broadcast_buffers=broadcast))
    replay, replayed = step_replayed(config, 3)
    first = [buffers["norm.running_mean"].clone() for buffers in replay.buffers]
    assert not torch.equal(first[0], first[1]), "each rank saw its own samples"
    replay.update(replayed)
    replay.gradients()
    inputs = replay.batches[1].micro_batches(1)[0].inputs
    start = first[0] if broadcast else first[1]
    expected = 0.9 * start + 0.1 * inputs.mean(0)
    assert torch.allclose(replay.buffers[1]["norm.running_mean"], expected, rtol=1e-5, atol=1e-6)


def test_steps_follow_the_optimizer_the_schedule_and_the_clipping() -> None:
    config = small("ddp", hidden=7, layers=1, optimizer=SGD(lr=0.5, momentum=0.9), clip_norm=1e-3, steps=4)
    replay, replayed = step_replayed(config)
    name = next(iter(replay.parameters))
    start = replay.parameters[name].detach().clone()
    facts = replay.update(replayed)
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in replayed.reduced.values()))
    assert facts["grad_norm"] == pytest.approx(norm, rel=1e-12) and facts["clip"] == 1e-3 / (facts["grad_norm"] + 1e-6)
    moved = start - 0.5 * (replayed.reduced[name] * facts["clip"])
    assert torch.allclose(replay.parameters[name], moved, rtol=1e-6)
    assert all(parameter.grad is None for parameter in replay.parameters.values())


def test_a_scaler_skips_and_backs_off_like_the_trainers() -> None:
    scaler = LossScaler(enabled=True, init_scale=2.0**24)
    config = small("ddp", hidden=7, layers=1, precision=replace(preset("fp16"), scaler=scaler), steps=20)
    replay, replayed = step_replayed(config)
    before = replay.parameters[next(iter(replay.parameters))].detach().clone()
    facts = replay.update(replayed)
    assert facts["skipped"] and replay.scaler.scale == 2.0**23
    assert torch.equal(replay.parameters[next(iter(replay.parameters))], before)


# --------------------------------------------------------------------------------------------------------------
# On disk
# --------------------------------------------------------------------------------------------------------------


def computed(config: Config, folder: Path, ranks: int = 2) -> Baseline:
    folder.mkdir()
    config = in_world(config, ranks)
    set_determinism(config, 1)
    compute_baseline(config, folder, CPU)
    return Baseline(folder)


def test_a_baseline_is_the_same_every_time(tmp_path: Path) -> None:
    config = language("ddp", gate=Gate(steps=2), steps=2)
    one, two = computed(config, tmp_path / "one"), computed(config, tmp_path / "two")
    for file in sorted(one.folder.iterdir()):
        if file.suffix == ".safetensors" and not file.name.startswith(("summary", "weights")):
            assert file.read_bytes() == (two.folder / file.name).read_bytes(), file.name
    facts = [{**b.facts, "seconds": 0.0} for b in (one, two)]
    assert facts[0] == facts[1]


def test_what_a_baseline_holds(tmp_path: Path) -> None:
    config = custom("Normed", "ddp", gate=Gate(steps=2), steps=5, optimizer=SGD(lr=0.1, momentum=0.9))
    baseline = computed(config, tmp_path / "b")
    assert baseline.num_steps == 2 and [step["step"] for step in baseline.steps] == [1, 2]
    names = {p.name for p in baseline.weights(0)}
    with baseline.tensors(0) as file:
        state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    assert {key[2:] for key in state if key.startswith("P/")} == names
    assert {key for key in state if key.startswith("B1/")} >= {"B1/norm.running_mean", "B1/norm.num_batches_tracked"}
    with baseline.tensors(2) as file:
        keys = set(file.keys())
        gradient, mean = file.get_tensor("R/head.weight"), file.get_tensor("G/head.weight")
    assert {key.split("/")[0] for key in keys} == {"G", "A", "R", "P", "O", "B0", "B1"}
    assert "O/momentum_buffer/head.weight" in keys
    assert mean.dtype is torch.float64 and torch.equal(gradient, mean.float())
    assert tensor_digest(state["B0/norm.running_mean"]) == baseline.facts["initial_buffers"][0]["norm.running_mean"]


def test_steps_that_are_skipped_do_not_count(tmp_path: Path) -> None:
    scaler = LossScaler(enabled=True, init_scale=2.0**20)
    chosen = replace(preset("fp16"), scaler=scaler)
    config = small("ddp", hidden=7, layers=1, precision=chosen, gate=Gate(steps=2, fp64_reference=False), steps=20)
    baseline = computed(config, tmp_path / "b")
    skipped = [step["skipped"] for step in baseline.steps]
    assert skipped.count(False) == 2 and skipped[0] is True and len(skipped) < MAX_SKIPPED
    assert baseline.steps[0]["grad_norm"] in (math.inf,) or math.isnan(baseline.steps[0]["grad_norm"])
    assert isinstance(baseline.steps[0]["grad_norm"], float), "read back as a number"
    never = replace(chosen, scaler=replace(scaler, init_scale=2.0**100, backoff_factor=0.99))
    endless = computed(replace(config, precision=never, steps=100), tmp_path / "endless")
    assert endless.num_steps == MAX_SKIPPED


def test_nan_losses_are_read_back_as_numbers(tmp_path: Path) -> None:
    config = custom("Plain", "ddp", gate=Gate(steps=1))
    config.model._target_, config.model.kwargs = "tests.numerics.odd_models.Scaled", {"scale": math.inf}
    baseline = computed(config, tmp_path / "b")
    assert all(math.isnan(loss) or math.isinf(loss) for loss in baseline.step(1)["losses"])
    assert not math.isfinite(baseline.step(1)["loss"])


def test_the_precision_error_is_the_precisions(tmp_path: Path) -> None:
    """fp64 costs nothing, fp32 little, bf16 more; the fp64 reference does not depend on the precision."""
    errors = {}
    for name in ("fp64", "fp32", "bf16"):
        config = small("ddp", hidden=7, layers=1, precision=preset(name), gate=Gate(steps=1))
        errors[name] = computed(config, tmp_path / name).facts["precision_error"]
    assert errors["fp64"]["relative_l2"] == 0.0
    assert 1e-9 < errors["fp32"]["relative_l2"] < 1e-5 < errors["bf16"]["relative_l2"] < 0.1
    assert len({error["loss"] for error in errors.values()}) == 1
    assert fp64(preset("fp16")).scaler.enabled is False
    without = small("ddp", hidden=7, layers=1, gate=Gate(steps=1, fp64_reference=False))
    facts = computed(without, tmp_path / "without").facts
    assert facts["precision_error"] is None and facts["precision_error_reason"] == "gate.fp64_reference=false"


def test_the_noise_floor_is_that_of_rearrangements() -> None:
    """Above rounding's smallest, far below a real error."""
    config = in_world(small("ddp", hidden=7, layers=1, gate=Gate(steps=1)), 2)
    exact = step_replayed(replace(config, precision=preset("fp64")))[1].mean
    floor = noise_floor(config, CPU, exact)
    assert floor.keys() == exact.keys()
    assert all(2.0**-26 < value < 1e-4 for value in floor.values())


@pytest.mark.parametrize("content", ["", "{", "[]", '{"steps": 3}', '{"steps": [{}]}', '{"facts": []}'])
def test_a_damaged_baseline_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "baseline.json").write_text(content)
    with pytest.raises(BaselineError, match="is damaged"):
        Baseline(tmp_path)


def test_baseline_json_is_strict(tmp_path: Path) -> None:
    scaler = LossScaler(enabled=True, init_scale=2.0**24)
    chosen = replace(preset("fp16"), scaler=scaler)
    config = small("ddp", hidden=7, layers=1, precision=chosen, gate=Gate(steps=1))
    computed(config, tmp_path / "b")

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    json.loads((tmp_path / "b" / "baseline.json").read_text(), parse_constant=refuse)


def test_tensors_are_read_in_slices(tmp_path: Path) -> None:
    baseline = computed(small("ddp", hidden=7, layers=1, gate=Gate(steps=1)), tmp_path / "b")
    with safe_open(baseline.folder / "step_1.safetensors", "pt") as file:
        whole = file.get_tensor("P/layers.0.up.weight") if "P/layers.0.up.weight" in file.keys() else None  # noqa: SIM118
        name = next(key for key in file.keys() if key.startswith("P/") and "weight" in key)  # noqa: SIM118
        assert whole is None or whole.dim() == 2
        assert torch.equal(file.get_slice(name)[:2], file.get_tensor(name)[:2])


def test_a_replay_leaves_the_users_module_alone() -> None:
    """Between ranks the model is given back the buffers of whoever comes next, and no gradient is left behind."""
    replay, _ = step_replayed(custom("Normed", "ddp"), 2)
    assert all(parameter.grad is None for parameter in replay.parameters.values())
    assert isinstance(replay.models[0], nn.Module) and replay.steps_done == 0
