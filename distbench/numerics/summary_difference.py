"""How far two gradients are apart, from their summaries alone.

Why 16 numbers can say so: y_p = sum_i s_p(i) g_i with random signs has E y_p^2 = |g|^2, and y is linear, so
the mean of (y_p(a) - y_p(b))^2 estimates |a - b|^2. The norms are known exactly, so only the angle is estimated.
Derivation of the errors: docs/gradient-summaries.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from distbench.errors import SummaryError
from distbench.numerics.summary import CHUNK, ParameterSummary, Summary
from distbench.numerics.summary_torch import LANES, PROJECTIONS, UNIT

RELATIVE_ERROR = math.sqrt(1 / (2 * PROJECTIONS))
"""Largest standard error of an estimated distance, relative to it: sqrt(2/k) for its square, half that for itself."""

LIKELY = (0.745, 1.52)
"""The true distance is within these multiples of one that is estimated alone in 95 % of cases."""


class Relation(StrEnum):
    """What is known for certain about two gradients of one parameter."""

    BITWISE = "bitwise"
    """Same shape, dtype and digest: the same bits, NaNs included."""
    EQUAL = "equal"
    """Same values in other bits or none at all: both None, or both all zero."""
    DIFFERENT = "different"
    """Digests differ."""
    UNKNOWN = "unknown"
    """Other dtypes, so digests cannot tell; the distance between the values is estimated."""
    NONFINITE = "nonfinite"
    """NaN or inf on either side, and not bitwise equal: never equal, and no distance exists."""
    NONE = "none"
    """The gradient is None on one side."""
    SHAPE = "shape"
    """Other shapes: nothing to compare."""
    INCOMPLETE = "incomplete"
    """On either side the shards did not cover the tensor exactly once: replicas summed, or a rank missing."""
    ONLY_A = "only_a"
    ONLY_B = "only_b"


@dataclass(frozen=True)
class Difference:
    """Estimates for one parameter, nan where there is none. With a and b the two gradients:"""

    name: str
    relation: Relation
    distance: float = math.nan
    """|a - b|, L2."""
    distance_error: float = math.nan
    """Its standard error: RELATIVE_ERROR * distance where the norms say nothing of it, less where they say most of it
    (a factor), 0 where the distance is exact."""
    distance_low: float = math.nan
    distance_high: float = math.nan
    """The true distance is between them in 95 % of cases."""
    rounding: float = math.nan
    """Bound on what float64 rounding can add to `distance`: below it, a distance says nothing."""
    relative: float = math.nan
    """distance / |b|; nan if b is zero."""
    cosine: float = math.nan
    """<a, b> / (|a| |b|); nan if either is zero."""
    cosine_error: float = math.nan
    """Standard error of the cosine, (1 - cosine^2) / sqrt(k (1 + cosine^2))."""
    alpha: float = math.nan
    """<a, b> / |b|^2: the factor by which a is b, if it is."""
    alpha_error: float = math.nan
    nonfinite_a: int = 0
    nonfinite_b: int = 0

    @property
    def exact(self) -> bool:
        """Whether `distance` is known and not estimated."""
        return self.distance_error == 0


def estimate_difference(a: Summary, b: Summary) -> list[Difference]:
    """Compare two summaries parameter by parameter, in the order of `a` and then of what only `b` has.

    Raises SummaryError if their projections were made with different seeds.
    """
    if a.seed != b.seed:
        raise SummaryError(f"summaries have projection seeds {a.seed} and {b.seed}: only equal seeds can be compared")
    in_b = {parameter.name: parameter for parameter in b}
    differences = []
    for parameter in a:
        other = in_b.pop(parameter.name, None)
        if other is None:
            differences.append(Difference(parameter.name, Relation.ONLY_A))
        else:
            differences.append(compare(parameter, other))
    return differences + [Difference(name, Relation.ONLY_B) for name in in_b]


@np.errstate(over="ignore", invalid="ignore")  # sums may be any numbers at all; what comes out is looked at, not how
def compare(a: ParameterSummary, b: ParameterSummary) -> Difference:
    """Compare two gradients of one parameter, summarised with one seed under one name."""
    relation = _relation(a, b)
    counts = {"nonfinite_a": a.nonfinite, "nonfinite_b": b.nonfinite}
    if relation in (Relation.BITWISE, Relation.EQUAL):
        one = 1.0 if a.sum_squares > 0 and not a.nonfinite else math.nan
        return Difference(
            a.name,
            relation,
            distance=0.0,
            distance_error=0.0,
            distance_low=0.0,
            distance_high=0.0,
            rounding=0.0,
            relative=0.0 if one == 1.0 else math.nan,
            cosine=one,
            cosine_error=0.0 * one,
            alpha=one,
            alpha_error=0.0 * one,
            **counts,
        )
    if relation not in (Relation.DIFFERENT, Relation.UNKNOWN):
        return Difference(a.name, relation, **counts)

    d = _angle(a, b)
    if a.sum_squares == 0 or b.sum_squares == 0 or a.numel == 1:
        distance = abs(a.sum - b.sum) if a.numel == 1 else a.norm + b.norm
        distance_error, low, high, rounding = 0.0, distance, distance, 0.0
    else:
        rounding = 1.5 * (_rounding(a) + _rounding(b))  # of the projections, and half as much of the norms
        distance, distance_error, low, high = _distance(a.norm, b.norm, d, rounding)
    cosine, cosine_error = 1.0 - d, _cosine_error(d)
    scale = a.norm / b.norm if b.sum_squares > 0 else math.nan
    return Difference(
        a.name,
        relation,
        distance=distance,
        distance_error=distance_error,
        distance_low=low,
        distance_high=high,
        rounding=rounding,
        relative=distance / b.norm if b.sum_squares > 0 else math.nan,
        cosine=cosine,
        cosine_error=cosine_error,
        alpha=cosine * scale,
        alpha_error=cosine_error * scale,
        **counts,
    )


def _relation(a: ParameterSummary, b: ParameterSummary) -> Relation:
    if a.shape != b.shape:
        return Relation.SHAPE
    if not (a.complete and b.complete):
        return Relation.INCOMPLETE
    if a.is_none or b.is_none:
        return Relation.EQUAL if a.is_none and b.is_none else Relation.NONE
    if a.dtype == b.dtype and a.digest == b.digest:
        return Relation.BITWISE
    if a.nonfinite or b.nonfinite:
        return Relation.NONFINITE
    if a.zeros == b.zeros == a.numel:
        return Relation.EQUAL
    return Relation.DIFFERENT if a.dtype == b.dtype else Relation.UNKNOWN


def _rounding(x: ParameterSummary) -> float:
    """Bound on the rounding error of a root mean square of projections: gamma_m sum |g|.

    m additions a path: 5 in a unit's transform, units of a chunk, lanes, chunks, and up to 4096 ranks.
    With u = 2^-53 it holds for any order of summation (Higham 2002, ch. 4), and for shards with runs of at
    least a unit; with shorter ones a chunk spans more units.
    """
    additions = 5 + CHUNK // UNIT + LANES + -(-x.numel // CHUNK) + 4096
    return min(additions, x.numel) * 2.0**-53 * x.sum_abs


def _distance(norm_a: float, norm_b: float, d: float, rounding: float) -> tuple[float, float, float, float]:
    """|a - b| from the exact norms and the estimated d = 1 - cosine; its standard error, and the 95 % interval.

    |a - b|^2 = (|a| - |b|)^2 + 2 |a| |b| d = (|a| + |b|)^2 - 2 |a| |b| (2 - d). In each form the first term is exact and
    the second estimated; that with the smaller second is taken, so a factor, or a sign, is known to all digits.
    """
    near, far = (norm_a - norm_b) ** 2, (norm_a + norm_b) ** 2
    estimated = 2.0 * norm_a * norm_b * min(d, 2.0 - d)
    distance = math.sqrt(near + estimated if d <= 1.0 else max(far - estimated, near))
    error = RELATIVE_ERROR * max(estimated, rounding**2) / max(distance, rounding)
    least, most = (estimated * factor**2 for factor in LIKELY)
    low, high = (near + least, near + most) if d <= 1.0 else (far - most, far - least)
    return distance, error, math.sqrt(max(low, near)), math.sqrt(min(high, far))


def _angle(a: ParameterSummary, b: ParameterSummary) -> float:
    """Maximum-likelihood d = 1 - cosine, given the exact norms (Li, Hastie, Church 2006); nan where one is zero.

    For unit vectors with projections u and v, and d = 1 - cosine, the likelihood depends on P = |u + v|^2 and
    D = |u - v|^2 alone. That form does not cancel for nearly parallel gradients: a pure scale error gives
    d = 0, so alpha to all digits.
    """
    if a.sum_squares == 0 or b.sum_squares == 0:
        return math.nan
    u, v = a.projections / a.norm, b.projections / b.norm
    return _most_likely(float(np.sum((u + v) ** 2)), float(np.sum((u - v) ** 2)))


def _cosine_error(d: float) -> float:
    """Standard error of 1 - d."""
    return d * (2.0 - d) / math.sqrt(PROJECTIONS * (1.0 + (1.0 - d) ** 2))


def _most_likely(plus: float, minus: float) -> float:
    """The d in [0, 2] with the least -log likelihood k/2 log(d (2-d)) + P / (4 (2-d)) + D / (4 d)."""
    k = PROJECTIONS
    if minus < 1e-6 or plus < 1e-6:  # nearly (anti)parallel: to first order, where it is exact to all digits
        return minus / (2 * k) if minus < plus else 2 - plus / (2 * k)
    # Stationary where 2k d (2-d) (2-2d) + P d^2 - D (2-d)^2 = 0: -4D at 0 and 4P at 2, so a root is between.
    roots = np.roots([4 * k, plus - minus - 12 * k, 8 * k + 4 * minus, -4 * minus])
    d = np.clip(roots.real, 1e-12, 2 - 1e-12)
    cost = k / 2 * np.log(d * (2 - d)) + plus / (4 * (2 - d)) + minus / (4 * d)
    return float(d[np.argmin(cost)])
