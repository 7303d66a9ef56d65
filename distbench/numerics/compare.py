"""Exact comparison of two sets of tensors on disk, whoever wrote them: the engine of `distbench diff`.

Every element of every tensor that both sides have is read once, in pieces, by a pool of threads; memory stays
bounded whatever the size of the files.

    comparison = compare_files("a.safetensors", "folder/of/shards")
    comparison.tensors[0]            # the worst
    comparison.differs(1e-5)         # by relative L2 distance, tensor by tensor
"""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from distbench.errors import TensorFileError
from distbench.numerics.compare_kernels import (
    BLOCK,
    FLOAT64,
    FORMATS,
    SPAN,
    TEMPORARY_BYTES,
    Method,
    Sums,
    Totals,
    choose_method,
    combine,
    is_supported,
    widen,
)
from distbench.numerics.tensor_files import Bytes, StoredTensor, TensorSource

_PIECE_BYTES = 16 * 2**20
"""Of each file, mapped by one thread at once; smaller pieces cost more system calls."""
_PIECE_ELEMENTS = 2**18
"""At most, where temporaries are needed."""
_LEAST_THREAD_BYTES = 8 * 2**20
"""With less than this for each thread, fewer threads are used."""
_FUSED_FROM_BYTES = 64 * 2**20
"""Below this NumPy is done before numba is imported."""

Progress = Callable[[int, int], None]
"""Called with the bytes compared so far and those to compare, of both sides together."""


@dataclass(frozen=True)
class TensorDifference:
    """How a tensor of the same name and shape differs between a and b; b is the reference.

    Norms, `cosine`, `alpha`, `max_abs_difference` and `max_ulp` are over the positions where both sides are
    finite. Sums are fp64 with a relative error below 2.3e-13 (`compare_kernels`).
    """

    name: str
    shape: tuple[int, ...]
    dtype_a: str
    """As torch names it, without `torch.`."""
    dtype_b: str
    compared_as: str
    """The dtype in which elements were compared; that of both, where they have the same."""
    numel: int
    bitwise_equal: bool
    """Same dtype and same bits. -0 and +0 have the same value and not the same bits."""
    num_different: int
    """Elements of different value. NaN and infinity equal nothing but their own bits, of the same dtype; an
    infinity also equals that of another dtype."""
    l2_difference: float
    l2_a: float
    l2_b: float
    relative_l2: float | None
    """`l2_difference / l2_b`, or None for the reason in `relative_l2_reason`."""
    relative_l2_reason: str | None
    cosine: float | None
    """None where either side is all zero."""
    alpha: float | None
    """<a, b> / <b, b>: the factor on b that comes closest to a. None where b is all zero."""
    max_abs_difference: float | int
    """An exact int for integers."""
    max_abs_index: int | None
    """Flat index of the first such element; None where nothing differs by a finite amount."""
    max_ulp: int | None
    """Most steps between neighbouring numbers from a to b. None unless both have one floating dtype."""
    num_nonfinite_a: int
    num_nonfinite_b: int
    num_nonfinite_different: int
    """Positions, counted in `num_different` too, that are not finite on one side or both."""
    num_nan_mismatch: int
    """Positions that are NaN on exactly one side."""
    num_zero_a: int
    num_zero_b: int
    absolute_floor: float
    """The L2 difference if every element that differs did so by the smallest positive number of the finer
    dtype. Not more than that is within any positive tolerance, even where b is all zero."""
    is_exact: bool
    """Integers or booleans: no tolerance applies."""

    def differs(self, tolerance: float = 0.0) -> bool:
        """Whether values differ, or with a tolerance, by more than `tolerance * l2_b` in L2 norm.

        Whatever the tolerance, a difference of integers, or of what is not finite, counts.
        """
        if tolerance <= 0 or self.is_exact or self.num_nonfinite_different:
            return self.num_different > 0
        return not self.l2_difference <= max(tolerance * self.l2_b, self.absolute_floor)

    @property
    def severity(self) -> tuple[bool, float, float, int]:
        """A sorting key, the worst largest: what is not finite, then relative, then absolute difference."""
        relative = self.relative_l2
        if relative is None:
            relative = math.inf if self.l2_difference > 0 else 0.0
        return self.num_nonfinite_different > 0, relative, self.l2_difference, self.num_different


@dataclass(frozen=True)
class ShapeMismatch:
    """A tensor that both sides have with different shapes; its elements are not compared."""

    name: str
    shape_a: tuple[int, ...]
    shape_b: tuple[int, ...]


@dataclass(frozen=True)
class NotCompared:
    """A tensor of a dtype that cannot be compared by value here. Where both have it, bytes were compared."""

    name: str
    dtype_a: str
    dtype_b: str
    reason: str
    bytes_equal: bool


@dataclass
class Comparison:
    """All that was found between two sources a and b."""

    only_in_a: list[str] = field(default_factory=list)
    only_in_b: list[str] = field(default_factory=list)
    shape_mismatch: list[ShapeMismatch] = field(default_factory=list)
    not_compared: list[NotCompared] = field(default_factory=list)
    tensors: list[TensorDifference] = field(default_factory=list)
    """Every tensor of the same name and shape on both sides, worst first."""
    notes: list[str] = field(default_factory=list)
    """Files of the two folders that were left out, and why."""

    def differs(self, tolerance: float = 0.0) -> bool:
        """Whether any tensor is missing on one side, of another shape, or differs beyond `tolerance`.

        `tolerance` is a relative L2 distance (`TensorDifference.differs`). Equal values of different
        dtypes do not differ.
        """
        return (
            bool(self.only_in_a or self.only_in_b or self.shape_mismatch)
            or not all(tensor.bytes_equal for tensor in self.not_compared)
            or any(tensor.differs(tolerance) for tensor in self.tensors)
        )


def compare_files(
    path_a: str | Path,
    path_b: str | Path,
    *,
    names: Collection[str] | None = None,
    max_memory_mib: int = 256,
    progress: Progress | None = None,
    fused: bool | None = None,
) -> Comparison:
    """Compare two safetensors files, or folders of them, element by element.

    Args:
        path_a, path_b: a file, or a folder of shards with or without an index (`TensorSource.open`).
        names: only these tensors; each must be on one side at least.
        max_memory_mib: bound on buffers and resident pages of the files, beside what the interpreter, the
            libraries and the headers take. Small values cost speed.
        progress: called from this thread now and then.
        fused: whether to use the compiled kernels (numba). None: for more than 64 MiB, where numba is there.

    Raises:
        TensorFileError: a file is missing, damaged, truncated or foreign, or neither side has one of `names`.
        ImportError: `fused=True` without numba.
    """
    with TensorSource.open(path_a) as source_a, TensorSource.open(path_b) as source_b:
        common, result = _match(source_a, source_b, names)
        total = sum(tensor.stop - tensor.start for pair in common.values() for tensor in pair)
        kernels = _load_kernels(fused, total)
        max_bytes = max_memory_mib * 2**20
        threads = max(1, min(torch.get_num_threads(), max_bytes // _LEAST_THREAD_BYTES))
        tasks = []
        for name, (a, b) in common.items():
            if a.shape != b.shape:
                result.shape_mismatch.append(ShapeMismatch(name, a.shape, b.shape))
            elif unsupported := [dtype for dtype in (a.dtype, b.dtype) if not is_supported(dtype)]:
                result.not_compared.append(_compare_bytes(name, a, b, unsupported[0]))
            else:
                method = choose_method(a.dtype, b.dtype, kernels)
                tasks.append(_Task(name, a, b, method, max_bytes // threads))
        _run(tasks, threads, progress)
        result.tensors = sorted((task.result() for task in tasks), key=lambda t: t.severity, reverse=True)
        return result


def _match(
    source_a: TensorSource, source_b: TensorSource, names: Collection[str] | None
) -> tuple[dict[str, tuple[StoredTensor, StoredTensor]], Comparison]:
    """Pair tensors by name, in the order of a's files, which is the order in which to read them."""
    in_a, in_b = source_a.tensors, source_b.tensors
    if names is not None:
        for name in names:
            if name not in in_a and name not in in_b:
                close = difflib.get_close_matches(name, [*in_a, *in_b], n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise TensorFileError(f"tensor {name!r} is neither in {source_a.path} nor in {source_b.path}{hint}")
    wanted = set(in_a.keys() | in_b.keys() if names is None else names)
    result = Comparison(
        only_in_a=sorted(wanted & in_a.keys() - in_b.keys()),
        only_in_b=sorted(wanted & in_b.keys() - in_a.keys()),
        notes=source_a.notes + source_b.notes,
    )
    common = sorted(wanted & in_a.keys() & in_b.keys(), key=lambda name: (in_a[name].file.path, in_a[name].start))
    return {name: (in_a[name], in_b[name]) for name in common}, result


def _load_kernels(fused: bool | None, total_bytes: int) -> ModuleType | None:
    """The compiled kernels, or None where NumPy is to do it alone."""
    if fused is False or (fused is None and total_bytes < _FUSED_FROM_BYTES):
        return None
    try:
        from distbench.numerics import compare_numba
    except ImportError:
        if fused:
            raise
        return None
    return compare_numba


class _Task:
    """One tensor on both sides, read in pieces by several threads."""

    def __init__(self, name: str, a: StoredTensor, b: StoredTensor, method: Method, max_thread_bytes: int) -> None:
        self.name, self.a, self.b, self.method = name, a, b, method
        itemsizes = method.itemsize_a + method.itemsize_b
        if method.in_place:
            elements = min(2 * _PIECE_BYTES, max_thread_bytes // 2) // itemsizes
        else:
            elements = min(_PIECE_ELEMENTS, max_thread_bytes // 2 // (itemsizes + TEMPORARY_BYTES))
        self.piece = max(BLOCK, elements)
        self.parts: dict[int, Totals] = {}

    def totals(self, start: int, stop: int) -> Totals:
        """Totals of elements `start` to `stop`; their pages are let go of piece by piece."""
        parts = []
        for first in range(start, stop, self.piece):
            last = min(first + self.piece, stop)
            part = self.method.totals(*self.read(first, last))
            parts.append(part.shifted(first))
            self.a.drop(first * self.method.itemsize_a, last * self.method.itemsize_a)
            self.b.drop(first * self.method.itemsize_b, last * self.method.itemsize_b)
        return combine(parts)

    def read(self, start: int, stop: int) -> tuple[Bytes, Bytes]:
        """The bytes of elements `start` to `stop` on both sides."""
        size_a, size_b = self.method.itemsize_a, self.method.itemsize_b
        return self.a.read(start * size_a, stop * size_a), self.b.read(start * size_b, stop * size_b)

    def result(self) -> TensorDifference:
        """What all parts come to."""
        totals = combine([self.parts[start] for start in sorted(self.parts)])
        norms = _norms(self, totals)
        numel = self.a.numel
        return TensorDifference(
            name=self.name,
            shape=self.a.shape,
            dtype_a=FORMATS[self.a.dtype].name,
            dtype_b=FORMATS[self.b.dtype].name,
            compared_as=self.method.compared_as,
            numel=numel,
            bitwise_equal=self.a.dtype == self.b.dtype and not totals.bits_differ,
            num_different=totals.different,
            l2_difference=norms.l2_difference,
            l2_a=norms.l2_a,
            l2_b=norms.l2_b,
            relative_l2=norms.relative_l2,
            relative_l2_reason=norms.reason,
            cosine=norms.cosine,
            alpha=norms.alpha,
            max_abs_difference=totals.max_difference,
            max_abs_index=totals.max_index if totals.max_difference > 0 else None,
            max_ulp=totals.max_ulp if self.method.has_ulp else None,
            num_nonfinite_a=totals.nonfinite_a,
            num_nonfinite_b=totals.nonfinite_b,
            num_nonfinite_different=totals.nonfinite_different,
            num_nan_mismatch=totals.nan_mismatch,
            num_zero_a=totals.zero_a,
            num_zero_b=totals.zero_b,
            absolute_floor=self.method.smallest * math.sqrt(totals.different),
            is_exact=self.method.exact,
        )


def _run(tasks: list[_Task], threads: int, progress: Progress | None) -> None:
    """Fill in the parts of every task."""
    total = sum(task.a.stop - task.a.start + task.b.stop - task.b.start for task in tasks)
    done = 0
    executor = ThreadPoolExecutor(threads, thread_name_prefix="compare")
    try:
        for future in as_completed([executor.submit(_work, batch) for batch in _batches(tasks)]):
            for task, start, part, size in future.result():
                task.parts[start] = part
                done += size
            if progress is not None:
                progress(done, total)
    finally:
        executor.shutdown(cancel_futures=True)


_Segment = tuple[_Task, int, int]


def _batches(tasks: list[_Task]) -> Iterator[list[_Segment]]:
    """Cut the tasks into runs of about one piece: small tensors share one, large ones take many."""
    batch: list[_Segment] = []
    room = _PIECE_BYTES
    for task in tasks:
        start, numel = 0, task.a.numel
        while start < numel:
            # Whole pieces, but for the end of the tensor: each piece costs the same whatever its size.
            pieces = max(1, room // (task.piece * task.method.itemsize_a))
            stop = min(start + pieces * task.piece, numel)
            batch.append((task, start, stop))
            room -= (stop - start) * task.method.itemsize_a
            start = stop
            if room <= 0:
                yield batch
                batch, room = [], _PIECE_BYTES
    if batch:
        yield batch


def _work(batch: list[_Segment]) -> list[tuple[_Task, int, Totals, int]]:
    """In a thread of the pool: the totals of each segment, with the bytes it has on both sides."""
    return [
        (
            task,
            start,
            task.totals(start, stop),
            (stop - start) * (task.method.itemsize_a + task.method.itemsize_b),
        )
        for task, start, stop in batch
    ]


@dataclass(frozen=True)
class _Norms:
    """Figures made of sums of products whose factors may have been scaled by 2**-exponent beforehand."""

    sums: Sums
    nonfinite_different: int
    exponent_a: int = 0
    exponent_b: int = 0
    exponent_difference: int = 0

    @property
    def l2_a(self) -> float:
        return _ldexp(math.sqrt(self.sums.aa), self.exponent_a)

    @property
    def l2_b(self) -> float:
        return _ldexp(math.sqrt(self.sums.bb), self.exponent_b)

    @property
    def l2_difference(self) -> float:
        return _ldexp(math.sqrt(self.sums.dd), self.exponent_difference)

    @property
    def reason(self) -> str | None:
        """Why there is no relative difference."""
        if self.nonfinite_different:
            return f"not finite, and different, at {self.nonfinite_different} positions"
        if self.sums.bb == 0:
            return "b is all zero" if self.sums.aa > 0 else "a and b are all zero"
        return None

    @property
    def relative_l2(self) -> float | None:
        if self.reason is not None:
            return None
        ratio = math.sqrt(self.sums.dd) / math.sqrt(self.sums.bb)
        return _ldexp(ratio, self.exponent_difference - self.exponent_b)

    @property
    def cosine(self) -> float | None:
        if self.sums.aa == 0 or self.sums.bb == 0:
            return None
        cosine = self.sums.ab / (math.sqrt(self.sums.aa) * math.sqrt(self.sums.bb))
        return min(1.0, max(-1.0, cosine))

    @property
    def alpha(self) -> float | None:
        if self.sums.bb == 0:
            return None
        return _ldexp(self.sums.ab / self.sums.bb, self.exponent_a - self.exponent_b)


def _ldexp(number: float, exponent: int) -> float:
    try:
        return math.ldexp(number, exponent)
    except OverflowError:
        return math.copysign(math.inf, number)


def _norms(task: _Task, totals: Totals) -> _Norms:
    """Norms from the totals; read again, scaled, where squares of fp64 numbers overflowed or vanished."""
    largest = (totals.max_a, totals.max_b, totals.max_difference)
    if not task.method.compared_as.startswith("float64") or all(x == 0 or 1e-140 < x < 1e140 for x in largest):
        return _Norms(totals.sums, totals.nonfinite_different)

    exponents = [math.frexp(x)[1] if x < math.inf else sys.float_info.max_exp + 1 for x in largest]
    by_a, by_b, by_difference = (-exponent for exponent in exponents)
    parts = []
    for start in range(0, task.a.numel, SPAN):
        raw_a, raw_b = task.read(start, min(start + SPAN, task.a.numel))
        a = widen(raw_a, FORMATS[task.a.dtype], FLOAT64)
        b = widen(raw_b, FORMATS[task.b.dtype], FLOAT64)
        finite = np.isfinite(a) & np.isfinite(b)
        a[~finite] = b[~finite] = 0
        if by_difference < 0:  # the difference itself may overflow
            d = np.ldexp(a, by_difference) - np.ldexp(b, by_difference)
        else:
            d = np.ldexp(a - b, by_difference)
        a, b = np.ldexp(a, by_a), np.ldexp(b, by_b)
        parts.append(Sums.of(a, b, d))
    return _Norms(Sums.total(parts), totals.nonfinite_different, *exponents)


def _compare_bytes(name: str, a: StoredTensor, b: StoredTensor, unsupported: str) -> NotCompared:
    """What can be said of a dtype that cannot be read here."""
    equal = a.dtype == b.dtype
    size = a.stop - a.start
    for start in range(0, size if equal else 0, _PIECE_BYTES):
        stop = min(start + _PIECE_BYTES, size)
        equal = equal and np.array_equal(a.read(start, stop), b.read(start, stop))
        a.drop(start, stop)
        b.drop(start, stop)
    where = f"torch {torch.__version__} has no such dtype" if unsupported in FORMATS else "no numeric reading of it"
    return NotCompared(name, a.dtype, b.dtype, f"dtype {unsupported}: {where}", equal)
