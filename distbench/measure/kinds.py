"""What a rank's memory held when it was largest, by kind: from the allocator's own events of one step, the addresses of
what is known (parameters, gradients, optimizer state, buffers), and the part of the step in which the rest was made.

It works for every strategy and precision alike. The sum is torch's MemTracker's, where that can run (tests/measure).
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate

from torch import Tensor

from distbench.measure.memory import live_storages
from distbench.measure.phases import PREFIX, Phases
from distbench.measure.recorder import Change, Recording, ScopeRecorder, Span
from distbench.stand_ins import places
from distbench.trainer import Backward, Observer, Trainer

SCOPES = (
    ("FSDP::all_gather_copy_out", "gathered_parameters"),
    ("FSDP::all_gather", "communication"),
    ("FSDP::post_backward", "communication"),
    ("FullyShardedDataParallel._post_backward_hook", "communication"),
    ("FullyShardedDataParallel._post_backward_prefetch", "gathered_parameters"),
    ("FullyShardedDataParallel._pre_", "gathered_parameters"),
    (f"{PREFIX}forward", "activations"),
)
"""Marked parts of a step, by how their names begin: what is made in one, and not known otherwise, is of this kind. Of
nested ones the innermost counts."""
ORDER = (
    *("parameters", "gathered_parameters", "gradients", "optimizer_state", "activations", "buffers", "communication"),
    "other",
)
TRIES = 3
"""Steps looked at: one of Gloo's threads may free a block without an event, and the step that misses least counts."""


@dataclass
class Block:
    """Memory that lived in the step."""

    address: int
    size: int
    start: int = 0
    """ns, as `end`; 0 where it was there before, None while it lives."""
    scopes: tuple[str, ...] = ()
    kind: str | None = None
    """Of what was there before."""
    end: int | None = None
    missed: bool = False
    """It was freed without an event."""

    def lives(self, time: int) -> bool:
        return self.start <= time and (self.end is None or self.end > time)


@dataclass
class Seen(Observer):
    """Addresses that are known only within a step."""

    gradients: set[int] = field(default_factory=set)
    copies: list[set[int]] = field(default_factory=list)
    """Of parameters cast to the compute dtype, at the end of each forward: backward frees them, and what the next
    micro-batch makes may lie where they lay."""

    def on_gradients(self, backward: Backward, trainer: Trainer) -> None:
        self.gradients = set(addresses(trainer.strategy.gradients(trainer.module)))

    def see_copies(self, trainer: Trainer) -> None:
        held = (vars(module).get(name) for module, name in places(trainer.module.modules()))
        self.copies.append(set(addresses(tensor for tensor in held if isinstance(tensor, Tensor))))


def memory_by_kind(trainer: Trainer) -> dict[str, int]:
    """Bytes by kind when this rank's tensors were largest. Makes up to `TRIES` training steps; a collective only in that
    the steps are, so every rank makes as many."""
    found = [_one_step(trainer) for _ in range(TRIES)]
    return min(found, key=lambda missed_and_kinds: missed_and_kinds[0])[1]


def _one_step(trainer: Trainer) -> tuple[int, dict[str, int]]:
    """(bytes that were freed without an event, bytes by kind at the peak)."""
    trainer.optimizer.zero_grad(set_to_none=True)
    gc.collect()
    standing, hidden = _standing(trainer)
    seen, recorder = Seen(), ScopeRecorder(trainer.world.device, memory=True, changes=True)
    observers, span = trainer.observers, trainer.span
    trainer.observers, trainer.span = [seen], _seeing_copies(trainer, seen)
    try:
        recorder.start()
        trainer.train_step()
        recording = recorder.stop()
    finally:
        trainer.observers, trainer.span = observers, span
    changes = [change for change in recording.changes if change.device == trainer.world.device.type]
    blocks = paired(standing, changes)
    alive = live_storages(trainer.world.device)
    missed = sum(b.size for b in blocks if b.missed or (b.end is None and b.address not in alive))
    peak, optimizing = time_of_peak(blocks), _spans(recording, "optimizer")[0].start
    forwards = [span.end for span in _spans(recording, "forward")]
    kinds = Counter(hidden)
    for block in blocks:
        if block.lives(peak):
            kinds[block.kind or kind_of(block, seen, forwards, optimizing)] += block.size
    return missed, {kind: kinds[kind] for kind in ORDER if kinds[kind]}


def _standing(trainer: Trainer) -> tuple[list[Block], dict[str, int]]:
    """What lives when a step begins, and kind -> bytes of what only C++ refers to."""
    local, strategy = trainer.strategy.local, trainer.strategy
    state = [
        value for entry in trainer.optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)
    ]
    known = {
        "optimizer_state": [local(value) for value in state],
        "buffers": list(trainer.module.buffers()),
        "parameters": [local(parameter.detach()) for parameter in trainer.module.parameters()],
    }
    kinds = {address: kind for kind, tensors in known.items() for address in addresses(tensors)}
    alive = live_storages(trainer.world.device)
    blocks = [Block(address, size, kind=kinds.get(address, "other")) for address, size in alive.items()]
    return blocks, {strategy.hidden_kind: strategy.hidden_bytes(trainer.module)}


def paired(standing: Iterable[Block], changes: Iterable[Change]) -> list[Block]:
    """Every block that lived in the step, from the allocator's events in order of time."""
    live = {block.address: block for block in standing}
    blocks = list(live.values())
    for change in changes:
        if (block := live.pop(change.address, None)) is not None:
            # Freed; or made again, and so freed before without an event.
            block.end, block.missed = change.time, change.size > 0
        if change.size > 0:
            live[change.address] = Block(change.address, change.size, change.time, change.scopes)
            blocks.append(live[change.address])
    return blocks


def time_of_peak(blocks: Iterable[Block]) -> int:
    """ns at which the blocks together are largest."""
    changes = [(block.start, 1, block.size) for block in blocks]
    changes += [(block.end, 0, -block.size) for block in blocks if block.end is not None]
    changes.sort()  # at one time, what is freed first
    totals = list(accumulate(size for _, _, size in changes))
    return changes[totals.index(max(totals))][0] if totals else 0


def kind_of(block: Block, seen: Seen, forwards: list[int], optimizing: int) -> str:
    """`forwards`: ns at which each forward ended; `optimizing`: at which the optimizer began."""
    if block.address in seen.gradients and block.lives(optimizing):
        return "gradients"
    if any(block.address in copies and block.lives(end) for copies, end in zip(seen.copies, forwards, strict=True)):
        return "gathered_parameters"
    for scope in reversed(block.scopes):
        for beginning, kind in SCOPES:
            if scope.startswith(beginning):
                return kind
    return "other"


def _spans(recording: Recording, phase: str) -> list[Span]:
    """A phase's, in order; not what Kineto repeats on the device's line."""
    return [span for span in recording.spans if span.name == f"{PREFIX}{phase}" and not span.device]


def _seeing_copies(trainer: Trainer, seen: Seen) -> Callable[[str], AbstractContextManager[None]]:
    phases = Phases()

    @contextmanager
    def span(name: str) -> Iterator[None]:
        with phases.span(name):
            yield
            if name == "forward":
                seen.see_copies(trainer)

    return span


def addresses(tensors: Iterable[Tensor]) -> Iterator[int]:
    """Where the storages of plain tensors begin; those of empty ones are left out."""
    for tensor in tensors:
        if address := tensor.untyped_storage().data_ptr():
            yield address
