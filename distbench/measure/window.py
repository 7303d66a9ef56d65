"""The window: what a step costs, from metered steps and, right after them, the same steps without meters.

Protocol and definitions: docs/window.md. The steps are the run's own; what observers would have been told of them they
are told after each window, so that no log is written between two measured steps.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.profiler import record_function

from distbench.config import Window as WindowConfig
from distbench.measure import cores, flight, network
from distbench.measure.collectives import Call, calls, is_collective
from distbench.measure.intervals import Interval, intersection, length
from distbench.measure.memory import MemoryMeter, memory_meters
from distbench.measure.phases import PHASES, PREFIX, STEP, Phases
from distbench.measure.recorder import Recording, ScopeRecorder
from distbench.trainer import Observer, StepMetrics, Trainer

LEAST_WARM_UP = 3
"""Steps before the first window, the gate's among them: DDP rebuilds its buckets after the first, the optimizer makes its
state in it, the allocator settles."""


@dataclass
class Step:
    """One metered step of one rank; seconds."""

    seconds: float
    phases: dict[str, float]
    comm_busy: float
    exposed: float | None
    tokens: int


@dataclass
class Take:
    """One rank's share of one window."""

    steps: list[Step] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)
    """Seconds of each step without meters."""
    calls: list[Call] = field(default_factory=list)
    calls_reason: str | None = None
    memory: dict[str, int] = field(default_factory=dict)
    """Column -> bytes."""
    network_bytes: float | None = None
    """Sent over this host's interface in the metered and the absorbed step, a step."""
    core_wait: float | None = None
    """Seconds a step, of the thread that waited longest for a core; None where the system does not say."""
    timeline: list[dict[str, Any]] = field(default_factory=list)
    """Of the last metered step."""


@dataclass
class Measurement:
    """What one rank has of all windows."""

    takes: list[Take]
    meters: dict[str, str]
    """Column -> the meter's name."""
    unavailable: dict[str, str]
    """Column -> why it could not be read."""
    exposed_meter: str
    exposed_reason: str | None
    network_reason: str | None
    host: str = ""
    """Whose interface's counter it is."""


def planned(window: WindowConfig, done: int, steps: int) -> tuple[int, int, str | None]:
    """(warm-up steps, windows) that fit between the `done` steps and the last, or why none does."""
    warm_up = max(window.warm_up, LEAST_WARM_UP - done)
    each = 1 + window.measured + window.reference
    repeats = min(window.repeats, (steps - done - warm_up) // each)
    if repeats > 0:
        return warm_up, repeats, None
    need = done + warm_up + each
    return 0, 0, f"steps={steps} are too few for a window: it needs steps={need} (docs/window.md)"


class Window:
    """Meters over a trainer's steps, on every rank at once."""

    def __init__(self, config: WindowConfig, trainer: Trainer, traces: Path | None) -> None:
        """`traces`: folder to keep Kineto traces in, or None."""
        self.config, self.trainer, self.traces = config, trainer, traces
        self.device = trainer.world.device
        meters = memory_meters(self.device, trainer.strategy.hidden_bytes(trainer.module))
        reasons = [(meter, meter.available()) for meter in meters]
        self.memory: list[MemoryMeter] = [meter for meter, reason in reasons if reason is None]
        self.unavailable = {m.column: reason for m, reason in reasons if reason is not None}
        for meter in self.memory:
            self.unavailable.pop(meter.column, None)

    def measure(self, warm_up: int, repeats: int) -> Measurement:
        """Run the windows. A collective."""
        self.trainer.run(until=self.trainer.step + warm_up)
        phases = Phases()
        exposed_meter, exposed_reason = self._exposed_meter(phases)
        try:
            takes = [self._take(phases, number) for number in range(repeats)]
        finally:
            phases.close()
        return Measurement(
            takes,
            {meter.column: meter.name for meter in self.memory},
            self.unavailable,
            exposed_meter,
            exposed_reason,
            network.unavailable(),
            network.host(),
        )

    def _exposed_meter(self, phases: Phases) -> tuple[str, str | None]:
        if self.device.type == "cuda":
            return "collective kernels outside every other kernel (Kineto)", None
        import torch

        bound = "" if torch.get_num_threads() == 1 else ", at most: other kernel threads of this rank count, too"
        return f"time the training thread slept outside loading data (schedstat{bound})", phases.blocked_reason

    def _take(self, phases: Phases, number: int) -> Take:
        kept: list[StepMetrics] = []
        try:
            return self._measured(phases, number, kept)
        finally:
            self._tell(kept)  # of a window that was interrupted, too, as far as it came

    def _measured(self, phases: Phases, number: int, kept: list[StepMetrics]) -> Take:
        """One window; `kept`: every step's metrics, as they are done."""
        trainer, world, take = self.trainer, self.trainer.world, Take()
        gc.collect()
        trainer.optimizer.zero_grad(set_to_none=True)
        recorder = ScopeRecorder(self.device, memory=True)
        with self._unobserved(phases, kept):
            for meter in self.memory:
                meter.start()
            before, sent = flight.last_record(), network.bytes_sent()
            recorder.start()
            world.barrier()
            spent: list[dict[str, float]] = []
            queued = cores.queued()
            asleep: list[float] = []
            for _ in range(1 + self.config.measured):
                phases.reset()
                with record_function(STEP):
                    kept.append(trainer.train_step())
                spent.append(phases.seconds)
                asleep.append(sum(value for name, value in phases.asleep.items() if name != "data"))
            for meter in self.memory:
                meter.stop()
            waited = cores.waited(queued, cores.queued())
            after = network.bytes_sent()
            trace = self.traces / f"window{number}" / f"rank{world.rank}.pt.trace.json" if self.traces else None
            recording = recorder.stop(trace)
            entries, reason = flight.read(before)
            world.barrier()
        with self._unobserved(None, kept):
            for _ in range(self.config.reference):
                kept.append(trainer.train_step())
        metered = kept[1 : 1 + self.config.measured]  # the first is absorbed: it carries the ranks' start skew
        take.reference = [metrics.step_seconds for metrics in kept[1 + self.config.measured :]]
        intervals = [span.interval for span in recording.spans if span.name == STEP and not span.device][1:]
        take.calls = calls(recording, entries, intervals, flight.members()) if reason is None else []
        take.calls_reason = reason
        take.memory = {meter.column: meter.read(recording) for meter in self.memory}
        if sent is not None and after is not None:
            take.network_bytes = (after - sent) / (1 + self.config.measured)
        take.core_wait = None if waited is None else waited / (1 + self.config.measured)
        for metrics, parts, slept, interval in zip(metered, spent[1:], asleep[1:], intervals, strict=True):
            busy, exposed = self._communication(recording, interval, slept if phases.blocked else None)
            take.steps.append(Step(metrics.step_seconds, parts, busy / 1e9, exposed, metrics.tokens))
        take.timeline = timeline(recording, intervals[-1])
        return take

    @contextmanager
    def _unobserved(self, phases: Phases | None, kept: list[StepMetrics]) -> Iterator[None]:
        observers, span = self.trainer.observers, self.trainer.span
        self.trainer.observers = []
        if phases is not None:
            self.trainer.span = phases.span
        try:
            yield
        finally:
            self.trainer.observers, self.trainer.span = observers, span

    def _tell(self, kept: list[StepMetrics]) -> None:
        observers: list[Observer] = [o for o in self.trainer.observers if not o.reads_state]
        for metrics in kept:
            for observer in observers:
                observer.on_step(metrics, self.trainer)

    def _communication(self, recording: Recording, step: Interval, asleep: float | None) -> tuple[int, float | None]:
        """(ns of the union of collectives in the step, seconds of it that were exposed)."""
        collectives = intersection((s.interval for s in recording.spans if is_collective(s)), [step])
        busy = length(collectives)
        if self.device.type == "cuda":
            compute = [
                s.interval for s in recording.spans if s.device and not is_collective(s) and not _annotation(s.name)
            ]
            return busy, (busy - length(intersection(collectives, compute))) / 1e9
        return busy, None if asleep is None else min(max(asleep, 0.0), busy / 1e9)


def _annotation(name: str) -> bool:
    """Ranges that Kineto repeats on the device's line: not kernels."""
    return name.startswith((PREFIX, "FSDP::", "DistributedDataParallel", "Optimizer.", "nccl:", "ProfilerStep"))


def timeline(recording: Recording, step: Interval) -> list[dict[str, Any]]:
    """Phases and collectives of one step: kind, name, start and end in seconds from the step's start."""
    found = []
    for span in recording.spans:
        if span.end <= step[0] or span.start >= step[1]:
            continue
        phase = span.name.removeprefix(PREFIX)
        if is_collective(span):
            kind, name = "collective", span.name.partition(":")[2] or span.name
        elif span.name.startswith(PREFIX) and phase in PHASES and not span.device:
            kind, name = phase, phase
        else:
            continue
        found.append(
            {"kind": kind, "name": name, "start": (span.start - step[0]) / 1e9, "end": (span.end - step[0]) / 1e9}
        )
    return found
