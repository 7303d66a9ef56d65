"""The frequent comparisons fused into few passes over blocks in cache; importing this needs numba.

Same results as `compare_kernels`, but for the last bits of the sums. The loops release the interpreter lock, so a
thread pool runs them side by side. What makes them fast is that each leaves the compiler nothing but a few
reductions over integers or fp64 numbers, without branches, which it turns into vector instructions. Hence several
short loops over a block in the first-level cache rather than one long one, which it does not vectorise as well;
codes as unsigned integers (numba declares the overflow of signed ones undefined); and |a - b| compared by its bits,
which have the same order, since a maximum of floats must mind NaN. Blocks with a number that is not finite are rare
and are handed back to NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from distbench.numerics import compare_kernels
from distbench.numerics.compare_kernels import (
    BLOCK,
    SPAN,
    Array,
    Decoded,
    FloatFormat,
    Sums,
    Totals,
    aligned,
    combine,
    decode,
)
from distbench.numerics.tensor_files import Bytes

# Positions in the array of sums (each with its compensation four further on, and one maximum) and in that of counts.
_AA, _BB, _AB, _DD = range(4)  # as in `Sums`
_MAX_DIFFERENCE, _NUM_SUMS = 8, 9
_DIFFERENT, _BITS_DIFFER, _ZERO_A, _ZERO_B, _MAX_ULP, _MAX_A, _MAX_B, _MAX_ROUNDED, _MAX_INDEX = range(9)
_NUM_COUNTS = 9

_uint32, _uint64 = np.uint32, np.uint64


def _compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`njit`, with compiled code kept on disk where there is a place to write it."""

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return njit(cache=True, nogil=True, error_model="numpy", **options)(function)
        except RuntimeError:  # numba found no folder that it may write to
            return njit(nogil=True, error_model="numpy", **options)(function)

    return decorate


# Sums in any order and products kept unrounded in multiply-adds: the stated error allows both.
_any_order = _compiled(fastmath={"reassoc", "contract", "nsz"})
_in_order = _compiled()


@_any_order
def _count(codes_a: Array, codes_b: Array) -> Any:
    """Elements that differ, bits that do, zeros and largest magnitudes of a block of unsigned codes."""
    unsigned = codes_a.dtype.type
    clear_sign = unsigned(unsigned(~unsigned(0)) >> unsigned(1))
    different = unsigned(0)
    bits = unsigned(0)
    zero_a = unsigned(0)
    zero_b = unsigned(0)
    max_a = unsigned(0)
    max_b = unsigned(0)
    for i in range(len(codes_a)):
        a = codes_a[i]
        b = codes_b[i]
        magnitude_a = unsigned(a & clear_sign)
        magnitude_b = unsigned(b & clear_sign)
        bits = unsigned(bits | (a ^ b))
        different = unsigned(different + unsigned((a != b) & (unsigned(magnitude_a | magnitude_b) != unsigned(0))))
        zero_a = unsigned(zero_a + unsigned(magnitude_a == unsigned(0)))
        zero_b = unsigned(zero_b + unsigned(magnitude_b == unsigned(0)))
        max_a = max(max_a, magnitude_a)
        max_b = max(max_b, magnitude_b)
    return different, bits, zero_a, zero_b, max_a, max_b


@_any_order
def _furthest(codes_a: Array, codes_b: Array) -> Any:
    """The largest distance in units in the last place of a block of unsigned codes."""
    unsigned = codes_a.dtype.type
    clear_sign = unsigned(unsigned(~unsigned(0)) >> unsigned(1))
    sign = unsigned(~clear_sign)
    furthest = unsigned(0)
    for i in range(len(codes_a)):
        a = codes_a[i]
        b = codes_b[i]
        # Unsigned integers in the order of their numbers, neighbours one apart and both zeros the same.
        ordinal_a = unsigned(unsigned(0) - a) if a > clear_sign else unsigned(a | sign)
        ordinal_b = unsigned(unsigned(0) - b) if b > clear_sign else unsigned(b | sign)
        furthest = max(furthest, unsigned(max(ordinal_a, ordinal_b) - min(ordinal_a, ordinal_b)))
    return furthest


@_any_order
def _multiply(values_a: Array, values_b: Array) -> Any:
    """Sums of products of a block, in fp64."""
    aa = 0.0
    bb = 0.0
    ab = 0.0
    dd = 0.0
    for i in range(len(values_a)):
        a = np.float64(values_a[i])
        b = np.float64(values_b[i])
        difference = a - b
        aa += a * a
        bb += b * b
        ab += a * b
        dd += difference * difference
    return aa, bb, ab, dd


@_any_order
def _square(values: Array) -> Any:
    """The sum of squares of a block, in fp64."""
    total = 0.0
    for i in range(len(values)):
        value = np.float64(values[i])
        total += value * value
    return total


@_any_order
def _max_rounded_fp32(values_a: Array, values_b: Array) -> Any:
    """Bits of max |a - b| of a block, rounded to fp32: half the work of fp64."""
    furthest = _uint32(0)
    for i in range(len(values_a)):
        difference = np.float32(values_a[i] - values_b[i])
        furthest = max(furthest, _uint32(difference.view(np.uint32) & _uint32(0x7FFF_FFFF)))
    return furthest


@_any_order
def _max_rounded_fp64(values_a: Array, values_b: Array) -> Any:
    """Bits of max |a - b| of a block of fp64 numbers."""
    furthest = _uint64(0)
    for i in range(len(values_a)):
        difference = np.float64(values_a[i] - values_b[i])
        furthest = max(furthest, _uint64(difference.view(np.uint64) & _uint64(0x7FFF_FFFF_FFFF_FFFF)))
    return furthest


@_in_order
def _max_exact(values_a: Array, values_b: Array) -> Any:
    """max |a - b| of a block in fp64, and its first position."""
    furthest = 0.0
    position = 0
    for i in range(len(values_a)):
        difference = abs(np.float64(values_a[i]) - np.float64(values_b[i]))
        if difference > furthest:
            furthest = difference
            position = i
    return furthest, position


@_in_order
def _add(sums: Array, which: int, term: float) -> None:
    """Neumaier's compensated addition."""
    total = sums[which] + term
    if abs(sums[which]) >= abs(term):
        sums[which + 4] += (sums[which] - total) + term
    else:
        sums[which + 4] += (term - total) + sums[which]
    sums[which] = total


@_in_order
def _add_block(
    codes_a: Array,
    values_a: Array,
    codes_b: Array,
    values_b: Array,
    start: int,
    infinite_from: int,
    sums: Array,
    counts: Array,
) -> bool:
    """Add one block to the totals. Where a number in it is not finite: add nothing, return False."""
    different, bits, zero_a, zero_b, max_a, max_b = _count(codes_a, codes_b)
    if _uint64(max(max_a, max_b)) >= _uint64(infinite_from):
        return False
    counts[_ZERO_A] += zero_a
    counts[_ZERO_B] += zero_b
    counts[_MAX_A] = max(counts[_MAX_A], _uint64(max_a))
    counts[_MAX_B] = max(counts[_MAX_B], _uint64(max_b))
    if bits == 0:
        aa = _square(values_a)
        _add(sums, _AA, aa)
        _add(sums, _BB, aa)
        _add(sums, _AB, aa)
        return True
    counts[_BITS_DIFFER] = 1
    counts[_DIFFERENT] += different
    counts[_MAX_ULP] = max(counts[_MAX_ULP], _uint64(_furthest(codes_a, codes_b)))
    aa, bb, ab, dd = _multiply(values_a, values_b)
    _add(sums, _AA, aa)
    _add(sums, _BB, bb)
    _add(sums, _AB, ab)
    _add(sums, _DD, dd)
    if values_a.itemsize == 4:
        rounded = _uint64(_max_rounded_fp32(values_a, values_b))
    else:
        rounded = _max_rounded_fp64(values_a, values_b)
    # Rounding keeps order: where the rounded maximum is below an earlier one, so is the exact one.
    if rounded >= counts[_MAX_ROUNDED]:
        furthest, position = _max_exact(values_a, values_b)
        if furthest > sums[_MAX_DIFFERENCE]:
            sums[_MAX_DIFFERENCE] = furthest
            counts[_MAX_ROUNDED] = rounded
            counts[_MAX_INDEX] = start + position
    return True


@_in_order
def _add_decoded(
    codes_a: Array,
    values_a: Array,
    codes_b: Array,
    values_b: Array,
    start: int,
    infinite_from: int,
    sums: Array,
    counts: Array,
) -> int:
    """Add blocks from `start` on. Returns where it stopped: the end, or a block that is not all finite."""
    for first in range(start, len(codes_a), BLOCK):
        end = min(first + BLOCK, len(codes_a))
        if not _add_block(
            codes_a[first:end],
            values_a[first:end],
            codes_b[first:end],
            values_b[first:end],
            first,
            infinite_from,
            sums,
            counts,
        ):
            return first
    return len(codes_a)


@_in_order
def _decode_half(bits: Array, is_bfloat16: bool, values: Array) -> None:
    """Values of a block of 16-bit floats; what is not finite comes out as anything."""
    if is_bfloat16:
        for i in range(len(bits)):
            single = _uint32(_uint32(bits[i]) << _uint32(16))
            values[i] = single.view(np.float32)
    else:
        # The fields moved to their places in fp32 are the number with the wrong exponent bias, 15 and not 127; one
        # multiplication by a power of two corrects that, for subnormal numbers too.
        for i in range(len(bits)):
            half = _uint32(bits[i])
            sign = _uint32(_uint32(half & _uint32(0x8000)) << _uint32(16))
            single = _uint32(sign | _uint32(_uint32(half & _uint32(0x7FFF)) << _uint32(13)))
            values[i] = single.view(np.float32) * np.float32(2.0**112)


@_in_order
def _add_halves(
    bits_a: Array, bits_b: Array, is_bfloat16: bool, start: int, infinite_from: int, sums: Array, counts: Array
) -> int:
    """`_add_decoded` for 16-bit floats: their bits are the codes, their values are decoded block by block."""
    values_a = np.empty(BLOCK, np.float32)
    values_b = np.empty(BLOCK, np.float32)
    for first in range(start, len(bits_a), BLOCK):
        end = min(first + BLOCK, len(bits_a))
        _decode_half(bits_a[first:end], is_bfloat16, values_a)
        _decode_half(bits_b[first:end], is_bfloat16, values_b)
        if not _add_block(
            bits_a[first:end],
            values_a[: end - first],
            bits_b[first:end],
            values_b[: end - first],
            first,
            infinite_from,
            sums,
            counts,
        ):
            return first
    return len(bits_a)


def float_totals(a: Decoded, b: Decoded, form: FloatFormat) -> Totals:
    """As `compare_kernels.float_totals`."""
    unsigned = f"u{a.codes.itemsize}"
    unsigned_a, unsigned_b = a.codes.view(unsigned), b.codes.view(unsigned)

    def fast(start: int, sums: Array, counts: Array) -> int:
        return int(_add_decoded(unsigned_a, a.values, unsigned_b, b.values, start, form.infinite_from, sums, counts))

    def slow(start: int, stop: int) -> Totals:
        return compare_kernels.float_totals(a.cut(start, stop), b.cut(start, stop), form)

    return _run(fast, slow, len(a.codes), form)


def raw_totals(raw_a: Bytes, raw_b: Bytes, form: FloatFormat) -> Totals:
    """Totals of two runs of elements of one dtype of 16, 32 or 64 bits, read where they lie."""
    if form.itemsize > 2:
        return float_totals(decode(raw_a, form), decode(raw_b, form), form)
    bits_a, bits_b = aligned(raw_a, np.uint16), aligned(raw_b, np.uint16)
    is_bfloat16 = form.name == "bfloat16"

    def fast(start: int, sums: Array, counts: Array) -> int:
        return int(_add_halves(bits_a, bits_b, is_bfloat16, start, form.infinite_from, sums, counts))

    def slow(start: int, stop: int) -> Totals:
        part = slice(start * form.itemsize, stop * form.itemsize)
        return compare_kernels.float_totals(decode(raw_a[part], form), decode(raw_b[part], form), form)

    return _run(fast, slow, len(bits_a), form)


def _run(
    fast: Callable[[int, Array, Array], int],
    slow: Callable[[int, int], Totals],
    numel: int,
    form: FloatFormat,
) -> Totals:
    """Totals of `numel` elements: the compiled pass where it can, NumPy for a stretch where it stopped."""
    parts = []
    start = 0
    while start < numel:
        sums, counts = np.zeros(_NUM_SUMS), np.zeros(_NUM_COUNTS, np.uint64)
        stopped = fast(start, sums, counts)
        if stopped > start:
            parts.append(_as_totals(sums, counts, form))
        if stopped < numel:
            parts.append(slow(stopped, min(stopped + SPAN, numel)).shifted(stopped))
        start = stopped + SPAN
    return combine(parts)


def _as_totals(sums: Array, counts: Array, form: FloatFormat) -> Totals:
    # Where a sum of fp64 squares overflowed, its compensation is NaN.
    exact = sums[:4] + np.where(np.isfinite(sums[4:8]), sums[4:8], 0)
    as_float = counts.view(np.float64)
    return Totals(
        sums=Sums(*exact.tolist()),
        different=int(counts[_DIFFERENT]),
        bits_differ=bool(counts[_BITS_DIFFER]),
        zero_a=int(counts[_ZERO_A]),
        zero_b=int(counts[_ZERO_B]),
        max_difference=float(sums[_MAX_DIFFERENCE]),
        max_index=int(counts[_MAX_INDEX]),
        max_ulp=int(counts[_MAX_ULP]),
        max_a=float(as_float[_MAX_A]) if form.itemsize == 8 else 0,
        max_b=float(as_float[_MAX_B]) if form.itemsize == 8 else 0,
    )
