"""The bound is a theorem: no legal order of summation may violate it, and no error it promises to see may pass.

Every legal way from the ranks' own gradients to the optimizer's is simulated with torch's own arithmetic: any tree and
permutation, division before, after, or on both sides of the sum, by quotients or by rounded reciprocals, casts,
micro-batches reduced at once or one by one. G and A are the replay's, the verdict is the gate's.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from distbench.config import LocalLaunch
from distbench.numerics.baseline import GradientSums, round_up
from distbench.numerics.bounds import SUBNORMAL, Reduction, gamma, unit_roundoff
from distbench.numerics.gate import compare
from distbench.precision import DTYPES
from distbench.preflight import preset
from distbench.strategies import strategy_class
from tests.configs import small

ELEMENTS = 192
PRECISIONS = {
    # name: param, compute, reduce
    "fp64": ("fp64", "fp64", "fp64"),
    "fp32": ("fp32", "fp32", "fp32"),
    "bf16": ("fp32", "bf16", "bf16"),
    "fp16": ("fp32", "fp16", "fp16"),
    "bf16, reduced in fp32": ("fp32", "bf16", "fp32"),
    "fp16, reduced in fp32": ("fp32", "fp16", "fp32"),
    "fp32, reduced in bf16": ("fp32", "fp32", "bf16"),
    "fp32, reduced in fp16": ("fp32", "fp32", "fp16"),
    "bf16 throughout": ("bf16", "bf16", "bf16"),
    "bf16 parameters, reduced in fp32": ("bf16", "bf16", "fp32"),
    "fp16 throughout": ("fp16", "fp16", "fp16"),
    "fp16 parameters, reduced in fp32": ("fp16", "fp16", "fp32"),
}
STRATEGIES = ["ddp", "fsdp", "fsdp-no-shard", "fsdp2"]


@cache
def reduction_of(strategy: str, precision: str, ranks: int, accumulation: int = 1, synced: bool = False) -> Reduction:
    """What the strategy itself declares."""
    param, compute, reduce = PRECISIONS[precision]
    chosen = replace(preset("fp32"), param_dtype=param, compute_dtype=compute, reduce_dtype=reduce)
    config = small(strategy, precision=chosen, accumulation=accumulation, accumulation_sync=synced)
    config = replace(config, launch=LocalLaunch(nproc=ranks))
    return strategy_class(config.strategy.name).reduction(config)


# --------------------------------------------------------------------------------------------------------------
# Every legal way to reduce
# --------------------------------------------------------------------------------------------------------------

DIVISIONS = ("reciprocal before", "rounded reciprocal before", "before", "after", "reciprocal after", "balanced")


@dataclass
class Way:
    """How one simulated collective adds and divides."""

    division: str
    rng: random.Random

    def mean(self, parts: list[Tensor], dtype: torch.dtype) -> Tensor:
        n = len(parts)
        terms = [part.to(dtype) for part in parts]
        if dtype is torch.float16 and self.division.endswith("after"):
            self.division = "balanced"  # nobody sums fp16 undivided: it would overflow
        if self.division == "reciprocal before":
            terms = [term * (1.0 / n) for term in terms]  # DDP, as it copies into the bucket
        elif self.division == "rounded reciprocal before":
            terms = [term * torch.tensor(1.0 / n, dtype=dtype) for term in terms]  # NCCL's average
        elif self.division == "before":
            terms = [term / n for term in terms]
        elif self.division == "balanced":
            terms = [term / balanced(n) for term in terms]  # FSDP
        total = self.tree(terms)
        if self.division == "after":
            return total / n
        if self.division == "reciprocal after":
            return total * torch.tensor(1.0 / n, dtype=dtype)  # a division by a number, on CUDA
        if self.division == "balanced":
            return total / (n / balanced(n))
        return total

    def tree(self, terms: list[Tensor]) -> Tensor:
        """Any order, any tree; half of the time the chain that a ring makes."""
        terms = self.rng.sample(terms, len(terms))
        chain = self.rng.random() < 0.5
        while len(terms) > 1:
            a = terms.pop(0 if chain else self.rng.randrange(len(terms)))
            b = terms.pop(0 if chain else self.rng.randrange(len(terms)))
            terms.insert(0, a + b)
        return terms[0]


def balanced(n: int) -> int:
    """torch.distributed.fsdp's `_get_gradient_predivide_factor`."""
    factor = 1
    while n % factor == 0 and n / factor > factor:
        factor *= 2
    return factor


def reduced(reduction: Reduction, parts: list[list[Tensor]], scale: float, way: Way) -> Tensor:
    """What a wrapper makes of `parts` [rank][micro-batch]: unscaled, in the master dtype."""
    master, reduce = DTYPES[reduction.param_dtype], DTYPES[reduction.reduce_dtype]
    k = reduction.accumulation
    if k > 1 and reduction.synced:
        running: Tensor | None = None
        for index in range(k):
            own = [rank[index] for rank in parts]
            if running is not None and reduction.carries:
                running = way.mean([running + part.to(master) for part in own], reduce).to(master)
                continue
            share = way.mean(own, reduce).to(master)
            running = share if running is None else running + share
        assert running is not None
    else:
        running = way.mean([accumulated(reduction, rank) for rank in parts], reduce).to(master)
    return running * (1.0 / scale)


def accumulated(reduction: Reduction, micro: list[Tensor]) -> Tensor:
    if len(micro) == 1:
        return micro[0]
    total = micro[0].to(DTYPES[reduction.accumulate_dtype], copy=True)
    for part in micro[1:]:
        total += part
    return total


# --------------------------------------------------------------------------------------------------------------
# Data that summation is bad at
# --------------------------------------------------------------------------------------------------------------

KINDS = ("normal", "cancelling", "subnormal", "range", "huge", "ties", "zeros", "one term")


def gradients(kinds: list[str], ranks: int, micro: int, dtype: torch.dtype, seed: int) -> list[list[Tensor]]:
    """[rank][micro-batch] of tensors, each element of one of the kinds."""
    made = torch.Generator().manual_seed(seed)
    shape = (ranks, micro, ELEMENTS)
    info = torch.finfo(dtype)
    normal = torch.randn(shape, generator=made, dtype=torch.float64)
    uniform = torch.rand(shape, generator=made, dtype=torch.float64)
    sign = torch.where(torch.rand(shape, generator=made) < 0.5, -1.0, 1.0).double()
    low, high = math.log2(SUBNORMAL[dtype]), math.log2(info.max)
    if dtype is torch.float64:
        low, high = -120.0, 120.0  # A is kept in fp32
    alternating = torch.where(torch.arange(ranks) % 2 == 0, 1.0, -1.0).double()[:, None, None]
    integers = torch.randint(-9, 10, shape, generator=made).double()
    data = {
        "normal": normal,
        "cancelling": alternating * (1.0 + uniform[:1, :1] * 3 + integers * info.eps),
        "subnormal": integers * SUBNORMAL[dtype],
        "range": sign * 2.0 ** (low + (high - low) * uniform * 0.999),
        "huge": sign * (0.4 + 0.6 * uniform) * (info.max if dtype is not torch.float64 else 1e37),
        "ties": (2.0 / info.eps + torch.randint(0, 64, shape, generator=made)) * sign,
        "zeros": torch.where(uniform < 0.5, 0.0, torch.where(uniform < 0.8, -0.0, normal)),
        "one term": torch.where(torch.arange(ranks)[:, None, None] == 0, normal, 0.0),
    }
    chosen = torch.randint(0, len(kinds), (ELEMENTS,), generator=made)
    mixed = torch.stack([data[kind] for kind in kinds])[chosen, :, :, torch.arange(ELEMENTS)]  # (E, ranks, micro)
    return [[mixed[:, r, m].to(dtype) for m in range(micro)] for r in range(ranks)]


def replay(reduction: Reduction, parts: list[list[Tensor]], scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """G, A and the replay's own reduced gradient."""
    sums = GradientSums(reduction, ["w"], scale)
    for index in range(reduction.accumulation):
        for rank, micro in enumerate(parts):
            sums.add(rank, {"w": micro[index].to(DTYPES[reduction.param_dtype])})
        if reduction.synced or index == reduction.accumulation - 1:
            sums.sync()
    mean, size, own = sums.result()
    return mean["w"], size["w"], own["w"]


def within(reduction: Reduction, gradient: Tensor, mean: Tensor, size: Tensor, scale: float) -> tuple[int, float]:
    """The gate's own count of violations, and its margin."""
    sums, maxima = compare(gradient, mean, size, reduction, scale)
    return int(sums[4]), float(maxima[0])


cases = given(
    strategy=st.sampled_from(STRATEGIES),
    precision=st.sampled_from(list(PRECISIONS)),
    ranks=st.integers(2, 8),
    accumulation=st.integers(1, 3),
    synced=st.booleans(),
    division=st.sampled_from(DIVISIONS),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3, unique=True),
    scale=st.sampled_from([1.0, 65536.0, 2.0**-4, 3.0, 1000.0]),
    seed=st.integers(0, 2**32 - 1),
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@cases
@example("ddp", "bf16 parameters, reduced in fp32", 3, 1, False, "after", ["normal"], 1.0, 0)
@example("fsdp2", "fp32, reduced in fp16", 2, 1, False, "balanced", ["huge"], 1.0, 0)
@example("fsdp", "fp32", 2, 3, True, "balanced", ["subnormal"], 1.0, 0)
@example("ddp", "fp16 throughout", 4, 1, False, "reciprocal before", ["subnormal", "range"], 65536.0, 0)
@example("fsdp2", "fp32, reduced in bf16", 4, 3, False, "after", ["ties"], 1.0, 0)
@example("ddp", "fp64", 3, 3, True, "after", ["cancelling"], 1.0, 0)
@example("fsdp-no-shard", "fp16 throughout", 2, 2, True, "before", ["cancelling", "range"], 65536.0, 3231993261)
def test_no_legal_order_of_summation_violates_the_bound(
    strategy: str,
    precision: str,
    ranks: int,
    accumulation: int,
    synced: bool,
    division: str,
    kinds: list[str],
    scale: float,
    seed: int,
) -> None:
    reduction = reduction_of(strategy, precision, ranks, accumulation, synced and accumulation > 1)
    parts = gradients(kinds, ranks, accumulation, DTYPES[reduction.compute_dtype], seed)
    mean, size, own = replay(reduction, parts, scale)
    way = Way(division, random.Random(seed))
    assert within(reduction, own, mean, size, scale)[0] == 0, "the replay itself"
    for _ in range(3):
        violations, margin = within(reduction, reduced(reduction, parts, scale, way), mean, size, scale)
        assert violations == 0 and margin <= 1.0, f"{violations} elements, margin {margin}, {reduction}"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(
    precision=st.sampled_from(list(PRECISIONS)),
    ranks=st.integers(2, 64),
    division=st.sampled_from(DIVISIONS),
    seed=st.integers(0, 2**32 - 1),
)
def test_many_ranks(precision: str, ranks: int, division: str, seed: int) -> None:
    """Where m u passes 1 (bf16, many micro-batches) the bound says little, but it says it."""
    reduction = reduction_of("ddp", precision, ranks, 5, True)
    parts = gradients(["normal", "ties", "cancelling"], ranks, 5, DTYPES[reduction.compute_dtype], seed)
    mean, size, _ = replay(reduction, parts, 1.0)
    got = reduced(reduction, parts, 1.0, Way(division, random.Random(seed)))
    violations, margin = within(reduction, got, mean, size, 1.0)
    assert violations == 0 and margin <= 1.0


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_the_bound_is_nearly_reached(name: str) -> None:
    """A chain in which every addition rounds down by nearly u: the first term suffers all of them."""
    ranks = 8
    dtype = DTYPES[name]
    u = unit_roundoff(dtype)
    # 1 + (u - u^2) rounds to 1 each time, so everything after the first term is lost.
    parts = [torch.ones(4, dtype=dtype)] + [torch.full((4,), u * (1 - 2 * u), dtype=dtype) for _ in range(ranks - 1)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    assert torch.equal(total, torch.ones(4, dtype=dtype))
    reduction = reduction_of("ddp", name, ranks)
    mean, size, _ = replay(reduction, [[part] for part in parts], 1.0)
    violations, margin = within(reduction, total / ranks, mean, size, 1.0)
    assert violations == 0
    assert margin > 0.85


def test_gamma_is_below_highams() -> None:
    for u in (2.0**-8, 2.0**-11, 2.0**-24, 2.0**-53):
        for m in (1, 2, 7, 63):
            assert m * u < gamma(m, u) * (1 + 1e-9) and gamma(m, u) <= m * u / (1 - m * u) * (1 + 2**-50)
    assert gamma(0, 2.0**-8) == 0.0
    assert 1.0 < gamma(300, 2.0**-8) < math.inf


# --------------------------------------------------------------------------------------------------------------
# The count of roundings, written out
# --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "precision", "ranks", "accumulation", "synced", "expected"),
    [
        ("ddp", "fp32", 2, 1, False, 1),  # one addition; halving is exact
        ("ddp", "fp32", 4, 1, False, 3),
        ("ddp", "fp32", 3, 1, False, 2 + 2),  # two additions; 1/3 is rounded, and so is the product with it
        ("fsdp", "fp32", 3, 1, False, 2 + 2),  # divided by 2, and by 1.5 after the sum
        ("fsdp2", "fp32", 6, 1, False, 5 + 2),
        ("ddp", "bf16", 4, 1, False, 3),  # each gradient is bf16 already: casting it rounds nothing
        ("ddp", "bf16", 4, 3, False, 3 + 1),  # added up in fp32, then cast
        ("fsdp", "bf16", 4, 3, False, 3),  # added up in bf16
        ("fsdp2", "bf16, reduced in fp32", 4, 3, False, 3),
        ("fsdp2", "fp32, reduced in bf16", 4, 1, False, 3 + 1),
        ("fsdp", "bf16 parameters, reduced in fp32", 4, 1, False, 3 + 1),  # and the cast back
        ("ddp", "fp32", 4, 3, True, 3 * 3 + 2),  # the running average is reduced again
        ("fsdp", "fp32", 4, 3, True, 3 + 2),
        ("fsdp2", "fp32", 3, 2, True, 4 + 1),
        ("fsdp-no-shard", "bf16", 4, 3, True, 3 * (3 + 1) + 2),  # the running average is fp32, so it is cast again
        ("fsdp", "fp32", 1, 3, True, 2),
        ("ddp", "fp32", 1, 1, False, 0),
    ],
)
def test_the_count(strategy: str, precision: str, ranks: int, accumulation: int, synced: bool, expected: int) -> None:
    assert reduction_of(strategy, precision, ranks, accumulation, synced).num_roundings == expected


def test_one_process_has_no_freedom() -> None:
    reduction = reduction_of("single", "fp32", 1, 3, True)
    size = torch.tensor([1.0, 1e30])
    assert reduction.num_roundings == 0
    assert reduction.elementwise(size).tolist() == [0.0, 0.0]
    assert not reduction.may_overflow(torch.tensor([1e38])).any()


def test_magnitudes_are_rounded_up() -> None:
    wide = torch.tensor([0.1, 1.0, 1e-46, 0.0, 3.5e38, math.inf, math.nan], dtype=torch.float64)
    narrow = round_up(wide)
    assert narrow.dtype is torch.float32 and (narrow.double()[:6] >= wide[:6]).all() and narrow[6].isnan()
    assert narrow.tolist()[1] == 1.0 and narrow.tolist()[2] == 2.0**-149 and narrow.tolist()[3] == 0.0


# --------------------------------------------------------------------------------------------------------------
# Power: what must not pass
# --------------------------------------------------------------------------------------------------------------


def plain(precision: str, ranks: int, strategy: str = "ddp") -> tuple[Reduction, Tensor, Tensor, Tensor]:
    """A reduction, a legal gradient, G and A."""
    reduction = reduction_of(strategy, precision, ranks)
    parts = gradients(["normal"], ranks, 1, DTYPES[reduction.compute_dtype], 0)
    mean, size, own = replay(reduction, parts, 1.0)
    return reduction, own, mean, size


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_real_scale_error_is_seen_in_fp32(strategy: str, ranks: int) -> None:
    """2.4e-4 in a whole parameter, and a hundredth of it."""
    reduction, own, mean, size = plain("fp32", ranks, strategy)
    assert within(reduction, own, mean, size, 1.0)[0] == 0
    for error in (2.4e-4, -2.4e-4, 2.4e-6):
        assert within(reduction, own * (1 + error), mean, size, 1.0)[0] > ELEMENTS // 2


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16, reduced in fp32"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_stated_power_is_kept(precision: str, ranks: int) -> None:
    """Whatever legal error there is already: the smallest scale error and element change that must be caught are."""
    reduction, own, mean, size = plain(precision, ranks)
    _, maxima = compare(own, mean, size, reduction, 1.0)
    scale, element = 1 / float(maxima[1]), float(maxima[2])
    bound = reduction.elementwise(size)
    for sign in (-1.0, 1.0):
        worst = mean + sign * bound * (1 - 1e-6)  # every element off by all that is legal
        for factor in (1 + scale * (1 + 1e-5), 1 - scale * (1 + 1e-5)):
            assert within(reduction, worst * factor, mean, size, 1.0)[0] > 0
        for index in (0, ELEMENTS - 1):
            changed = worst.clone()
            changed[index] -= sign * element * (1 + 1e-5)
            assert within(reduction, changed, mean, size, 1.0)[0] == 1
    if precision == "fp32":
        assert scale < 1e-5


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_single_elements_are_seen(precision: str) -> None:
    """A flipped sign, a flipped exponent bit, two elements exchanged, one lost."""
    reduction, own, mean, size = plain(precision, 4)
    largest = int(mean.abs().argmax())

    def changed(index: int, value: float) -> int:
        gradient = own.clone()
        gradient[index] = value
        return within(reduction, gradient, mean, size, 1.0)[0]

    assert changed(largest, float(own[largest])) == 0
    assert changed(largest, -float(own[largest])) == 1
    assert changed(largest, float(own[largest]) * 2) == 1
    assert changed(largest, 0.0) == 1
    assert changed(largest, math.inf) == 1 and changed(largest, math.nan) == 1
    assert within(reduction, own.roll(1), mean, size, 1.0)[0] > ELEMENTS // 2


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_missing_rank_and_a_low_precision_are_seen(ranks: int) -> None:
    reduction = reduction_of("fsdp", "fp32", ranks)
    parts = gradients(["normal"], ranks, 1, torch.float32, 3)
    mean, size, own = replay(reduction, parts, 1.0)
    one_less = sum(part[0] for part in parts[1:]) / (ranks - 1)
    in_bf16 = own.to(torch.bfloat16).float()
    assert within(reduction, one_less, mean, size, 1.0)[0] > ELEMENTS // 2
    assert within(reduction, in_bf16, mean, size, 1.0)[0] > ELEMENTS // 2


# --------------------------------------------------------------------------------------------------------------
# Infinities and NaNs
# --------------------------------------------------------------------------------------------------------------

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("terms", "got", "legal"),
    [
        ([INF, 1.0, 2.0], INF, True),
        ([INF, 1.0, 2.0], -INF, False),
        ([INF, 1.0, 2.0], 1.0, False),  # a rank's infinity was left out
        ([INF, -INF, 2.0], NAN, True),
        ([INF, -INF, 2.0], 1.0, False),
        ([NAN, 1.0, 2.0], NAN, True),
        ([NAN, 1.0, 2.0], 1.0, False),
        ([1.0, 1.0, 2.0], INF, False),
        ([1.0, 1.0, 2.0], NAN, False),
        ([3e38, 3e38, -3e38], INF, True),  # two of them first
        ([3e38, 3e38, -3e38], 1e38, True),
        ([0.0, 0.0, 0.0], 0.0, True),
        ([0.0, 0.0, 0.0], -0.0, True),
        ([0.0, 0.0, 0.0], 1e-30, False),
    ],
)
def test_what_a_nonfinite_element_may_be(terms: list[float], got: float, legal: bool) -> None:
    reduction = reduction_of("fsdp2", "fp32", 3)
    mean, size, _ = replay(reduction, [[torch.tensor([x])] for x in terms], 1.0)
    violations, margin = within(reduction, torch.tensor([got]), mean, size, 1.0)
    assert (violations == 0) is legal and (margin <= 1.0) is legal


def test_a_cast_may_overflow_before_the_division() -> None:
    """FSDP casts to fp16 first and then divides: the sum alone would have fitted."""
    reduction = reduction_of("fsdp2", "fp32, reduced in fp16", 2)
    parts = [[torch.tensor([70000.0])], [torch.tensor([0.0])]]
    mean, size, own = replay(reduction, parts, 1.0)
    assert own.isinf().all() and within(reduction, own, mean, size, 1.0) == (0, 0.0)


def test_empty_slices() -> None:
    reduction = reduction_of("fsdp", "fp32", 4)
    empty = torch.zeros(0)
    sums, maxima = compare(empty, empty.double(), empty, reduction, 1.0)
    assert sums.tolist() == [0.0] * 6 and maxima.tolist() == [0.0] * 3
