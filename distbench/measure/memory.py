"""Memory meters. Each says what it can read here; values of different meters are never compared with each other."""

from __future__ import annotations

import gc
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from distbench.measure.phases import STEP
from distbench.measure.recorder import Recording


class MemoryMeter(ABC):
    """One way to read a peak between `start` and `read`."""

    column: str
    """The record's name of it."""
    name: str

    @abstractmethod
    def available(self) -> str | None:
        """Why it cannot be read here, or None."""

    @abstractmethod
    def start(self) -> None:
        """Forget the peak so far."""

    def stop(self) -> None:
        """The window is over; what comes next is not the run's."""
        self.peak = 0

    def read(self, recording: Recording) -> int:
        """Bytes of the peak between `start` and `stop`."""
        return self.peak


class CpuTensors(MemoryMeter):
    """CPU tensors: what lives at a step's start, and the allocator's own events from there on.

    A block that one of Gloo's threads frees has no event (torch 2.13 reports to the profiler of the freeing thread), so
    a sum over the whole window would only grow. Each step is summed for itself, from what is known to live at its start.
    Where a step's sum does not come back to what lives at its end, events are missing, and its peak is too high by as
    much at most: the steps that miss least count.
    """

    column, name = "peak_allocated", "CPU tensor allocations (torch profiler) above the tensors alive at the start"

    def __init__(self, device: torch.device, hidden_bytes: int) -> None:
        """`hidden_bytes`: storage that only C++ refers to, such as DDP's buckets."""
        self.device, self.hidden_bytes = device, hidden_bytes

    def available(self) -> str | None:
        return None if self.device.type == "cpu" else "the model is not on the CPU"

    def start(self) -> None:
        self.alive = live_tensor_bytes() + self.hidden_bytes

    def stop(self) -> None:
        self.kept = live_tensor_bytes() + self.hidden_bytes - self.alive

    def read(self, recording: Recording) -> int:
        peaks: list[tuple[int, int]] = []
        for number, step in enumerate(span for span in recording.spans if span.name == STEP):
            events = [size for time, size in recording.allocations if step.start <= time < step.end]
            # Gradients were dropped before the first step; the later ones start with those of the step before.
            carried, left = (0, self.kept) if number == 0 else (self.kept, 0)
            peaks.append((abs(sum(events) - left), self.alive + carried + max(accumulate(events, initial=0))))
        least = min(missed for missed, _ in peaks)
        return max(peak for missed, peak in peaks if missed == least)


class HighWater(MemoryMeter):
    """The process's resident set, its high-water mark reset by `clear_refs` (Linux, proc(5)). A cross-check: the
    allocator decides what goes back to the system."""

    column, name = "rss_peak", "VmHWM since clear_refs"

    def available(self) -> str | None:
        try:
            self.start()
        except OSError as error:
            return f"/proc/self/clear_refs cannot be written: {error.strerror}"
        return None

    def start(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")

    def stop(self) -> None:
        self.peak = resident("VmHWM")


class CudaAllocator(MemoryMeter):
    """One statistic of CUDA's caching allocator. Not run by the authors' tests (docs/gpu.md)."""

    def __init__(self, device: torch.device, column: str, statistic: str) -> None:
        self.device, self.column, self.statistic = device, column, statistic
        self.name = f"torch.cuda.memory_stats {statistic}"

    def available(self) -> str | None:
        return None if self.device.type == "cuda" else "no CUDA device in use"

    def start(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def stop(self) -> None:
        self.peak = int(torch.cuda.memory_stats(self.device)[self.statistic])


class CudaDevice(MemoryMeter):
    """What the driver says is used on the whole device, at the end: every process's, contexts and NCCL's buffers too."""

    column, name = "device_used", "cudaMemGetInfo at the window's end, all processes"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def available(self) -> str | None:
        return None if self.device.type == "cuda" else "no CUDA device in use"

    def start(self) -> None:
        pass

    def stop(self) -> None:
        free, total = torch.cuda.mem_get_info(self.device)
        self.peak = total - free


def memory_meters(device: torch.device, hidden_bytes: int) -> list[MemoryMeter]:
    """Every meter that this device could have; where two share a column, one is available."""
    return [
        CpuTensors(device, hidden_bytes),
        CudaAllocator(device, "peak_allocated", "allocated_bytes.all.peak"),
        CudaAllocator(device, "peak_active", "active_bytes.all.peak"),
        CudaAllocator(device, "peak_reserved", "reserved_bytes.all.peak"),
        CudaDevice(device),
        HighWater(),
    ]


def resident(field: str = "VmRSS") -> int:
    """Bytes of a field of /proc/self/status."""
    match = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if match is None:
        raise OSError(f"/proc/self/status has no {field}")
    return int(match[1]) * 1024


def live_tensor_bytes() -> int:
    """Bytes of all CPU storage that a tensor known to Python refers to."""
    return sum(live_storages(torch.device("cpu")).values())


def live_storages(device: torch.device) -> dict[int, int]:
    """Address -> bytes of all storage on a device that a tensor known to Python refers to."""
    # By type: isinstance asks objects for their class, and some of torch's answer with a deprecation warning.
    return storages((thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)), device)


def storages(tensors: Iterable[Tensor], device: torch.device) -> dict[int, int]:
    """Address -> bytes of distinct storages; a gradient counts with its parameter, a wrapper (DTensor) by what it wraps."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        # Only of parameters: asking a view whose base was changed in place about its history raises (FSDP1's flat views).
        for part in (tensor, tensor.grad if issubclass(type(tensor), nn.Parameter) else None):
            if part is None or part.device.type != device.type or part.layout is not torch.strided:
                continue
            if is_traceable_wrapper_subclass(part):
                continue
            storage = part.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    sizes.pop(0, None)
    return sizes
