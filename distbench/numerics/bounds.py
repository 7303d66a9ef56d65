"""The proven bound on the order of summation, and how many roundings each strategy spends (docs/bounds.md).

For terms x_1 ... x_n added in any order and any tree, each passing through at most m roundings of unit roundoff u,

    | computed - exact | <= gamma_m * sum |x_i| + m * eta,      gamma_m = m u / (1 - m u)

(Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., ch. 4 and section 2.1 for the subnormal term; eta is the
smallest subnormal of the format). It is a theorem, so a violation is a fault, never bad luck.
"""

from __future__ import annotations

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
    """gamma_m = m u / (1 - m u). Raises ValueError where m u >= 1: nothing is promised there."""
    if m * u >= 1:
        raise ValueError(f"{m} roundings of unit roundoff {u} bound nothing")
    return m * u / (1 - m * u)


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
    """Synced micro-batches: True where the running average is reduced again with the next one (DDP), False where each is
    reduced alone and added to the sharded gradient (FSDP)."""
    accumulate_dtype: str
    """Unsynced micro-batches are added up in it."""
    compute_dtype: str
    reduce_dtype: str
    param_dtype: str
    broadcast_buffers: bool
    """Rank 0's buffers are sent to all ranks at the forward that follows a synced one."""

    @property
    def divide_before(self) -> int:
        """The power of two by which fp16 is divided before the sum (torch FSDP's rule: about sqrt(N))."""
        before = 1
        if self.reduce_dtype == "fp16":
            n = self.world_size
            while n % before == 0 and n / before > before:
                before *= 2
        return before

    @property
    def num_roundings(self) -> int:
        """m: the most roundings any one term goes through.

        One reduction costs N - 1 additions, the cast to the reduction dtype where that is narrower, and two for dividing
        by N (a product with a rounded reciprocal, or a division on each side of the sum), none where N is a power of
        two. Synced micro-batches add k - 1 additions; where the running average is carried, every reduction again.
        """
        if not self.reduces:
            return 0
        n, k = self.world_size, self.accumulation if self.synced else 1
        scaling = 0 if n & (n - 1) == 0 else 2
        cast = int(unit_roundoff(self._dtype(self.reduce_dtype)) > unit_roundoff(self._dtype(self._local_dtype)))
        once = n - 1 + scaling + cast
        return (k * once if self.carries else once) + (k - 1)

    @property
    def unit_roundoff(self) -> float:
        """The coarsest among those roundings."""
        dtypes = [self.reduce_dtype] + ([self.param_dtype] if self.synced and self.accumulation > 1 else [])
        return max(unit_roundoff(self._dtype(name)) for name in dtypes)

    @property
    def _local_dtype(self) -> str:
        if self.synced and self.carries and self.accumulation > 1:
            return self.param_dtype  # the carried average has the master dtype's bits
        return self.accumulate_dtype if self.accumulation > 1 and not self.synced else self.compute_dtype

    @staticmethod
    def _dtype(name: str) -> torch.dtype:
        return DTYPES[name]

    @property
    def subnormal(self) -> float:
        return SUBNORMAL[self._dtype(self.reduce_dtype)]

    @property
    def largest(self) -> float:
        """Largest finite number of the reduction dtype."""
        return torch.finfo(self._dtype(self.reduce_dtype)).max

    def elementwise(self, magnitudes: Tensor, scale: float = 1.0) -> Tensor:
        """The bound per element, fp64: `magnitudes` is A = (1/N) sum over ranks of |g_r|, unscaled; `scale` the loss
        scale under which the reduction ran (its subnormals are that much smaller once unscaled)."""
        m = self.num_roundings
        relative = gamma(m, self.unit_roundoff) if m else 0.0
        return magnitudes.double() * relative + m * self.subnormal / scale

    def may_overflow(self, magnitudes: Tensor, scale: float = 1.0) -> Tensor:
        """Where some order of summation may leave the reduction dtype's range: infinities there are legal."""
        most = magnitudes.double() * self.world_size * scale / self.divide_before
        return most * (1 + 2 * self.num_roundings * self.unit_roundoff) > self.largest

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
        }
