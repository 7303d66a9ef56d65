"""The only place that reads fully_shard's private attributes (seen in torch 2.13)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

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


def slot(name: str, parameter: nn.Parameter) -> Slot:
    """A DTensor parameter's local block, which must be sharded on at most one dim per mesh axis it is sharded over.

    Raises ValueError for a placement that is not Shard or Replicate.
    """
    if not isinstance(parameter, DTensor):
        return Slot.whole(name, parameter)
    if any(placement.is_partial() for placement in parameter.placements):
        raise ValueError(f"parameter {name} is Partial over a mesh axis: it has no value of its own to name")
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    dims = {placement.dim for placement in parameter.placements if placement.is_shard()}
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


def _param_groups(module: nn.Module) -> list[Any]:
    states = [unit._get_fsdp_state() for unit in module.modules() if isinstance(unit, FSDPModule)]
    return [group for state in states for group in state._fsdp_param_groups]
