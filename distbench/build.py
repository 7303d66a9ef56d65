"""Build one rank's trainer: model -> precision -> wrap -> strategy -> optimizer; and read back what was built."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from distbench.config import Config, batch_shape, not_applicable
from distbench.config import Fault as FaultConfig
from distbench.data.batches import SampleAddressedBatches, build_source
from distbench.errors import NonDeterministicStart, UserModelError
from distbench.faults.base import Fault
from distbench.launching.world import World
from distbench.losses import LossFunction
from distbench.models.build import block_classes, build_model, locate, weights_digest
from distbench.optim import build_optimizer, build_schedule
from distbench.precision import PrecisionPolicy, Scaler, dtype_name
from distbench.strategies import build_strategy
from distbench.trainer import Trainer
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
    model = policy.prepare(build_model(config.model, config.seed.model))
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
    module = strategy.wrap(fault.before_wrap(model, world), policy, units)
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


@contextmanager
def effective_dtypes(trainer: Trainer) -> Iterator[dict[str, str | None]]:
    """Around one training step: fills in the dtypes that were really there, read from the built objects.

    `compute` is the dtype of the first parameterised leaf's output in forward.
    """
    seen: dict[str, str | None] = {}
    leaf = next(
        module for module in trainer.module.modules() if not list(module.children()) and list(module.parameters())
    )

    def observe(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.is_floating_point():
            seen["compute"] = dtype_name(output.dtype)

    handle = leaf.register_forward_hook(observe)
    try:
        yield seen
    finally:
        handle.remove()
    parameter = next(p for p in trainer.module.parameters() if p.requires_grad)
    gradients = trainer.strategy.gradients(trainer.module)
    state = [v for values in trainer.optimizer.state.values() for v in values.values()]
    floats = [v for v in state if isinstance(v, torch.Tensor) and v.is_floating_point() and v.dim() > 0]
    reduce_dtype = trainer.strategy.reduce_dtype(trainer.module)
    seen.setdefault("compute", None)
    seen["parameters"] = dtype_name(parameter.dtype)
    seen["gradients"] = dtype_name(gradients[0].dtype) if gradients else None
    seen["reduce"] = None if reduce_dtype is None else dtype_name(reduce_dtype)
    seen["optimizer_state"] = dtype_name(floats[0].dtype) if floats else None
    buffers = [b for b in trainer.module.buffers() if b.is_floating_point()]
    seen["buffers"] = dtype_name(buffers[0].dtype) if buffers else None
