"""The proven bound on the order of summation, and how many roundings each strategy spends (docs/bounds.md).

For terms x_1 ... x_N added in any order and any tree, each passing through at most m roundings of unit roundoff u,

    | computed - exact | <= ((1 + u)^m - 1) * sum |x_i| + underflow,      (1 + u)^m - 1 <= gamma_m = m u / (1 - m u)

(Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., lemma 3.1 and section 4.2; section 2.1 for underflow).
It is a theorem, so a violation is a fault, never bad luck.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from distbench.precision import DTYPES

SUBNORMAL = {
    torch.float64: 2.0**-1074,
    torch.float32: 2.0**-149,
    torch.bfloat16: 2.0**-133,
    torch.float16: 2.0**-24,
}
"""Smallest positive subnormal of each format."""


def unit_roundoff(dtype: torch.dtype) -> float:
    """u: half the distance from 1 to the next number of the format."""
    return torch.finfo(dtype).eps / 2


def gamma(m: int, u: float) -> float:
    """(1 + u)^m - 1: at most Higham's gamma_m = m u / (1 - m u), and defined for every m. No rounding here is in a
    denominator, so the sharper form holds."""
    return math.expm1(m * math.log1p(u))


@dataclass(frozen=True)
class Reduction:
    """How a strategy turns each rank's gradients into the reduced one: enough to replay it bit for bit with two ranks,
    and to bound what its order of summation may change with more."""

    reduces: bool
    """False: one process, nothing is summed over ranks."""
    world_size: int
    accumulation: int
    """Micro-batches a step."""
    synced: bool
    """Every micro-batch is reduced, not only the last."""
    carries: bool
    """Synced micro-batches: True where the running average is reduced again with the next one (DDP), False where each
    is reduced alone and added to the sharded gradient (FSDP)."""
    accumulate_dtype: str
    """Unsynced micro-batches are added up in it."""
    compute_dtype: str
    reduce_dtype: str
    param_dtype: str
    broadcast_buffers: bool
    """Rank 0's buffers are sent to all ranks at the forward that follows a synced one."""
    unit_calls: str | None = None
    """What the wrapper does at each call of a unit, a key of `distbench.stand_ins.UNIT_CALLS`: it decides how the
    gradients of what is used several times add up."""
    packed: int | None = None
    """Parameters of a unit lie in one buffer, each at a multiple of so many elements (FSDP1's flat parameter); None: each
    in a buffer of its own. Some matrix products round by where a weight lies."""

    @property
    def divide_before(self) -> int:
        """What the replay divides terms by before it adds them; the rest of N divides their sum. For fp16 torch FSDP's
        power of two, about sqrt(N). With two ranks only subnormals and overflow can tell one choice from another, so
        strategies that make others share the baseline."""
        before = 1
        if self.reduce_dtype == "fp16":
            n = self.world_size
            while n % before == 0 and n / before > before:
                before *= 2
        return before

    @property
    def num_roundings(self) -> int:
        """m: the most roundings any one term goes through, of the reduction dtype and of the master's."""
        return sum(self._roundings())

    def _roundings(self) -> tuple[int, int]:
        """Of the reduction dtype, and of the master dtype.

        One reduction costs N - 1 additions, the cast to the reduction dtype where that is narrower, and two for
        dividing by N (a product with a rounded reciprocal, or a division on each side of the sum), none where N is a
        power of two; then the cast to the master dtype where that is narrower still. Synced micro-batches add k - 1
        additions in the master dtype; where the running average is carried, every reduction again.
        """
        if not self.reduces:
            return 0, 0
        n, k = self.world_size, self.accumulation if self.synced else 1
        scaling = 0 if n & (n - 1) == 0 else 2
        again = k if self.carries else 1
        return again * (n - 1 + scaling + self._casts_in), again * self._casts_out + k - 1

    @property
    def _casts_in(self) -> bool:
        """The cast to the reduction dtype rounds."""
        return unit_roundoff(DTYPES[self.reduce_dtype]) > unit_roundoff(DTYPES[self._local_dtype])

    @property
    def _casts_out(self) -> bool:
        """The cast of the reduced gradient to the master dtype rounds."""
        return unit_roundoff(DTYPES[self.param_dtype]) > unit_roundoff(DTYPES[self.reduce_dtype])

    @property
    def _local_dtype(self) -> str:
        if self.accumulation == 1:
            return self.compute_dtype
        if not self.synced:
            return self.accumulate_dtype
        return self.param_dtype if self.carries else self.compute_dtype  # the carried average has the master's bits

    def elementwise(self, magnitudes: Tensor, scale: float = 1.0) -> Tensor:
        """The bound per element, fp64: `magnitudes` is A = (1/N) sum over ranks of |g_r|, unscaled; `scale` the loss
        scale under which the reduction ran (its subnormals are that much smaller once unscaled)."""
        relative = self.relative(scale)
        return magnitudes.double() * relative + self._underflow(scale) * (1 + relative)

    def relative(self, scale: float = 1.0) -> float:
        """The factor of A."""
        if not self.reduces:
            return 0.0
        reduce, master = self._roundings()
        if math.frexp(scale)[0] != 0.5:
            master += 2  # unscaling multiplies by a rounded reciprocal
        # G and A are rounded sums in fp64 themselves: N - 1 + k - 1 additions, two divisions. Only fp64 runs notice.
        reference = 2 * (self.world_size + self.accumulation)
        u_reduce, u_master = (unit_roundoff(DTYPES[name]) for name in (self.reduce_dtype, self.param_dtype))
        logs = (reduce * math.log1p(u_reduce), master * math.log1p(u_master), reference * math.log1p(2.0**-53))
        return math.expm1(sum(logs))

    def _underflow(self, scale: float) -> float:
        """Half a subnormal for every product, quotient and cast that may leave one, as far as it reaches the mean (sums
        of subnormals are exact). Dividing each of N terms before the sum, the worst place, reaches it with N halves."""
        if not self.reduces:
            return 0.0
        eta_reduce, eta_master = SUBNORMAL[DTYPES[self.reduce_dtype]], SUBNORMAL[DTYPES[self.param_dtype]]
        n, times = self.world_size, self.accumulation if self.synced else 1
        once = (n if n > 1 else 0) + (eta_reduce > SUBNORMAL[DTYPES[self._local_dtype]])
        casts_out = eta_master > eta_reduce
        scaled = times * (once * eta_reduce + casts_out * eta_master) / 2 / scale
        return scaled + (0.0 if scale == 1.0 else eta_master / 2)

    def may_overflow(self, magnitudes: Tensor, scale: float = 1.0) -> Tensor:
        """Where some order of summation may leave the range of the reduction or master dtype: infinities there, and the
        NaN of two opposite ones, are legal."""
        if not self.reduces:
            return torch.zeros_like(magnitudes, dtype=torch.bool)
        adds_first = self.carries and self.synced and self.accumulation > 1
        before = 1.0 if self._casts_in or adds_first else self.divide_before  # the division comes after those
        reduce, master = (torch.finfo(DTYPES[name]).max for name in (self.reduce_dtype, self.param_dtype))
        most = magnitudes.double() * (1 + self.relative(scale)) * (1 + 2 * unit_roundoff(DTYPES[self.reduce_dtype]))
        # Unscaling, too, where the scale has fallen below 1.
        return (most * self.world_size * scale / before > min(reduce, master)) | (most > master)

    def to_dict(self) -> dict[str, object]:
        return {
            "reduces": self.reduces,
            "world_size": self.world_size,
            "accumulation": self.accumulation,
            "synced": self.synced if self.accumulation > 1 else None,
            "carries": self.carries if self.accumulation > 1 and self.synced else None,
            "accumulate_dtype": self.accumulate_dtype if self.accumulation > 1 and not self.synced else None,
            "compute_dtype": self.compute_dtype,
            "reduce_dtype": self.reduce_dtype if self.reduces else None,
            "param_dtype": self.param_dtype,
            "broadcast_buffers": self.broadcast_buffers,
            "unit_calls": self.unit_calls,
            "packed": self.packed,
        }
