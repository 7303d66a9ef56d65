"""The only place that reads FSDP1's private attributes (seen in torch 2.13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from distbench.strategies.slots import Slot


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


def slots(module: nn.Module, canonical: Callable[[str], str]) -> list[Slot]:
    """Each plain parameter's piece of its unit's flat shard, padding left out.

    With use_orig_params the optimizer holds one 1-D view per parameter, otherwise the flat parameter.
    """
    names = {
        id(unit): canonical(name) for name, unit in module.named_modules() if isinstance(unit, FullyShardedDataParallel)
    }
    found: list[Slot] = []
    for unit in FullyShardedDataParallel.fsdp_modules(module):
        handle = unit._handle
        if handle is None:
            continue
        flat = handle.flat_param
        prefix = f"{names[id(unit)]}." if names[id(unit)] else ""
        originals = flat._params if handle._use_orig_params else [flat] * len(flat._fqns)
        for fqn, shape, info, original in zip(
            flat._fqns, flat._shapes, flat._shard_param_infos, originals, strict=True
        ):
            numel = info.numel_in_shard if info.in_shard else 0
            start = info.intra_param_start_idx if info.in_shard else 0
            offset = info.offset_in_shard if info.in_shard and original is flat else 0
            run = max(numel, 1)
            found.append(Slot(f"{prefix}{canonical(fqn)}", tuple(shape), original, offset, numel, start, run, run))
    return found


def _handles(module: nn.Module) -> list[Any]:
    return [unit._handle for unit in FullyShardedDataParallel.fsdp_modules(module) if unit._handle is not None]
