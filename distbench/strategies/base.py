"""What a strategy owes the trainer. A new one is one file here and one YAML in `conf/strategy/`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from distbench.config import Config, Prefetch, world_size
from distbench.launching.world import World
from distbench.measure.traffic import Traffic
from distbench.numerics.bounds import Reduction
from distbench.precision import CastParameters, PrecisionPolicy
from distbench.strategies.extra_state import tensors_only
from distbench.strategies.slots import Slot

CAST_PREFIX = "_cast_module."


class Strategy(ABC):
    """One way to spread a model over ranks."""

    needs_group: ClassVar[bool] = True
    """Whether it needs a process group even with one rank."""
    zeros_for_unused: ClassVar[bool] = False
    """A parameter that no forward used may get a gradient of zeros instead of none, so weight decay moves it."""

    def __init__(self, options: Any, prefetch: Prefetch, world: World) -> None:
        self.options, self.prefetch, self.world = options, prefetch, world

    @abstractmethod
    def wrap(self, model: nn.Module, policy: PrecisionPolicy, units: list[str]) -> nn.Module:
        """Wrap a prepared model (on its device, in master dtype). `units`: names of the modules to wrap, inner first."""

    @classmethod
    def reduction(cls, config: Config) -> Reduction:
        """What this strategy does to gradients between the ranks' backward and the optimizer. The baseline replays it and
        the gate holds the strategy to it."""
        precision = config.precision
        compute = precision.param_dtype if precision.autocast else precision.compute_dtype
        return Reduction(
            reduces=True,
            world_size=world_size(config),
            accumulation=config.accumulation,
            synced=config.accumulation_sync,
            carries=False,
            accumulate_dtype=compute,
            compute_dtype=compute,
            reduce_dtype=precision.reduce_dtype,
            param_dtype=precision.param_dtype,
            broadcast_buffers=False,
        )

    def backward_sync(self, module: nn.Module, sync: bool) -> AbstractContextManager[Any]:
        """Around one micro-batch's forward *and* backward; `sync` False leaves gradients unreduced."""
        return nullcontext()

    @property
    def num_replicas(self) -> int:
        """How many ranks hold the same gradient shard: world size over the number of shards."""
        return self.world.size

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """The ranks that together hold one copy of the gradients; None where every rank holds all of it."""
        return None if self.num_replicas == self.world.size else dist.group.WORLD

    def gradients(self, module: nn.Module) -> list[Tensor]:
        """This rank's reduced gradients, as plain local tensors that share memory with what the optimizer reads."""
        return [self.local(p.grad) for p in module.parameters() if p.grad is not None]

    def local(self, tensor: Tensor) -> Tensor:
        """This rank's part of a parameter or gradient as a plain tensor, sharing its memory."""
        return tensor

    def local_gradients(self, module: nn.Module) -> dict[str, Tensor]:
        """This rank's own whole gradients after backwards with `backward_sync(..., False)`, by canonical name."""
        return {
            self.canonical_name(name): parameter.grad
            for name, parameter in module.named_parameters()
            if parameter.grad is not None
        }

    def drop_local_gradients(self, module: nn.Module) -> None:
        """Forget unreduced gradients."""
        module.zero_grad(set_to_none=True)

    def slots(self, module: nn.Module) -> list[Slot]:
        """Where each plain parameter's local piece is, in the plain model's order; tied parameters once."""
        return [Slot.whole(self.canonical_name(name), parameter) for name, parameter in module.named_parameters()]

    def reduce_dtype(self, module: nn.Module) -> torch.dtype | None:
        """Read back from the wrapper: what gradients cross the network in. None where nothing crosses it."""
        return None

    def canonical_name(self, name: str) -> str:
        """The plain model's name of a wrapped module's parameter."""
        return name.replace(CAST_PREFIX, "")

    def full_state(self, module: nn.Module) -> dict[str, Tensor]:
        """The plain model's whole state dict, on CPU, on rank 0 (empty elsewhere), without extra state that is no tensor. A
        collective."""
        # On CPU every rank gathers the model: offloading what is on CPU already made FSDP1 read freed memory and crash
        # (torch 2.13, Gloo, StateDictOptions(cpu_offload=True)).
        options = StateDictOptions(full_state_dict=True, cpu_offload=self.world.device.type != "cpu")
        with tensors_only(module):
            state = get_model_state_dict(module, options=options)
        if self.world.rank != 0:
            return {}
        return {self.canonical_name(name): value for name, value in state.items() if isinstance(value, Tensor)}

    @property
    def hidden_kind(self) -> str:
        """What `hidden_bytes` are: a kind of the record's memory_by_kind."""
        return "communication"

    def hidden_bytes(self, module: nn.Module) -> int:
        """Tensor memory that only C++ refers to and that lives from step to step."""
        return 0

    def expected_traffic(self, module: nn.Module, micro_batches: int, syncs: int) -> list[Traffic]:
        """What one optimizer step of `micro_batches` forwards and backwards sends, `syncs` of which reduce gradients.

        The window's byte audit holds the strategy to it."""
        return []

    def facts(self, module: nn.Module) -> dict[str, Any]:
        """What the record should say that was read from the built wrapper."""
        return {}


def inner_module(module: nn.Module) -> nn.Module:
    """The user's module under `CastParameters`."""
    return module._cast_module if isinstance(module, CastParameters) else module
