"""fully_shard (FSDP2): every parameter is a DTensor sharded on dim 0."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from distbench.config import BackwardPrefetch, Config, CustomModel, FSDP2Strategy
from distbench.measure.traffic import Traffic
from distbench.numerics.bounds import Reduction
from distbench.precision import PrecisionPolicy
from distbench.strategies import torch_fsdp2
from distbench.strategies.base import Strategy
from distbench.strategies.slots import Slot


class FSDP2(Strategy):
    options: FSDP2Strategy

    @classmethod
    def reduction(cls, config: Config) -> Reduction:
        """Unsynced micro-batches add up in the reduction dtype."""
        return replace(
            super().reduction(config),
            accumulate_dtype=config.precision.reduce_dtype,
            # The units of distbench's own model use their input as often as it is used at all: nothing to tell apart.
            unit_calls="inputs" if isinstance(config.model, CustomModel) else None,
        )

    def wrap(self, model: nn.Module, policy: PrecisionPolicy, units: list[str]) -> nn.Module:
        mesh = init_device_mesh(self.world.device.type, (self.world.size,), mesh_dim_names=("shard",))
        options: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=policy.compute_dtype if policy.casts_parameters else None,
                reduce_dtype=policy.reduce_dtype,  # None would mean param_dtype here, not the master parameters' dtype
                # Inputs and outputs are the policy's, for every strategy alike.
                output_dtype=None,
                cast_forward_inputs=False,
            ),
        }
        for name in units:
            fully_shard(model.get_submodule(name), reshard_after_forward=self.options.reshard_after_forward, **options)
        # torch's own default for the root is not to reshard it, since backward needs it at once; a model in one piece
        # is all root, and there the option must mean what it says.
        root = None if units else self.options.reshard_after_forward
        fully_shard(model, reshard_after_forward=root, **options)
        _set_prefetch(model, self.prefetch.backward, self.prefetch.forward)
        return model

    def backward_sync(self, module: nn.Module, sync: bool) -> AbstractContextManager[Any]:
        return _gradient_sync(module, sync)

    @property
    def num_replicas(self) -> int:
        return 1

    def local(self, tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def local_gradients(self, module: nn.Module) -> dict[str, Tensor]:
        return torch_fsdp2.local_gradients(module, self.canonical_name)

    def drop_local_gradients(self, module: nn.Module) -> None:
        module.zero_grad(set_to_none=True)
        torch_fsdp2.drop_local_gradients(module)

    def slots(self, module: nn.Module) -> list[Slot]:
        return [torch_fsdp2.slot(self.canonical_name(name), p) for name, p in module.named_parameters()]

    def reduce_dtype(self, module: nn.Module) -> torch.dtype:
        return torch_fsdp2.reduce_dtype(module)

    def expected_traffic(self, module: nn.Module, micro_batches: int, syncs: int) -> list[Traffic]:
        """Gathers in forward over all ranks and, where a unit is resharded after it, in backward over the ranks that it is
        resharded to."""
        n = self.world.size
        forward = reduced = 0
        backward: dict[int, int] = {}
        for unit in torch_fsdp2.unit_bytes(module):
            forward += micro_batches * unit.gathered
            reduced += syncs * unit.reduced
            if unit.backward_ranks:
                ranks = unit.backward_ranks
                backward[ranks] = backward.get(ranks, 0) + micro_batches * unit.gathered
        return [
            Traffic("parameters, forward", "all_gather", forward, n),
            *(Traffic("parameters, backward", "all_gather", size, ranks) for ranks, size in backward.items()),
            Traffic("gradients", "reduce_scatter", reduced, n),
        ]

    def facts(self, module: nn.Module) -> dict[str, Any]:
        return {"padded_bytes": torch_fsdp2.padded_bytes(module)}


@contextmanager
def _gradient_sync(module: nn.Module, sync: bool) -> Iterator[None]:
    assert isinstance(module, FSDPModule)
    module.set_requires_gradient_sync(sync)
    yield


def _set_prefetch(model: nn.Module, backward: BackwardPrefetch, forward: bool) -> None:
    """Map the prefetch group to explicit prefetching; units run in the order in which the model registers them.

    `pre` is fully_shard's own implicit behaviour. `none` names each unit as its own prefetch target, which is a no-op
    that turns the implicit one off. `post` unshards the previous unit when the gradient of this unit's input is there.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    inner = units[1:]  # the root runs around the others
    if forward:
        for unit, following in pairwise(inner):
            unit.set_modules_to_forward_prefetch([following])
    if backward is BackwardPrefetch.pre:
        return
    for unit in units:
        unit.set_modules_to_backward_prefetch([unit])
    if backward is BackwardPrefetch.post:
        for previous, unit in pairwise(inner):
            _unshard_after_backward_of(unit, previous)


def _unshard_after_backward_of(unit: FSDPModule, previous: FSDPModule) -> None:
    def watch(module: nn.Module, args: tuple[Any, ...]) -> None:
        for tensor in args:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(issue)

    def issue(_: Tensor) -> None:
        previous.unshard(async_op=True)

    assert isinstance(unit, nn.Module)
    unit.register_forward_pre_hook(watch)
