"""Bytes that a step should send: what a strategy promises, and what that means on a backend's wire.

A collective over n ranks with a whole buffer of S bytes is counted as what one rank sends in the bandwidth-optimal
algorithm: all-reduce 2 (n-1)/n S, all-gather and reduce-scatter (n-1)/n S, broadcast (n-1)/n S averaged over the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

SENT = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "broadcast": 1.0, "all_to_all": 1.0}
"""Multiples of (n-1)/n S."""

GLOO = {"reduce_scatter": "all_reduce"}
"""Operations that Gloo does not have, and what it runs instead."""


@dataclass(frozen=True)
class Traffic:
    """One kind of collective in one optimizer step."""

    what: str
    op: str
    buffer_bytes: int
    """Whole buffers, summed over the calls."""
    group_size: int

    @property
    def logical_bytes(self) -> float:
        return sent(self.op, self.buffer_bytes, self.group_size)

    def wire_bytes(self, backend: str | None) -> float:
        return sent(on_wire(self.op, backend), self.buffer_bytes, self.group_size)


def on_wire(op: str, backend: str | None) -> str:
    """What a backend runs for an operation."""
    return GLOO.get(op, op) if backend == "gloo" else op


def sent(op: str, buffer_bytes: float, group_size: int) -> float:
    """Bytes that one rank sends."""
    return SENT[op] * buffer_bytes * (group_size - 1) / group_size
