"""What the pattern of differences points to, in sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distbench.runs.diff import Diff
    from distbench.runs.diff_rows import Tensors

WORK = ("model.", "data.", "loss.", "seed.", "global_batch")
"""Settings that decide what is computed: with other values, other numbers are right."""


UPDATE = ("optimizer.", "clip_norm")
"""Settings that decide what is done with the gradients."""


def explain(found: Diff) -> list[str]:
    """What the pattern of differences points to. Says nothing rather than something it has no evidence for."""
    said = []
    # A key that only one side has came with another version of distbench, or with another kind of model.
    config = [s.key for s in found.settings if s.section == "config" and not s.unused and not s.missing]
    other_work = [key for key in config if key.startswith(WORK)]
    if other_work:
        said.append(
            f"A and B were asked to compute different things ({_some(other_work)}), so their numbers may differ."
        )
    elif any(s.key == "initial_weights" and s.a is not None and s.b is not None for s in found.settings):
        said.append("A and B started from different weights.")
    if other_update := [key for key in config if key.startswith(UPDATE)]:
        said.append(f"They update their weights otherwise ({_some(other_update)}): steps after the first may differ.")
    dtypes = [
        f"{s.key.removeprefix('dtypes.')} {s.a} and {s.b}"
        for s in found.settings
        if s.key.startswith("dtypes.") and s.a is not None and s.b is not None  # a run that ended early knows none
    ]
    if dtypes:
        said.append(f"They ran in other dtypes ({_some(dtypes)}): a difference of that size is the price of precision.")
    said += dict.fromkeys(text for part in found.gradients for text in part.replicas)
    if not found.differs:
        return said
    first = found.first_gradients
    if first is not None:
        said += _explain_gradients(found, first)
    elif found.gradients and found.weights is not None and found.weights.differs:
        said.append(
            "Gradients agree in every step compared and weights do not: look at the optimizer (state, groups, decay, "
            "learning rate), at clipping, and at steps that kept no gradients."
        )
    return said


def _explain_gradients(found: Diff, first: Tensors) -> list[str]:
    said = []
    steps = [part.step_a for part in found.gradients]
    if found.gradients[0] is not first:
        said.append(
            f"Gradients agree up to step {steps[found.gradients.index(first) - 1]} and first differ at step "
            f"{first.step_a}: look at what is carried from step to step (optimizer state, loss scaler, random state, "
            "data order)."
        )
    losses = found.losses
    if losses is not None and first.step_a in losses.steps:
        at = losses.steps.index(first.step_a)
        if losses.a[at] == losses.b[at]:
            said.append(
                f"The losses of step {first.step_a} are equal: the difference arises in the backward pass, in the "
                "reduction of gradients, or in what is done to them before they were recorded."
            )
    factor = _common_factor(first)
    if factor is not None:
        said.append(
            f"In every parameter that differs A is {factor:.9g} times B, with cosine 1: a scale. Usual causes: "
            "averaged over ranks twice or never, the divisor of accumulation or of the loss, a loss scale left in."
        )
    if 0 < len(first.differing) <= len(first.rows) // 4:
        names = _some([row.name for row in first.differing])
        said.append(
            f"Only {len(first.differing)} of {len(first.rows)} parameters differ ({names}): look at what is special "
            "about them (tied, frozen, wrapped or grouped differently, not synchronised)."
        )
    if any(row.relation == "nonfinite" for row in first.differing):
        said.append("There are NaNs or infinities: differences elsewhere may all come from them.")
    biggest = max((row.relative for row in first.differing if row.relative is not None), default=None)
    if biggest is not None and biggest < 1e-6 and all(r.relative is not None for r in first.differing):
        said.append(
            f"The largest relative difference at step {first.step_a} is {biggest:.2g}: of the size that another order "
            "of summation makes in fp32 (6e-8 a rounding)."
        )
    return said


def _common_factor(part: Tensors) -> float | None:
    """The one factor by which a is b in every parameter that differs, where there is one and it is not 1."""
    factors = []
    for row in part.differing:
        if row.alpha is None or row.cosine is None or abs(row.cosine - 1) > 1e-9:
            return None
        factors.append(row.alpha)
    if not factors or max(factors) - min(factors) > 1e-6 * abs(factors[0]) or abs(factors[0] - 1) < 1e-6:
        return None
    return factors[0]


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
