"""FullyShardedDataParallel (FSDP1): flat parameters, sharded per unit."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import CustomPolicy

from distbench.config import BackwardPrefetch, Config, CustomModel, FSDPStrategy, ShardingStrategy, SimpleModel
from distbench.measure.traffic import Traffic
from distbench.numerics.bounds import Reduction
from distbench.precision import DTYPES, PrecisionPolicy
from distbench.strategies import torch_fsdp1
from distbench.strategies.base import Strategy
from distbench.strategies.slots import Slot

ALIGNMENT = 16
"""Bytes to a multiple of which use_orig_params=true pads parameters in the flat one (`_get_aligned_numel` in torch 2.13)."""
CACHE_LINE = 64
"""Bytes; CPU tensors begin at a multiple of them."""

PREFETCH = {
    BackwardPrefetch.pre: torch_fsdp.BackwardPrefetch.BACKWARD_PRE,
    BackwardPrefetch.post: torch_fsdp.BackwardPrefetch.BACKWARD_POST,
    BackwardPrefetch.none: None,
}


class FSDP(Strategy):
    options: FSDPStrategy
    zeros_for_unused = True  # beside a used one in the same flat parameter

    @classmethod
    def reduction(cls, config: Config) -> Reduction:
        """Unsharded (NO_SHARD, or one rank), the running average is reduced again with each synced micro-batch."""
        reduction = super().reduction(config)
        whole = config.strategy.sharding_strategy is ShardingStrategy.NO_SHARD or reduction.world_size == 1
        # distbench's own model uses each weight once, where views make no difference: it mostly shares ddp's baseline.
        return replace(
            reduction,
            carries=whole,
            unit_calls="views" if isinstance(config.model, CustomModel) else None,
            packed=_packed(config, DTYPES[reduction.compute_dtype].itemsize),
        )

    def wrap(self, model: nn.Module, policy: PrecisionPolicy, units: list[str]) -> nn.Module:
        options = self.options
        wrapped = {id(model.get_submodule(name)) for name in units}
        return FullyShardedDataParallel(
            model,
            sharding_strategy=torch_fsdp.ShardingStrategy[options.sharding_strategy.name],
            auto_wrap_policy=CustomPolicy(lambda module: id(module) in wrapped),
            backward_prefetch=PREFETCH[self.prefetch.backward],
            mixed_precision=_mixed_precision(policy),
            device_id=self.world.device,
            sync_module_states=options.sync_module_states,
            forward_prefetch=options.forward_prefetch,
            limit_all_gathers=options.limit_all_gathers,
            use_orig_params=options.use_orig_params,
        )

    def backward_sync(self, module: nn.Module, sync: bool) -> AbstractContextManager[Any]:
        assert isinstance(module, FullyShardedDataParallel)
        return nullcontext() if sync else module.no_sync()

    @property
    def num_replicas(self) -> int:
        return self.world.size if self.options.sharding_strategy is ShardingStrategy.NO_SHARD else 1

    def local_gradients(self, module: nn.Module) -> dict[str, Tensor]:
        return torch_fsdp1.local_gradients(module, self.canonical_name)

    def drop_local_gradients(self, module: nn.Module) -> None:
        module.zero_grad(set_to_none=True)
        torch_fsdp1.drop_local_gradients(module)

    def slots(self, module: nn.Module) -> list[Slot]:
        return torch_fsdp1.slots(module, self.canonical_name)

    def reduce_dtype(self, module: nn.Module) -> torch.dtype:
        return torch_fsdp1.reduce_dtype(module)

    def canonical_name(self, name: str) -> str:
        return super().canonical_name(name.replace("_fsdp_wrapped_module.", ""))

    def expected_traffic(self, module: nn.Module, micro_batches: int, syncs: int) -> list[Traffic]:
        """Gathers in forward and, where a unit is resharded after it, in backward; the root never is. SHARD_GRAD_OP keeps
        parameters whole until gradients are reduced."""
        n, strategy = self.world.size, self.options.sharding_strategy
        gathered = reduced = 0
        for unit in torch_fsdp1.unit_bytes(module):
            reduced += syncs * unit.reduced
            if strategy is ShardingStrategy.FULL_SHARD:
                gathered += micro_batches * unit.gathered * (1 if unit.root else 2)
            elif strategy is ShardingStrategy.SHARD_GRAD_OP:
                gathered += syncs * unit.gathered
        if strategy is ShardingStrategy.NO_SHARD:
            return [Traffic("gradients", "all_reduce", reduced, n)]
        return [Traffic("parameters", "all_gather", gathered, n), Traffic("gradients", "reduce_scatter", reduced, n)]

    def facts(self, module: nn.Module) -> dict[str, Any]:
        return {"flat_parameters": torch_fsdp1.flat_parameters(module)}


def _packed(config: Config, itemsize: int) -> int | None:
    """`Reduction.packed`; None, too, where the model's sizes keep every weight on a cache line, however it is packed."""
    if isinstance(config.model, SimpleModel):
        sizes = config.model.hidden_dim, config.model.vocab_size or 0
        if all(size * itemsize % CACHE_LINE == 0 for size in sizes):
            return None
    return ALIGNMENT // itemsize if config.strategy.use_orig_params else 1


def _mixed_precision(policy: PrecisionPolicy) -> torch_fsdp.MixedPrecision | None:
    """Parameters and reduction only: inputs, outputs and buffers are the policy's, for every strategy alike."""
    if not policy.casts_parameters and policy.reduce_dtype == policy.param_dtype:
        return None
    return torch_fsdp.MixedPrecision(
        param_dtype=policy.compute_dtype if policy.casts_parameters else policy.param_dtype,
        reduce_dtype=policy.reduce_dtype,
        buffer_dtype=None,
        cast_forward_inputs=False,
        cast_root_forward_inputs=False,
        # By default FSDP1 would keep batch norm in fp32, and no other strategy does.
        _module_classes_to_ignore=(),
    )
