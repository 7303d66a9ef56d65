"""The only place that reads torch's profiler. Recording user scopes alone is what makes an always-on meter: torch 2.13
adds nothing measurable to a step for it, where a full CPU profile costs one to three microseconds an operation.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distbench.measure.intervals import Interval


@dataclass(frozen=True)
class Span:
    """One recorded interval; ns since the epoch."""

    name: str
    start: int
    end: int
    thread: int
    device: bool = False
    """A kernel on an accelerator."""

    @property
    def interval(self) -> Interval:
        return self.start, self.end


@dataclass(frozen=True)
class Change:
    """Memory allocated, or freed where `size` is negative."""

    time: int
    """ns since the epoch."""
    address: int
    size: int
    device: str
    scopes: tuple[str, ...]
    """Marked parts of the step that its thread was in, the outermost first."""


@dataclass
class Recording:
    spans: list[Span] = field(default_factory=list)
    """In order of their start."""
    allocations: list[tuple[int, int]] = field(default_factory=list)
    """(ns, bytes): CPU tensor memory, negative where freed; blocks from before the recording are missing."""
    changes: list[Change] = field(default_factory=list)
    """The same with addresses, where asked for."""


class ScopeRecorder:
    """Records what torch and the trainer mark by name (`record_function`, Gloo's collectives, FSDP's phases); with `ops`
    every operator, too; on CUDA always every kernel. With `changes`, each allocation with its address."""

    def __init__(self, device: torch.device, *, memory: bool = False, ops: bool = False, changes: bool = False) -> None:
        self.cuda, self.memory, self.ops, self.changes = device.type == "cuda", memory, ops, changes
        self._public: Any = None

    def start(self) -> None:
        if scopes_alone() is not None or self.cuda or self.ops:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self.cuda:
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            memory = self.changes or (self.memory and not self.cuda)
            self._public = torch.profiler.profile(activities=activities, profile_memory=memory)
            self._public.__enter__()
            return
        from torch.autograd import ProfilerConfig, ProfilerState, _enable_profiler, _prepare_profiler

        config = ProfilerConfig(
            ProfilerState.KINETO, False, self.memory, False, False, False, torch._C._profiler._ExperimentalConfig()
        )
        cpu = {torch.profiler.ProfilerActivity.CPU}
        _prepare_profiler(config, cpu)
        _enable_profiler(config, cpu, {torch._C._profiler.RecordScope.USER_SCOPE})

    def stop(self, trace: Path | None = None) -> Recording:
        """End the recording; `trace`: also keep it as a Chrome trace, for Perfetto and HolisticTraceAnalysis."""
        if trace is not None and self._public is None and dist.is_initialized():
            # As the public profiler does: who reads several traces tells their ranks apart by it.
            ranks = {"backend": dist.get_backend(), "rank": dist.get_rank(), "world_size": dist.get_world_size()}
            torch.autograd._add_metadata_json("distributedInfo", json.dumps(ranks))
        if self._public is not None:
            self._public.__exit__(None, None, None)
            results = self._public.profiler.kineto_results
        else:
            results = torch.autograd._disable_profiler()
        if trace is not None:
            trace.parent.mkdir(parents=True, exist_ok=True)
            results.save(str(trace))
        events = results.events()
        recording = Recording()
        for event in events:
            name = event.name()
            if name == "[memory]":
                recording.allocations.append((event.start_ns(), event.nbytes()))
                continue
            device = event.device_type() != torch.profiler.DeviceType.CPU
            recording.spans.append(Span(name, event.start_ns(), event.end_ns(), event.start_thread_id(), device))
        recording.spans.sort(key=lambda span: span.start)
        recording.allocations.sort()
        if self.changes:
            recording.changes = sorted(_changes(results.experimental_event_tree(), ()), key=lambda change: change.time)
        return recording


def _changes(events: Iterable[Any], scopes: tuple[str, ...]) -> Iterator[Change]:
    for event in events:
        kind, fields = event.typed
        if kind == torch._C._profiler._EventType.Allocation:
            yield Change(event.start_time_ns, fields.ptr, fields.alloc_size, fields.device.type, scopes)
        yield from _changes(event.children, (*scopes, event.name))


def scopes_alone() -> str | None:
    """Why user scopes cannot be recorded alone (then the full profiler is used), or None."""
    scope = getattr(getattr(torch._C, "_profiler", None), "RecordScope", None)
    if scope is None or not hasattr(scope, "USER_SCOPE") or not hasattr(torch.autograd, "_enable_profiler"):
        return f"torch {torch.__version__} does not record user scopes alone"
    return None
