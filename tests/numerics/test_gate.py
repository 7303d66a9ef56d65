"""The gate: no clean run is flagged, every check fails on the fault it is there for, and gating changes no run."""

from __future__ import annotations

import atexit
import itertools
import shutil
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

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
from distbench.errors import StaleBaseline
from distbench.numerics.gate import Tier
from distbench.preflight import preset
from tests.configs import small
from tests.distributed import run_distributed
from tests.gates import UNGATED, Gated, gated_each, gated_here, in_world, make_baseline
from tests.numerics import spoilers

STRATEGIES = ["ddp", "fsdp", "fsdp2"]
NOTHING = Gated(UNGATED)
GATE = Gate(steps=2, fp64_reference=False)
NUM_STEPS = 4
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
    """Legal configurations. What is not crossed is spread over the rest; from three ranks on every pair of strategy,
    precision and accumulation is there once (a Latin square)."""
    cases: dict[str, Config] = {}
    optimizers = itertools.cycle([(ADAMW, 0.05), (NESTEROV, None), (ADAMW, None), (NESTEROV, 0.5)])
    for index, (strategy, (name, chosen), (micro, (k, synced))) in enumerate(
        itertools.product(STRATEGIES, PRECISIONS.items(), ACCUMULATIONS.items())
    ):
        if ranks > 2 and sum(divmod(index // 3, 3), index) % 3:
            continue
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
    for strategy in ("fsdp-flat", "fsdp-no-shard"):
        # One row a rank: MKL's product then rounds by where the weight lies.
        one_row = base(strategy, ranks, wrap=NoWrap(), optimizer=replace(ADAMW, decay_1d=True))
        one_row.model.hidden_dim, one_row.model.seq_len = 29, 1
        one_row.data.input_shape = one_row.data.target_shape = [1, 29]
        one_row.model.input_shape = one_row.model.target_shape = [1, 29]
        cases[f"{strategy} one row"] = replace(one_row, global_batch=ranks)
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
    folder = tempfile.mkdtemp(prefix="distbench-baselines-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@cache
def runs(ranks: int) -> dict[str, tuple[Gated, Gated]]:
    """Every case of the matrix, gated and (where steps are forced) ungated, as rank 0 saw it."""
    cases: dict[str, Any] = {}
    for name, config in matrix(ranks).items():
        cases[f"{name}, gated"] = (config, make_baseline(config, root()))
        if ranks > 2:
            cases[f"{name}, ungated"] = (config, None)
    found = run_distributed(gated_each, ranks, cases, timeout_s=600)[0]
    return {name: (found[f"{name}, gated"], found.get(f"{name}, ungated", NOTHING)) for name in matrix(ranks)}


# --------------------------------------------------------------------------------------------------------------
# Clean runs
# --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", matrix(2))
def test_two_ranks_are_bitwise(name: str) -> None:
    """At every step of the free trajectory: two terms commute, and the optimizer is elementwise."""
    gated = runs(2)[name][0]
    assert gated.verdict.passed, gated.why
    assert gated.tiers == {"bitwise"} and gated.margin == 0.0
    if "fp64" not in name:  # its clipping coefficient shows in what order the norm was summed
        assert {mode for _, mode in gated.modes} == {"free"}, "the weights left the baseline's"


@pytest.mark.parametrize("name", matrix(3))
def test_three_ranks_are_within_the_bound(name: str) -> None:
    """Every step, from the baseline's own state where the run's has left it."""
    gated, _ = runs(3)[name]
    assert gated.verdict.passed, gated.why
    assert gated.tiers <= {"bitwise", "bound"} and gated.margin <= 1.0
    compared = [step for step, _ in gated.modes]
    assert compared == sorted(set(compared)) and len(compared) >= GATE.steps


def test_some_steps_were_forced() -> None:
    """Else the test above has seen nothing of it."""
    forced = [name for name, (gated, _) in runs(3).items() if any(mode == "forced" for _, mode in gated.modes)]
    assert len(forced) > len(runs(3)) / 2
    skipped = [name for name, (gated, _) in runs(3).items() if any(m.skipped for m in gated.metrics)]
    assert {name.split()[0] for name in skipped} == set(STRATEGIES)


@pytest.mark.parametrize("name", matrix(3))
def test_gating_changes_no_run(name: str) -> None:
    """After forced steps from the baseline's weights, the run goes on as if nothing had been."""
    gated, ungated = runs(3)[name]
    assert gated.losses == ungated.losses and len(gated.losses) == NUM_STEPS
    assert [(m.grad_norm, m.lr, m.scale, m.skipped) for m in gated.metrics] == [
        (m.grad_norm, m.lr, m.scale, m.skipped) for m in ungated.metrics
    ]
    assert gated.weights.keys() == ungated.weights.keys()
    for key, value in ungated.weights.items():
        assert torch.equal(gated.weights[key], value), key


@cache
def alone() -> dict[str, Gated]:
    """Wrappers around one rank."""
    names = ["ddp fp32 3 synced", "fsdp bf16 3 synced", "fsdp2 bf16 3", "fsdp-flat 3 synced", "fsdp-no-shard 1"]
    names += ["fsdp fp16 1", "ddp normed", "fsdp2 language", "fsdp mixed", "ddp odd"]
    cases = {name: config for name, config in matrix(1).items() if name in names}
    return run_distributed(gated_each, 1, {n: (c, make_baseline(c, root())) for n, c in cases.items()})[0]


def test_one_rank_is_bitwise() -> None:
    assert len(alone()) == 10
    for name, gated in alone().items():
        assert gated.verdict.passed and gated.tiers == {"bitwise"}, (name, gated.why)


@cache
def four() -> dict[str, Gated]:
    names = [
        "fsdp-flat 3",
        "fsdp-no-shard 3 synced",
        "fsdp tiny",
        "fsdp2 language",
        "ddp normed",
        "fsdp2 bf16 autocast",
    ]
    cases = {name: config for name, config in matrix(4).items() if name in names}
    return run_distributed(gated_each, 4, {n: (c, make_baseline(c, root())) for n, c in cases.items()})[0]


def test_four_ranks_are_within_the_bound() -> None:
    assert len(four()) == 6
    for name, gated in four().items():
        assert gated.verdict.passed and gated.margin <= 1.0, (name, gated.why)


def test_parameters_without_elements_have_no_say() -> None:
    """FSDP1 gives those that are used no gradient, and with flat parameters those that are not used one."""
    unused = DDPStrategy(find_unused_parameters=True)
    optimizer = replace(ADAMW, decay_1d=True)
    cases = {}
    for strategy in ("ddp", "fsdp", "fsdp-flat", "fsdp-no-shard"):
        config = modelled(strategy, 2, "tests.numerics.odd_models.Empty")
        config = replace(config, optimizer=optimizer, wrap_policy=NoWrap())
        config = replace(config, strategy=unused) if strategy == "ddp" else config
        cases[strategy] = (config, make_baseline(config, root()))
    for strategy, gated in run_distributed(gated_each, 2, cases)[0].items():
        assert gated.verdict.passed and gated.tiers == {"bitwise"}, (strategy, gated.why)


@pytest.mark.parametrize("precision_name", ["fp32", "bf16", "fp16", "fp64"])
def test_one_process_is_the_replay(precision_name: str, tmp_path: Path) -> None:
    config = base("single", 1, precision=preset(precision_name), accumulation=3, optimizer=ADAMW)
    gated = gated_here(config, tmp_path)
    assert gated.verdict.passed and gated.tiers == {"bitwise"}, gated.why
    count = len(gated.verdict.gradients) // GATE.steps
    assert gated.verdict.text() == f"gate PASSED (bitwise, {count} of {count} parameters)"


# --------------------------------------------------------------------------------------------------------------
# Values that arithmetic is bad at
# --------------------------------------------------------------------------------------------------------------

SCALED = "tests.numerics.odd_models.Scaled"


def extremes(ranks: int) -> dict[str, Config]:
    cases: dict[str, Config] = {}
    for strategy in STRATEGIES:
        plain = modelled(strategy, ranks, SCALED)
        cases |= {
            f"{strategy} subnormal gradients": modelled(strategy, ranks, SCALED, scale=1e-42),
            f"{strategy} infinite gradients": modelled(strategy, ranks, SCALED, scale=1e38),
            f"{strategy} no learning rate": replace(plain, optimizer=AdamW(lr=0.0)),
            f"{strategy} no eps": replace(plain, optimizer=AdamW(lr=1.0, eps=0.0, weight_decay=10.0, betas=[0.0, 0.0])),
            f"{strategy} no eps, subnormal gradients": replace(
                modelled(strategy, ranks, SCALED, scale=1e-42),
                optimizer=AdamW(lr=1.0, eps=0.0, weight_decay=0.0),
                clip_norm=1e-6,
            ),
        }
    return cases


@cache
def extreme_runs(ranks: int) -> dict[str, Gated]:
    cases = {name: (config, make_baseline(config, root())) for name, config in extremes(ranks).items()}
    return run_distributed(gated_each, ranks, cases)[0]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", extremes(2))
def test_extreme_values_flag_no_clean_run(name: str, ranks: int) -> None:
    gated = extreme_runs(ranks)[name]
    assert gated.verdict.passed and gated.margin <= 1.0, gated.why


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nonfinite_gradients_are_reported_even_where_equal(strategy: str) -> None:
    verdict = extreme_runs(2)[f"{strategy} infinite gradients"].verdict
    assert "non-finite gradients in 4 parameters, as in the baseline, first first.weight at step 1" in verdict.text()
    assert all(g.nonfinite for g in verdict.gradients if g.name == "first.weight")


# --------------------------------------------------------------------------------------------------------------
# Every check
# --------------------------------------------------------------------------------------------------------------

FAULTS: dict[str, tuple[Any, str, int, str]] = {
    # fault: spoiler, first check to fail, at step, on which config
    "other samples": (spoilers.other_samples, "samples", 1, "plain"),
    "the same samples again": (spoilers.other_samples_later, "samples", 2, "plain"),
    "other loss": (spoilers.other_loss, "loss", 1, "plain"),
    "other count": (spoilers.other_count, "loss", 1, "plain"),
    "loss reported wrong": (spoilers.loss_reported_wrong, "reported", 1, "plain"),
    "loss reported as NaN": (spoilers.loss_reported_as_nan, "reported", 1, "plain"),
    "other weights": (spoilers.other_weights, "initial_weights", 1, "plain"),
    "other buffers": (spoilers.other_buffers, "initial_buffers", 1, "normed"),
    "another parameter": (spoilers.another_parameter, "structure", 1, "plain"),
    "wider": (spoilers.wider, "dtypes", 1, "plain"),
    "scaled": (spoilers.scaled, "gradients", 1, "plain"),
    "scaled later": (spoilers.scaled_later, "gradients", 2, "plain"),
    "one sign": (spoilers.one_sign, "gradients", 1, "plain"),
    "one infinity": (spoilers.one_infinity, "gradients", 1, "plain"),
    "one NaN": (spoilers.one_nan, "gradients", 1, "plain"),
    "infinities hidden": (spoilers.finite, "gradients", 1, "infinite"),
    "lost gradient": (spoilers.lost, "none_gradients", 1, "plain"),
    "other norm": (spoilers.other_norm, "norm", 1, "plain"),
    "norm is NaN": (spoilers.norm_is_nan, "norm", 1, "plain"),
    "clipped otherwise": (spoilers.clipped_otherwise, "clip", 1, "plain"),
    "not clipped": (spoilers.not_clipped, "update", 1, "plain"),
    "dead parameters": (spoilers.dead_parameters, "plain_sgd", 1, "plain"),
    "not stepped": (spoilers.not_stepped, "update", 1, "plain"),
    "not stepped, tiny gradients": (spoilers.dead_parameters, "plain_sgd", 1, "tiny"),
    "stepped twice": (spoilers.stepped_twice, "update", 1, "plain"),
    "one weight differs": (spoilers.one_weight_differs_after, "update", 1, "plain"),
    "moments lost": (spoilers.moments_lost, "update", 2, "plain"),
    "other decay": (spoilers.other_decay, "optimizer_groups", 1, "plain"),
    "schedule stepped twice": (spoilers.schedule_twice, "optimizer_groups", 2, "plain"),
    "unused weights move": (spoilers.unused_moves, "update", 1, "unused"),
    "other scale": (spoilers.other_scale, "scale", 1, "fp16"),
    "other momentum": (spoilers.other_momentum, "buffers", 1, "normed"),
    "buffers reset later": (spoilers.buffers_reset_later, "buffers", 2, "normed"),
    "bf16 weights, not stepped": (spoilers.not_stepped, "update", 1, "bf16"),
}


@cache
def alone_configs() -> dict[str, Config]:
    plain = base("single", 1, optimizer=ADAMW, clip_norm=0.05)
    return {
        "plain": plain,
        "normed": modelled("single", 1, "distbench.faults.models.Normed", width=5),
        "infinite": modelled("single", 1, SCALED, scale=1e38),
        "tiny": replace(modelled("single", 1, SCALED, scale=1e-12), optimizer=SGD(lr=1e-3)),
        "unused": modelled("single", 1, "distbench.faults.models.Mixed", width=5, frozen=False, unused=True),
        "fp16": replace(plain, precision=precision("fp16", scaler=LossScaler(enabled=True, init_scale=1024.0))),
        "bf16": replace(plain, precision=MORE_PRECISIONS["bf16 throughout"], optimizer=AdamW(lr=3e-4)),
    }


@pytest.mark.parametrize("name", ["plain", "normed", "infinite", "tiny", "unused", "fp16", "bf16"])
def test_without_a_fault_every_check_passes(name: str) -> None:
    gated = gated_here(alone_configs()[name], root())
    assert gated.verdict.passed, gated.why
    assert gated.tiers == {"bitwise"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_fails_its_own_check(fault: str) -> None:
    spoil, check, step, config = FAULTS[fault]
    gated = gated_here(alone_configs()[config], root(), spoil)
    assert not gated.verdict.passed and gated.verdict.tier is Tier.fail
    failure = gated.verdict.first_failure
    assert failure is not None and (failure.name, failure.step) == (check, step), gated.why
    assert "gate FAILED" in gated.verdict.text()


def test_the_worst_parameter_is_named() -> None:
    gated = gated_here(alone_configs()["plain"], root(), spoilers.scaled)
    worst = gated.verdict.worst_gradient()
    assert worst is not None and worst.alpha == pytest.approx(1 + 2.4e-4, rel=1e-5)
    assert [g.name for g in gated.verdict.gradients if g.tier == "fail"] == [worst.name]
    assert worst.name in gated.verdict.text() and gated.check("gradients").parameter == worst.name


TOGETHER: dict[str, tuple[Any, str, set[str]]] = {
    # fault on rank 1, strategy, checks of which at least the first must fail
    "gradient, ddp": (spoilers.on_rank_1, "ddp", {"replicas"}),
    "gradient, fsdp": (spoilers.on_rank_1, "fsdp", {"gradients"}),
    "gradient, fsdp2": (spoilers.on_rank_1, "fsdp2", {"gradients"}),
    "weights, ddp": (spoilers.other_weights_on_rank_1_after, "ddp", {"update", "replicas_after"}),
    "weights, fsdp": (spoilers.other_weights_on_rank_1_after, "fsdp", {"update"}),
    "weights, fsdp2": (spoilers.other_weights_on_rank_1_after, "fsdp2", {"update"}),
}


@cache
def together() -> list[dict[str, Gated]]:
    cases: dict[str, Any] = {}
    for name, (spoil, strategy, _) in TOGETHER.items():
        config = base(strategy, 2, optimizer=ADAMW)
        cases[name] = (config, make_baseline(config, root()), spoil)
    for strategy in STRATEGIES:
        config = base(strategy, 2, precision=preset("bf16"))
        cases[f"rounded, {strategy}"] = (config, make_baseline(config, root()), spoilers.rounded)
    return run_distributed(gated_each, 2, cases)


@pytest.mark.parametrize("name", TOGETHER)
def test_what_one_rank_alone_does_is_seen_by_all(name: str) -> None:
    for rank in (0, 1):
        gated = together()[rank][name]
        assert TOGETHER[name][2] <= set(gated.failed), gated.why


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_less_than_the_bound_of_a_low_precision_is_seen_too(strategy: str) -> None:
    gated = together()[0][f"rounded, {strategy}"]
    assert set(gated.failed) == {"representable"}, gated.why


@cache
def faulty_three() -> dict[str, Gated]:
    cases: dict[str, Any] = {}
    for strategy in STRATEGIES:
        config = base(strategy, 3, optimizer=ADAMW)
        folder = make_baseline(config, root())
        cases[f"scaled, {strategy}"] = (config, folder, spoilers.scaled)
        cases[f"scaled later, {strategy}"] = (config, folder, spoilers.scaled_later)
        config = modelled(strategy, 3, "distbench.faults.models.Normed", width=5)
        cases[f"buffers, {strategy}"] = (config, make_baseline(config, root()), spoilers.buffers_reset_later)
    return run_distributed(gated_each, 3, cases)[0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_three_ranks_see_a_real_scale_error(strategy: str) -> None:
    """In the first step, and in one that only a forced step can be held to."""
    for fault, step in (("scaled", 1), ("scaled later", 2)):
        failure = faulty_three()[f"{fault}, {strategy}"].verdict.first_failure
        assert failure is not None and (failure.name, failure.step) == ("gradients", step)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_three_ranks_see_buffers_that_go_wrong_later(strategy: str) -> None:
    failure = faulty_three()[f"buffers, {strategy}"].verdict.first_failure
    assert failure is not None and (failure.name, failure.step) == ("buffers", 2)


# --------------------------------------------------------------------------------------------------------------
# Tolerance, stale baselines
# --------------------------------------------------------------------------------------------------------------


def test_a_tolerance_is_labelled_and_lets_through_what_it_says() -> None:
    plain = alone_configs()["plain"]
    loose = replace(plain, gate=replace(GATE, tolerance=1e-3, steps=1))
    gated = gated_here(loose, root(), spoilers.scaled)
    assert gated.verdict.passed and gated.verdict.tier is Tier.tolerance and "tolerance" in gated.verdict.text()
    row = next(g for g in gated.verdict.gradients if g.tier == "tolerance")
    assert row.power_scale == pytest.approx(1e-3) and row.margin == pytest.approx(0.24, rel=1e-3)
    assert row.power_element == pytest.approx(1e-3 * 5**0.5), "all of the norm in one of its five elements"
    strict = replace(plain, gate=replace(GATE, tolerance=1e-4, steps=1))
    assert gated_here(strict, root(), spoilers.scaled).failed == ["gradients"]


def test_a_tolerance_passes_no_infinity() -> None:
    loose = replace(alone_configs()["plain"], gate=replace(GATE, tolerance=1e9, steps=1))
    assert "gradients" in gated_here(loose, root(), spoilers.one_infinity).failed


@pytest.mark.parametrize(("spoil", "config"), [(spoilers.other_weights, "plain"), (spoilers.other_buffers, "normed")])
def test_a_reused_baseline_of_other_weights_is_stale_and_not_a_fault(spoil: Any, config: str) -> None:
    """Even if only some of the weights differ."""
    with pytest.raises(StaleBaseline, match="other initial weights"):
        gated_here(alone_configs()[config], root(), spoil, reused=True)
