"""From a failure's signature to a named cause, with the evidence beside it. "unknown" is an answer, a guess is not.

Classes: `scale`, `missing_sync`, `reduction`, `data`, `before_communication`, `wrapping`, `clipping`, `optimizer`,
`later_steps`, `unknown` (docs/gate.md has the table).
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from distbench.config import Config, world_size
from distbench.numerics.bounds import unit_roundoff
from distbench.numerics.gate import Check, GradientCheck, Tier, Verdict
from distbench.numerics.locate import Location
from distbench.precision import DTYPES

RANDOM_MODULES = ("Dropout", "AlphaDropout", "FeatureAlphaDropout", "DropPath")


@dataclass
class Diagnosis:
    """A class of causes and, where the numbers name it, the cause itself."""

    kind: str
    text: str
    """One line: the cause, then where it was first seen."""
    evidence: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def diagnose(verdict: Verdict, location: Location, config: Config) -> Diagnosis:
    """Name the cause of the verdict's first failure. The failed check's own words stand before it, in `Verdict.text`."""
    check = verdict.first_failure
    assert check is not None, "nothing failed"
    failed = [g for g in verdict.gradients if g.tier == Tier.fail and g.step == check.step]
    kind, cause = _cause(check, failed, verdict, location, config)
    where = f"first seen in {_where(location)}"
    if location.local_gradients_agree is not None:
        # They were played again from the baseline's state: what a later step itself started from is not known.
        start = " from the baseline's weights" if check.step > 1 else ""
        where += f", local gradients{start} {'equal' if location.local_gradients_agree else 'differ'}"
    evidence = dict.fromkeys([check.detail, *location.evidence, *_numbers(failed)])
    return Diagnosis(kind, f"{cause}; {where}", [line for line in evidence if line])


def _where(location: Location) -> str:
    if location.module is not None and location.direction is not None:
        ranks = f" on ranks {location.ranks}" if location.ranks else ""
        return f"{location.direction} of {location.module}{ranks}"
    if location.phase == "loss" and location.direction == "backward":
        return "the gradient that enters backward (the loss is equal)"
    return location.phase.replace("_", " ")


def _numbers(failed: list[GradientCheck]) -> list[str]:
    return [
        f"{g.name}: relative L2 {_short(g.relative_l2)}, alpha {_short(g.alpha)}, cosine {_short(g.cosine)}, "
        f"{g.violations} elements outside the bound"
        for g in failed[:5]
    ]


def _short(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.6g}"


def _cause(
    check: Check, failed: list[GradientCheck], verdict: Verdict, location: Location, config: Config
) -> tuple[str, str]:
    later = check.step > 1
    if check.name == "samples":
        return ("later_steps", "sampler or epoch state") if later else ("data", "other samples than the baseline's")
    if check.name == "structure":
        return "wrapping", "wrapping changed the parameters"
    if check.name == "initial_weights":
        return "before_communication", "other initial weights than the baseline's"
    if check.name in ("initial_buffers", "buffers"):
        return ("later_steps" if later else "before_communication"), "other buffers than the baseline's"
    if check.name == "dtypes":
        return "before_communication", "another precision than the configured one"
    if check.name in ("norm", "clip"):
        return "clipping", "clipped by a norm that is not the global gradient's"
    if check.name == "weights_held":
        return "later_steps", "weights changed outside the optimizer"
    if check.name == "coverage" and "never run" in check.detail:
        return "later_steps", "the run did not go through the gate's steps"
    if check.name == "coverage":
        return "scale", "no optimizer step was compared"
    if check.name in ("scale", "next_scale"):
        return ("later_steps" if later else "scale"), "another loss scale than the baseline's"
    if check.name == "representable":
        return "reduction", "changed after the reduction"
    if check.name == "reported":
        return "missing_sync", "what is logged is not what was done"
    if check.name in ("plain_sgd", "update", "optimizer_groups", "unused_weights"):
        return "optimizer", _optimizer_cause(check)
    if check.name == "replicas_after":
        return "optimizer", "ranks took different steps"
    if check.name == "loss":
        return _loss_cause(check, location, later)
    if check.name == "replicas":
        return (
            "missing_sync",
            f"gradients are not reduced over all ranks: {_names(failed, location) or check.parameter}",
        )
    if check.name in ("gradients", "none_gradients"):
        return _gradient_cause(check, failed, verdict, location, config, later)
    return "unknown", "unknown"


def _names(failed: list[GradientCheck], location: Location) -> str:
    names = [g.name for g in failed] or location.parameters
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _optimizer_cause(check: Check) -> str:
    if check.name == "plain_sgd":
        return "the optimizer does not hold the module's parameters"
    return "the update is not the configured optimizer's (state, groups, decay or schedule)"


def _loss_cause(check: Check, location: Location, later: bool) -> tuple[str, str]:
    if "normalised by" in check.detail:
        return "data", "loss weighting"
    if location.module_class in RANDOM_MODULES:
        cause = f"random state: {location.module} drew another mask"
        return ("later_steps" if later else "before_communication"), cause
    if location.phase == "loss":
        return ("later_steps" if later else "data"), "the loss itself"
    return ("later_steps" if later else "before_communication"), _something_else(location, "forward")


def _something_else(location: Location, what: str) -> str:
    if location.inputs_agree is False:
        return (
            f"what enters {location.module or 'the model'} in {what} differs already, though no module before it does"
        )
    return f"{location.module or what} computes something else" + (f" in {what}" if location.module else "")


def _gradient_cause(
    check: Check,
    failed: list[GradientCheck],
    verdict: Verdict,
    location: Location,
    config: Config,
    later: bool,
) -> tuple[str, str]:
    if check.name == "none_gradients":
        # Where a few are missing they were frozen or not wrapped; where all are, nothing was ever reduced.
        if location.local_gradients_agree and not any(g.step == check.step for g in verdict.gradients):
            return "missing_sync", "gradients never reached the parameters"
        return "wrapping", "a parameter that should have a gradient has none, or one that should have none has one"
    replicas = next((c for c in verdict.checks if c.name == "replicas" and c.step == check.step and not c.passed), None)
    if replicas is not None and location.local_gradients_agree:
        return "missing_sync", f"gradients are not reduced over all ranks: {_names(failed, location)}"
    if any(g.nonfinite for g in failed):
        return ("later_steps" if later else "unknown"), f"non-finite gradients in {_names(failed, location)}"
    scale = _scale(failed, config)
    if scale is not None:
        return "scale", scale
    compared = [g for g in verdict.gradients if g.step == check.step]
    few = len(failed) <= max(1, len(compared) // 4)
    if location.phase == "reduction":
        if _one_element(failed):
            return "reduction", f"a few elements of {_names(failed, location)} changed in the reduction (corruption)"
        if later:
            return "later_steps", (
                "reduced gradients are not those of the baseline's weights, though step 1's were: gradients left over or "
                "left out, or weights that changed between the steps"
            )
        if all(g.cosine is not None and g.cosine > 0.98 for g in failed) and not few:
            return "reduction", "reduction in a lower precision than declared, or by another algorithm"
        if few:
            return "missing_sync", f"part of the reduction is missing: {_names(failed, location)}"
        return "missing_sync", "local gradients are right, but they are not what was reduced"
    if later:
        return "later_steps", f"state that step 1 does not use: {_names(failed, location)}"
    if location.phase == "loss":
        return "data", (
            "the loss is right, but not what enters backward: micro-batches weighted otherwise, or a hook on the output"
        )
    if location.phase in ("forward", "backward"):
        if location.module_class in RANDOM_MODULES:
            return "before_communication", f"random state: {location.module} drew another mask"
        return "before_communication", _something_else(location, location.phase)
    if location.phase == "local_gradients" and _rounding(failed, config):
        return "before_communication", f"gradients of {_names(failed, location)} add up in another order or precision"
    if location.phase == "local_gradients" and len(location.ranks) < world_size(config):
        return (
            "before_communication",
            f"gradients of {_names(failed, location)} were changed on ranks {location.ranks} alone, before any reduction",
        )
    if location.phase == "local_gradients" and few:
        return "wrapping", f"only {_names(failed, location)} differ, before any reduction: tying, wrapping or freezing"
    if location.phase == "local_gradients":
        lost = "micro-batches lost or weighted otherwise" if config.accumulation > 1 else "changed in or after backward"
        return "data", f"every rank's own gradient differs though its loss does not: {lost}"
    return "unknown", "unknown"


def _one_element(failed: list[GradientCheck]) -> bool:
    return bool(failed) and sum(g.violations for g in failed) <= 4


def _rounding(failed: list[GradientCheck], config: Config) -> bool:
    """Whether nothing is further off than a few dozen roundings of the compute dtype take it."""
    most = 32 * unit_roundoff(DTYPES[config.precision.compute_dtype])
    return bool(failed) and all(g.relative_l2 is not None and g.relative_l2 <= most for g in failed)


def _scale(failed: list[GradientCheck], config: Config) -> str | None:
    """All failing gradients point the right way and are off by one common factor."""
    usable = [g for g in failed if g.alpha is not None and g.cosine is not None]
    if not usable or len(usable) < len(failed):
        return None
    loose = 3e-2 if config.precision.reduce_dtype in ("bf16", "fp16") else 1e-4
    if any(g.cosine is None or g.cosine < 1 - loose for g in usable):
        return None
    if any(g.relative_l2 is not None and abs(g.alpha - 1) < g.relative_l2 / 2 for g in usable if g.alpha is not None):
        return None  # most of the difference is not along the gradient: rounding, not a factor
    alphas = [g.alpha for g in usable if g.alpha is not None]
    alpha = statistics.median(alphas)
    if alpha <= 0 or any(abs(a - alpha) > loose * abs(alpha) for a in alphas) or abs(alpha - 1) < 1e-12:
        return None
    if config.precision.reduce_dtype in ("bf16", "fp16") and abs(alpha - 1) < loose:
        return None  # rounding of a low precision, not a factor
    names = [text for factor, text in _factors(config).items() if abs(alpha - factor) <= 2 * loose * factor]
    known = " or ".join(names)
    return known or f"scaled by {alpha:.6g}, no known factor of this run"


def _factors(config: Config) -> dict[float, str]:
    n, k = world_size(config), config.accumulation
    scaler = config.precision.scaler
    factors: dict[float, str] = {}

    def add(factor: float, text: str) -> None:
        if not math.isclose(factor, 1.0):
            factors[factor] = f"{factors[factor]} or {text}" if factor in factors else text

    add(float(n), f"summed, not averaged (world size {n})")
    add(1 / n, f"averaged twice (world size {n})")
    add(float(k), f"accumulation divisor missing (accumulation {k})")
    add(1 / k, f"divided by the accumulation twice (accumulation {k})")
    if k > 1:
        add(float(n * k), f"neither averaged nor divided by the accumulation (world size {n}, accumulation {k})")
        add(1 / (n * k), f"divided twice by world size and accumulation ({n} x {k})")
    add(math.sqrt(n), f"divided by the square root of the world size ({n})")
    add(1 / math.sqrt(n), f"divided by the square root of the world size ({n}) too often")
    if scaler.enabled:
        add(scaler.init_scale, f"loss scale not undone ({scaler.init_scale:g})")
        add(1 / scaler.init_scale, f"loss scale undone twice ({scaler.init_scale:g})")
    return factors
