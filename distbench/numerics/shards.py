"""Where one rank's piece of a parameter-shaped tensor lies in the whole.

Everything that must be independent of the sharding (digests, projections, the comparison with a baseline) is
keyed on the *global* flat index of an element, and a `Shard` is how a strategy says what that index is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

DTYPES: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes a gradient may have here. The order is part of the summary's wire format: append only."""


@dataclass(frozen=True)
class Shard:
    """One rank's piece of one parameter-shaped tensor.

    Local flat element j has the global flat index `start + (j // run) * stride + j % run`: runs of `run`
    neighbours, `stride` apart. That covers a whole tensor, a slice of a flat buffer (FSDP1: one run), rows
    (`Shard(0)`: one run) and a slice along any other dim (`Shard(d)`: one run per outer index).
    """

    name: str
    """Canonical parameter name, without wrapper prefixes."""
    shape: tuple[int, ...]
    """Global shape."""
    values: torch.Tensor | None
    """Local values: one of `DTYPES`, any device, contiguous, any shape, perhaps empty. None: no gradient."""
    start: int
    run: int
    stride: int

    def __post_init__(self) -> None:
        if self.values is None:
            return
        if self.values.dtype not in DTYPES:
            raise ValueError(f"shard of {self.name}: dtype {self.values.dtype}; expected one of {DTYPES}")
        if not self.values.is_contiguous():
            raise ValueError(f"shard of {self.name}: values are not contiguous; call .contiguous() first")
        if self.start < 0 or self.run < 1 or self.stride < self.run:
            raise ValueError(
                f"shard of {self.name}: start {self.start}, run {self.run}, stride {self.stride}; "
                "expected start >= 0 and stride >= run >= 1, else elements overlap"
            )
        count = self.values.numel()
        if count and self.global_index(count - 1) >= self.numel:
            raise ValueError(
                f"shard of {self.name}: its last element has global index {self.global_index(count - 1)}, "
                f"but a tensor of shape {self.shape} has {self.numel} elements"
            )

    @property
    def numel(self) -> int:
        """Elements of the whole tensor, not of this piece."""
        return math.prod(self.shape)

    def global_index(self, local: int) -> int:
        """Global flat index of the local flat element `local`."""
        return self.start + local // self.run * self.stride + local % self.run

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor | None, shape: tuple[int, ...] | None = None) -> Shard:
        """The whole tensor on this rank. For a gradient that is None, give the parameter's `shape`."""
        if tensor is None:
            if shape is None:
                raise ValueError(f"shard of {name}: a gradient that is None needs the parameter's shape")
            return cls(name, tuple(shape), None, 0, 1, 1)
        return cls.flat(name, tensor.contiguous(), tuple(tensor.shape), 0)

    @classmethod
    def flat(cls, name: str, values: torch.Tensor, shape: tuple[int, ...], offset: int) -> Shard:
        """Contiguous piece of the flattened tensor, from flat index `offset` on (FSDP1, flat buffers)."""
        run = max(values.numel(), 1)
        return cls(name, tuple(shape), values, offset, run, run)

    @classmethod
    def along(cls, name: str, values: torch.Tensor, shape: tuple[int, ...], dim: int, offset: int) -> Shard:
        """The slice `[offset, offset + values.shape[dim])` of dim `dim` (a DTensor placed `Shard(dim)`)."""
        dim %= len(shape)
        inner = math.prod(shape[dim + 1 :])
        run = values.shape[dim] * inner
        if values.numel() == 0:
            return cls(name, tuple(shape), values.contiguous(), 0, 1, 1)
        return cls(name, tuple(shape), values.contiguous(), offset * inner, run, shape[dim] * inner)
