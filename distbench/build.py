"""Build one rank's trainer: model -> precision -> wrap -> strategy -> optimizer; and read back what was built."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from distbench.checkpoint.attributes import attributes_of
from distbench.config import Config, batch_shape, not_applicable
from distbench.config import Fault as FaultConfig
from distbench.data.batches import SampleAddressedBatches, build_source
from distbench.errors import NonDeterministicStart, UserModelError
from distbench.faults.base import Fault
from distbench.launching.world import World
from distbench.losses import LossFunction
from distbench.models.build import block_classes, build_model, locate, weights_digest
from distbench.models.check import check_parameters
from distbench.optim import build_optimizer, build_schedule
from distbench.precision import PrecisionPolicy, Scaler, dtype_name
from distbench.strategies import build_strategy
from distbench.trainer import Backward, Observer, StepMetrics, Trainer
from distbench.wrapping import describe_units, unit_names, unit_rows


def set_determinism(config: Config, threads: int) -> None:
    """Threads, seeds and kernels that make a run repeatable bit for bit on the same machine."""
    torch.set_num_threads(threads)
    torch.manual_seed(config.seed.model)
    if config.deterministic:
        # warn_only: an operation without a deterministic kernel is the user's to know about, not to be stopped by.
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False
        # cuBLAS is deterministic only with a fixed workspace; read when its handle is made, so it is not too late here.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def build_trainer(config: Config, world: World) -> tuple[Trainer, dict[str, Any]]:
    """The trainer, and the record's sections that are known before the first step. A collective.

    Raises NonDeterministicStart if ranks built different weights, and ConfigError as `wrapping.unit_names` does.
    """
    policy = PrecisionPolicy(config.precision, world.device)
    model = build_model(config.model, config.seed.model)
    check_parameters(config, model)
    model = policy.prepare(model)
    start = _same_start(model, world)
    strategy = build_strategy(config, world)
    shards = "wrap_policy" not in not_applicable(config)
    units = unit_names(config.wrap_policy, model, block_classes(config.model, model)) if shards else []
    plain = {
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "num_trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "num_tensors": sum(1 for _ in model.parameters()),
    }
    dims = {name: parameter.dim() for name, parameter in model.named_parameters()}
    rows = unit_rows(describe_units(model, units)) if shards else []

    fault = build_fault(config.fault)
    module = fault.wrap(strategy, model, policy, units)
    named = [(strategy.canonical_name(name), parameter) for name, parameter in module.named_parameters()]
    optimizer = build_optimizer(config.optimizer, named, dims)
    trainer = Trainer(
        module=module,
        strategy=strategy,
        batches=SampleAddressedBatches(
            build_source(config.data, config.seed), batch_shape(config), world.rank, world.device, policy.data_dtype
        ),
        loss=LossFunction(config.loss),
        optimizer=optimizer,
        schedule=build_schedule(config.optimizer, optimizer, config.steps),
        policy=policy,
        scaler=Scaler(config.precision.scaler),
        world=world,
        clip_norm=config.clip_norm,
        sync_each_micro_batch=config.accumulation_sync,
        seed=config.seed.model,
    )
    fault.install(trainer)
    trainer.initial = attributes_of(trainer).initial()
    facts = {"model": plain, "initial_weights": start, "units": rows, "wrapper": strategy.facts(module)}
    return trainer, facts


def build_fault(fault: FaultConfig) -> Fault:
    """The configured fault; without one, one that does nothing."""
    if fault._target_ is None:
        return Fault()
    built = locate(fault._target_, "fault._target_")(**fault.kwargs)
    if not isinstance(built, Fault):
        raise UserModelError(
            f"fault._target_={fault._target_} returned {type(built).__name__}, not a distbench.faults.base.Fault"
        )
    return built


def _same_start(model: nn.Module, world: World) -> str:
    """Digest of the initial weights, which must be every rank's."""
    digests = world.gather(weights_digest(model))
    if len(set(digests)) > 1:
        listed = ", ".join(f"rank {rank}: {digest}" for rank, digest in enumerate(digests))
        raise NonDeterministicStart(
            f"ranks built different initial weights ({listed}); build the model from torch's seeded generator alone, "
            "not from the rank, the time or another source of randomness"
        )
    return digests[0]


def _holds_weights(module: nn.Module) -> bool:
    """Of its own; FSDP with use_orig_params=false turns them into plain tensors, views of the flat parameter."""
    return any(isinstance(value, torch.Tensor) for value in [*module.parameters(recurse=False), *vars(module).values()])


class EffectiveDtypes(Observer):
    """Reads back, in the first step, the dtypes that are really there: of parameters, compute, gradients, reduction,
    optimizer state and buffers. `compute` is the dtype of the first parameterised leaf's output in forward."""

    def __init__(self, trainer: Trainer) -> None:
        self.seen: dict[str, str | None] = {"compute": None}
        leaf = next((m for m in trainer.module.modules() if not list(m.children()) and _holds_weights(m)), None)
        self._handle = None if leaf is None else leaf.register_forward_hook(self._observe)

    def _observe(self, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.is_floating_point():
            self.seen["compute"] = dtype_name(output.dtype)

    def on_gradients(self, backward: Backward, trainer: Trainer) -> None:
        if "gradients" in self.seen:
            return
        if self._handle is not None:
            self._handle.remove()
        gradients = [p.grad for p in trainer.module.parameters() if p.grad is not None]
        reduced_in = trainer.strategy.reduce_dtype(trainer.module)
        self.seen["gradients"] = dtype_name(gradients[0].dtype) if gradients else None
        self.seen["reduce"] = None if reduced_in is None else dtype_name(reduced_in)

    def on_step(self, metrics: StepMetrics, trainer: Trainer) -> None:
        if "parameters" in self.seen:
            return
        state = [value for values in trainer.optimizer.state.values() for value in values.values()]
        floats = [v for v in state if isinstance(v, torch.Tensor) and v.is_floating_point() and v.dim() > 0]
        buffers = [b for b in trainer.module.buffers() if b.is_floating_point()]
        self.seen["parameters"] = dtype_name(next(trainer.module.parameters()).dtype)
        self.seen["optimizer_state"] = dtype_name(floats[0].dtype) if floats else None
        self.seen["buffers"] = dtype_name(buffers[0].dtype) if buffers else None
