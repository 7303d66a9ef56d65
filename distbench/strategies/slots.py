"""Where each plain parameter lives in a wrapped module: what turns a wrapper's tensors into named shards."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from distbench.numerics.shards import Shard


@dataclass(frozen=True)
class Slot:
    """One rank's piece of one plain parameter.

    `parameter` is what the optimizer holds: the parameter itself, a DTensor, or a flat parameter with many plain ones in
    it. Any tensor shaped like its local part (gradient, moments) is cut the same way.
    """

    name: str
    """Canonical name."""
    shape: tuple[int, ...]
    """Global shape."""
    parameter: nn.Parameter
    offset: int
    """First element in the flattened local part of `parameter`."""
    numel: int
    """Elements held here; 0 where this rank holds nothing of it."""
    start: int
    run: int
    stride: int

    @classmethod
    def whole(cls, name: str, parameter: nn.Parameter) -> Slot:
        """A parameter that every rank holds whole."""
        numel = parameter.numel()
        return cls(name, tuple(parameter.shape), parameter, 0, numel, 0, max(numel, 1), max(numel, 1))

    def cut(self, local: Tensor) -> Tensor:
        """This slot's elements of a local tensor, flat; shares its memory where it is contiguous."""
        return local.detach().reshape(-1)[self.offset : self.offset + self.numel]

    def write(self, local: Tensor, values: Tensor) -> None:
        """Put flat `values` where `cut` reads them, in a local tensor of any memory layout."""
        if local.is_contiguous():
            self.cut(local).copy_(values)
        else:  # a transposed or channels-last parameter: cut gives a copy of it, and slots of such hold it whole
            local.copy_(values.view(local.shape))

    def shard(self, local: Tensor | None) -> Shard:
        """The named shard of a local tensor, or of an absent gradient."""
        values = None if local is None else self.cut(local)
        return Shard(self.name, self.shape, values, self.start, self.run, self.stride)

    def slice_of(self, full: Tensor) -> Tensor:
        """The elements of the plain parameter's whole tensor that this slot holds, flat, in the same order."""
        return self._view(full).reshape(-1)

    def put(self, full: Tensor, values: Tensor) -> None:
        """Write this slot's elements into a contiguous whole tensor; the inverse of `slice_of`."""
        view = self._view(full)
        view.copy_(values.view(view.shape))

    def _view(self, full: Tensor) -> Tensor:
        flat = full.reshape(-1)
        if self.numel <= self.run:
            return flat[self.start : self.start + self.numel]
        rows = self.numel // self.run
        return flat.as_strided((rows, self.run), (self.stride, 1), flat.storage_offset() + self.start)
