"""The only place that reads fully_shard's private attributes (seen in torch 2.13)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from distbench.strategies.slots import Slot


def reduce_dtype(module: nn.Module) -> torch.dtype:
    """What the units' gradients are reduced in."""
    group = _param_groups(module)[0]
    policy, parameter = group.mp_policy, group.fsdp_params[0].sharded_param
    return policy.reduce_dtype or policy.param_dtype or parameter.dtype


def padded_bytes(module: nn.Module) -> int:
    """Bytes of all parameters with dim 0 padded to a multiple of the shards, in the dtype they are gathered in."""
    total = 0
    for group in _param_groups(module):
        for parameter in group.fsdp_params:
            dtype = group.mp_policy.param_dtype or parameter.sharded_param.dtype
            total += parameter.padded_sharded_param_size.numel() * group.mesh_info.shard_mesh_size * dtype.itemsize
    return total


@dataclass(frozen=True)
class UnitBytes:
    """A unit's parameters, each padded on dim 0 to a multiple of the shards, in the dtypes that cross the network."""

    gathered: int
    reduced: int
    """Trained parameters only."""
    backward_ranks: int | None
    """How many ranks share one copy after forward, to be gathered again in backward; None: they stay whole."""


def unit_bytes(module: nn.Module) -> list[UnitBytes]:
    found = []
    for group in _param_groups(module):
        gathered = reduced = 0
        for parameter in group.fsdp_params:
            padded = parameter.padded_sharded_param_size.numel() * group.mesh_info.shard_mesh_size
            kept, policy = parameter.sharded_param.dtype, group.mp_policy
            gathered += padded * (policy.param_dtype or kept).itemsize
            if parameter.sharded_param.requires_grad:
                reduced += padded * (policy.reduce_dtype or policy.param_dtype or kept).itemsize
        after = group.post_forward_mesh_info
        found.append(UnitBytes(gathered, reduced, None if after is None else after.shard_mesh_size))
    return found


def local_gradients(module: nn.Module, canonical: Callable[[str], str]) -> dict[str, Tensor]:
    """Unreduced gradients that backwards without gradient sync left in the unsharded parameters, by plain name."""
    names = {id(parameter): canonical(name) for name, parameter in module.named_parameters()}
    found: dict[str, Tensor] = {}
    for group in _param_groups(module):
        for parameter in group.fsdp_params:
            gradient = parameter.unsharded_accumulated_grad
            if gradient is None and hasattr(parameter, "_unsharded_param"):
                gradient = parameter.unsharded_param.grad
            if gradient is not None:
                found[names[id(parameter.sharded_param)]] = gradient
    return found


def drop_local_gradients(module: nn.Module) -> None:
    for group in _param_groups(module):
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter.unsharded_param.grad = None


def slot(name: str, parameter: nn.Parameter) -> Slot:
    """A DTensor parameter's local block, which must be sharded on at most one dim per mesh axis it is sharded over.

    Raises ValueError for a placement that is not Shard or Replicate.
    """
    if not isinstance(parameter, DTensor):
        return Slot.whole(name, parameter)
    if any(placement.is_partial() for placement in parameter.placements):
        raise ValueError(f"parameter {name} is Partial over a mesh axis: it has no value of its own to name")
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    if shape != tuple(parameter.to_local().shape) or not _is_block(parameter):
        raise ValueError(f"parameter {name} placed as {parameter.placements} does not hold one block of neighbours")
    dims = {placement.dim for placement in parameter.placements if _is_shard(placement)}
    numel = math.prod(shape)
    if not dims or numel == 0:
        run = max(numel, 1)
        return Slot(name, tuple(parameter.shape), parameter, 0, numel, 0, run, run)
    # Rows of a dim-0 shard are neighbours; a shard of another dim is one run for each index of the dims before it.
    inner_dim = max(dims)
    if len(dims) > 1 and any(shape[dim] != parameter.shape[dim] for dim in dims if dim not in (0, inner_dim)):
        raise ValueError(f"parameter {name} is sharded on dims {sorted(dims)}: only dim 0 and one other are supported")
    inner = math.prod(parameter.shape[inner_dim + 1 :])
    run, stride = shape[inner_dim] * inner, parameter.shape[inner_dim] * inner
    start = sum(offset[dim] * math.prod(parameter.shape[dim + 1 :]) for dim in dims)
    return Slot(name, tuple(parameter.shape), parameter, 0, numel, start, run, stride if numel > run else run)


def shard_groups(parameter: DTensor) -> tuple[dist.ProcessGroup, ...]:
    """The ranks that shard a parameter: one group for each mesh axis it is sharded over, none for replicated axes."""
    mesh = parameter.device_mesh
    return tuple(
        mesh.get_group(axis)
        for axis, placement in enumerate(parameter.placements)
        if _is_shard(placement) and mesh.size(axis) > 1
    )


def _is_shard(placement: Any) -> bool:
    """Shard, or _StridedShard, which fully_shard makes of a dim that tensor parallelism shards too and which does not
    call itself one."""
    return placement.is_shard() or isinstance(placement, _StridedShard)


def _is_block(parameter: DTensor) -> bool:
    """A strided shard holds neighbours once the axes after it have divided the same dim by its split factor."""
    mesh, placements = parameter.device_mesh, parameter.placements
    for axis, placement in enumerate(placements):
        if isinstance(placement, _StridedShard):
            later = [
                mesh.size(i)
                for i in range(axis + 1, len(placements))
                if getattr(placements[i], "dim", None) == placement.dim
            ]
            if math.prod(later) != placement.split_factor:
                return False
    return True


def _param_groups(module: nn.Module) -> list[Any]:
    states = [unit._get_fsdp_state() for unit in module.modules() if isinstance(unit, FSDPModule)]
    return [group for state in states for group in state._fsdp_param_groups]
