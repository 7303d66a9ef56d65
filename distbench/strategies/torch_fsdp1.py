"""The only place that reads FSDP1's private attributes (seen in torch 2.13)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from distbench.strategies.slots import Slot


def reduce_dtype(module: nn.Module) -> torch.dtype:
    """What the root unit's gradients are reduced in."""
    handle = _handles(module)[0]
    return handle._fwd_bwd_param_dtype if handle._reduce_dtype is None else handle._reduce_dtype


@dataclass(frozen=True)
class UnitBytes:
    """A unit's whole flat parameter with its padding, in the dtypes that cross the network."""

    gathered: int
    reduced: int
    """0 where nothing in it is trained."""
    root: bool


def unit_bytes(module: nn.Module) -> list[UnitBytes]:
    found = []
    for unit in FullyShardedDataParallel.fsdp_modules(module):
        if (handle := unit._handle) is None:
            continue
        flat = handle.flat_param
        padded = int(flat._sharded_size.numel()) * (handle.world_size if handle.uses_sharded_strategy else 1)
        reduce_dtype = handle._fwd_bwd_param_dtype if handle._reduce_dtype is None else handle._reduce_dtype
        found.append(
            UnitBytes(
                gathered=padded * handle._fwd_bwd_param_dtype.itemsize,
                reduced=padded * reduce_dtype.itemsize if flat.requires_grad else 0,
                root=unit is module,
            )
        )
    return found


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


def local_gradients(module: nn.Module, canonical: Callable[[str], str]) -> dict[str, Tensor]:
    """Unreduced gradients that backwards inside `no_sync` left in the unsharded flat gradients, by plain name."""
    found: dict[str, Tensor] = {}
    for prefix, handle in _named_handles(module, canonical):
        flat = handle.flat_param
        if flat.grad is None:
            continue
        numel = flat._unpadded_unsharded_size.numel()
        for fqn, view in zip(flat._fqns, handle._get_unflat_views(flat.grad.reshape(-1)[:numel]), strict=True):
            found[f"{prefix}{canonical(fqn)}"] = view
    return found


def drop_local_gradients(module: nn.Module) -> None:
    for handle in _handles(module):
        handle.flat_param.grad = None


def _named_handles(module: nn.Module, canonical: Callable[[str], str]) -> list[tuple[str, Any]]:
    """Each flat parameter's handle with the plain-name prefix of its unit."""
    names = {id(m): canonical(f"{n}.") for n, m in module.named_modules() if isinstance(m, FullyShardedDataParallel)}
    return [
        ("" if names[id(unit)] == "." else names[id(unit)], unit._handle)
        for unit in FullyShardedDataParallel.fsdp_modules(module)
        if unit._handle is not None
    ]


def slots(module: nn.Module, canonical: Callable[[str], str]) -> list[Slot]:
    """Each plain parameter's piece of its unit's flat shard, padding left out.

    With use_orig_params the optimizer holds one 1-D view per parameter, otherwise the flat parameter.
    """
    found: list[Slot] = []
    for prefix, handle in _named_handles(module, canonical):
        flat = handle.flat_param
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


def shard_groups(module: nn.Module, canonical: Callable[[str], str]) -> dict[str, dist.ProcessGroup | None]:
    """The ranks that shard each plain parameter, by name: those of one replica, and none under NO_SHARD."""
    return {
        f"{prefix}{canonical(fqn)}": handle.process_group if handle.uses_sharded_strategy else None
        for prefix, handle in _named_handles(module, canonical)
        for fqn in handle.flat_param._fqns
    }


def aliases(module: nn.Module, canonical: Callable[[str], str]) -> dict[str, list[str]]:
    """Other names of parameters that are tied within a unit, by the name of the first."""
    found: dict[str, list[str]] = {}
    for prefix, handle in _named_handles(module, canonical):
        for name, _, owner, first_name, _, first_owner in handle.flat_param._shared_param_infos:
            first = f"{prefix}{canonical(f'{first_owner}.{first_name}' if first_owner else first_name)}"
            found.setdefault(first, []).append(f"{prefix}{canonical(f'{owner}.{name}' if owner else name)}")
    return found


def flattened(module: nn.Module) -> set[int]:
    """Ids of the parameters that `slots` accounts for: the flat ones and the views into them."""
    held = [
        [h.flat_param, *(h.flat_param._params or []), *(h.flat_param._shared_params or [])] for h in _handles(module)
    ]
    return {id(parameter) for parameters in held for parameter in parameters}


def _handles(module: nn.Module) -> list[Any]:
    return [unit._handle for unit in FullyShardedDataParallel.fsdp_modules(module) if unit._handle is not None]
