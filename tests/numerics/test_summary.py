"""Gradient summaries: the same whatever the sharding, exact where they say so, honest where they estimate."""

from __future__ import annotations

import itertools
import json
import math
import os
import pickle
import random
import struct
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from distbench.errors import SummaryError
from distbench.numerics import summary as summary_module
from distbench.numerics import summary_kernels
from distbench.numerics import summary_torch as fields
from distbench.numerics.shards import DTYPES, Shard
from distbench.numerics.summary import FORMAT, Summary, prepare, summarize
from distbench.numerics.summary_difference import (
    RELATIVE_ERROR,
    Relation,
    compare,
    estimate_difference,
)

# --- helpers


def gradient(count: int, dtype: torch.dtype, seed: int = 0, special: bool = True) -> torch.Tensor:
    """Values over a wide range of exponents, with every kind of special value among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator, dtype=torch.float64)
    values *= torch.exp2(torch.randint(-30, 5, (count,), generator=generator).double())
    values = values.to(dtype)
    if special:
        tiny = torch.finfo(dtype).tiny
        large = 2.0**130 if dtype == torch.float64 else torch.finfo(dtype).max  # sums of squares must be finite
        kinds = [0.0, -0.0, math.nan, math.inf, -math.inf, tiny, tiny / 2, -tiny / 4, large]
        where = torch.randperm(count, generator=generator)[: count // 3]
        values[where] = torch.tensor(kinds, dtype=torch.float64)[where % len(kinds)].to(dtype)
    return values


def whole(tensor: torch.Tensor | None, name: str = "w", seed: int = 0, **kwargs: tuple[int, ...]) -> Summary:
    return summarize([Shard.whole(name, tensor, **kwargs)], seed)


def assert_same(a: Summary, b: Summary) -> None:
    """Exact in everything exact; sums and projections to the stated tolerance."""
    assert (a.names, a.shapes, a.dtypes) == (b.names, b.shapes, b.dtypes)
    np.testing.assert_array_equal(a.integers, b.integers)
    np.testing.assert_array_equal(a.maxima, b.maxima)
    elements = a.integers[:, fields.ELEMENTS]
    gamma = (elements * 2.0**-53)[:, None]
    scale = np.repeat(a.floats[:, [fields.SUM_ABS]], fields.FLOATS, axis=1)
    scale[:, fields.SUM_SQUARES] = a.floats[:, fields.SUM_SQUARES]
    assert np.all(np.abs(a.floats - b.floats) <= 2 * gamma * scale)


def merge(parts: list[Summary], order: random.Random) -> Summary:
    parts = list(parts)
    order.shuffle(parts)
    total = parts[0]
    for part in parts[1:]:
        total = part.merge(total) if order.random() < 0.5 else total.merge(part)
    return total


# --- sharding


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 3000),
    cuts=st.lists(st.floats(0, 1), max_size=5),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_contiguous_pieces_merge_to_the_whole(count: int, cuts: list[float], dtype: torch.dtype, seed: int) -> None:
    values = gradient(count, dtype, seed)
    edges = [0, *sorted(int(cut * count) for cut in cuts), count]  # repeated edges: empty shards
    parts = [summarize([Shard.flat("w", values[a:b], (count,), a)], seed=3) for a, b in itertools.pairwise(edges)]
    assert_same(whole(values, seed=3), merge(parts, random.Random(seed)))


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 70), st.integers(1, 20)),
    dim=st.integers(0, 2),
    ranks=st.integers(1, 5),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_slices_along_any_dim_merge_to_the_whole(
    shape: tuple[int, int, int], dim: int, ranks: int, dtype: torch.dtype, seed: int
) -> None:
    values = gradient(math.prod(shape), dtype, seed).view(shape)
    size = -(-shape[dim] // ranks)  # as DTensor: the last ranks may hold less, or nothing
    parts = []
    for rank in range(ranks):
        first = min(rank * size, shape[dim])
        piece = values.narrow(dim, first, min(size, shape[dim] - first)).contiguous()
        parts.append(summarize([Shard.along("w", piece, shape, dim, first)], seed=3))
    assert_same(whole(values, seed=3), merge(parts, random.Random(seed)))


def test_many_chunks_many_threads_and_far_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary_module, "CHUNK", 1000)
    values = gradient(20_011, torch.float32)
    shape, offset = (1 << 20, 1 << 20), (1 << 40) - 20_011
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(summarize([Shard.flat("w", values, shape, offset)]))
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:  # sums too: they do not depend on the number of threads
        np.testing.assert_array_equal(results[0].integers, result.integers)
        np.testing.assert_array_equal(results[0].floats, result.floats)
    integers, floats, maximum = fields.scan(Shard.flat("w", values, shape, offset), 0)
    np.testing.assert_array_equal(results[0].integers[0], integers)
    np.testing.assert_allclose(results[0].floats[0], floats, rtol=1e-9, atol=1e-9 * floats[fields.SUM_ABS])
    assert results[0].maxima[0] == maximum


def test_shard_refuses_what_it_cannot_describe() -> None:
    with pytest.raises(ValueError, match="dtype"):
        Shard.whole("w", torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="contiguous"):
        Shard("w", (4, 3), torch.zeros(3, 4).t(), 0, 12, 12)
    with pytest.raises(ValueError, match="overlap"):
        Shard("w", (12,), torch.zeros(6), 0, 3, 2)
    with pytest.raises(ValueError, match="last element has global index 12"):
        Shard.flat("w", torch.zeros(6), (12,), 7)
    with pytest.raises(ValueError, match="shape"):
        Shard.whole("w", None)


# --- fields


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 31, 512, 513, 5000])
def test_kernel_and_torch_path_agree(dtype: torch.dtype, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = [
        Shard.flat("a", gradient(count, dtype, 1), (10**6,), 777),
        Shard("b", (10**6,), gradient(count, dtype, 2), 5, 7, 11),
        Shard.whole("c", gradient(count, dtype, 3, special=False)),
    ]
    fast = summarize(shards, seed=9)
    monkeypatch.setattr(summary_module, "_kernels", lambda: None)
    assert_same(fast, summarize(shards, seed=9))


@pytest.mark.parametrize("dtype", DTYPES)
def test_fields_are_what_they_are_called(dtype: torch.dtype) -> None:
    values = gradient(4099, dtype, 5)
    got = whole(values)["w"]
    finite = values[values.isfinite()].double().numpy()
    nonzero = np.abs(finite[finite != 0])
    assert (got.elements, got.numel, got.complete, got.is_none) == (4099, 4099, True, False)
    assert (got.nans, got.infs) == (int(values.isnan().sum()), int(values.isinf().sum()))
    assert got.zeros == int((values == 0).sum())
    assert got.subnormals == np.sum(nonzero < torch.finfo(dtype).tiny) > 0
    assert got.max_abs == np.abs(finite).max()
    assert got.sum == pytest.approx(math.fsum(finite), rel=1e-12, abs=1e-12 * got.sum_abs)
    assert got.sum_abs == pytest.approx(math.fsum(np.abs(finite)))
    assert got.norm == pytest.approx(math.sqrt(math.fsum(finite**2)))
    bins = np.clip(np.frexp(nonzero)[1] + 126, 0, 255)
    np.testing.assert_array_equal(got.exponents, np.bincount(bins, minlength=256))
    assert got.exponents.sum() + got.zeros + got.nonfinite == got.elements


def test_flush_to_zero_changes_no_exact_field() -> None:
    values = gradient(2000, torch.float32, 6)
    before = whole(values)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        np.testing.assert_array_equal(before.integers, whole(values).integers)
        np.testing.assert_array_equal(before.integers[0], fields.scan(Shard.whole("w", values), 0)[0])
    finally:
        torch.set_flush_denormal(False)


def test_projections_by_the_definition() -> None:
    """Element by element in plain Python: signs of one unit vector after the other."""
    count, seed = 1100, 4
    key = fields.projection_key("layer.weight", seed)
    for i in random.Random(0).sample(range(count), 60):
        one = torch.zeros(count)
        one[i] = 1.0
        unit, j = divmod(i, 512)
        row, lane = divmod(j, 32)
        first = fields.mix64((unit * fields.GOLDEN + key) & fields.MASK64)
        second = fields.mix64((first + fields.GOLDEN) & fields.MASK64)
        lanes = fields.mix64((lane * fields.GOLDEN + (key ^ fields.LANE_KEY)) & fields.MASK64)
        w = (int(fields.SIGN_TABLE[j]) ^ (first & fields.MASK32)) * 0x85EBCA6B & fields.MASK32
        w = (w ^ (w >> 15)) * ((first >> 32) | 1) & fields.MASK32
        expected = [
            (-1.0) ** ((w >> 31) + (p & row).bit_count() + (second >> p & 1) + (lanes >> p & 1)) for p in range(16)
        ]
        got = summarize([Shard.whole("layer.weight", one)], seed)["layer.weight"]
        assert list(got.projections) == expected


# Of float16, bfloat16, float32, float64.
GOLDEN_DIGESTS = ["bfa8be0f606d4b46", "1f92f768cb6b24f9", "81871944e40210e9", "5a794715dd08090c"]
GOLDEN_PROJECTIONS = [47.5, 344.5, 2633.0, -2639.75]


def test_golden_values_never_change() -> None:
    """A digest written by one version is compared with another's. If this fails, the schema must change."""
    values = torch.arange(-700, 700).float() / 8
    assert [f"{whole(values.to(dtype))['w'].digest:016x}" for dtype in DTYPES] == GOLDEN_DIGESTS
    assert whole(values, seed=5)["w"].projections[:4].tolist() == GOLDEN_PROJECTIONS


def test_nones_empties_and_scalars() -> None:
    none = summarize([Shard.whole("w", None, shape=(3, 4)), Shard.whole("s", torch.tensor(2.0))])
    assert none["w"].is_none and none["w"].complete and none["w"].dtype == ""
    assert none["s"].sum == 2.0 and none["s"].shape == ()
    empty = whole(torch.zeros(0, 5))["w"]
    assert (empty.elements, empty.digest, empty.is_none, empty.complete) == (0, 0, False, True)
    assert whole(torch.tensor([math.nan, math.inf]))["w"].max_abs == 0.0
    # A rank that holds nothing of a parameter may well report None.
    part = summarize([Shard.flat("w", torch.ones(12), (3, 4), 0)]).merge(whole(None, shape=(3, 4)))
    assert not part["w"].is_none and part["w"].complete and part["w"].nones == 1
    twice = whole(torch.ones(3)).merge(whole(torch.ones(3)))["w"]
    assert not twice.complete and twice.elements == 6
    assert len(summarize([])) == 0


def test_merge_keeps_what_only_one_has_and_refuses_contradictions() -> None:
    a, b = whole(torch.ones(3), "a"), whole(torch.ones(4), "b")
    both = a.merge(b)
    assert both.names == ("a", "b") and both["b"].sum == 4 and "c" not in both
    for other, match in (
        (whole(torch.ones(4), "a"), "shapes"),
        (whole(torch.ones(3).double(), "a"), "dtypes"),
        (whole(torch.ones(3), "a", seed=1), "seed"),
    ):
        with pytest.raises(SummaryError, match=match):
            a.merge(other)


# --- the digest


def terms(position: torch.Tensor, bits: torch.Tensor) -> np.ndarray:
    return fields.digest_terms(position, bits & fields.MASK32).numpy().view(np.uint64)


def float_bits(values: torch.Tensor) -> torch.Tensor:
    return values.float().view(torch.int32).long()


POSITIONS = torch.arange(1 << 20)


@pytest.mark.parametrize(
    "old, new",
    [
        (0, 1 << 31),  # 0.0 and -0.0
        (0x3F800000, 0xBF800000),  # sign flip
        (0x3F800000, 0x3F800001),  # one ulp
        (0x3F800000, 0x40000000),  # factor of two
        (0x7FC00000, 0x7FC00001),  # NaN payload
        (1, 2),
    ],
)
def test_equal_changes_at_two_places_never_cancel(old: int, new: int) -> None:
    """f(i, x) - f(i, y) over a million i: all different, no two opposite. So no swap or pair of flips is missed."""
    change = terms(POSITIONS, torch.tensor(old)) - terms(POSITIONS, torch.tensor(new))
    assert np.all(change != 0)
    folded = np.minimum(change, np.uint64(0) - change)
    assert len(np.unique(folded)) == len(folded)
    # Regular changes must look irregular down to the last bits, else sums of many cancel too easily.
    for shift in (0, 20, 40, 52):
        counts = np.bincount((change >> np.uint64(shift)).astype(np.int64) & 0xFFF, minlength=4096)
        assert abs(chi_square(counts)) < 6


def chi_square(counts: np.ndarray) -> float:
    """Standard deviations from what uniform counts give."""
    expected, bins = counts.sum() / len(counts), len(counts)
    return float((np.sum((counts - expected) ** 2) / expected - bins) / math.sqrt(2 * bins))


def test_terms_of_related_places_and_values_are_distinct() -> None:
    """Trade-offs between index and bits, small integers, repeated values: a million terms, no two alike."""
    i = torch.arange(1 << 16)
    words = [
        i,  # index and bits rise together
        (1 << 20) - i,  # or against each other
        i ^ 0x55555,
        *(float_bits(torch.full(i.shape, float(k))) for k in range(-4, 5)),
        *(torch.full_like(i, k + (1 << 28)) for k in range(4)),
    ]
    pairs = np.unique(np.concatenate([(i << 32 | word & fields.MASK32).numpy() for word in words]))
    everything = terms(torch.from_numpy(pairs >> 32), torch.from_numpy(pairs))
    assert len(np.unique(everything)) == len(everything) > 1_000_000


def test_digest_of_permuted_and_edited_tensors_is_new() -> None:
    """Structured edits of one tensor of small integers with many repeats; every digest is another."""
    rows, cols, rng = 48, 64, np.random.default_rng(0)
    base = torch.from_numpy(rng.integers(-2, 3, (rows, cols))).float()
    base[:, 0] = torch.arange(rows)
    seen = {base.numpy().tobytes(): whole(base)["w"].digest}
    for trial in range(4000):
        edited = base.clone()
        kind = trial % 5
        a, b = rng.choice(rows, 2, replace=False)
        c, d = rng.choice(cols, 2, replace=False)
        if kind == 0:
            edited[[a, b]] = edited[[b, a]]
        elif kind == 1:
            edited[:, [c, d]] = edited[:, [d, c]]
        elif kind == 2:
            edited[a, c], edited[b, d] = edited[b, d].clone(), edited[a, c].clone()
        elif kind == 3:  # a rectangle of opposite changes: cancels in any hash additive in row and column
            edited[a, c] += 1
            edited[b, d] += 1
            edited[a, d] -= 1
            edited[b, c] -= 1
        else:
            edited[a] = -edited[a]
        seen[edited.numpy().tobytes()] = whole(edited)["w"].digest
    assert len(set(seen.values())) == len(seen) > 2500


def test_digest_avalanche() -> None:
    """Flipping any bit of the value or the index changes every digest bit half of the time."""
    generator = torch.Generator().manual_seed(1)
    position = torch.randint(0, 1 << 40, (4096,), generator=generator)
    word = torch.randint(0, 1 << 32, (4096,), generator=generator)
    before = terms(position, word)

    def flipped(after: np.ndarray) -> np.ndarray:
        changed = before ^ after
        return np.array([np.mean((changed >> np.uint64(bit)) & np.uint64(1)) for bit in range(64)])

    for bit in range(32):
        rates = flipped(terms(position, word ^ (1 << bit)))
        assert np.all(np.abs(rates - 0.5) < 0.06), (bit, rates)
    for bit in range(40):
        rates = flipped(terms(position ^ (1 << bit), word))
        assert np.all(np.abs(rates - 0.5) < 0.06), (bit, rates)


def test_digest_sees_signs_of_zero_nan_payloads_and_places() -> None:
    def digest(bits: list[int]) -> int:
        return whole(torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32))["w"].digest

    nan, minus_zero = 0x7FC00000, -(1 << 31)
    tensors = [[0, 0], [minus_zero, 0], [0, minus_zero], [nan, 0], [nan + 1, 0], [0, nan], [0]]
    assert len({digest(bits) for bits in tensors}) == len(tensors)
    name, seed = whole(torch.ones(5), "a", 1)["a"], whole(torch.ones(5), "b", 2)["b"]
    assert name.digest == seed.digest  # of the content alone, so tied and renamed parameters show


# --- estimates


def differences() -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    sparse = torch.zeros(8192)
    sparse[torch.randperm(8192, generator=generator)[:20]] = 1.0
    return [
        ("dense", normal(8192)),
        ("constant", torch.ones(8192)),
        ("rank one", torch.outer(normal(64), normal(128)).flatten()),
        ("rank one, row of a unit", torch.outer(normal(16), normal(512)).flatten()),
        ("one column", torch.outer(torch.ones(128), torch.eye(64)[5]).flatten()),
        ("one row", torch.outer(torch.eye(16)[5], torch.ones(512)).flatten()),
        ("one lane", torch.outer(torch.ones(256), torch.eye(32)[5]).flatten()),
        ("neighbours", torch.cat([torch.ones(32), torch.zeros(8160)])),
        ("heavy tail", normal(8192) ** 5),
        ("sparse", sparse),
    ]


@pytest.mark.parametrize("label, d", differences(), ids=[label for label, _ in differences()])
def test_distance_has_the_stated_standard_error(label: str, d: torch.Tensor) -> None:
    """Over 400 seeds: unbiased, variance of |a-b|^2 within (2/k) |a-b|^4, and the interval the docs promise."""
    true = float(d.double().square().sum())
    squares = np.array([np.mean(whole(d, seed=s)["w"].projections ** 2) for s in range(400)]) / true
    bound = math.sqrt(2 / 16)
    assert abs(squares.mean() - 1) < 4 * bound / math.sqrt(400)
    assert squares.std() < 1.15 * bound  # 4 standard errors of a standard deviation
    errors = np.sqrt(squares) - 1
    assert np.mean(np.abs(errors) <= 2 * RELATIVE_ERROR * np.sqrt(squares)) > 0.88
    assert np.mean((squares > 0.65**2) & (squares < 1.4**2)) > 0.95


def test_signs_of_four_elements_are_independent() -> None:
    """What the variance rests on: within a projection, the product of four signs averages to nothing.

    Over 4000 pairs of units, for elements in one unit and for the corners of rectangles over two units, which a
    product of a row sign and a column sign would give the constant product 1.
    """
    shape, rng = (8192 * 512,), np.random.default_rng(0)
    signs = np.stack([_signs(shape, j) for j in (0, 1, 31, 32, 64, 300, 511)], 1)  # [units, places, projections]
    limit = 4.5 / math.sqrt(4096)
    for _ in range(40):
        a, b, c, d = rng.choice(7, 4, replace=False)
        assert np.all(np.abs(signs[:, [a, b, c, d]].prod(1).mean(0)) < limit)
        one, other = signs[0::2, [a, b]].prod(1), signs[1::2, [a, b]].prod(1)
        assert np.all(np.abs((one * other).mean(0)) < limit)


def _signs(shape: tuple[int], j: int) -> np.ndarray:
    """s_p of the j-th element of every unit, [units, PROJECTIONS]."""
    units = np.arange(shape[0] // 512, dtype=np.uint64)
    golden, key = np.uint64(fields.GOLDEN), np.uint64(fields.projection_key("w", 0))
    first = _mix(units * golden + key)
    second = _mix(first + golden)
    lane = fields.mix64((j % 32 * fields.GOLDEN + (int(key) ^ fields.LANE_KEY)) & fields.MASK64)
    w = (fields.SIGN_TABLE[j] ^ first.astype(np.uint32)) * np.uint32(0x85EBCA6B)
    w = (w ^ (w >> np.uint32(15))) * ((first >> np.uint64(32)).astype(np.uint32) | np.uint32(1))
    p = np.arange(16)
    hadamard = np.array([(int(k) & (j // 32)).bit_count() for k in p])
    parity = (
        (w >> np.uint32(31))[:, None]
        + (second.astype(np.int64)[:, None] >> p & 1)
        + hadamard
        + ((lane & 0xFFFF) >> p & 1)
    )
    return 1.0 - 2.0 * (parity % 2)


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def test_scale_errors_give_alpha_to_all_digits() -> None:
    b = torch.randn(10_000)
    for factor in (0.5, 2.0, 4.0, 65536.0, -1.0):
        (difference,) = estimate_difference(whole(factor * b), whole(b))
        assert difference.relation == Relation.DIFFERENT
        assert difference.alpha == pytest.approx(factor, rel=1e-12)
        assert difference.cosine == pytest.approx(math.copysign(1, factor), rel=1e-12)
        assert difference.distance == pytest.approx(abs(factor - 1) * float(b.double().norm()), rel=1e-12)
        assert difference.distance_error < 1e-12 * difference.distance and not difference.exact
        assert difference.distance_low == pytest.approx(difference.distance, rel=1e-12)
        assert difference.distance_high == pytest.approx(difference.distance, rel=1e-12)
    scaled = b * (1 + 2.4e-4)
    tiny = compare(whole(scaled)["w"], whole(b)["w"])
    assert tiny.alpha == pytest.approx(float(scaled.double() @ b.double()) / float(b.double() @ b.double()), abs=1e-13)
    assert tiny.alpha_error < 1e-13


def test_cosine_and_alpha_of_any_angle_have_the_stated_errors() -> None:
    b = torch.randn(4096)
    other = torch.randn(4096)
    other -= (other @ b) / (b @ b) * b
    other *= b.norm() / other.norm()
    for cosine in (0.999, 0.9, 0.5, 0.0, -0.7):
        a = 3 * (cosine * b + math.sqrt(1 - cosine**2) * other)
        found = [compare(whole(a, seed=s)["w"], whole(b, seed=s)["w"]) for s in range(200)]
        errors = np.array([d.cosine - cosine for d in found])
        stated = (1 - cosine**2) / math.sqrt(16 * (1 + cosine**2))
        assert abs(errors.mean()) < 0.3 * stated and errors.std() < 1.2 * stated
        # With the error as estimated from the same 16 numbers, the interval is a little short.
        assert np.mean([abs(d.cosine - cosine) < 2 * d.cosine_error for d in found]) > 0.8
        assert all(d.alpha == pytest.approx(3 * d.cosine, rel=1e-5) for d in found)
        # The distance follows from the same angle, and is known the better the more of it the norms make.
        true = float((a - b).double().norm())
        assert np.std([d.distance for d in found]) < 1.25 * np.mean([d.distance_error for d in found])
        assert np.mean([d.distance_low <= true <= d.distance_high for d in found]) > 0.9
        assert all(d.distance_error <= (RELATIVE_ERROR + 1e-12) * d.distance for d in found)


def test_close_gradients_are_told_apart_far_below_float32() -> None:
    a = torch.randn(1 << 18, dtype=torch.float64)
    b = a + 1e-9 * torch.randn(1 << 18, dtype=torch.float64)
    (difference,) = estimate_difference(whole(a), whole(b))
    true = float((a - b).norm())
    assert abs(difference.distance - true) < 5 * difference.distance_error
    assert difference.rounding < difference.distance
    assert 0 < 1 - difference.cosine < 1e-17 or difference.cosine == 1.0


def test_relations() -> None:
    ones, minus = torch.ones(4), torch.tensor([1.0, 1.0, 1.0, -1.0])
    nan, zero = torch.tensor([1.0, math.nan, 1.0, 1.0]), torch.zeros(4)
    table = [
        (ones, ones, Relation.BITWISE),
        (ones, minus, Relation.DIFFERENT),
        (nan, nan, Relation.BITWISE),
        (nan, ones, Relation.NONFINITE),
        (nan, torch.tensor([1.0, math.inf, 1.0, 1.0]), Relation.NONFINITE),
        (zero, -zero, Relation.EQUAL),
        (ones, ones.double(), Relation.UNKNOWN),
        (ones, ones.view(2, 2), Relation.SHAPE),
        (ones, None, Relation.NONE),
        (None, None, Relation.EQUAL),
    ]
    for a, b, relation in table:
        shapes = [(4,) if t is None else None for t in (a, b)]
        (got,) = estimate_difference(
            *(summarize([Shard.whole("w", t, s)]) for t, s in zip((a, b), shapes, strict=True))
        )
        assert got.relation == relation, (a, b, got)
        if relation in (Relation.BITWISE, Relation.EQUAL):
            assert got.distance == 0 and got.exact
    both_nan = compare(whole(nan)["w"], whole(nan)["w"])
    assert (both_nan.nonfinite_a, both_nan.nonfinite_b) == (1, 1)
    assert math.isnan(compare(whole(nan)["w"], whole(ones)["w"]).distance)

    doubled = whole(ones).merge(whole(ones))
    assert estimate_difference(doubled, whole(ones))[0].relation == Relation.INCOMPLETE
    sides = estimate_difference(whole(ones, "a"), whole(ones, "b"))
    assert [(d.name, d.relation) for d in sides] == [("a", Relation.ONLY_A), ("b", Relation.ONLY_B)]
    with pytest.raises(SummaryError, match="seeds 0 and 1"):
        estimate_difference(whole(ones), whole(ones, seed=1))


def test_zero_gradients_have_exact_distances_and_no_angle() -> None:
    values = torch.randn(100)
    got = compare(whole(values)["w"], whole(torch.zeros(100))["w"])
    assert got.exact and got.distance == pytest.approx(float(values.double().norm()))
    assert math.isnan(got.relative) and math.isnan(got.alpha) and math.isnan(got.cosine)
    one = compare(whole(torch.tensor([3.0]))["w"], whole(torch.tensor([-1.0]))["w"])
    assert one.exact and one.distance == 4.0 and one.alpha == -3.0


# --- over ranks


def _reduce_on_a_rank(rank: int, port: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=3)
    group = dist.group.WORLD
    w, v = gradient(1001, torch.float32, 1), gradient(70, torch.bfloat16, 2).view(7, 10)
    edges = [0, 600, 600, 1001]  # rank 1 holds nothing of w, and says None of n
    shards = [
        Shard.flat("w", w[edges[rank] : edges[rank + 1]], (1001,), edges[rank]),
        Shard.along("v", v[:, 4 * rank : min(4 * rank + 4, 10)], (7, 10), 1, 4 * rank),
        Shard.whole("none", None, (5,)),
        Shard("n", (4,), None, 0, 1, 1) if rank == 1 else Shard.flat("n", torch.ones(2), (4,), rank),
    ]
    whole_summary = summarize(shards).reduce(group)
    whole_summary.save(Path(folder) / f"{rank}.safetensors")
    assert summarize(shards).reduce(None)["w"].elements == edges[rank + 1] - edges[rank]
    errors = []
    for wrong in (
        [Shard.whole("other", torch.ones(2 + rank))],
        [Shard.whole("x", torch.ones(2).to(DTYPES[rank]))],
    ):
        try:
            summarize(wrong).reduce(group)
        except SummaryError as error:
            errors.append(str(error))
    (Path(folder) / f"{rank}.json").write_text(json.dumps(errors))
    dist.barrier()
    dist.destroy_process_group()


def test_reduce_over_three_ranks(tmp_path: Path) -> None:
    prepare()  # so that ranks find the kernels compiled
    port = 20_000 + os.getpid() % 20_000
    mp.start_processes(_reduce_on_a_rank, (port, str(tmp_path)), nprocs=3, start_method="spawn")
    w, v = gradient(1001, torch.float32, 1), gradient(70, torch.bfloat16, 2).view(7, 10)
    expected = summarize([Shard.whole("w", w), Shard.whole("v", v)])
    contents = [(tmp_path / f"{rank}.safetensors").read_bytes() for rank in range(3)]
    assert contents[0] == contents[1] == contents[2]
    got = Summary.load(tmp_path / "0.safetensors")
    for name in ("w", "v"):
        assert compare(got[name], expected[name]).relation == Relation.BITWISE
        assert got[name].max_abs == expected[name].max_abs
        np.testing.assert_array_equal(got[name].exponents, expected[name].exponents)
    assert got["none"].is_none and got["none"].nones == 3
    assert got["n"].elements == 4 and got["n"].nones == 1 and got["n"].dtype == "float32"
    for rank in range(3):
        names, dtypes = json.loads((tmp_path / f"{rank}.json").read_text())
        assert "names, shapes or seed" in names and "gradient of x is float16 on one rank" in dtypes


# --- the file


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    summary = summarize(
        [Shard.whole("w", gradient(700, torch.float32)), Shard.whole("n", None, (2, 3))],
        seed=7,
        aliases={"w": ["head.weight"]},
    )
    summary.save(tmp_path / "step_1.safetensors", {"step": "1"})
    return tmp_path / "step_1.safetensors"


def test_file_round_trip(saved: Path) -> None:
    before = summarize([Shard.whole("w", gradient(700, torch.float32)), Shard.whole("n", None, (2, 3))], seed=7)
    after = Summary.load(saved)
    assert_same(before, after)
    np.testing.assert_array_equal(before.floats, after.floats)
    assert after.metadata == {"step": "1"} and after["w"].aliases == ("head.weight",) and after.seed == 7
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]  # no temporary left
    after.save(saved)
    assert Summary.load(saved).metadata == {"step": "1"}
    summarize([]).save(saved)
    assert len(Summary.load(saved)) == 0


def test_damaged_files_are_refused(saved: Path) -> None:
    content = saved.read_bytes()
    rng = random.Random(0)
    cases = [content[:size] for size in (0, 5, 8, 100, len(content) // 2, len(content) - 1)]
    cases += [content + b"x", b"\xff" * 8 + content[8:], b"not a file of ours" * 10, pickle.dumps({"a": 1})]
    for _ in range(150):
        at = rng.randrange(len(content))
        cases.append(content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :])
    for case in cases:
        saved.write_bytes(case)
        with pytest.raises(SummaryError, match="step_1"):
            Summary.load(saved)
    with pytest.raises(SummaryError, match="missing"):
        Summary.load(saved.with_name("missing.safetensors"))
    with pytest.raises(SummaryError):
        Summary.load(saved.parent)


def _rewrite(path: Path, key: str, value: object) -> None:
    """The same file with another entry in its header."""
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    outer = json.loads(content[8 : 8 + size])
    header = json.loads(outer["__metadata__"][FORMAT])
    outer["__metadata__"][FORMAT] = json.dumps(header | {key: value})
    text = json.dumps(outer).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])


def test_foreign_newer_and_lying_files_are_refused(saved: Path) -> None:
    content = saved.read_bytes()
    deep: list[object] = []
    for _ in range(500):
        deep = [deep]
    for key, value, match in (
        ("schema", 2, "newer"),
        ("schema", "zero", "damaged"),
        ("schema", 0, "damaged"),
        ("parameters", None, "damaged"),
        ("parameters", deep, "damaged"),
        ("parameters", [{"name": "w"}] * 100_000, "too short"),
        ("seed", 8, "checksum"),
        ("metadata", {}, "checksum"),
        ("metadata", [], "damaged"),
    ):
        saved.write_bytes(content)
        _rewrite(saved, key, value)
        with pytest.raises(SummaryError, match=match):
            Summary.load(saved)
    save_file({"w": np.zeros(3)}, saved)
    with pytest.raises(SummaryError, match="not a gradient summary"):
        Summary.load(saved)


def test_metadata_is_bounded(saved: Path) -> None:
    with pytest.raises(SummaryError, match="metadata of"):
        Summary.load(saved).save(saved, {"notes": "x" * (2 << 20)})
    assert Summary.load(saved).metadata == {"step": "1"}  # the old file is untouched


# --- how it is loaded


IDLE = """
import importlib.util, os, torch, numpy
if importlib.util.find_spec("scipy"):  # numba imports it where it is installed, with a pool of its own BLAS's
    import scipy.linalg
print(len(os.listdir("/proc/self/task")))
"""


def test_preparing_starts_no_thread_and_needs_no_cache_folder() -> None:
    code = (
        "import os, torch; from distbench.numerics.shards import Shard;"
        "from distbench.numerics.summary import prepare, summarize; prepare();"
        "print(len(os.listdir('/proc/self/task')));"
        "print(summarize([Shard.whole('w', torch.ones(3))])['w'].digest)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    threads, digest = done.stdout.split()
    assert int(digest) == whole(torch.ones(3))["w"].digest
    idle = subprocess.run(
        [sys.executable, "-c", IDLE],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(threads) == int(idle.stdout)


def test_kernels_compile_where_nothing_can_be_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = numba.njit

    def njit(cache: bool = False, **options: object) -> object:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return plain(**options)

    monkeypatch.setattr(numba, "njit", njit)
    twice = summary_kernels._jit()(lambda x: x + x)
    assert twice(3) == 6


def test_a_broken_numba_falls_back_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError("no space left on device")

    values = gradient(1000, torch.float32)
    expected = whole(values)
    monkeypatch.setattr(summary_kernels, "scan", broken)
    summary_module._kernels.cache_clear()
    try:
        with pytest.warns(UserWarning, match="no space left"):
            assert_same(expected, whole(values))
    finally:
        monkeypatch.undo()
        summary_module._kernels.cache_clear()
