"""The only place that reads fully_shard's private attributes (seen in torch 2.13)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


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


def _param_groups(module: nn.Module) -> list[Any]:
    states = [unit._get_fsdp_state() for unit in module.modules() if isinstance(unit, FSDPModule)]
    return [group for state in states for group in state._fsdp_param_groups]
