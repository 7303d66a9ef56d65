"""One parameter's row in a comparison: the same figures whether they are exact or estimated, and which they are."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace

from distbench.numerics.compare import Comparison, TensorDifference
from distbench.numerics.summary import ParameterSummary, Summary
from distbench.numerics.summary_difference import Difference, Relation, estimate_difference

Pair = tuple[int | None, int | None]
"""Steps of a and b; None where a file does not say."""

SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149, "float64": 2.0**-1074}
"""The smallest positive number of each dtype: what is not further from zero is within any positive tolerance."""


@dataclass(frozen=True)
class Row:
    """One parameter that both sides have. With a and b its values; what is not known is None."""

    name: str
    relation: str
    """`bitwise`, `equal` (in value), `different`, `nonfinite`, `none`, `shape`, `incomplete` or `not_compared`."""
    differs: bool
    """Beyond the tolerance."""
    exact: bool
    """Whether figures are exact, or estimated from projections."""
    detail: str = ""
    uncertain: bool = False
    """The tolerance is within the estimate's own error."""
    shape_a: tuple[int, ...] = ()
    shape_b: tuple[int, ...] = ()
    dtype_a: str = ""
    dtype_b: str = ""
    distance: float | None = None
    """|a - b|, L2."""
    distance_error: float | None = None
    """Its standard error; 0 where it is exact."""
    distance_low: float | None = None
    distance_high: float | None = None
    """The true distance is between them in 95 % of cases (docs/gradient-summaries.md)."""
    relative: float | None = None
    """distance / |b|."""
    cosine: float | None = None
    cosine_error: float | None = None
    alpha: float | None = None
    """<a, b> / |b|^2: the factor by which a is b."""
    alpha_error: float | None = None
    """Standard error, as `cosine_error` is; 0 where it is exact."""
    norm_a: float | None = None
    norm_b: float | None = None
    nonfinite_a: int = 0
    nonfinite_b: int = 0
    num_different: int | None = None
    """Elements; known only where tensors were compared."""
    max_abs: float | None = None
    max_ulp: int | None = None

    @property
    def relative_error(self) -> float | None:
        """Standard error of `relative`."""
        if self.relative is None or self.distance_error is None or not self.distance:
            return None if self.relative is None else 0.0
        return self.relative * self.distance_error / self.distance

    @property
    def severity(self) -> tuple[bool, bool, float, float]:
        """A sorting key, the worst largest: what has no figure at all, then relative, then absolute difference."""
        same = self.relation in ("bitwise", "equal")
        relative = self.relative
        if relative is None:
            relative = math.inf if self.distance else 0.0
        return self.differs, self.distance is None and not same, relative, self.distance or 0.0


@dataclass(frozen=True)
class Tensors:
    """One set of tensors on both sides: the gradients of one step, or the weights."""

    what: str
    """`gradients` or `weights`."""
    step_a: int | None
    step_b: int | None
    method: str
    """`exact`, or `estimated`: from summaries, exact where digests are equal."""
    rows: list[Row]
    """Worst first."""
    only_a: list[str]
    only_b: list[str]
    order: list[str]
    """Names of `rows` in the order of the model."""
    notes: list[str] = field(default_factory=list)
    replicas: list[str] = field(default_factory=list)
    """Where ranks of one side did not agree on what they all hold."""

    @property
    def differing(self) -> list[Row]:
        return [row for row in self.rows if row.differs]

    @property
    def differs(self) -> bool:
        return bool(self.only_a or self.only_b or self.differing)

    @property
    def relative(self) -> float | None:
        """Of all parameters together that have a distance: sqrt(sum distance^2 / sum |b|^2)."""
        norm = math.hypot(*(row.norm_b or 0.0 for row in self.rows if row.distance is not None))
        relative = self._distance / norm if norm > 0 else math.nan
        return relative if math.isfinite(relative) else None

    @property
    def relative_error(self) -> float | None:
        """Standard error of `relative`: the squares of estimates of different parameters are independent."""
        relative = self.relative
        if not relative:
            return relative
        total = self._distance
        errors = [
            row.distance / total * (row.distance_error / total)
            for row in self.rows
            if row.distance and row.distance_error
        ]
        return relative * math.hypot(*errors)

    @property
    def _distance(self) -> float:
        return math.hypot(*(row.distance for row in self.rows if row.distance is not None))


def estimated_rows(a: Summary, b: Summary, pair: Pair, tolerance: float, what: str = "gradients") -> Tensors:
    """Compare two summaries: exactly where digests are equal, by their projections elsewhere."""
    notes = []
    comparable = a.seed == b.seed
    if not comparable:
        notes.append(
            f"projections have seeds {a.seed} (A) and {b.seed} (B), so distances cannot be estimated; equal digests "
            "are still equal gradients. Record both with one seed"
        )
    in_a, in_b = {p.name: p for p in a}, {p.name: p for p in b}
    differences = estimate_difference(a, b) if comparable else _without_projections(a, b)
    rows = [
        _estimated_row(d, in_a[d.name], in_b[d.name], tolerance, comparable)
        for d in differences
        if d.name in in_a and d.name in in_b
    ]
    return Tensors(
        what,
        *pair,
        "estimated",
        sorted(rows, key=lambda row: row.severity, reverse=True),
        only_a=[name for name in in_a if name not in in_b],
        only_b=[name for name in in_b if name not in in_a],
        order=[row.name for row in rows],
        notes=notes,
    )


def _without_projections(a: Summary, b: Summary) -> list[Difference]:
    """What digests, counts and norms say; distances only where they do not rest on projections."""
    return [
        d if d.exact else Difference(d.name, d.relation, nonfinite_a=d.nonfinite_a, nonfinite_b=d.nonfinite_b)
        for d in estimate_difference(a, replace(b, seed=a.seed))
    ]


def _estimated_row(d: Difference, a: ParameterSummary, b: ParameterSummary, tolerance: float, comparable: bool) -> Row:
    relation, detail, differs, uncertain = d.relation.value, "", True, False
    if d.relation in (Relation.BITWISE, Relation.EQUAL) and a.nonfinite:
        relation, detail = "nonfinite", f"the same bits, with {_nonfinite(a)}: never equal"
    elif d.relation in (Relation.BITWISE, Relation.EQUAL):
        differs = False
    elif d.relation is Relation.NONFINITE:
        detail = f"A has {_nonfinite(a)}, B has {_nonfinite(b)}"
    elif d.relation is Relation.NONE:
        other, side = (b, "A") if a.is_none else (a, "B")
        differs = other.zeros != other.numel
        detail = f"None in {side}, {'not zero' if differs else 'all zero'} in {'B' if side == 'A' else 'A'}"
    elif d.relation is Relation.SHAPE:
        detail = f"shape {list(a.shape)} in A, {list(b.shape)} in B"
    elif d.relation is Relation.INCOMPLETE:
        counts = f"{a.elements} of {a.numel} elements in A, {b.elements} of {b.numel} in B"
        detail = f"{counts}: replicas were summed, or ranks are missing"
    elif not comparable and not d.exact:
        # Not known to be within any tolerance, so it counts.
        relation, detail, uncertain = "different", "other projection seeds: no distance", tolerance > 0
    else:
        relation = "different"
        differs, uncertain, detail = _beyond(d, a, b, tolerance)
        if not differs and d.relation is Relation.UNKNOWN and tolerance == 0:
            relation = "equal"
    return Row(
        name=d.name,
        relation=relation,
        differs=differs,
        exact=d.exact or d.relation not in (Relation.DIFFERENT, Relation.UNKNOWN),
        detail=detail,
        uncertain=uncertain,
        shape_a=a.shape,
        shape_b=b.shape,
        dtype_a=a.dtype,
        dtype_b=b.dtype,
        distance=None if relation == "nonfinite" else _known(d.distance),
        distance_error=None if relation == "nonfinite" else _known(d.distance_error),
        distance_low=None if relation == "nonfinite" else _known(d.distance_low),
        distance_high=None if relation == "nonfinite" else _known(d.distance_high),
        relative=None if relation == "nonfinite" else _known(d.relative),
        cosine=_known(d.cosine),
        cosine_error=_known(d.cosine_error),
        alpha=_known(d.alpha),
        alpha_error=_known(d.alpha_error),
        norm_a=_known(a.norm),
        norm_b=_known(b.norm),
        nonfinite_a=a.nonfinite,
        nonfinite_b=b.nonfinite,
    )


def _beyond(d: Difference, a: ParameterSummary, b: ParameterSummary, tolerance: float) -> tuple[bool, bool, str]:
    """Whether a distance counts, whether its estimate leaves that open, and what to say about it."""
    if b.sum_squares == 0 or a.sum_squares == 0:
        detail = "B is all zero: absolute difference" if b.sum_squares == 0 else "A is all zero"
        nonzero = a.numel - min(a.zeros, b.zeros)
        floor = min(SMALLEST[a.dtype], SMALLEST[b.dtype]) * math.sqrt(nonzero) if tolerance > 0 else 0.0
        return d.distance > max(floor, tolerance * b.norm), False, detail
    if tolerance == 0 and d.relation is Relation.DIFFERENT:
        return True, False, ""  # the digest says so, however small the distance
    allowed = tolerance * b.norm + (0.0 if d.exact else d.rounding)
    uncertain = tolerance > 0 and d.distance_low <= allowed < d.distance_high
    detail = f"dtypes {a.dtype} and {b.dtype}: values compared" if d.relation is Relation.UNKNOWN else ""
    return not d.distance <= allowed, uncertain, detail  # where norms overflow it is NaN, and counts


def _nonfinite(p: ParameterSummary) -> str:
    parts = [f"{count} {name}" for count, name in ((p.nans, "NaN"), (p.infs, "inf")) if count]
    return " and ".join(parts) or "none"


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


# --- tensors


def exact_rows(what: str, pair: Pair, comparison: Comparison, tolerance: float, order: list[str]) -> Tensors:
    """Rows of an exact comparison; `order` names tensors in the order of the model as far as it is known."""
    rows = [_exact_row(tensor, tolerance) for tensor in comparison.tensors]
    rows += [
        Row(
            m.name,
            "shape",
            True,
            True,
            f"shape {list(m.shape_a)} in A, {list(m.shape_b)} in B",
            False,
            m.shape_a,
            m.shape_b,
        )
        for m in comparison.shape_mismatch
    ]
    rows += [
        Row(
            n.name,
            "bitwise" if n.bytes_equal else "not_compared",
            not n.bytes_equal,
            True,
            f"{n.reason}; bytes {'are equal' if n.bytes_equal else 'differ'}",
            dtype_a=n.dtype_a,
            dtype_b=n.dtype_b,
        )
        for n in comparison.not_compared
    ]
    known = {name: index for index, name in enumerate(order)}
    names = sorted((row.name for row in rows), key=lambda name: (known.get(name, len(known)), _natural(name)))
    rows.sort(key=lambda row: row.severity, reverse=True)
    return Tensors(
        what, *pair, "exact", rows, comparison.only_in_a, comparison.only_in_b, names, list(comparison.notes)
    )


def _exact_row(t: TensorDifference, tolerance: float) -> Row:
    details = []
    if t.num_nonfinite_different:
        relation = "nonfinite"
        details.append(
            f"not finite and different at {t.num_nonfinite_different} elements ({t.num_nan_mismatch} NaN on one side)"
        )
    elif t.bitwise_equal:
        relation = "bitwise"
    else:
        relation = "different" if t.num_different else "equal"
    if not t.num_nonfinite_different and (t.num_nonfinite_a or t.num_nonfinite_b):
        details.append(f"{t.num_nonfinite_a} elements are NaN or inf, the same on both sides")
    if t.dtype_a != t.dtype_b:
        details.append(f"dtypes {t.dtype_a} and {t.dtype_b}: values compared")
    if relation == "different" and t.relative_l2 is None:
        details.append(f"{t.relative_l2_reason}: absolute difference")
    return Row(
        name=t.name,
        relation=relation,
        differs=t.differs(tolerance),
        exact=True,
        detail="; ".join(details),
        shape_a=t.shape,
        shape_b=t.shape,
        dtype_a=t.dtype_a,
        dtype_b=t.dtype_b,
        distance=None if relation == "nonfinite" else t.l2_difference,
        distance_error=None if relation == "nonfinite" else 0.0,
        distance_low=None if relation == "nonfinite" else t.l2_difference,
        distance_high=None if relation == "nonfinite" else t.l2_difference,
        relative=t.relative_l2,
        cosine=t.cosine,
        cosine_error=None if t.cosine is None else 0.0,
        alpha=t.alpha,
        alpha_error=None if t.alpha is None else 0.0,
        norm_a=t.l2_a,
        norm_b=t.l2_b,
        nonfinite_a=t.num_nonfinite_a,
        nonfinite_b=t.num_nonfinite_b,
        num_different=t.num_different,
        max_abs=float(t.max_abs_difference),
        max_ulp=t.max_ulp,
    )


def _natural(name: str) -> list[tuple[int, str]]:
    """layers.2 before layers.10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d{1,18})", name)]
