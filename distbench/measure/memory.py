"""Memory meters. Each says what it can read here; values of different meters are never compared with each other."""

from __future__ import annotations

import gc
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

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

    @abstractmethod
    def read(self, recording: Recording) -> int:
        """Bytes of the peak since `start`."""


class CpuTensors(MemoryMeter):
    """CPU tensors: what lives at the start, and the allocator's own events from there on."""

    column, name = "peak_allocated", "CPU tensor allocations (torch profiler) above the tensors alive at the start"

    def __init__(self, device: torch.device, hidden_bytes: int) -> None:
        """`hidden_bytes`: storage that only C++ refers to, such as DDP's buckets."""
        self.device, self.hidden_bytes = device, hidden_bytes

    def available(self) -> str | None:
        return None if self.device.type == "cpu" else "the model is not on the CPU"

    def start(self) -> None:
        self.alive = live_tensor_bytes() + self.hidden_bytes

    def read(self, recording: Recording) -> int:
        return self.alive + max(accumulate((size for _, size in recording.allocations), initial=0))


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

    def read(self, recording: Recording) -> int:
        return resident("VmHWM")


class CudaAllocator(MemoryMeter):
    """One statistic of CUDA's caching allocator. Not run by the authors' tests (docs/gpu.md)."""

    def __init__(self, device: torch.device, column: str, statistic: str) -> None:
        self.device, self.column, self.statistic = device, column, statistic
        self.name = f"torch.cuda.memory_stats {statistic}"

    def available(self) -> str | None:
        return None if self.device.type == "cuda" else "no CUDA device in use"

    def start(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def read(self, recording: Recording) -> int:
        return int(torch.cuda.memory_stats(self.device)[self.statistic])


class CudaDevice(MemoryMeter):
    """What the driver says is used on the whole device, at the end: every process's, contexts and NCCL's buffers too."""

    column, name = "device_used", "cudaMemGetInfo at the window's end, all processes"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def available(self) -> str | None:
        return None if self.device.type == "cuda" else "no CUDA device in use"

    def start(self) -> None:
        pass

    def read(self, recording: Recording) -> int:
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free


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
    tensors = (thing for thing in gc.get_objects() if isinstance(thing, Tensor))
    return storage_bytes(tensors)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of distinct CPU storages; a gradient counts with its parameter, a wrapper (DTensor) by what it wraps."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        for part in (tensor, tensor.grad if tensor.is_leaf else None):
            if part is None or part.device.type != "cpu" or part.layout is not torch.strided:
                continue
            if is_traceable_wrapper_subclass(part):
                continue
            storage = part.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(size for pointer, size in sizes.items() if pointer)
