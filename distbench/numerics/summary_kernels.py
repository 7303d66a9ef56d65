"""The fields of a gradient summary in one pass over CPU memory, compiled by numba.

Same numbers as `summary_torch`, which defines them: digest, counts, maximum and histogram to the bit.
The kernel is serial and releases the GIL: the caller runs it over chunks in as many threads as torch has. No
thread exists before that, since ranks may be forked from a process that has imported this module.

A unit of UNIT elements stays in the first-level cache while a few short loops pass over it, each simple
enough for LLVM to vectorise. They slice arrays first since an index that might be negative is not vectorised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from distbench.numerics.summary_torch import (
    BINS,
    BITS_TABLE,
    DIGEST,
    DIGEST_KEY,
    ELEMENTS,
    EXPONENTS,
    GOLDEN,
    HIGH_TABLE,
    INFS,
    LANE_KEY,
    LANES,
    LOW_TABLE,
    NANS,
    PROJECTED,
    PROJECTIONS,
    SIGN_TABLE,
    SUBNORMALS,
    SUM,
    SUM_ABS,
    SUM_SQUARES,
    UNIT,
    ZEROS,
)

u32, u64, f64 = np.uint32, np.uint64, np.float64
Array = np.ndarray[Any, Any]

# Typed constants: in numba, uint64 combined with a plain int is a float64.
_GOLDEN, _DIGEST_KEY, _LANE_KEY = u64(GOLDEN), u64(DIGEST_KEY), u64(LANE_KEY)
_MAGNITUDE, _INFINITY = u32(0x7FFFFFFF), u32(0x7F800000)

_FEW = 40
"""Spread of exponents up to which comparing beats a histogram."""

FLOAT32, BFLOAT16, FLOAT16 = range(3)
"""How the kernel is to read `raw`."""


def _jit(*fastmath: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`numba.njit`, cached on disk where some cache folder can be written."""
    options = {"nogil": True, "error_model": "numpy", "fastmath": set(fastmath)}

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError:  # no locator available: neither beside this file nor in the user's cache folder
            return numba.njit(**options)(function)

    return decorate


@_jit()
def _mix64(z: np.uint64) -> np.uint64:
    z = (z ^ (z >> u64(30))) * u64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> u64(27))) * u64(0x94D049BB133111EB)
    return z ^ (z >> u64(31))


@_jit()
def _sign(word: np.uint64, p: int) -> float:
    return 1.0 - 2.0 * f64((word >> u64(p)) & u64(1))


@_jit()
def _digest(raw: Array, lo: int, unit: int, hashed: Array) -> np.uint64:
    """Digest of `raw`, which lies at `lo` in its unit. Two loops: 8 lanes of 32 bits, then 4 of 64."""
    n = raw.size
    first = _mix64(u64(unit) * _GOLDEN + _DIGEST_KEY)
    second = _mix64(first + _GOLDEN)
    bits_key, low_key, high_key = u32(first), u32(second & u64(0xFFFFFFFE)), u32(second >> u64(32))
    bits_table, low_table, high_table = (
        BITS_TABLE[lo : lo + n],
        LOW_TABLE[lo : lo + n],
        HIGH_TABLE[lo : lo + n],
    )
    high = u32(0)
    for j in range(n):
        h = u32(u32(raw[j]) ^ bits_table[j] ^ bits_key)
        h = u32(h ^ (h >> u32(16)))
        h = u32(h * u32(0x7FEB352D))
        h = u32(h ^ (h >> u32(15)))
        h = u32(h * u32(0x846CA68B))
        h = u32(h ^ (h >> u32(16)))
        hashed[j] = h
        high = u32(high + u32(h * u32(high_table[j] ^ high_key)))
    low = u64(0)
    for j in range(n):
        low += u64(hashed[j]) * u64(u32(low_table[j] ^ low_key))
    return low + (u64(high) << u64(32))


@_jit()
def _apply_signs(bits: Array, lo: int, key: np.uint64, signed: Array) -> tuple[np.uint32, np.uint32, np.uint32]:
    """Write t(i) * x to `signed`; on the way, the extremes of the nonzero magnitudes, as bits, and the zeros."""
    n = bits.size
    table, signed = SIGN_TABLE[lo : lo + n], signed[lo : lo + n]
    add, multiply = u32(key), u32(u32(key >> u64(32)) | u32(1))
    smallest, largest, zeros = u32(0xFFFFFFFF), u32(0), u32(0)
    for j in range(n):
        b = bits[j]
        magnitude = u32(b & _MAGNITUDE)
        smallest = min(smallest, u32(magnitude - u32(1)))  # a zero becomes the largest of all
        largest = max(largest, magnitude)
        zeros = u32(zeros + u32(magnitude == u32(0)))
        w = u32(table[j] ^ add)
        w = u32(w * u32(0x85EBCA6B))
        w = u32(w ^ (w >> u32(15)))
        w = u32(w * multiply)
        signed[j] = u32(b ^ u32(w & u32(0x80000000)))
    return u32(smallest + u32(1)), largest, zeros


@_jit("reassoc", "contract")
def _sums(values: Array) -> tuple[float, float, float]:
    total, magnitudes, squares = 0.0, 0.0, 0.0
    for j in range(values.size):
        x = f64(values[j])
        total += x
        magnitudes += abs(x)
        squares += x * x
    return total, magnitudes, squares


@_jit()
def _count_exponents(bits: Array, smallest: np.uint32, largest: np.uint32, octets: Array, counts: Array) -> None:
    """Add a histogram of the 9 bits of sign and exponent; the sign is irrelevant to the caller and may be 0.

    The increments of a histogram wait for each other. The nonzero elements of a unit mostly span a dozen
    exponents, and comparing all of them with each takes a third of the time.

    Args:
        bits: of float32, at most UNIT.
        smallest, largest: bits of the nonzero magnitudes' extremes; smallest is 0 if there are none.
        octets: scratch, uint8 [UNIT].
        counts: int32 [4, 2 * BINS], to be summed over the tables and the sign.
    """
    lowest, highest = np.int64(smallest >> u32(23)), np.int64(largest >> u32(23))
    if bits.size == UNIT and highest - lowest < _FEW:
        for j in range(UNIT):
            octets[j] = np.uint8((bits[j] >> u32(23)) & u32(0xFF))
        counts[0, 0] += UNIT  # the zeros, once the others are taken away
        for k in range(lowest, highest + 1):
            for part in range(0, UNIT, 128):
                count = np.int32(_count_equal(octets[part : part + 128], np.uint8(k)))
                counts[0, k] += count
                counts[0, 0] -= count
        return
    # Four tables in turn, since neighbours often share a bin.
    quarter = bits.size // 4
    a, b, c = bits[:quarter], bits[quarter : 2 * quarter], bits[2 * quarter : 3 * quarter]
    d = bits[3 * quarter :]
    for j in range(quarter):
        counts[0, a[j] >> u32(23)] += np.int32(1)
        counts[1, b[j] >> u32(23)] += np.int32(1)
        counts[2, c[j] >> u32(23)] += np.int32(1)
        counts[3, d[j] >> u32(23)] += np.int32(1)
    for j in range(quarter, d.size):
        counts[0, d[j] >> u32(23)] += np.int32(1)


@_jit()
def _count_equal(octets: Array, value: np.uint8) -> np.uint8:
    """How many of 128 are `value`: few enough to be counted in octets, 32 at a time."""
    count = np.uint8(0)
    for j in range(128):
        count = np.uint8(count + np.uint8(octets[j] == value))
    return count


@_jit("contract")
def _project(x: Array, y: Array, key: np.uint64, c: Array) -> None:
    """y[p, lane] += r_p(unit) * sum over rows of H[p, row] x[row, lane], a Hadamard transform of the rows."""
    word = _mix64(key + _GOLDEN)
    for p in range(PROJECTIONS):
        c[p] = _sign(word, p)
    for i in range(LANES):
        a0, a1, a2, a3 = f64(x[i]), f64(x[32 + i]), f64(x[64 + i]), f64(x[96 + i])
        a4, a5, a6, a7 = f64(x[128 + i]), f64(x[160 + i]), f64(x[192 + i]), f64(x[224 + i])
        b0, b1, b2, b3 = f64(x[256 + i]), f64(x[288 + i]), f64(x[320 + i]), f64(x[352 + i])
        b4, b5, b6, b7 = f64(x[384 + i]), f64(x[416 + i]), f64(x[448 + i]), f64(x[480 + i])
        a0, b0, a1, b1 = a0 + b0, a0 - b0, a1 + b1, a1 - b1
        a2, b2, a3, b3 = a2 + b2, a2 - b2, a3 + b3, a3 - b3
        a4, b4, a5, b5 = a4 + b4, a4 - b4, a5 + b5, a5 - b5
        a6, b6, a7, b7 = a6 + b6, a6 - b6, a7 + b7, a7 - b7
        a0, a4, a1, a5 = a0 + a4, a0 - a4, a1 + a5, a1 - a5
        a2, a6, a3, a7 = a2 + a6, a2 - a6, a3 + a7, a3 - a7
        b0, b4, b1, b5 = b0 + b4, b0 - b4, b1 + b5, b1 - b5
        b2, b6, b3, b7 = b2 + b6, b2 - b6, b3 + b7, b3 - b7
        a0, a2, a1, a3 = a0 + a2, a0 - a2, a1 + a3, a1 - a3
        a4, a6, a5, a7 = a4 + a6, a4 - a6, a5 + a7, a5 - a7
        b0, b2, b1, b3 = b0 + b2, b0 - b2, b1 + b3, b1 - b3
        b4, b6, b5, b7 = b4 + b6, b4 - b6, b5 + b7, b5 - b7
        y[i] += c[0] * (a0 + a1)
        y[32 + i] += c[1] * (a0 - a1)
        y[64 + i] += c[2] * (a2 + a3)
        y[96 + i] += c[3] * (a2 - a3)
        y[128 + i] += c[4] * (a4 + a5)
        y[160 + i] += c[5] * (a4 - a5)
        y[192 + i] += c[6] * (a6 + a7)
        y[224 + i] += c[7] * (a6 - a7)
        y[256 + i] += c[8] * (b0 + b1)
        y[288 + i] += c[9] * (b0 - b1)
        y[320 + i] += c[10] * (b2 + b3)
        y[352 + i] += c[11] * (b2 - b3)
        y[384 + i] += c[12] * (b4 + b5)
        y[416 + i] += c[13] * (b4 - b5)
        y[448 + i] += c[14] * (b6 + b7)
        y[480 + i] += c[15] * (b6 - b7)


@_jit()
def _widen(raw: Array, kind: int, bits: Array, values: Array) -> None:
    """Each 16-bit float as float32, exactly; `bits` and `values` are views of one buffer."""
    if kind == BFLOAT16:
        for j in range(raw.size):
            bits[j] = u32(raw[j]) << u32(16)
        return
    for j in range(raw.size):  # right where it is subnormal, m * 2^-24; the next loop replaces the others
        values[j] = np.float32(raw[j] & np.uint16(0x7FFF)) * np.float32(2.0**-24)
    for j in range(raw.size):
        m = u32(raw[j]) & u32(0x7FFF)
        bias = u32(224 << 23) if m >= u32(0x7C00) else u32(112 << 23)
        magnitude = bits[j] if m < u32(0x0400) else u32(u32(m << u32(13)) + bias)
        bits[j] = u32(magnitude | u32(u32(u32(raw[j]) & u32(0x8000)) << u32(16)))


@_jit()
def _drop_nonfinite(bits: Array, clean: Array) -> tuple[np.uint32, np.uint32]:
    """Copy with every inf and nan made zero; how many nans and infs there were."""
    nans, infs = u32(0), u32(0)
    for j in range(bits.size):
        magnitude = u32(bits[j] & _MAGNITUDE)
        nans = u32(nans + u32(magnitude > _INFINITY))
        infs = u32(infs + u32(magnitude == _INFINITY))
        clean[j] = bits[j] if magnitude < _INFINITY else u32(0)
    return nans, infs


@_jit()
def scan(
    raw: Array,
    bits: Array,
    values: Array,
    kind: int,
    first: int,
    start: int,
    run: int,
    stride: int,
    key: np.uint64,
    integers: Array,
    floats: Array,
) -> np.uint32:
    """Add the fields of some elements of a shard to its rows.

    Args:
        raw: the elements' bits, uint16 or uint32.
        bits, values: `raw` as uint32 and as float32 where it is float32; else empty.
        kind: FLOAT32, BFLOAT16 or FLOAT16.
        first: local flat index of raw[0]; with start, run and stride (see Shard) that gives global indices.
        key: the projection key.
        integers, floats: rows to add to, int64 [INTEGERS] and float64 [FLOATS].

    Returns:
        max |g| over the finite elements, as the bits of a float32.
    """
    hashed = np.empty(UNIT, np.uint32)
    wide, clean = np.empty(UNIT, np.uint32), np.empty(UNIT, np.uint32)
    wide_values, clean_values = wide.view(np.float32), clean.view(np.float32)
    octets, signed = np.empty(UNIT, np.uint8), np.zeros(UNIT, np.uint32)
    signed_values = signed.view(np.float32)
    projected, unit_signs = np.zeros(UNIT), np.empty(PROJECTIONS)
    counts = np.zeros((4, 2 * BINS), np.int32)
    digest, top, zeros = u64(0), u32(0), 0
    nans, infs = 0, 0
    total, magnitudes, squares = 0.0, 0.0, 0.0

    pending, pending_key = -1, u64(0)  # unit whose elements wait in `signed`: short runs share a transform
    at = 0
    while at < raw.size:
        local = first + at
        index = start + local // run * stride + local % run
        unit, lo = index // UNIT, index % UNIT
        n = min(UNIT - lo, run - local % run, raw.size - at)

        piece = raw[at : at + n]
        digest += _digest(piece, lo, unit, hashed)
        if kind == FLOAT32:
            x, v = bits[at : at + n], values[at : at + n]
        else:
            x, v = wide[:n], wide_values[:n]
            _widen(piece, kind, x, v)

        if unit != pending:
            if pending >= 0:
                _project(signed_values, projected, pending_key, unit_signs)
            pending, pending_key = unit, _mix64(u64(unit) * _GOLDEN + key)
            if n < UNIT:
                signed[:] = u32(0)
        smallest, largest, piece_zeros = _apply_signs(x, lo, pending_key, signed)
        _count_exponents(x, smallest, largest, octets, counts)
        zeros += piece_zeros
        if largest >= _INFINITY:
            more_nans, more_infs = _drop_nonfinite(x, clean[:n])
            nans += more_nans
            infs += more_infs
            v = clean_values[:n]
            _, largest, _ = _apply_signs(clean[:n], lo, pending_key, signed)
        top = max(top, largest)
        piece_total, piece_magnitudes, piece_squares = _sums(v)
        total += piece_total
        magnitudes += piece_magnitudes
        squares += piece_squares
        at += n
    if pending >= 0:
        _project(signed_values, projected, pending_key, unit_signs)

    # Exponents tell subnormals from normals, once zeros are known. Those of float16 are normal in float32.
    smallest_normal = 113 if kind == FLOAT16 else 1
    tiny = 0
    for k in range(BINS - 1):  # the last bin holds the non-finite ones, which no bin counts
        count = counts[:, k].sum() + counts[:, BINS + k].sum() - (zeros if k == 0 else 0)
        if k < smallest_normal:
            tiny += count
        integers[EXPONENTS + k] += count
    integers[DIGEST] += np.int64(digest)
    integers[ELEMENTS] += raw.size
    integers[ZEROS] += zeros
    integers[SUBNORMALS] += tiny
    integers[NANS] += nans
    integers[INFS] += infs
    floats[SUM] += total
    floats[SUM_ABS] += magnitudes
    floats[SUM_SQUARES] += squares
    _add_lanes(projected, key, floats)
    return top


@_jit()
def _add_lanes(projected: Array, key: np.uint64, floats: Array) -> None:
    """y_p += sum over lanes of q_p(lane) y[p, lane]."""
    for i in range(LANES):
        word = _mix64(u64(i) * _GOLDEN + (key ^ _LANE_KEY))
        for p in range(PROJECTIONS):
            floats[PROJECTED + p] += projected[p * LANES + i] * _sign(word, p)


@_jit()
def _read_float64(bits: Array, lo: int, key: np.uint64, signed: Array, clean: Array, integers: Array) -> np.uint64:
    """Count what there is to count, write finite values to `clean` and t(i) times them to `signed`."""
    add, multiply = u32(key), u32(u32(key >> u64(32)) | u32(1))
    infinity, top = u64(0x7FF0000000000000), u64(0)
    for j in range(bits.size):
        magnitude = bits[j] & u64(0x7FFFFFFFFFFFFFFF)
        clean[j] = bits[j]
        if magnitude == u64(0):
            integers[ZEROS] += 1
        elif magnitude >= infinity:
            integers[INFS if magnitude == infinity else NANS] += 1
            clean[j] = u64(0)
        else:
            exponent = np.int64(magnitude >> u64(52))
            integers[SUBNORMALS] += exponent == 0
            if exponent < 1023 - 127:
                integers[EXPONENTS] += 1
            elif exponent < 1023 - 127 + BINS:
                integers[EXPONENTS + exponent - (1023 - 127)] += 1
            else:
                integers[EXPONENTS + BINS - 1] += 1
            top = max(top, magnitude)
        w = u32(u32(SIGN_TABLE[lo + j] ^ add) * u32(0x85EBCA6B))
        w = u32(u32(w ^ (w >> u32(15))) * multiply)
        signed[lo + j] = clean[j] ^ (u64(w >> u32(31)) << u64(63))
    return top


@_jit()
def scan_float64(
    words: Array,
    bits: Array,
    first: int,
    start: int,
    run: int,
    stride: int,
    key: np.uint64,
    integers: Array,
    floats: Array,
) -> np.uint64:
    """`scan` for float64, which only references use: plainer, and some ten times slower.

    `bits` are the elements as uint64 and `words` the same memory as uint32; returns max |g| as bits.
    """
    hashed = np.empty(UNIT, np.uint32)
    clean, signed = np.empty(UNIT, np.uint64), np.zeros(UNIT, np.uint64)
    clean_values, signed_values = clean.view(np.float64), signed.view(np.float64)
    projected, unit_signs = np.zeros(UNIT), np.empty(PROJECTIONS)
    digest, top = u64(0), u64(0)
    at = 0
    while at < bits.size:
        local = first + at
        index = start + local // run * stride + local % run
        unit, lo = index // UNIT, index % UNIT
        n = min(UNIT - lo, run - local % run, bits.size - at)

        word = 0  # two words an element, so the digest's units are half as long
        while word < 2 * n:
            position = 2 * index + word
            m = min(UNIT - position % UNIT, 2 * n - word)
            piece = words[2 * at + word : 2 * at + word + m]
            digest += _digest(piece, position % UNIT, position // UNIT, hashed)
            word += m

        unit_key = _mix64(u64(unit) * _GOLDEN + key)
        signed[:] = u64(0)
        top = max(top, _read_float64(bits[at : at + n], lo, unit_key, signed, clean, integers))
        total, magnitudes, squares = _sums(clean_values[:n])
        floats[SUM] += total
        floats[SUM_ABS] += magnitudes
        floats[SUM_SQUARES] += squares
        _project(signed_values, projected, unit_key, unit_signs)
        at += n
    integers[DIGEST] += np.int64(digest)
    integers[ELEMENTS] += bits.size
    _add_lanes(projected, key, floats)
    return top
