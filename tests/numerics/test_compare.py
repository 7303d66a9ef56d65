"""`compare_files` against a naive reference on every dtype, and on files that are not what they should be."""

from __future__ import annotations

import functools
import json
import math
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from distbench.errors import TensorFileError
from distbench.numerics import compare, compare_kernels, tensor_files
from distbench.numerics.compare import Comparison, TensorDifference, compare_files
from distbench.numerics.compare_kernels import BLOCK, FORMATS, SPAN, FloatFormat, IntegerFormat

try:
    from distbench.numerics import compare_numba
except ImportError:
    ENGINES = [False]
else:
    ENGINES = [False, True]

FLOATS = [code for code, form in FORMATS.items() if isinstance(form, FloatFormat)]
INTEGERS = [code for code, form in FORMATS.items() if isinstance(form, IntegerFormat)]
engines = pytest.mark.parametrize("fused", ENGINES, ids=lambda fused: "numba" if fused else "numpy")
relaxed = settings(
    max_examples=25,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

Stored = tuple[str, tuple[int, ...], bytes]


def write(path: Path, tensors: Mapping[str, Stored], padding: int = 0) -> Path:
    """A safetensors file of (dtype code, shape, bytes); `padding` spaces after its header move the data."""
    header, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return write_raw(path, json.dumps(header).encode() + b" " * padding, data)


def write_raw(path: Path, header: bytes, data: bytes = b"", length: int | None = None) -> Path:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)
    return path


def raw(code: str, values: Any) -> bytes:
    """Values as bytes of a dtype."""
    dtype = getattr(torch, FORMATS[code].name)
    if not len(values):
        return b""
    return torch.tensor(values, dtype=torch.float64).to(dtype).view(torch.uint8).numpy().tobytes()


def one(
    folder: Path, code_a: str, raw_a: bytes, code_b: str, raw_b: bytes, padding: int = 0, **options: Any
) -> TensorDifference:
    """Compare two files of one 1-dim tensor each."""
    shape = (len(raw_a) // FORMATS[code_a].itemsize,)
    a = write(folder / "a.safetensors", {"x": (code_a, shape, raw_a)}, padding)
    b = write(folder / "b.safetensors", {"x": (code_b, shape, raw_b)})
    comparison = compare_files(a, b, **options)
    assert not comparison.not_compared
    return comparison.tensors[0]


def as_float64(code: str, data: bytes) -> np.ndarray:
    """What torch reads from the bytes; what it converts exactly, it does."""
    if not data:
        return np.empty(0)
    bits = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if code == "BOOL":
        return bits.numpy().astype(np.float64)
    return bits.view(getattr(torch, FORMATS[code].name)).to(torch.float64).numpy()


def as_bits(code: str, data: bytes) -> np.ndarray:
    return np.frombuffer(data, f"u{FORMATS[code].itemsize}")


@functools.cache
def places(code: str) -> dict[float, int]:
    """Every finite number of a dtype of at most 16 bits, with its place among them."""
    every = np.arange(256 ** FORMATS[code].itemsize, dtype=f"u{FORMATS[code].itemsize}")
    values = as_float64(code, every.tobytes())
    return {value: place for place, value in enumerate(sorted(set(values[np.isfinite(values)].tolist())))}


def rank(code: str, data: bytes) -> list[int]:
    """The place of each element among the numbers of its dtype in ascending order, both zeros the same."""
    width = 8 * FORMATS[code].itemsize
    if width <= 16:
        return [places(code).get(value, 0) for value in as_float64(code, data).tolist()]
    sign = 1 << (width - 1)
    return [-(bits - sign) if bits >= sign else bits for bits in as_bits(code, data).tolist()]


def as_integers(values: np.ndarray) -> list[int]:
    """Every finite fp64 number is a whole multiple of 2**-1074: exact arithmetic without overflow."""
    ratios = (value.as_integer_ratio() for value in values.tolist())
    return [(numerator << 1074) // denominator for numerator, denominator in ratios]


def root(squares: int) -> float:
    """The square root of a sum of squares of such integers, in units of 1; inf beyond fp64."""
    return ratio(math.isqrt(squares << 128), 1 << 1138)


def ratio(numerator: int, denominator: int) -> float:
    try:
        return numerator / denominator
    except OverflowError:
        return math.inf if numerator > 0 else -math.inf


def reference(code: str, raw_a: bytes, raw_b: bytes) -> dict[str, Any]:
    """The naive comparison of two tensors of one floating-point dtype, exact but for one rounding each."""
    a, b = as_float64(code, raw_a), as_float64(code, raw_b)
    bits_a, bits_b = as_bits(code, raw_a), as_bits(code, raw_b)
    finite = np.isfinite(a) & np.isfinite(b)
    x, y = as_integers(np.where(finite, a, 0)), as_integers(np.where(finite, b, 0))
    distances = [abs(p - q) for p, q in zip(x, y, strict=True)]
    # The difference of two elements is rounded to fp64 before the largest is looked for.
    with np.errstate(over="ignore"):
        rounded = np.abs(np.where(finite, a, 0) - np.where(finite, b, 0))
    different = np.where(finite, a != b, bits_a != bits_b)
    squares_b = sum(q * q for q in y)
    ranks = zip(rank(code, raw_a), rank(code, raw_b), finite, strict=True)
    return {
        "num_different": int(different.sum()),
        "bitwise_equal": raw_a == raw_b,
        "l2_a": root(sum(p * p for p in x)),
        "l2_b": root(squares_b),
        "l2_difference": root(sum(d * d for d in distances)),
        "alpha": ratio(sum(p * q for p, q in zip(x, y, strict=True)), squares_b) if squares_b else None,
        "max_abs_difference": float(rounded.max(initial=0)),
        "max_abs_index": int(rounded.argmax()) if rounded.any() else None,
        "max_ulp": max((abs(p - q) for p, q, ok in ranks if ok), default=0),
        "num_nonfinite_a": int((~np.isfinite(a)).sum()),
        "num_nonfinite_b": int((~np.isfinite(b)).sum()),
        "num_nonfinite_different": int((different & ~finite).sum()),
        "num_nan_mismatch": int((np.isnan(a) != np.isnan(b)).sum()),
        "num_zero_a": int((a == 0).sum()),
        "num_zero_b": int((b == 0).sum()),
    }


def assert_same(found: TensorDifference, expected: Mapping[str, Any]) -> None:
    for key, value in expected.items():
        got = getattr(found, key)
        if key == "alpha" and value is not None:
            # The terms of <a, b> may cancel; its error is relative to their magnitudes, at most |a| |b|.
            error = 1e-12 * found.l2_a / found.l2_b if found.l2_a < math.inf else math.inf
            assert got == value or abs(got - value) <= max(error, 1e-12 * abs(value)), key
        elif value == math.inf:
            assert got >= sys.float_info.max, key  # the last bit decides
        elif isinstance(value, float):
            assert got == pytest.approx(value, rel=1e-12, abs=1e-12 if key == "cosine" else 0), key
        else:
            assert got == value, key


def make_pair(code: str, numel: int, kind: str, seed: int) -> tuple[bytes, bytes]:
    """Two runs of elements that are mostly the same, with the special numbers among them.

    `kind` is what most are: any bits, normal random numbers, or mostly zeros.
    """
    rng = np.random.default_rng(seed)
    itemsize = FORMATS[code].itemsize
    if kind == "bits" or isinstance(FORMATS[code], IntegerFormat):
        a = rng.integers(0, 2 if code == "BOOL" else 256, (numel, itemsize), np.uint8)
    else:
        values = rng.standard_normal(numel) * (rng.random(numel) < 0.1 if kind == "sparse" else 1.0)
        a = np.frombuffer(raw(code, values), np.uint8).reshape(numel, itemsize).copy()
    b = a.copy()
    for _ in range(rng.integers(0, 8) if numel else 0):
        side = a if rng.random() < 0.5 else b
        side[rng.integers(numel)] = rng.choice(special(code))
    if rng.random() < 0.5 and code != "BOOL":
        noisy = rng.random(numel) < 0.3
        b[noisy, 0] ^= rng.integers(0, 256, noisy.sum(), np.uint8)
    return a.tobytes(), b.tobytes()


def special(code: str) -> list[list[int]]:
    """The bytes of zeros, of the smallest and largest numbers, infinities and NaNs, of both signs."""
    form, width = FORMATS[code], 8 * FORMATS[code].itemsize
    if code == "BOOL":
        return [[0], [1]]
    top = form.infinite_from if isinstance(form, FloatFormat) else 2 ** (width - 1) - 1
    magnitudes = [0, 1, 2, top - 1, top, min(top + 1, 2**width - 1)]
    both_signs = magnitudes + [value | 1 << (width - 1) for value in magnitudes]
    return [list((value % 2**width).to_bytes(width // 8, "little")) for value in both_signs]


SIZES = st.one_of(st.integers(0, 40), st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5]))
KINDS = st.sampled_from(["bits", "normal", "sparse"])
SEEDS = st.integers(0, 2**32 - 1)


@engines
@pytest.mark.parametrize("code", FLOATS)
@relaxed
@given(numel=SIZES, kind=KINDS, seed=SEEDS)
def test_floats_match_the_naive_reference(
    code: str, fused: bool, tmp_path: Path, numel: int, kind: str, seed: int
) -> None:
    raw_a, raw_b = make_pair(code, numel, kind, seed)
    found = one(tmp_path, code, raw_a, code, raw_b, padding=seed % 9, fused=fused)
    expected = reference(code, raw_a, raw_b)
    assert_same(found, expected)
    if expected["num_nonfinite_different"]:
        assert found.relative_l2 is None and "not finite" in (found.relative_l2_reason or "")
    elif found.l2_b == 0:
        assert found.relative_l2 is None and "zero" in (found.relative_l2_reason or "")
    elif found.l2_difference < math.inf and found.l2_b < math.inf:
        assert found.relative_l2 == pytest.approx(found.l2_difference / found.l2_b, rel=1e-12)
    assert found.cosine is None or -1 <= found.cosine <= 1


@pytest.mark.parametrize("code", INTEGERS)
@relaxed
@given(numel=SIZES, seed=SEEDS)
def test_integers_are_compared_exactly(code: str, tmp_path: Path, numel: int, seed: int) -> None:
    raw_a, raw_b = make_pair(code, numel, "bits", seed)
    found = one(tmp_path, code, raw_a, code, raw_b)
    dtype = "u1" if code == "BOOL" else FORMATS[code].name
    a, b = (np.frombuffer(data, dtype).tolist() for data in (raw_a, raw_b))
    distances = [abs(x - y) for x, y in zip(a, b, strict=True)]  # of Python integers: nothing overflows
    assert found.num_different == sum(x != y for x, y in zip(a, b, strict=True))
    assert found.max_abs_difference == max(distances, default=0)
    assert isinstance(found.max_abs_difference, int)
    assert found.max_abs_index == (distances.index(max(distances)) if any(distances) else None)
    assert found.l2_difference == pytest.approx(math.sqrt(sum(d * d for d in distances)), rel=1e-12)
    assert found.l2_b == pytest.approx(math.sqrt(sum(y * y for y in b)), rel=1e-12)
    assert (found.num_zero_a, found.num_zero_b) == (a.count(0), b.count(0))
    assert found.max_ulp is None
    assert found.differs(1e30) == (a != b), "no tolerance applies to integers"


@pytest.mark.skipif(len(ENGINES) < 2, reason="numba is not installed")
@pytest.mark.parametrize("code", ["F64", "F32", "BF16", "F16", "F8_E4M3"])
@relaxed
@given(numel=st.sampled_from([1, BLOCK, SPAN - 1, SPAN + BLOCK + 1, 2 * SPAN + 3]), kind=KINDS, seed=SEEDS)
def test_kernels_equal_the_fallback(code: str, tmp_path: Path, numel: int, kind: str, seed: int) -> None:
    raw_a, raw_b = make_pair(code, numel, kind, seed)
    plain = one(tmp_path, code, raw_a, code, raw_b, fused=False)
    fused = one(tmp_path, code, raw_a, code, raw_b, fused=True)
    assert_same(fused, asdict(plain))
    assert fused.max_abs_difference == plain.max_abs_difference


@engines
def test_not_finite_is_never_equal_but_to_its_own_bits(fused: bool, tmp_path: Path) -> None:
    nan, inf = math.nan, math.inf
    same = raw("F32", [nan, inf, -inf, 1.0])
    found = one(tmp_path, "F32", same, "F32", same, fused=fused)
    assert found.bitwise_equal and found.num_different == 0 and not found.differs()
    assert (found.num_nonfinite_a, found.num_nonfinite_b, found.num_nonfinite_different) == (3, 3, 0)
    assert found.relative_l2 == 0 and found.l2_a == 1

    found = one(
        tmp_path,
        "F32",
        raw("F32", [nan, inf, 0.0, 1.0]),
        "F32",
        raw("F32", [1.0, -inf, nan, 1.0]),
        fused=fused,
    )
    assert found.num_different == found.num_nonfinite_different == 3
    assert found.num_nan_mismatch == 2 and found.differs(1e30) and found.relative_l2 is None
    assert found.severity > one(tmp_path, "F32", raw("F32", [1e30]), "F32", raw("F32", [1e-30])).severity

    other_nan = np.array([0x7FC00001], np.uint32).tobytes()
    found = one(tmp_path, "F32", raw("F32", [nan]), "F32", other_nan, fused=fused)
    assert found.num_different == 1 and found.num_nan_mismatch == 0 and found.differs(1.0)


@engines
@pytest.mark.parametrize("code", ["F64", "F32", "BF16", "F16", "F8_E5M2"])
def test_signed_zeros_and_subnormals(code: str, fused: bool, tmp_path: Path) -> None:
    found = one(tmp_path, code, raw(code, [0.0, 1.0]), code, raw(code, [-0.0, 1.0]), fused=fused)
    assert found.num_different == 0 and not found.bitwise_equal and not found.differs()
    assert found.max_ulp == 0 and found.num_zero_a == found.num_zero_b == 1

    smallest = FORMATS[code].smallest
    found = one(tmp_path, code, raw(code, [smallest, -smallest]), code, raw(code, [-smallest, 0.0]), fused=fused)
    assert found.num_different == 2 and found.max_ulp == 2
    assert found.max_abs_difference == 2 * smallest and found.max_abs_index == 0
    assert found.l2_difference == pytest.approx(math.sqrt(5) * smallest, rel=1e-12)
    assert found.l2_b == smallest


@pytest.mark.parametrize("code", FLOATS)
def test_formats_describe_what_torch_reads(code: str) -> None:
    form = FORMATS[code]
    width = 8 * form.itemsize
    if width > 16:
        places = [0, 1, form.infinite_from - 1, form.infinite_from, form.nan_from]
        bits = np.array(places + [1 << (width - 1) | place for place in places], f"u{form.itemsize}")
    else:
        bits = np.arange(2**width, dtype=f"u{form.itemsize}")
    codes, values = compare_kernels.decode(bits.view(np.uint8), form)
    expected = as_float64(code, bits.tobytes())
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(values.astype(np.float64), expected)
    magnitudes = codes & np.iinfo(codes.dtype).max
    np.testing.assert_array_equal(magnitudes >= form.infinite_from, ~np.isfinite(expected))
    np.testing.assert_array_equal(magnitudes >= form.nan_from, np.isnan(expected))
    np.testing.assert_array_equal(magnitudes == 0, expected == 0)
    assert form.smallest == expected[expected > 0].min()
    assert len(set(codes.tolist())) == len(bits), "codes tell all bit patterns apart"


def test_fp64_whose_squares_overflow_or_vanish(tmp_path: Path) -> None:
    for scale in (1e300, 1e-300, 1e154, 5e-324):
        a, b = raw("F64", [3 * scale, 4 * scale]), raw("F64", [3 * scale, 0.0])
        found = one(tmp_path, "F64", a, "F64", b)
        assert found.l2_b == pytest.approx(3 * scale, rel=1e-12)
        assert found.l2_difference == pytest.approx(4 * scale, rel=1e-12)
        assert found.relative_l2 == pytest.approx(4 / 3, rel=1e-12)
        assert found.cosine == pytest.approx(0.6, rel=1e-12) and found.alpha == pytest.approx(1.0, rel=1e-12)
    found = one(tmp_path, "F64", raw("F64", [1.7e308, 0.0]), "F64", raw("F64", [-1.7e308, 0.0]))
    assert found.relative_l2 == pytest.approx(2.0) and found.cosine == -1.0
    assert found.max_abs_difference == math.inf and found.max_ulp == 2 * struct.unpack("<q", raw("F64", [1.7e308]))[0]


@engines
def test_sums_are_as_exact_as_stated(fused: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    a = (rng.standard_normal(200_003) * 10.0 ** rng.integers(-15, 15, 200_003)).astype(np.float32)
    b = (a * rng.uniform(0.999, 1.001, a.size)).astype(np.float32)
    found = one(tmp_path, "F32", a.tobytes(), "F32", b.tobytes(), fused=fused)
    x, y = a.astype(np.float64), b.astype(np.float64)
    for got, squares in ((found.l2_a, x * x), (found.l2_b, y * y), (found.l2_difference, (x - y) ** 2)):
        assert got**2 == pytest.approx(math.fsum(squares), rel=2.3e-13)


@pytest.mark.parametrize(
    ("code_a", "code_b", "compared_as"),
    [
        ("F32", "BF16", "float32"),
        ("F8_E4M3", "BF16", "float32"),
        ("F64", "F16", "float64"),
        ("I8", "F32", "float64"),
        ("I64", "F32", "float64 (64-bit integers rounded)"),
        ("U64", "I8", "float64 (64-bit integers rounded)"),
        ("U8", "I64", "int64"),
        ("BOOL", "I32", "int32"),
    ],
)
def test_different_dtypes_are_compared_by_value(code_a: str, code_b: str, compared_as: str, tmp_path: Path) -> None:
    a, b = [0.0, 1.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0]
    found = one(tmp_path, code_a, raw(code_a, a), code_b, raw(code_b, b))
    assert (found.dtype_a, found.dtype_b) == (FORMATS[code_a].name, FORMATS[code_b].name)
    assert found.compared_as == compared_as
    assert found.num_different == 2 and not found.bitwise_equal and found.max_ulp is None
    assert found.l2_difference == pytest.approx(math.sqrt(2)) and found.max_abs_index == 2
    equal = one(tmp_path, code_a, raw(code_a, a), code_b, raw(code_b, a))
    assert equal.num_different == 0 and not equal.bitwise_equal and not equal.differs()


def test_not_finite_in_different_dtypes(tmp_path: Path) -> None:
    values = [math.nan, math.inf, -math.inf, 2.0]
    found = one(tmp_path, "F32", raw("F32", values), "BF16", raw("BF16", values))
    assert found.num_different == found.num_nonfinite_different == 1, "NaN equals no NaN of another dtype"
    assert found.num_nonfinite_a == found.num_nonfinite_b == 3 and found.num_nan_mismatch == 0


def test_zero_tensors_have_no_relative_error(tmp_path: Path) -> None:
    zero, one_ = raw("F32", [0.0, 0.0]), raw("F32", [1.0, 0.0])
    found = one(tmp_path, "F32", zero, "F32", zero)
    assert (found.relative_l2, found.cosine, found.alpha) == (None, None, None)
    assert found.relative_l2_reason == "a and b are all zero" and not found.differs(0.1)
    found = one(tmp_path, "F32", one_, "F32", zero)
    assert found.relative_l2_reason == "b is all zero" and found.differs(0.1) and found.severity[1] == math.inf
    found = one(tmp_path, "F32", zero, "F32", one_)
    assert found.relative_l2 == 1.0 and found.alpha == 0.0 and found.cosine is None
    # The floor: a's smallest possible difference from zero is within any tolerance, and still a difference.
    found = one(tmp_path, "F32", raw("F32", [2.0**-149, 0.0]), "F32", zero)
    assert found.differs() and not found.differs(1e-9)
    found = one(tmp_path, "F32", raw("F32", [2.0**-148, 0.0]), "F32", zero)
    assert found.differs(1e-9)


def test_tolerance_is_relative_to_b(tmp_path: Path) -> None:
    found = one(tmp_path, "F32", raw("F32", [1.001] * 10), "F32", raw("F32", [1.0] * 10))
    assert found.relative_l2 == pytest.approx(1e-3, rel=1e-3)
    assert found.differs(0.9e-3) and not found.differs(1.1e-3) and found.differs()


def test_scalars_and_empty_tensors(tmp_path: Path) -> None:
    tensors = {
        "scalar": ("F32", (), raw("F32", [2.0])),
        "empty": ("BF16", (3, 0, 2), b""),
        "none": ("I64", (0,), b""),
    }
    a = write(tmp_path / "a.safetensors", tensors)
    comparison = compare_files(a, a)
    found = {tensor.name: tensor for tensor in comparison.tensors}
    assert found["scalar"].shape == () and found["scalar"].numel == 1 and found["scalar"].l2_a == 2.0
    assert found["empty"].numel == 0 and found["empty"].bitwise_equal and found["empty"].max_abs_index is None
    assert not comparison.differs()
    nothing = write(tmp_path / "nothing.safetensors", {})
    assert compare_files(nothing, nothing) == Comparison()
    assert compare_files(a, nothing).only_in_a == ["empty", "none", "scalar"]


@engines
@pytest.mark.parametrize("code", ["F32", "BF16", "I16"])
def test_pieces_and_threads_do_not_show(
    code: str, fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(1)
    names = {f"t{i}": rng.integers(0, 9 * BLOCK) for i in range(12)}
    draw = lambda numel: raw(code, rng.integers(-50, 50, numel))  # noqa: E731
    tensors = {name: (code, (int(numel),), draw(numel)) for name, numel in names.items()}
    a = write(tmp_path / "a.safetensors", tensors)
    changed = {
        name: (code, shape, bytes(data[:-2] + b"\x01\x01")) for name, (_, shape, data) in tensors.items() if data
    }
    b = write(tmp_path / "b.safetensors", dict(reversed(changed.items())))
    whole = compare_files(a, b, fused=fused)
    monkeypatch.setattr(compare, "_PIECE_BYTES", 3 * BLOCK)
    monkeypatch.setattr(compare, "_PIECE_ELEMENTS", BLOCK)
    seen: list[tuple[int, int]] = []
    pieces = compare_files(a, b, fused=fused, progress=lambda *state: seen.append(state))
    for one_, other in zip(whole.tensors, pieces.tensors, strict=True):
        for key, value in asdict(one_).items():
            expected = pytest.approx(value, rel=1e-12) if isinstance(value, float) else value
            assert getattr(other, key) == expected, key
    assert seen[-1][0] == seen[-1][1] > 0 and sorted(seen) == seen
    numel = max(names.values())
    assert any(tensor.max_abs_index is not None and tensor.max_abs_index > BLOCK for tensor in pieces.tensors), numel


def test_names_shapes_and_order(tmp_path: Path) -> None:
    ones = lambda n: ("F32", (n,), raw("F32", [1.0] * n))  # noqa: E731
    a = write(
        tmp_path / "a.safetensors",
        {"same": ones(3), "slightly": ones(3), "badly": ones(3), "shape": ones(3), "only.a": ones(1)},
    )
    b = write(
        tmp_path / "b.safetensors",
        {
            "only.b": ones(1),
            "shape": ("F32", (3, 1), raw("F32", [1.0] * 3)),
            "badly": ("F32", (3,), raw("F32", [1.0, 2.0, 3.0])),
            "slightly": ("F32", (3,), raw("F32", [1.0, 1.0, 1.01])),
            "same": ones(3),
        },
    )
    comparison = compare_files(a, b)
    assert comparison.only_in_a == ["only.a"] and comparison.only_in_b == ["only.b"]
    assert comparison.shape_mismatch == [compare.ShapeMismatch("shape", (3,), (3, 1))]
    assert [tensor.name for tensor in comparison.tensors] == ["badly", "slightly", "same"]
    assert comparison.differs(1e9)
    some = compare_files(a, b, names=["same", "slightly"])
    assert not some.only_in_a and not some.differs(0.1) and some.differs(1e-4)
    with pytest.raises(TensorFileError, match=r"slightli.*did you mean 'slightly'"):
        compare_files(a, b, names=["slightli"])


def test_unreadable_dtypes_are_compared_by_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = write(tmp_path / "a.safetensors", {"x": ("C64", (2,), b"\0" * 16), "y": ("F8_E5M2", (2,), b"\1\2")})
    b = write(tmp_path / "b.safetensors", {"x": ("C64", (2,), b"\0" * 15 + b"\1"), "y": ("F8_E5M2", (2,), b"\1\2")})
    comparison = compare_files(a, b)
    assert [(t.name, t.bytes_equal) for t in comparison.not_compared] == [("x", False)] and comparison.differs(1e9)
    assert "C64" in comparison.not_compared[0].reason
    assert not compare_files(a, a).differs()
    monkeypatch.delattr(torch, "float8_e5m2")
    comparison = compare_files(a, a)
    assert [t.name for t in comparison.not_compared] == ["x", "y"] and "torch" in comparison.not_compared[1].reason


# Folders


def shard(folder: Path, name: str, *tensors: str) -> Path:
    folder.mkdir(exist_ok=True)
    return write(folder / name, {tensor: ("F32", (2,), raw("F32", [1.0, 2.0])) for tensor in tensors})


def index(folder: Path, weight_map: Any, name: str = "model.safetensors.index.json") -> None:
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_folders_of_shards_equal_one_file(tmp_path: Path) -> None:
    whole = shard(tmp_path, "whole.safetensors", "x", "y", "z")
    sharded = tmp_path / "sharded"
    shard(sharded, "model-00001-of-00002.safetensors", "z")
    shard(sharded, "model-00002-of-00002.safetensors", "x", "y")
    assert not compare_files(whole, sharded).differs() and len(compare_files(whole, sharded).tensors) == 3

    shard(sharded, "model-00001-of-00009.safetensors", "x", "old")  # of an earlier save
    index(
        sharded,
        {"z": "model-00001-of-00002.safetensors", **dict.fromkeys("xy", "model-00002-of-00002.safetensors")},
    )
    index(sharded, {"x": "pytorch_model-00001-of-00001.bin"}, "pytorch_model.bin.index.json")
    comparison = compare_files(sharded, whole)
    assert not comparison.differs() and len(comparison.tensors) == 3
    assert len(comparison.notes) == 2 and "00009" in comparison.notes[1] and ".bin" in comparison.notes[0]


def test_unlisted_tensors_of_a_listed_shard_count(tmp_path: Path) -> None:
    shard(tmp_path, "a.safetensors", "x", "extra")
    shard(tmp_path, "b.safetensors", "x", "y")
    index(tmp_path, {"x": "b.safetensors", "y": "b.safetensors", "extra": "a.safetensors"})
    source = tensor_files.TensorSource.open(tmp_path)
    assert {name: stored.file.path.name for name, stored in source.tensors.items()} == {
        "x": "b.safetensors",
        "y": "b.safetensors",
        "extra": "a.safetensors",
    }
    source.close()


def test_folders_are_refused(tmp_path: Path) -> None:
    def refused(match: str) -> None:
        with pytest.raises(TensorFileError, match=match) as caught:
            compare_files(tmp_path, tmp_path)
        assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)

    refused(r"no \*\.safetensors file")
    shard(tmp_path, "model-00001-of-00003.safetensors", "x")
    refused("1 of the 3 shards")
    shard(tmp_path, "model-00001-of-00003.safetensors", "x").rename(tmp_path / "a.safetensors")
    shard(tmp_path, "b.safetensors", "x")
    refused("'x' is in a.safetensors and in b.safetensors")
    index(tmp_path, {"gone": "a.safetensors"})
    refused("does not hold tensor 'gone'")
    index(tmp_path, {"x": "c.safetensors"})
    refused("c.safetensors: no such file")
    index(tmp_path, {"x": "a.safetensors"})
    index(tmp_path, {"x": "b.safetensors"}, "other.safetensors.index.json")
    refused("placed elsewhere")
    (tmp_path / "other.safetensors.index.json").unlink()
    for path in (
        "../a.safetensors",
        "/etc/passwd",
        "sub/a.safetensors",
        "..\\a.safetensors",
        "",
        ".",
        "..",
        "a\0b",
        7,
    ):
        index(tmp_path, {"x": path})
        refused("not the plain name")
    for text in (
        "",
        "[]",
        "{",
        '{"weight_map": []}',
        '{"weight_map": {}, "weight_map": {}}',
        "[" * 100_000,
        '"\\ud800"',
    ):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        refused("model.safetensors.index.json")


# Files that are not what they should be


def header(**tensors: Any) -> bytes:
    return json.dumps(tensors).encode()


def entry(shape: Any, offsets: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


BAD_HEADERS = {
    "overlap": (header(x=entry([2], [0, 8]), y=entry([2], [4, 12])), 12),
    "same place": (header(x=entry([2], [0, 8]), y=entry([2], [0, 8])), 8),
    "hole": (header(x=entry([2], [0, 8]), y=entry([2], [12, 20])), 20),
    "hole at the start": (header(x=entry([2], [4, 12])), 12),
    "bytes left over": (header(x=entry([2], [0, 8])), 9),
    "truncated": (header(x=entry([2], [0, 8])), 7),
    "size of another shape": (header(x=entry([3], [0, 8])), 8),
    "reversed offsets": (header(x=entry([2], [8, 0])), 8),
    "negative size": (header(x=entry([-2], [0, 8])), 8),
    "absurd shape": (header(x=entry([2**40, 2**40], [0, 8])), 8),
    "beyond 64 bits": (header(x=entry([2**80], [0, 8])), 8),
    "fractional size": (header(x=entry([2.0], [0, 8])), 8),
    "unknown dtype": (header(x=entry([2], [0, 8], "Q32")), 8),
    "no dtype": (b'{"x": {"shape": [2], "data_offsets": [0, 8]}}', 8),
    "name twice": (b'{"x": %s, "x": %s}' % ((json.dumps(entry([2], [0, 8])).encode(),) * 2), 8),
    "field twice": (b'{"x": {"dtype": "F32", "shape": [1], "shape": [2], "data_offsets": [0, 8]}}', 8),
    "list": (b"[]", 0),
    "not JSON": (b"{x: 1}", 0),
    "not UTF-8": (b'{"\xff": 1}', 0),
    "empty header": (b"", 0),
    "deep": (b'{"x": ' + b"[" * 100_000, 0),
    "deep in an unknown field": (
        b'{"x": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0], "y": ' + b"[" * 5000,
        0,
    ),
}


@pytest.mark.parametrize(("head", "size"), BAD_HEADERS.values(), ids=BAD_HEADERS.keys())
def test_damaged_headers_are_refused(head: bytes, size: int, tmp_path: Path) -> None:
    good = write(tmp_path / "good.safetensors", {"x": ("F32", (2,), b"\0" * 8)})
    bad = write_raw(tmp_path / "bad.safetensors", head, b"\0" * size)
    for pair in ((bad, good), (good, bad)):
        with pytest.raises(TensorFileError, match=r"bad\.safetensors") as caught:
            compare_files(*pair)
        assert "\n" not in str(caught.value)


def test_foreign_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"

    def refused(match: str) -> None:
        with pytest.raises(TensorFileError, match=match):
            compare_files(path, path)

    refused("no such file")
    path.write_bytes(b"")
    refused("0 bytes are too few")
    path.write_bytes(b"\0" * 7)
    refused("7 bytes are too few")
    torch.save({"x": torch.ones(2)}, path)
    refused("PyTorch .pt file")
    path.write_bytes(pickle.dumps({"x": 1}, protocol=2))
    refused("pickle")
    path.write_text("version https://git-lfs.github.com/spec/v1\n")
    refused("Git LFS pointer")
    write_raw(path, b"{}", length=2**63)
    refused("announces a header of")
    write_raw(path, b"{}", length=100)
    refused("announces a header of 100 bytes in a file of 10")
    path.unlink()
    os.mkfifo(path)
    refused("not a regular file")


def test_a_header_is_bounded_before_it_is_parsed(tmp_path: Path) -> None:
    head = (
        b'{"x": {"dtype": "F32", "shape": ['
        + b"0," * (tensor_files.MAX_HEADER_BYTES // 2)
        + b'0], "data_offsets": [0, 0]}}'
    )
    path = write_raw(tmp_path / "large.safetensors", head)
    with pytest.raises(TensorFileError, match="more than the 16777216 accepted"):
        compare_files(path, path)


def test_a_header_length_may_look_like_a_pickle(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", {"x": ("F32", (1,), raw("F32", [1.0]))})
    length = struct.unpack("<Q", path.read_bytes()[:8])[0]
    write(path, {"x": ("F32", (1,), raw("F32", [1.0]))}, padding=0x0280 - length)
    assert path.read_bytes()[:2] == b"\x80\x02" and not compare_files(path, path).differs()


@pytest.mark.parametrize("seed", range(4))
def test_mutated_files_give_an_answer_or_a_named_error(seed: int, tmp_path: Path) -> None:
    """Wherever bytes change, are cut out or added: never another error, and never a crash."""
    rng = np.random.default_rng(seed)
    good = tmp_path / "good.safetensors"
    save_file(
        {
            "w": torch.randn(5, 7),
            "half": torch.randn(9).bfloat16(),
            "count": torch.tensor(3),
            "none": torch.empty(0),
        },
        good,
    )
    whole, bad = good.read_bytes(), tmp_path / "bad.safetensors"
    head = struct.unpack("<Q", whole[:8])[0] + 8
    refused = 0
    for _ in range(150):
        mutated = bytearray(whole)
        for _ in range(rng.integers(1, 4)):
            kind, place = rng.integers(0, 5), int(rng.integers(0, head if rng.random() < 0.9 else len(whole)))
            if kind == 0:
                mutated[place % max(len(mutated), 1) :] = b""
            elif kind == 1:
                mutated[place : place + 1] = rng.bytes(1)
            elif kind == 2:
                mutated[place:place] = rng.bytes(int(rng.integers(1, 9)))
            elif kind == 3:
                mutated[place : place + int(rng.integers(1, 9))] = b""
            else:  # another digit, bracket or quote makes JSON that parses more often than any byte
                mutated[place : place + 1] = rng.choice(list(b'0123456789{}[]",:')).tobytes()[:1]
        bad.write_bytes(mutated)
        try:
            compare_files(good, bad)
        except TensorFileError as error:
            refused += 1
            assert str(bad) in str(error) and "\n" not in str(error)
    assert refused > 75


def test_garbage_is_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    path = tmp_path / "garbage.safetensors"
    for size in rng.integers(0, 300, 200):
        garbage = rng.bytes(int(size))
        path.write_bytes(struct.pack("<Q", max(0, size - 16)) + garbage if size % 2 else garbage)
        with pytest.raises(TensorFileError, match=r"garbage\.safetensors"):
            compare_files(path, path)


def test_a_file_cut_short_while_it_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", {"x": ("F32", (100_000,), b"\0" * 400_000)})
    source = tensor_files.TensorSource.open(path)
    os.truncate(path, 100_000)
    with pytest.raises(TensorFileError, match="became shorter"):
        source.tensors["x"].read(0, 400_000)
    source.close()


# Resources


def test_memory_is_bounded(tmp_path: Path) -> None:
    """Resident memory, pages of the files included, grows by no more than what was allowed."""
    path = tmp_path / "large.safetensors"
    save_file({"x": torch.ones(40 * 2**20), "y": torch.ones(8 * 2**20, dtype=torch.bfloat16)}, path)
    small = write(tmp_path / "small.safetensors", {"x": ("F32", (1,), raw("F32", [1.0]))})
    code = f"""
import resource
from distbench.numerics.compare import compare_files
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for fused in {ENGINES!r}:
    compare_files({str(small)!r}, {str(small)!r}, fused=fused)
    before = peak()
    compare_files({str(path)!r}, {str(path)!r}, fused=fused, max_memory_mib=32)
    print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for grown in done.stdout.split():
        assert int(grown) < 40 * 1024, f"{grown} KiB, of files of 176 MiB"


def test_without_numba(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "_FUSED_FROM_BYTES", 0)
    monkeypatch.setitem(sys.modules, "distbench.numerics.compare_numba", None)
    monkeypatch.delattr("distbench.numerics.compare_numba", raising=False)
    path = write(tmp_path / "a.safetensors", {"x": ("F32", (2,), raw("F32", [1.0, 2.0]))})
    assert not compare_files(path, path).differs()
    with pytest.raises(ImportError):
        compare_files(path, path, fused=True)


@pytest.mark.skipif(len(ENGINES) < 2, reason="numba is not installed")
def test_kernels_compile_where_nothing_can_be_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    def njit(**options: Any) -> Any:
        if options.pop("cache", False):
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: function

    monkeypatch.setattr(compare_numba, "njit", njit)
    assert compare_numba._compiled()(len) is len
