"""What a network does between ranks: each collective over sizes, and each pair of hosts. One rank's side.

Sizes, algbw and busbw are those of nccl-tests (its doc/PERFORMANCE.md): S bytes is what a collective is called with, the
larger of input and output of one rank; algbw is S over seconds; busbw is algbw times what the best algorithm sends of S, so
that it can be held against a link's speed whatever the collective and the number of ranks.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from distbench.launching.world import World

WARM_UP, BATCHES = 2, 5
BATCH_S, MAX_CALLS = 0.05, 50
"""Calls are timed back to back, for so long or so many."""
SLOW_S = 2.0
"""A call that takes longer is made once, and no larger one follows."""
SMALLEST, GROWTH = 1 << 10, 4
PING_BYTES, PINGS = 8, 30
FIRST_BYTES, MAX_BYTES, LONG_S = 1 << 20, 1 << 26, 0.2
"""A pair's message: the first tells how large it must be to take so long."""
MESSAGES = 5


@dataclass(frozen=True)
class Buffers:
    """What a collective of S bytes is called with: S bytes, one rank's share of them, and S bytes more."""

    whole: Tensor
    part: Tensor
    other: Tensor

    @classmethod
    def of(cls, size: int, world: World) -> Buffers:
        number = size // 4
        return cls(*(torch.empty(n, device=world.device) for n in (number, number // world.size, number)))

    def fill(self, value: float) -> None:
        for buffer in (self.whole, self.part, self.other):
            buffer.fill_(value)


@dataclass(frozen=True)
class Collective:
    """One operation on a buffer of S bytes."""

    factor: Callable[[int], float]
    """busbw over algbw, with n ranks."""
    call: Callable[[Buffers], object]
    right: Callable[[Buffers, int], bool]
    """Whether a call's outcome is, with n ranks, where rank r's input was r + 1."""


def _in_order(buffer: Tensor, number: int) -> bool:
    rows = buffer.view(number, -1)
    return bool((rows == torch.arange(1, number + 1, device=buffer.device, dtype=buffer.dtype)[:, None]).all())


def _sum(number: int) -> float:
    return number * (number + 1) / 2


COLLECTIVES: dict[str, Collective] = {
    "all_reduce": Collective(
        lambda n: 2 * (n - 1) / n,
        lambda at: dist.all_reduce(at.whole),
        lambda at, n: bool((at.whole == _sum(n)).all()),
    ),
    "all_gather": Collective(
        lambda n: (n - 1) / n,
        lambda at: dist.all_gather_into_tensor(at.whole, at.part),
        lambda at, n: _in_order(at.whole, n),
    ),
    "reduce_scatter": Collective(
        lambda n: (n - 1) / n,
        lambda at: dist.reduce_scatter_tensor(at.part, at.whole),
        lambda at, n: bool((at.part == _sum(n)).all()),
    ),
    "broadcast": Collective(
        lambda n: 1.0,
        lambda at: dist.broadcast(at.whole, 0),
        lambda at, n: bool((at.whole == 1).all()),
    ),
    "all_to_all": Collective(
        lambda n: (n - 1) / n,
        lambda at: dist.all_to_all_single(at.other, at.whole),
        lambda at, n: _in_order(at.other, n),
    ),
}


@dataclass(frozen=True)
class Timing:
    """One collective at one size, over all ranks."""

    op: str
    bytes: int
    seconds: float
    """Of one call, on the rank that took longest: median of batches."""
    low: float
    high: float
    """The quickest and the slowest batch."""
    calls: int
    algbw: float
    busbw: float
    """Bytes a second."""
    right: bool
    """Whether every rank had the right values."""


def time_collectives(world: World, largest: int, beat: Callable[[str], object]) -> Iterator[Timing]:
    """Every collective, each from small to `largest` bytes. A collective; the same on every rank."""
    for op in COLLECTIVES:
        for size in sizes(world.size, largest):
            beat(op)
            timing = _time(op, size, world)
            yield timing
            if timing.seconds > SLOW_S / GROWTH:
                break


def sizes(ranks: int, largest: int) -> list[int]:
    """Bytes, each a whole number of fp32 values for every rank."""
    unit, found = 4 * ranks, []
    size = SMALLEST
    while size <= largest:
        found.append(math.ceil(size / unit) * unit)
        size *= GROWTH
    return list(dict.fromkeys(found))


def _time(op: str, size: int, world: World) -> Timing:
    collective, buffers = COLLECTIVES[op], Buffers.of(size, world)

    def call() -> None:
        collective.call(buffers)

    right, estimate = True, 0.0
    for _ in range(WARM_UP):
        buffers.fill(world.rank + 1)
        estimate = _slowest([_seconds(call, 1, world)], world)[0]
        right = right and collective.right(buffers, world.size)
        if estimate > SLOW_S:
            break
    buffers.fill(0.0)  # sums must not grow until they overflow
    calls = max(1, min(MAX_CALLS, math.ceil(BATCH_S / max(estimate, 1e-9))))
    batches = 1 if estimate > SLOW_S else BATCHES
    times = [seconds / calls for seconds in _slowest([_seconds(call, calls, world) for _ in range(batches)], world)]
    seconds = statistics.median(times)
    algbw = size / seconds
    right = bool(_slowest([0.0 if right else 1.0], world)[0] == 0)
    return Timing(op, size, seconds, min(times), max(times), calls, algbw, algbw * collective.factor(world.size), right)


def _seconds(call: Callable[[], object], calls: int, world: World) -> float:
    world.barrier()
    world.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    world.synchronize()
    return time.perf_counter() - began


def _slowest(values: Sequence[float], world: World) -> list[float]:
    """Each value's largest over all ranks."""
    largest = torch.tensor(values, dtype=torch.float64, device=world.device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return [float(value) for value in largest]


# --- pairs


@dataclass(frozen=True)
class Pair:
    """What one rank sends another, while others may send, too."""

    source: int
    target: int
    latency: float
    """Seconds, one way: half of the median round trip of 8 bytes."""
    latency_best: float
    bytes: int
    bandwidth: float
    """Bytes a second, of the median message."""
    bandwidth_best: float


def time_pairs(world: World, ranks: Sequence[int], rounds: int, beat: Callable[[str], object]) -> list[Pair]:
    """Pairs of these ranks, both ways, in rounds in which each has one partner: so the network carries as much as it will
    when all train. At most `rounds` of them, of `len(ranks) - 1`. A collective; the same on every rank."""
    own: list[Pair] = []
    for pairs in tournament(ranks)[:rounds]:
        beat("pairs")
        world.barrier()
        for pair in pairs:
            if world.rank in pair:
                own += _time_pair(world, *pair)
    return [pair for found in world.gather(own) for pair in found]


def time_alone(world: World, pairs: Sequence[tuple[int, int]], beat: Callable[[str], object]) -> list[Pair]:
    """These pairs again, one after the other, while all others wait. A collective; the same on every rank."""
    own: list[Pair] = []
    for pair in pairs:
        beat("pairs")
        world.barrier()
        if world.rank in pair:
            own += _time_pair(world, *pair)
        world.barrier()
    return [pair for found in world.gather(own) for pair in found]


def tournament(ranks: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Rounds in which everybody meets everybody once: one stays, the others go round (the circle method)."""
    circle: list[int | None] = [*ranks, *([None] if len(ranks) % 2 else [])]
    found = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        opposite = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in opposite if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found


def _time_pair(world: World, low: int, high: int) -> list[Pair]:
    """Both ways; each is told by who sends."""
    found = []
    for source, target in ((low, high), (high, low)):
        if world.rank == source:
            found.append(_send(world, target))
        else:
            _receive(world, source)
    return found


def _send(world: World, target: int) -> Pair:
    ping = torch.zeros(PING_BYTES // 8, dtype=torch.int64, device=world.device)
    trips = []
    for _ in range(PINGS):
        trips.append(_exchange(world, ping, ping, target))
    trip = statistics.median(trips)
    size = FIRST_BYTES
    first = _message(world, size, ping, target)
    size = int(min(MAX_BYTES, max(FIRST_BYTES / 16, size * LONG_S / first))) // 8 * 8
    times = [_message(world, size, ping, target) for _ in range(MESSAGES)]
    ping.fill_(0)
    dist.send(ping, target)  # that is all
    rates = [size / max(seconds - trip, 1e-9) for seconds in times]
    return Pair(world.rank, target, trip / 2, min(trips) / 2, size, statistics.median(rates), max(rates))


def _message(world: World, size: int, ping: Tensor, target: int) -> float:
    """Seconds until so many bytes have come and the answer is back."""
    ping.fill_(size)
    dist.send(ping, target)
    message = torch.zeros(size // 8, dtype=torch.int64, device=world.device)
    dist.recv(ping, target)  # its memory is there
    return _exchange(world, message, ping, target)


def _exchange(world: World, message: Tensor, answer: Tensor, target: int) -> float:
    world.synchronize()
    began = time.perf_counter()
    dist.send(message, target)
    dist.recv(answer, target)
    world.synchronize()
    return time.perf_counter() - began


def _receive(world: World, source: int) -> None:
    ping = torch.zeros(PING_BYTES // 8, dtype=torch.int64, device=world.device)
    for _ in range(PINGS):
        dist.recv(ping, source)
        dist.send(ping, source)
    while True:
        dist.recv(ping, source)
        if not (size := int(ping[0])):
            return
        message = torch.empty(size // 8, dtype=torch.int64, device=world.device)
        dist.send(ping, source)
        dist.recv(message, source)
        dist.send(ping, source)
