"""One rank's view of the world: who it is, on which device, and the few collectives the trainer needs."""

from __future__ import annotations

import gc
import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

DRAIN_SECONDS = 0.05
"""How long Gloo's threads get to let go of the last collective's tensor; under 0.4 ms was seen."""


@dataclass(frozen=True)
class World:
    """Rank, size and device. With one rank every collective is the identity."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    backend: str | None
    """`gloo`, `nccl`, or None where there is no process group."""

    @classmethod
    def join(cls, device: str, timeout_s: float, needs_group: bool, store: dist.Store | None = None) -> World:
        """Join the ranks named by torchrun's variables.

        The CUDA device is chosen before the process group exists: NCCL binds its communicator to the current device.
        NCCL was never run by the authors' tests (docs/gpu.md).
        """
        rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        local_rank, local_size = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", size))
        place = torch.device("cpu")
        if device == "cuda":
            place = torch.device("cuda", local_rank)
            torch.cuda.set_device(place)
        if size == 1 and not needs_group:
            return cls(rank, size, local_rank, local_size, place, backend=None)
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(
            backend,
            store=store,
            rank=rank if store is not None else -1,
            world_size=size if store is not None else -1,
            timeout=timedelta(seconds=timeout_s),
            device_id=place if device == "cuda" else None,
        )
        return cls(rank, size, local_rank, local_size, place, backend)

    def leave(self) -> None:
        """End the process group, after success only: on the error path a peer would then fail first and hide the
        root cause.

        Wrappers must be collected and all ranks be done before: torch 2.13 with Gloo aborted at exit where a
        communication hook's future outlived its group, and can hang where a Gloo thread still wants the interpreter to
        drop the last collective's tensor while the group is being destroyed. Hence the barrier, and a moment after it.
        """
        if self.backend is None:
            return
        gc.collect()
        dist.barrier()
        time.sleep(DRAIN_SECONDS)
        dist.destroy_process_group()

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place, in the tensor's dtype; returns the tensor."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def gather(self, share: Any) -> list[Any]:
        """Every rank's `share`, in rank order, on every rank."""
        if self.size == 1:
            return [share]
        shares: list[Any] = [None] * self.size
        dist.all_gather_object(shares, share)
        return shares

    def synchronize(self) -> None:
        """Wait for the device; on CPU work is done when its call returns."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def describe(self) -> dict[str, Any]:
        """This rank's row in the record's topology."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        return {
            "rank": self.rank,
            "local_rank": self.local_rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "device": str(self.device),
            "device_name": name,
            "threads": torch.get_num_threads(),
        }
