"""The frequent comparisons fused into one pass over mapped memory; importing this needs numba.

Same results as `compare_kernels`, but for the last bits of the sums. The loops release the interpreter lock,
so a thread pool runs them side by side. What makes them fast is that they leave the compiler nothing but
integer and fp64 operations without branches, which it turns into vector instructions: a maximum of floats,
for one, would stop it because of NaN, so |a - b| is compared by its bits, which have the same order. Blocks
with a number that is not finite are rare and are handed back to NumPy.
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

# Positions in the arrays of sums (each followed, four further on, by its compensation) and of counts.
_AA, _BB, _AB, _DD = range(4)  # as in `Sums`
_DIFFERENT, _BITS_DIFFER, _ZERO_A, _ZERO_B, _ULP, _MAX_A, _MAX_B, _MAX_DIFFERENCE, _MAX_INDEX = range(9)

_int32, _uint32, _int64 = np.int32, np.uint32, np.int64
_CLEAR_SIGN = np.int64(0x7FFF_FFFF_FFFF_FFFF)


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
def _scan(codes_a: Array, codes_b: Array) -> Any:
    """Counts and largest magnitudes of a block, from its integer codes of whatever width."""
    integer = codes_a.dtype.type
    clear_sign = integer(~(integer(-1) << integer(codes_a.itemsize * 8 - 1)))
    different = integer(0)
    bits = integer(0)
    zero_a = integer(0)
    zero_b = integer(0)
    max_a = integer(0)
    max_b = integer(0)
    for i in range(len(codes_a)):
        a = codes_a[i]
        b = codes_b[i]
        magnitude_a = integer(a & clear_sign)
        magnitude_b = integer(b & clear_sign)
        bits = integer(bits | (a ^ b))
        different = integer(different + integer((a != b) & (integer(magnitude_a | magnitude_b) != integer(0))))
        zero_a = integer(zero_a + integer(magnitude_a == integer(0)))
        zero_b = integer(zero_b + integer(magnitude_b == integer(0)))
        max_a = max(max_a, magnitude_a)
        max_b = max(max_b, magnitude_b)
    return different, bits, zero_a, zero_b, max_a, max_b


@_any_order
def _max_ulp(codes_a: Array, codes_b: Array) -> Any:
    """The largest distance in a block, to be read as unsigned. In `_scan` it would slow that down fourfold."""
    integer = codes_a.dtype.type
    sign_shift = integer(codes_a.itemsize * 8 - 1)
    sign = integer(integer(-1) << sign_shift)
    clear_sign = integer(~sign)
    furthest = sign  # the distance with its top bit flipped, so that a signed maximum orders it
    for i in range(len(codes_a)):
        a = codes_a[i]
        b = codes_b[i]
        negative_a = integer(a >> sign_shift)  # 0 or -1: negates by complement and subtraction
        negative_b = integer(b >> sign_shift)
        ordinal_a = integer(integer((a & clear_sign) ^ negative_a) - negative_a)
        ordinal_b = integer(integer((b & clear_sign) ^ negative_b) - negative_b)
        high = ordinal_a if ordinal_a > ordinal_b else ordinal_b
        low = ordinal_b if ordinal_a > ordinal_b else ordinal_a
        # Unsigned, since a signed difference that overflows is undefined and was seen to change its sign.
        distance = integer(integer(np.uint64(high) - np.uint64(low)) ^ sign)
        furthest = distance if distance > furthest else furthest
    return integer(furthest ^ sign)


@_any_order
def _multiply(values_a: Array, values_b: Array) -> Any:
    """Sums of products of a block in fp64, and the bits of max |a - b|."""
    aa = 0.0
    bb = 0.0
    ab = 0.0
    dd = 0.0
    furthest = _int64(0)
    for i in range(len(values_a)):
        a = np.float64(values_a[i])
        b = np.float64(values_b[i])
        difference = np.float64(a - b)
        aa += a * a
        bb += b * b
        ab += a * b
        dd += difference * difference
        furthest = max(furthest, _int64(difference.view(np.int64) & _CLEAR_SIGN))
    return aa, bb, ab, dd, furthest


@_in_order
def _find(values_a: Array, values_b: Array, furthest: int) -> int:
    """First position at which |a - b| has these bits."""
    for i in range(len(values_a)):
        difference = np.float64(np.float64(values_a[i]) - np.float64(values_b[i]))
        if _int64(difference.view(np.int64) & _CLEAR_SIGN) == furthest:
            return i
    return -1


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
    different, bits, zero_a, zero_b, max_a, max_b = _scan(codes_a, codes_b)
    if max(max_a, max_b) >= infinite_from:
        return False
    counts[_DIFFERENT] += different
    counts[_BITS_DIFFER] |= bits
    counts[_ZERO_A] += zero_a
    counts[_ZERO_B] += zero_b
    counts[_MAX_A] = max(counts[_MAX_A], _int64(max_a))
    counts[_MAX_B] = max(counts[_MAX_B], _int64(max_b))
    if bits != 0:
        max_ulp = _max_ulp(codes_a, codes_b)
        if codes_a.itemsize == 4:
            counts[_ULP] = max(counts[_ULP], _int64(_uint32(max_ulp)))
        elif np.uint64(max_ulp) > np.uint64(counts[_ULP]):
            counts[_ULP] = max_ulp
    aa, bb, ab, dd, furthest = _multiply(values_a, values_b)
    _add(sums, _AA, aa)
    _add(sums, _BB, bb)
    _add(sums, _AB, ab)
    _add(sums, _DD, dd)
    if furthest > counts[_MAX_DIFFERENCE]:
        counts[_MAX_DIFFERENCE] = furthest
        counts[_MAX_INDEX] = start + _find(values_a, values_b, furthest)
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
def _decode_half(bits: Array, is_bfloat16: bool, codes: Array, values: Array) -> None:
    """Codes and values of a block of 16-bit floats; values that are not finite come out as anything."""
    for i in range(len(bits)):
        half = _uint32(bits[i])
        codes[i] = _int32(_uint32(_uint32(half & _uint32(0x8000)) << _uint32(16)) | _uint32(half & _uint32(0x7FFF)))
    if is_bfloat16:
        for i in range(len(bits)):
            single = _uint32(_uint32(bits[i]) << _uint32(16))
            values[i] = single.view(np.float32)
    else:
        # The fields moved to their places in fp32 are the number with the wrong exponent bias, 15 not 127;
        # one multiplication by a power of two corrects that, for subnormal numbers too.
        for i in range(len(bits)):
            half = _uint32(bits[i])
            single = _uint32(
                _uint32(_uint32(half & _uint32(0x8000)) << _uint32(16))
                | _uint32(_uint32(half & _uint32(0x7FFF)) << _uint32(13))
            )
            values[i] = single.view(np.float32) * np.float32(2.0**112)


@_in_order
def _add_halves(
    bits_a: Array,
    bits_b: Array,
    is_bfloat16: bool,
    start: int,
    infinite_from: int,
    sums: Array,
    counts: Array,
) -> int:
    """`_add_decoded` for 16-bit floats, decoded block by block into memory that stays in cache."""
    codes_a = np.empty(BLOCK, np.int32)
    codes_b = np.empty(BLOCK, np.int32)
    values_a = np.empty(BLOCK, np.float32)
    values_b = np.empty(BLOCK, np.float32)
    for first in range(start, len(bits_a), BLOCK):
        size = min(BLOCK, len(bits_a) - first)
        _decode_half(bits_a[first : first + size], is_bfloat16, codes_a, values_a)
        _decode_half(bits_b[first : first + size], is_bfloat16, codes_b, values_b)
        if not _add_block(
            codes_a[:size],
            values_a[:size],
            codes_b[:size],
            values_b[:size],
            first,
            infinite_from,
            sums,
            counts,
        ):
            return first
    return len(bits_a)


def float_totals(a: Decoded, b: Decoded, form: FloatFormat) -> Totals:
    """As `compare_kernels.float_totals`."""

    def fast(start: int, sums: Array, counts: Array) -> int:
        return int(_add_decoded(*a, *b, start, form.infinite_from, sums, counts))

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
        sums, counts = np.zeros(8), np.zeros(9, np.int64)
        stopped = fast(start, sums, counts)
        if stopped > start:
            parts.append(_as_totals(sums, counts, form))
        if stopped < numel:
            parts.append(slow(stopped, min(stopped + SPAN, numel)).shifted(stopped))
        start = stopped + SPAN
    return combine(parts)


def _as_totals(sums: Array, counts: Array, form: FloatFormat) -> Totals:
    # Where a sum of fp64 squares overflowed, its compensation is NaN.
    exact = sums[:4] + np.where(np.isfinite(sums[4:]), sums[4:], 0)
    as_float = counts.view(np.float64)
    return Totals(
        sums=Sums(*exact.tolist()),
        different=int(counts[_DIFFERENT]),
        bits_differ=bool(counts[_BITS_DIFFER]),
        zero_a=int(counts[_ZERO_A]),
        zero_b=int(counts[_ZERO_B]),
        max_difference=float(as_float[_MAX_DIFFERENCE]),
        max_index=int(counts[_MAX_INDEX]),
        max_ulp=int(counts.view(np.uint64)[_ULP]),
        max_a=float(as_float[_MAX_A]) if form.itemsize == 8 else 0,
        max_b=float(as_float[_MAX_B]) if form.itemsize == 8 else 0,
    )
