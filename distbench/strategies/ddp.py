"""DistributedDataParallel: every rank holds the whole model; gradients are averaged in buckets."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distbench.config import Config, DDPStrategy
from distbench.measure.traffic import Traffic
from distbench.numerics.bounds import Reduction
from distbench.precision import PrecisionPolicy
from distbench.strategies.base import Strategy


class DDP(Strategy):
    options: DDPStrategy

    @classmethod
    def reduction(cls, config: Config) -> Reduction:
        """Micro-batches add up in the parameters' own gradient; where each is reduced, so is the sum before it, again."""
        return replace(
            super().reduction(config),
            carries=True,
            accumulate_dtype=config.precision.param_dtype,
            broadcast_buffers=config.strategy.broadcast_buffers,
        )

    def wrap(self, model: nn.Module, policy: PrecisionPolicy, units: list[str]) -> nn.Module:
        options = self.options
        cuda = self.world.device.type == "cuda"
        module = DistributedDataParallel(
            policy.cast(model),
            device_ids=[self.world.device.index] if cuda else None,
            bucket_cap_mb=options.bucket_cap_mb,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            static_graph=options.static_graph,
            find_unused_parameters=options.find_unused_parameters,
            # Named only where it is not the default: naming it at all is deprecated since torch 2.13.
            **({} if options.broadcast_buffers else {"broadcast_buffers": False}),
        )
        self._reduce_dtype = policy.param_dtype
        if policy.reduce_dtype != policy.param_dtype:
            module.register_comm_hook(ReduceIn(policy.reduce_dtype, self.world.size), reduce_in_dtype)
            self._reduce_dtype = policy.reduce_dtype
        return module

    def backward_sync(self, module: nn.Module, sync: bool) -> AbstractContextManager[Any]:
        assert isinstance(module, DistributedDataParallel)
        return nullcontext() if sync else module.no_sync()

    def reduce_dtype(self, module: nn.Module) -> torch.dtype:
        return self._reduce_dtype

    @property
    def hidden_kind(self) -> str:
        return "gradients" if self.options.gradient_as_bucket_view else "communication"

    def hidden_bytes(self, module: nn.Module) -> int:
        """The buckets: each gradient has a place in one, whether or not it is a view of it."""
        return sum(p.nbytes for p in module.parameters() if p.requires_grad)

    def expected_traffic(self, module: nn.Module, micro_batches: int, syncs: int) -> list[Traffic]:
        """Gradients at each sync; buffers before the first forward after one; with find_unused_parameters which
        parameters were used, an int32 each."""
        trained = [p for p in module.parameters() if p.requires_grad]
        n = self.world.size
        found = [
            Traffic("gradients", "all_reduce", syncs * sum(p.numel() for p in trained) * self._reduce_dtype.itemsize, n)
        ]
        if self.options.broadcast_buffers and (size := sum(b.nbytes for b in module.buffers())):
            found.append(Traffic("buffers", "broadcast", syncs * size, n))
        if self.options.find_unused_parameters and not self.options.static_graph:
            found.append(Traffic("used parameters", "all_reduce", syncs * 4 * len(trained), n))
        return found

    def canonical_name(self, name: str) -> str:
        return super().canonical_name(name.removeprefix("module."))


class ReduceIn:
    """State of the communication hook: the dtype to reduce in, and where FSDP would divide for it."""

    def __init__(self, dtype: torch.dtype, world_size: int) -> None:
        self.dtype = dtype
        # fp16 overflows where it is summed before it is divided, and underflows the other way round: FSDP divides by
        # about sqrt(N) on each side. Everything else is divided after the sum.
        self.before = 1
        if dtype is torch.float16:
            while world_size % self.before == 0 and world_size / self.before > self.before:
                self.before *= 2
        self.after = world_size / self.before


def reduce_in_dtype(state: ReduceIn, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket in a dtype of its own, as FSDP's MixedPrecision(reduce_dtype) does.

    It waits for its own work instead of chaining a callback on the collective's future: with torch 2.13 on Gloo such
    callbacks sometimes still ran while the process exited, and aborted it. The price is that on CPU this bucket's
    communication hides behind nothing; on CUDA `wait` only orders streams.
    """
    buffer = bucket.buffer()
    reduced = buffer.to(state.dtype)
    if state.before != 1:
        reduced.div_(state.before)
    work = dist.all_reduce(reduced, async_op=True)
    assert work is not None
    work.wait()
    if state.after != 1:
        reduced.div_(state.after)
    buffer.copy_(reduced)
    future: torch.futures.Future[Tensor] = torch.futures.Future(
        devices=[buffer.device] if buffer.device.type == "cuda" else None
    )
    future.set_result(buffer)
    return future
