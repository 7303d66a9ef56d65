"""One pass over two equally long runs of elements, giving all sums and counts a comparison is made of.

Floating-point elements are handled as two views of the same thing: a *code*, the sign-magnitude integer of
the element's bits (so that equality, zeros, NaN and distances in units in the last place are integer
operations), and a *value*, the same number in fp32 or fp64, exactly. The functions here are written with
NumPy and serve every dtype; `compare_numba` fuses the frequent cases and must return the same.

Sums run over the positions where both sides are finite. They are fp64 sums of products that are exact in
fp64 for every dtype but fp64 itself and 64-bit integers, taken in runs of at most `BLOCK` elements in any
order and added over runs with compensation: relative error below BLOCK * 2**-53 < 2.3e-13 (that of <a, b>
relative to sum |a b|; that of |a - b|^2 with the rounding of a - b on top, 2**-52), typically 1e-15.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from distbench.numerics.tensor_files import Bytes

BLOCK = 2048
"""Elements summed without compensation: few enough for the first-level cache."""

SPAN = 8 * BLOCK
"""Elements a NumPy pass takes at once: it needs about 3 MiB of temporaries for them, mostly in cache."""

TEMPORARY_BYTES = 64
"""Memory per pair of elements that `decode` and `widen` take; a span's temporaries are not in it."""

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class FloatFormat:
    """How the bits of a floating-point dtype are read. A magnitude is a code without its sign."""

    name: str
    """As in torch: `"bfloat16"`."""
    itemsize: int
    infinite_from: int
    """Smallest magnitude that is not a finite number."""
    nan_from: int
    """Smallest magnitude that is NaN."""
    smallest: float
    """The smallest positive number."""


@dataclass(frozen=True)
class IntegerFormat:
    """A dtype whose elements are compared exactly, as integers; booleans too, by their byte."""

    name: str
    itemsize: int


FLOAT32 = FloatFormat("float32", 4, 0x7F80_0000, 0x7F80_0001, 2.0**-149)
FLOAT64 = FloatFormat("float64", 8, 0x7FF0_0000_0000_0000, 0x7FF0_0000_0000_0001, 2.0**-1074)

FORMATS: dict[str, FloatFormat | IntegerFormat] = {
    "F64": FLOAT64,
    "F32": FLOAT32,
    "BF16": FloatFormat("bfloat16", 2, 0x7F80, 0x7F81, 2.0**-133),
    "F16": FloatFormat("float16", 2, 0x7C00, 0x7C01, 2.0**-24),
    # The fp8 dtypes differ in what they spend on infinity and NaN: e4m3fn has no infinity, the fnuz ones have
    # one NaN in place of -0, e8m0 (a scale) has neither sign nor zero: its codes are its bits plus one.
    "F8_E5M2": FloatFormat("float8_e5m2", 1, 0x7C, 0x7D, 2.0**-16),
    "F8_E4M3": FloatFormat("float8_e4m3fn", 1, 0x7F, 0x7F, 2.0**-9),
    "F8_E5M2FNUZ": FloatFormat("float8_e5m2fnuz", 1, 0x80, 0x80, 2.0**-17),
    "F8_E4M3FNUZ": FloatFormat("float8_e4m3fnuz", 1, 0x80, 0x80, 2.0**-10),
    "F8_E8M0": FloatFormat("float8_e8m0fnu", 1, 0x100, 0x100, 2.0**-127),
    "I64": IntegerFormat("int64", 8),
    "I32": IntegerFormat("int32", 4),
    "I16": IntegerFormat("int16", 2),
    "I8": IntegerFormat("int8", 1),
    "U64": IntegerFormat("uint64", 8),
    "U32": IntegerFormat("uint32", 4),
    "U16": IntegerFormat("uint16", 2),
    "U8": IntegerFormat("uint8", 1),
    "BOOL": IntegerFormat("bool", 1),
}
"""Every safetensors dtype that can be compared by value, by its code in the file."""


def is_supported(dtype: str) -> bool:
    """Whether a safetensors dtype can be compared by value here; fp8 only where this torch has the dtype."""
    return dtype in FORMATS and (not dtype.startswith("F8_") or hasattr(torch, FORMATS[dtype].name))


class Sums(NamedTuple):
    """Sums of products over a run of element pairs (a, b)."""

    aa: float = 0.0
    bb: float = 0.0
    ab: float = 0.0
    dd: float = 0.0
    """Of (a - b)^2."""

    @classmethod
    def of(cls, a: Array, b: Array, difference: Array) -> Sums:
        """From fp64 arrays."""
        return cls(*(float(np.sum(x * y)) for x, y in ((a, a), (b, b), (a, b), (difference, difference))))

    @classmethod
    def total(cls, parts: Sequence[Sums]) -> Sums:
        """Of all parts together, rounded once; infinite or NaN where squares of fp64 numbers overflowed."""
        try:
            return cls(*(math.fsum(column) for column in zip(*parts, strict=True)))
        except (OverflowError, ValueError):
            return cls(*(float(sum(column)) for column in zip(*parts, strict=True)))


@dataclass
class Totals:
    """Sums and counts over a run of element pairs (a, b). Runs of one tensor add up by `combine`."""

    sums: Sums = field(default_factory=Sums)
    different: int = 0
    """Positions whose values differ: -0 equals +0, and what is not finite equals its own bits only."""
    bits_differ: bool = False
    nonfinite_a: int = 0
    nonfinite_b: int = 0
    nonfinite_different: int = 0
    nan_mismatch: int = 0
    """Positions that are NaN on exactly one side."""
    zero_a: int = 0
    zero_b: int = 0
    max_difference: float | int = 0
    max_index: int = 0
    """First position of `max_difference`, counted from the start of the run."""
    max_ulp: int = 0
    max_a: float | int = 0
    max_b: float | int = 0
    """Largest finite magnitude; kept for fp64 only, whose squares can overflow or vanish."""

    def shifted(self, start: int) -> Totals:
        """The same, for a run that starts at element `start` of its tensor."""
        return replace(self, max_index=self.max_index + start)


def combine(parts: Sequence[Totals]) -> Totals:
    """Totals of consecutive runs, in ascending order, with indexes counted from a common start."""
    if len(parts) == 1:
        return parts[0]
    worst = max(parts, key=lambda part: part.max_difference, default=Totals())  # the first one, where several tie
    return Totals(
        sums=Sums.total([part.sums for part in parts]),
        different=sum(part.different for part in parts),
        bits_differ=any(part.bits_differ for part in parts),
        nonfinite_a=sum(part.nonfinite_a for part in parts),
        nonfinite_b=sum(part.nonfinite_b for part in parts),
        nonfinite_different=sum(part.nonfinite_different for part in parts),
        nan_mismatch=sum(part.nan_mismatch for part in parts),
        zero_a=sum(part.zero_a for part in parts),
        zero_b=sum(part.zero_b for part in parts),
        max_difference=worst.max_difference,
        max_index=worst.max_index,
        max_ulp=max((part.max_ulp for part in parts), default=0),
        max_a=max((part.max_a for part in parts), default=0),
        max_b=max((part.max_b for part in parts), default=0),
    )


def aligned(raw: Bytes, dtype: npt.DTypeLike) -> Array:
    """The bytes as an array of `dtype`; copied only where the file did not align them."""
    itemsize = np.dtype(dtype).itemsize
    if raw.ctypes.data % itemsize:
        raw = raw.copy()
        raw.flags.writeable = False
    return raw.view(dtype)


class Decoded(NamedTuple):
    """A run of floating-point elements: two 1-dim arrays of one length."""

    codes: Array
    """int32, for fp64 int64."""
    values: Array
    """fp32, for fp64 fp64."""

    def cut(self, start: int, stop: int) -> Decoded:
        """Elements `start` to `stop`, not copied."""
        return Decoded(self.codes[start:stop], self.values[start:stop])


def decode(raw: Bytes, form: FloatFormat) -> Decoded:
    """The elements in `raw`; for fp32 and fp64 not copied."""
    if form.itemsize == 8:
        codes = aligned(raw, np.int64)
        return Decoded(codes, codes.view(np.float64))
    if form.itemsize == 4:
        codes = aligned(raw, np.int32)
        return Decoded(codes, codes.view(np.float32))
    if form.itemsize == 2:
        bits = aligned(raw, np.uint16).astype(np.uint32)
        codes = ((bits & 0x8000) << 16 | bits & 0x7FFF).view(np.int32)
        if form.name == "bfloat16":
            return Decoded(codes, (bits << 16).view(np.float32))
        return Decoded(codes, aligned(raw, np.float16).astype(np.float32))
    code_table, value_table = _byte_tables(form.name)
    return Decoded(code_table[raw], value_table[raw])


@functools.cache
def _byte_tables(name: str) -> tuple[Array, Array]:
    """Code and value of each of the 256 bytes of an fp8 dtype, the values as torch reads them."""
    bits = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    values = bits.view(getattr(torch, name)).to(torch.float32).numpy()
    codes = np.arange(256, dtype=np.int32)
    if name == "float8_e8m0fnu":
        codes += 1
    else:
        codes[0x80:] = (np.arange(0x80, dtype=np.uint32) | 0x8000_0000).view(np.int32)
        if name.endswith("fnuz"):
            codes[0x80] = 0x80
    return codes, values


def float_totals(a: Decoded, b: Decoded, form: FloatFormat) -> Totals:
    """Totals of as many elements of a as of b."""
    starts = range(0, len(a.codes), SPAN)
    return combine([_float_span(a.cut(i, i + SPAN), b.cut(i, i + SPAN), form).shifted(i) for i in starts])


def _float_span(decoded_a: Decoded, decoded_b: Decoded, form: FloatFormat) -> Totals:
    (codes_a, values_a), (codes_b, values_b) = decoded_a, decoded_b
    sign = np.iinfo(codes_a.dtype).min
    magnitude_a, magnitude_b = codes_a & ~sign, codes_b & ~sign
    finite_a, finite_b = magnitude_a < form.infinite_from, magnitude_b < form.infinite_from
    finite = finite_a & finite_b
    unequal = codes_a != codes_b
    max_ulp = 0
    if unequal.any():
        distance = _distance(_ordinals(codes_a, magnitude_a), _ordinals(codes_b, magnitude_b))
        max_ulp = int(np.where(finite, distance, 0).max())
    if not finite.all():
        values_a, values_b = np.where(finite, values_a, 0), np.where(finite, values_b, 0)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        a, b = values_a.astype(np.float64), values_b.astype(np.float64)
        difference = np.abs(a - b)
        index = int(difference.argmax())
        sums = Sums.of(a, b, difference)
    return Totals(
        sums=sums,
        different=int(np.count_nonzero(unequal & ((magnitude_a | magnitude_b) != 0))),
        bits_differ=bool(unequal.any()),
        nonfinite_a=len(codes_a) - int(np.count_nonzero(finite_a)),
        nonfinite_b=len(codes_b) - int(np.count_nonzero(finite_b)),
        nonfinite_different=int(np.count_nonzero(unequal & ~finite)),
        nan_mismatch=int(np.count_nonzero((magnitude_a >= form.nan_from) != (magnitude_b >= form.nan_from))),
        zero_a=len(codes_a) - int(np.count_nonzero(magnitude_a)),
        zero_b=len(codes_b) - int(np.count_nonzero(magnitude_b)),
        max_difference=float(difference[index]),
        max_index=index,
        max_ulp=max_ulp,
        max_a=float(np.abs(a).max()) if form.itemsize == 8 else 0,
        max_b=float(np.abs(b).max()) if form.itemsize == 8 else 0,
    )


def _ordinals(codes: Array, magnitudes: Array) -> Array:
    """Integers in the order of their numbers and one apart where these are neighbours; +-0 are both 0."""
    return np.where(codes < 0, -magnitudes, magnitudes)


def _distance(a: Array, b: Array) -> Array:
    """|a - b| as uint64, exactly: a signed difference that overflows is right again modulo 2**64."""
    return np.maximum(a, b).astype(np.uint64) - np.minimum(a, b).astype(np.uint64)


def integer_totals(a: Array, b: Array) -> Totals:
    """Totals of two 1-dim integer arrays of the same dtype and length; `max_difference` is an exact int."""
    return combine([_integer_span(a[i : i + SPAN], b[i : i + SPAN]).shifted(i) for i in range(0, len(a), SPAN)])


def _integer_span(a: Array, b: Array) -> Totals:
    difference = _distance(a, b)
    index = int(difference.argmax())
    x, y, d = a.astype(np.float64), b.astype(np.float64), difference.astype(np.float64)
    different = int(np.count_nonzero(difference))
    return Totals(
        sums=Sums.of(x, y, d),
        different=different,
        bits_differ=different > 0,
        zero_a=len(a) - int(np.count_nonzero(a)),
        zero_b=len(b) - int(np.count_nonzero(b)),
        max_difference=int(difference[index]),
        max_index=index,
    )


FloatPass = Callable[[Decoded, Decoded, FloatFormat], Totals]


@dataclass(frozen=True)
class Method:
    """How the elements of one pair of dtypes are compared."""

    compared_as: str
    """The dtype both sides were taken in; conversion to it is exact unless it says otherwise."""
    totals: Callable[[Bytes, Bytes], Totals]
    """From the bytes of equally many elements of a and of b."""
    itemsize_a: int
    itemsize_b: int
    exact: bool = False
    """Integers on both sides."""
    has_ulp: bool = False
    in_place: bool = False
    """Works on the bytes where they lie, without temporaries of their size."""
    smallest: float = 0.0
    """The smallest positive number of either dtype; 0 for integers."""


def choose_method(dtype_a: str, dtype_b: str, fused: ModuleType | None = None) -> Method:
    """The method for two safetensors dtypes that are both `is_supported`.

    `fused` is `compare_numba`, or None for NumPy alone.
    """
    form_a, form_b = FORMATS[dtype_a], FORMATS[dtype_b]
    float_pass = fused.float_totals if fused else float_totals
    sizes = form_a.itemsize, form_b.itemsize
    smallest = min((form.smallest for form in (form_a, form_b) if isinstance(form, FloatFormat)), default=0.0)

    if dtype_a == dtype_b and isinstance(form_a, FloatFormat):
        if fused and form_a.itemsize > 1:
            in_place = functools.partial(fused.raw_totals, form=form_a)
            return Method(form_a.name, in_place, *sizes, has_ulp=True, in_place=True, smallest=smallest)
        decoded = functools.partial(_decoded_totals, form=form_a, float_pass=float_pass)
        return Method(form_a.name, decoded, *sizes, has_ulp=True, smallest=smallest)

    if isinstance(form_a, IntegerFormat) and isinstance(form_b, IntegerFormat):
        common = np.result_type(_integer_dtype(form_a), _integer_dtype(form_b))
        if common.kind in "iu":
            name = form_a.name if form_a is form_b else common.name
            converted = functools.partial(_converted_integer_totals, form_a=form_a, form_b=form_b, common=common)
            return Method(name, converted, *sizes, exact=True)

    narrow = all(isinstance(form, FloatFormat) and form.itemsize < 8 for form in (form_a, form_b))
    wide = FLOAT32 if narrow else FLOAT64
    rounds = any(isinstance(form, IntegerFormat) and form.itemsize == 8 for form in (form_a, form_b))
    widened = functools.partial(_widened_totals, form_a=form_a, form_b=form_b, wide=wide, float_pass=float_pass)
    return Method(
        f"{wide.name} (64-bit integers rounded)" if rounds else wide.name,
        widened,
        *sizes,
        smallest=smallest,
    )


def _integer_dtype(form: IntegerFormat) -> np.dtype[Any]:
    return np.dtype(np.uint8 if form.name == "bool" else form.name)


def _decoded_totals(raw_a: Bytes, raw_b: Bytes, form: FloatFormat, float_pass: FloatPass) -> Totals:
    return float_pass(decode(raw_a, form), decode(raw_b, form), form)


def _converted_integer_totals(
    raw_a: Bytes, raw_b: Bytes, form_a: IntegerFormat, form_b: IntegerFormat, common: np.dtype[Any]
) -> Totals:
    a, b = aligned(raw_a, _integer_dtype(form_a)), aligned(raw_b, _integer_dtype(form_b))
    return integer_totals(a.astype(common, copy=False), b.astype(common, copy=False))


def _widened_totals(
    raw_a: Bytes,
    raw_b: Bytes,
    form_a: FloatFormat | IntegerFormat,
    form_b: FloatFormat | IntegerFormat,
    wide: FloatFormat,
    float_pass: FloatPass,
) -> Totals:
    a, b = widen(raw_a, form_a, wide), widen(raw_b, form_b, wide)
    # Bits of different dtypes cannot be identical, so NaN on both sides must not become so by conversion.
    a[np.isnan(a)] = np.nan
    b[np.isnan(b)] = -np.nan
    codes = np.dtype(f"int{8 * wide.itemsize}")
    return float_pass(Decoded(a.view(codes), a), Decoded(b.view(codes), b), wide)


def widen(raw: Bytes, form: FloatFormat | IntegerFormat, wide: FloatFormat) -> Array:
    """The elements in `raw` as a new array of the wider floating-point dtype."""
    values = decode(raw, form).values if isinstance(form, FloatFormat) else aligned(raw, _integer_dtype(form))
    return values.astype(wide.name)
