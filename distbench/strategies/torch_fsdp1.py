"""The only place that reads FSDP1's private attributes (seen in torch 2.13)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


def reduce_dtype(module: nn.Module) -> torch.dtype:
    """What the root unit's gradients are reduced in."""
    handle = _handles(module)[0]
    return handle._fwd_bwd_param_dtype if handle._reduce_dtype is None else handle._reduce_dtype


def flat_parameters(module: nn.Module) -> list[dict[str, Any]]:
    """One row per flat parameter: its unit's name, elements with padding, this rank's shard, its dtype."""
    return [
        {
            "unit": handle.flat_param._fqns[0].rpartition(".")[0] if len(handle.flat_param._fqns) == 1 else "",
            "parameters": list(handle.flat_param._fqns),
            "numel_padded": int(handle.flat_param._unpadded_unsharded_size.numel()),
            "shard_numel": int(handle.flat_param._sharded_size.numel()),
            "dtype": str(handle.flat_param.dtype).removeprefix("torch."),
        }
        for handle in _handles(module)
    ]


def _handles(module: nn.Module) -> list[Any]:
    return [unit._handle for unit in FullyShardedDataParallel.fsdp_modules(module) if unit._handle is not None]
