"""What the fields of a gradient summary are: the definition, in plain torch, on any device.

`summary_kernels` computes the same numbers far faster for CPU tensors; this path serves other devices and
installations without numba, and is what the kernels are tested against.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from distbench.numerics.shards import Shard

PROJECTIONS = 16
UNIT = 512
"""Consecutive global indices that share hash keys: PROJECTIONS rows of LANES lanes."""
LANES = UNIT // PROJECTIONS
BINS = 256

# Columns of the integer row, all merged by SUM mod 2^64 ...
DIGEST, ELEMENTS, ZEROS, SUBNORMALS, NANS, INFS, NONES = range(7)
EXPONENTS = 7  # ... the first of BINS columns
INTEGERS = EXPONENTS + BINS
# Columns of the float64 row, merged by SUM.
SUM, SUM_ABS, SUM_SQUARES = range(3)
PROJECTED = 3  # the first of PROJECTIONS columns
FLOATS = PROJECTED + PROJECTIONS

GOLDEN = 0x9E3779B97F4A7C15
MASK64 = (1 << 64) - 1
MASK32 = (1 << 32) - 1
# First digits of pi: nothing up the sleeve.
DIGEST_KEY = 0x243F6A8885A308D3
LANE_KEY = 0x13198A2E03707344
TABLE_KEY = 0xA4093822299F31D0

CPU_CHUNK, DEVICE_CHUNK = 1 << 15, 1 << 20
"""Elements a pass: about 150 bytes of temporaries each, whatever the size of the shard. On the CPU as many as torch
handles in one thread: waking others for each of a hundred small operations takes longer than the operations."""

_INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_MANTISSA_BITS = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23, torch.float64: 52}


def mix64(z: int) -> int:
    """Finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def _table(which: int) -> np.ndarray:
    """UNIT random 32-bit words; which word of a unit is one half of every key."""
    words = (mix64((TABLE_KEY + (which * UNIT + j) * GOLDEN) & MASK64) >> 32 for j in range(UNIT))
    return np.fromiter(words, np.uint32, UNIT)


BITS_TABLE = _table(0)
LOW_TABLE = _table(1) | np.uint32(1)  # odd multipliers: one changed element always changes the digest
HIGH_TABLE = _table(2)
SIGN_TABLE = _table(3)


def projection_key(name: str, seed: int) -> int:
    """64-bit key of one parameter's projections."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little")


def scan(shard: Shard, seed: int) -> tuple[np.ndarray, np.ndarray, float]:
    """This shard's share of every field.

    Returns:
        int64 [INTEGERS] (mod 2^64), float64 [FLOATS], and max |g|; columns as named above. Sums, projections
        and the maximum are over the finite elements only.
    """
    assert shard.values is not None
    values = shard.values.detach().reshape(-1)
    key = projection_key(shard.name, seed)
    # Fields stay on the device until the end: one transfer a shard, no synchronisation a chunk.
    integers = torch.zeros(INTEGERS, dtype=torch.int64, device=values.device)
    floats = torch.zeros(FLOATS, dtype=torch.float64, device=values.device)
    maximum = torch.zeros((), dtype=torch.int64, device=values.device)
    for index, chunk in _chunks(shard, values):
        more_integers, more_floats, top = _scan_chunk(index, chunk, key)
        integers += more_integers
        floats += more_floats
        maximum = torch.maximum(maximum, top)
    return integers.cpu().numpy(), floats.cpu().numpy(), decode(int(maximum), values.dtype)


def decode(bits: int, dtype: torch.dtype) -> float:
    """The value with these (non-negative) bits; by integers, so that flush-to-zero modes cannot touch it."""
    if dtype == torch.float64:
        return float(struct.unpack("<d", struct.pack("<Q", bits))[0])
    if dtype == torch.float16:
        return float(struct.unpack("<e", struct.pack("<H", bits))[0])
    return float(struct.unpack("<f", struct.pack("<I", bits << 16 if dtype == torch.bfloat16 else bits))[0])


def _chunks(shard: Shard, values: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    size = CPU_CHUNK if values.device.type == "cpu" else DEVICE_CHUNK
    for first in range(0, values.numel(), size):
        chunk = values[first : first + size]
        local = torch.arange(first, first + chunk.numel(), device=values.device)
        yield shard.start + local // shard.run * shard.stride + local % shard.run, chunk


def _scan_chunk(index: torch.Tensor, x: torch.Tensor, key: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    width = 8 * x.element_size()
    bits = x.view(_INTEGER[x.element_size()]).long() & _signed((1 << width) - 1)
    magnitude = bits & ((1 << (width - 1)) - 1)
    smallest_normal = 1 << _MANTISSA_BITS[x.dtype]
    infinity = ((1 << (width - 1)) - 1) & -smallest_normal
    nan, inf, zero = magnitude > infinity, magnitude == infinity, magnitude == 0
    finite = magnitude < infinity
    clean = torch.where(finite, x, torch.zeros_like(x)).double()

    bins = torch.where(finite & ~zero, _exponent_bins(x, bits), BINS)
    exponents = torch.bincount(bins, minlength=BINS + 1)[:BINS]
    counts = [
        torch.ones_like(zero).sum(),
        zero.sum(),
        ((magnitude < smallest_normal) & ~zero).sum(),
        nan.sum(),
        inf.sum(),
        torch.zeros_like(index[0]),
    ]
    integers = torch.cat([torch.stack([_digest(index, bits, width), *counts]), exponents])
    sums = torch.stack([clean.sum(), clean.abs().sum(), clean.square().sum()])
    floats = torch.cat([sums, _project(index, clean, key)])
    return integers, floats, torch.where(finite, magnitude, torch.zeros_like(magnitude)).max()


def _exponent_bins(x: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Bin k holds 2^(k-127) <= |g| < 2^(k-126) whatever the dtype; 0 and 255 hold what lies beyond."""
    if x.dtype == torch.float64:
        return (((bits >> 52) & 0x7FF) - 1023 + 127).clamp(0, BINS - 1)
    return (x.float().view(torch.int32).long() >> 23) & 0xFF


def _digest(index: torch.Tensor, bits: torch.Tensor, width: int) -> torch.Tensor:
    """Sum of the terms of all elements, mod 2^64, as int64. A float64 is two words, the low one first."""
    if width < 64:
        return digest_terms(index, bits).sum()
    low, high = digest_terms(2 * index, bits & MASK32), digest_terms(2 * index + 1, (bits >> 32) & MASK32)
    return low.sum() + high.sum()


def digest_terms(position: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    """hash32(word ^ key(position)) * multiplier(position) mod 2^64, as int64, for words of at most 32 bits.

    A keyed bijection of the word makes changes of it irregular, and the position's own odd 64-bit multiplier
    makes their sum vanish with a chance of about 2^-63 (multilinear hashing; Lemire and Kaser 2014).
    """
    units, which = torch.unique_consecutive(position // UNIT, return_inverse=True)
    j = position % UNIT
    first = _mix64(units * _signed(GOLDEN) + _signed(DIGEST_KEY))
    second = _mix64(first + _signed(GOLDEN))
    multiplier = (_shift_right(second, 32) << 32) | (second & (MASK32 - 1))
    tables = _tables(position.device)
    h = word ^ tables.bits[j] ^ (first & MASK32)[which]
    h = h ^ (h >> 16)
    h = (h * 0x7FEB352D) & MASK32
    h = h ^ (h >> 15)
    h = (h * 0x846CA68B) & MASK32
    h = h ^ (h >> 16)
    return h * (tables.multiplier[j] ^ multiplier[which])


def _project(index: torch.Tensor, x: torch.Tensor, key: int) -> torch.Tensor:
    """float64 [PROJECTIONS]: sum of s_p(i) x_i over elements; s_p = t(i) H[p, row] r_p(unit) q_p(lane)."""
    units, which = torch.unique_consecutive(index // UNIT, return_inverse=True)
    j = index % UNIT
    first = _mix64(units * _signed(GOLDEN) + _signed(key))
    second = _mix64(first + _signed(GOLDEN))
    tables = _tables(index.device)
    w = tables.sign[j] ^ (first & MASK32)[which]
    w = (w * 0x85EBCA6B) & MASK32
    w = w ^ (w >> 15)
    w = (w * (_shift_right(first, 32) | 1)[which]) & MASK32
    grid = x.new_zeros(units.numel() * UNIT)  # elements of a unit that are elsewhere count as zero
    grid[which * UNIT + j] = torch.where(w >> 31 == 0, x, -x)  # t(i)

    grid = grid.view(-1, PROJECTIONS, LANES)
    half = PROJECTIONS // 2
    while half:  # Hadamard transform: from rows to projections
        pairs = grid.view(len(units), -1, 2, half, LANES)
        grid = torch.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2)
        half //= 2
    grid = grid.view(-1, PROJECTIONS, LANES)
    lanes = _mix64(torch.arange(LANES, device=index.device) * _signed(GOLDEN) + _signed(key ^ LANE_KEY))
    p = torch.arange(PROJECTIONS, device=index.device)
    r = 1.0 - 2.0 * ((second[:, None] >> p) & 1).double()
    q = 1.0 - 2.0 * ((lanes >> p[:, None]) & 1).double()
    return ((grid * r[:, :, None]).sum(0) * q).sum(1)


class _Tables(NamedTuple):
    bits: torch.Tensor
    multiplier: torch.Tensor
    sign: torch.Tensor


@cache
def _tables(device: torch.device) -> _Tables:
    """The module's tables as int64 on a device."""
    bits, low, high, sign = (
        torch.from_numpy(table.astype(np.int64)) for table in (BITS_TABLE, LOW_TABLE, HIGH_TABLE, SIGN_TABLE)
    )
    return _Tables(bits.to(device), ((high << 32) | low).to(device), sign.to(device))


def _mix64(z: torch.Tensor) -> torch.Tensor:
    z = (z ^ _shift_right(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift_right(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shift_right(z, 31)


def _shift_right(z: torch.Tensor, by: int) -> torch.Tensor:
    """Logical shift; torch's own is arithmetic."""
    return (z >> by) & (MASK64 >> by)


def _signed(word: int) -> int:
    """The int64 with the bits of a 64-bit word: torch has no arithmetic on uint64, but int64 wraps alike."""
    word &= MASK64
    return word - (1 << 64) if word >> 63 else word
