"""From signatures to causes: each row of docs/gate.md's table, and "unknown" where nothing is known."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from distbench.config import Config, LocalLaunch, LossScaler
from distbench.numerics.diagnose import diagnose
from distbench.numerics.gate import Check, GradientCheck, Tier, Verdict
from distbench.numerics.locate import Location
from distbench.preflight import preset
from tests.configs import small


def config_of(ranks: int = 2, accumulation: int = 1, precision: str = "fp32") -> Config:
    config = small("ddp", accumulation=accumulation, precision=preset(precision))
    return replace(config, launch=LocalLaunch(nproc=ranks))


def gradient(name: str, alpha: float | None = 1.0, cosine: float | None = 1.0, **changes: Any) -> GradientCheck:
    off = None if alpha is None or cosine is None else math.hypot(alpha - 1, 1e-5 + math.sqrt(2 * (1 - cosine)))
    row = GradientCheck(name, 1, "free", "fail", off, cosine, alpha, 10.0, 100, 0, 1e-6, 0.1)
    return replace(row, **changes)


def verdict_of(
    *rows: GradientCheck, check: Check | None = None, fine: int = 0, also: list[Check] | None = None
) -> Verdict:
    """`fine`: parameters that agree."""
    good = [gradient(f"good.{i}", tier="bitwise", relative_l2=0.0, violations=0) for i in range(fine)]
    step = rows[0].step if rows else 1
    failure = check or Check("gradients", step, "free", False, detail="outside the bound")
    return Verdict(False, Tier.fail, [*(also or []), failure], [*rows, *good], len(rows) + fine)


REDUCTION = Location("reduction", 1, local_gradients_agree=True)


@pytest.mark.parametrize(
    ("ranks", "accumulation", "alpha", "text"),
    [
        (2, 1, 2.0, "summed, not averaged (world size 2)"),
        (2, 1, 0.5, "averaged twice (world size 2)"),
        (4, 1, 0.25, "averaged twice (world size 4)"),
        (2, 3, 3.0, "accumulation divisor missing (accumulation 3)"),
        (2, 3, 1 / 3, "divided by the accumulation twice (accumulation 3)"),
        (2, 3, 6.0, "neither averaged nor divided by the accumulation"),
        (3, 1, math.sqrt(3), "the square root of the world size (3)"),
        (2, 2, 0.5, "averaged twice (world size 2) or divided by the accumulation twice (accumulation 2)"),
        (2, 1, 1.7, "scaled by 1.7, no known factor of this run"),
        (2, 1, 1 + 2.4e-4, "scaled by 1.00024"),
    ],
)
def test_scales(ranks: int, accumulation: int, alpha: float, text: str) -> None:
    rows = [gradient("a", alpha), gradient("b", alpha * (1 + 1e-6))]
    found = diagnose(verdict_of(*rows), REDUCTION, config_of(ranks, accumulation))
    assert found.kind == "scale" and text in found.text
    assert "first seen in reduction, local gradients equal" in found.text
    assert any(line.startswith("a: relative L2") for line in found.evidence)


def test_the_loss_scale() -> None:
    config = config_of(precision="fp16")
    config = replace(config, precision=replace(config.precision, scaler=LossScaler(enabled=True, init_scale=1024.0)))
    for alpha, text in ((1024.0, "loss scale not undone (1024)"), (1 / 1024, "loss scale undone twice (1024)")):
        found = diagnose(verdict_of(gradient("a", alpha)), REDUCTION, config)
        assert found.kind == "scale" and text in found.text


@pytest.mark.parametrize(
    "rows",
    [
        [gradient("a", 2.0), gradient("b", 0.5)],  # no common factor
        [gradient("a", 2.0, 0.7)],  # another direction
        [gradient("a", -1.0, -1.0)],
        [gradient("a", None, None)],  # the baseline's is zero
        [gradient("a", 2.0), gradient("b", None, None)],
    ],
)
def test_what_is_no_scale(rows: list[GradientCheck]) -> None:
    assert diagnose(verdict_of(*rows), REDUCTION, config_of()).kind != "scale"


def test_a_low_precisions_rounding_is_no_scale() -> None:
    rows = [gradient(str(i), 1.002, 0.9999) for i in range(4)]
    found = diagnose(verdict_of(*rows), REDUCTION, config_of(precision="bf16"))
    assert (found.kind, "lower precision" in found.text) == ("reduction", True)


def test_unsynchronised_gradients() -> None:
    replicas = Check("replicas", 1, "free", False, detail="ranks hold different gradients: [1]", ranks=[1])
    rows = [gradient("a", 0.9, 0.8), gradient("b", 1.1, 0.7)]
    found = diagnose(verdict_of(*rows, check=replicas), REDUCTION, config_of())
    assert found.kind == "missing_sync" and "a, b" in found.text
    few = diagnose(verdict_of(gradient("c", 0.9, 0.8), fine=9), REDUCTION, config_of())
    assert few.kind == "missing_sync" and "part of the reduction is missing: c" in few.text


def test_a_corrupted_element() -> None:
    found = diagnose(verdict_of(gradient("a", 0.99, 0.97, violations=1), fine=3), REDUCTION, config_of())
    assert found.kind == "reduction" and "corruption" in found.text


def test_nonfinite_gradients_are_not_guessed_at() -> None:
    found = diagnose(verdict_of(gradient("a", 0.5, 1.0, nonfinite=3)), REDUCTION, config_of())
    assert found.kind == "unknown" and "non-finite gradients in a" in found.text


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_compute(phase: str) -> None:
    location = Location(phase, 1, "blocks.1", "Block", phase, ranks=[0], local_gradients_agree=False)
    found = diagnose(verdict_of(gradient("a", 0.9, 0.9)), location, config_of())
    assert found.kind == "before_communication" and f"{phase} of blocks.1 on ranks [0]" in found.text
    masked = replace(location, module="blocks.1.dropout", module_class="Dropout")
    assert "drew another mask" in diagnose(verdict_of(gradient("a", 0.9, 0.9)), masked, config_of()).text


def test_local_gradients() -> None:
    location = Location("local_gradients", 1, local_gradients_agree=False)
    location.ranks = [0, 1]
    few = diagnose(verdict_of(gradient("a", 0.9, 0.9), fine=9), location, config_of())
    assert few.kind == "wrapping" and "only a differ" in few.text
    every = diagnose(verdict_of(gradient("a", 0.9, 0.9), gradient("b", 0.8, 0.9)), location, config_of())
    assert every.kind == "data"


def test_one_ranks_gradient_is_no_wrapping() -> None:
    location = Location("local_gradients", 1, ranks=[1], local_gradients_agree=False)
    found = diagnose(verdict_of(gradient("a", 1.3, 0.99), fine=9), location, config_of())
    assert "gradients of a were changed on ranks [1] alone" in found.text and found.kind == "before_communication"


def test_rounding_is_no_scale_and_no_wrapping() -> None:
    location = Location("local_gradients", 1, ranks=[0, 1], local_gradients_agree=False)
    row = gradient("a", 1 + 1e-9, 1.0, relative_l2=6e-8)
    found = diagnose(verdict_of(row), location, config_of())
    assert "gradients of a add up in another order or precision" in found.text and "scaled" not in found.text


def test_micro_batches_are_not_lost_where_there_is_one() -> None:
    location = Location("local_gradients", 1, ranks=[0, 1], local_gradients_agree=False)
    verdict = verdict_of(gradient("a", 0.9, 0.9), gradient("b", 0.8, 0.9))
    assert "changed in or after backward" in diagnose(verdict, location, config_of()).text
    assert "micro-batches lost" in diagnose(verdict, location, config_of(accumulation=2)).text


def test_what_enters_a_module_is_not_its_own_fault() -> None:
    location = Location("forward", 1, "head", "Linear", "forward", inputs_agree=False, local_gradients_agree=False)
    found = diagnose(verdict_of(gradient("a", 0.9, 0.9)), location, config_of())
    assert "what enters head in forward differs already" in found.text and "computes something else" not in found.text


def test_a_later_steps_own_weights_are_not_vouched_for() -> None:
    location = replace(REDUCTION, step=2)
    found = diagnose(verdict_of(gradient("a", 0.9, 0.9, step=2)), location, config_of())
    assert "local gradients from the baseline's weights equal" in found.text
    assert "weights that changed between the steps" in found.text


def test_later_steps() -> None:
    row = gradient("a", 0.9, 0.9, step=2)
    location = Location("local_gradients", 2, local_gradients_agree=False)
    assert diagnose(verdict_of(row), location, config_of()).kind == "later_steps"


@pytest.mark.parametrize(
    ("name", "step", "kind"),
    [
        ("samples", 1, "data"),
        ("samples", 2, "later_steps"),
        ("structure", 1, "wrapping"),
        ("initial_weights", 1, "before_communication"),
        ("initial_buffers", 1, "before_communication"),
        ("buffers", 2, "later_steps"),
        ("dtypes", 1, "before_communication"),
        ("norm", 1, "clipping"),
        ("clip", 1, "clipping"),
        ("plain_sgd", 1, "optimizer"),
        ("update", 1, "optimizer"),
        ("optimizer_groups", 1, "optimizer"),
        ("replicas_after", 1, "optimizer"),
        ("representable", 1, "reduction"),
        ("reported", 1, "missing_sync"),
        ("something new", 1, "unknown"),
    ],
)
def test_checks_that_name_their_cause(name: str, step: int, kind: str) -> None:
    check = Check(name, step, "free", False, detail="the detail", parameter="a.weight")
    found = diagnose(verdict_of(check=check), Location(name, step), config_of())
    assert found.kind == kind
    assert "the detail" not in found.text, "the verdict says it, right before"
    assert found.evidence.count("the detail") == 1


def test_what_enters_backward() -> None:
    """The loss itself is equal, so it is not where anything was first seen."""
    location = Location("loss", 1, None, "loss", "backward", local_gradients_agree=False)
    found = diagnose(verdict_of(gradient("a", 0.9, 0.9), gradient("b", 0.8, 0.9)), location, config_of())
    assert found.kind == "data" and "the loss is right" in found.text
    assert "first seen in the gradient that enters backward (the loss is equal)" in found.text


def test_losses() -> None:
    count = Check("loss", 1, "free", False, detail="normalised by [6], the baseline by 12")
    assert diagnose(verdict_of(check=count), Location("loss", 1), config_of()).kind == "data"
    loss = Check("loss", 1, "free", False, detail="rank 0 has loss sum 1.0, the baseline 2.0")
    assert diagnose(verdict_of(check=loss), Location("loss", 1), config_of()).kind == "data"
    module = Location("forward", 1, "head", "Linear", "forward")
    assert "head computes something else" in diagnose(verdict_of(check=loss), module, config_of()).text
    dropout = Location("forward", 1, "drop", "Dropout", "forward")
    assert "drew another mask" in diagnose(verdict_of(check=loss), dropout, config_of()).text


def test_the_first_failure_is_diagnosed_and_no_later_one() -> None:
    first = Check("samples", 1, "free", False, detail="other samples")
    found = diagnose(verdict_of(gradient("a", 2.0), also=[first]), Location("samples", 1), config_of())
    assert found.kind == "data" and "other samples" in found.text
