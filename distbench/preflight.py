"""Checks that need torch or the model, still in the parent and before any rank starts."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from distbench.checkpoint.state import read_state
from distbench.checkpoint.tensors import form_of
from distbench.config import (
    Config,
    CustomModel,
    Precision,
    not_applicable,
    resolve_device,
    threads_per_rank,
    world_size,
)
from distbench.data.batches import build_source
from distbench.errors import ConfigError, UserModelError
from distbench.models.build import block_classes, build_model, locate
from distbench.models.check import check_parameters
from distbench.models.meta import check_forward
from distbench.optim import build_optimizer
from distbench.precision import DTYPES
from distbench.wrapping import describe_units, unit_names

SLOW_HOURS = 0.25
"""A CPU run in a low precision that is estimated above this many hours is announced."""


def preflight(config: Config, start: Path | None = None) -> tuple[Config, nn.Module | None, list[str]]:
    """The config as it will be run (a precision may have fallen back), the model on the meta device where that can be
    had, and notes for the record and the user. `start`: the checkpoint that the run goes on from.

    Raises ConfigError for what only the built model, the data or the device can tell, and CheckpointError for a checkpoint
    of another model or optimizer, or one that is damaged.
    """
    config, notes = _supported_precision(config)
    build_source(config.data, config.seed)
    notes += _check_fault(config)
    model = _meta_model(config)
    if model is not None:
        check_parameters(config, model)
        _check_batch_norm(config.precision, model)
        notes += _check_units(config, model)
        notes += _slow_low_precision(config, model)
        if isinstance(config.model, CustomModel):
            check_forward(config, model)
        if start is not None:
            _check_start(config, model, start)
    return config, model, notes


def _supported_precision(config: Config) -> tuple[Config, list[str]]:
    """bf16 on CUDA hardware without it is refused with the remedy, or falls back where the user said so."""
    precision = config.precision
    if precision.compute_dtype != "bf16" or resolve_device(config) != "cuda":
        return config, []
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return config, []
    name = torch.cuda.get_device_name(0)
    if precision.fallback is None:
        raise ConfigError(
            f"precision={precision.name} needs bf16, which {name} does not have; use precision=fp16, or "
            "precision.fallback=fp16 to fall back and record it"
        )
    return replace(config, precision=preset(precision.fallback)), [
        f"precision={precision.name} fell back to {precision.fallback}: {name} has no bf16"
    ]


def preset(name: str) -> Precision:
    """The precision that `conf/precision/<name>.yaml` describes."""
    import yaml

    from distbench.hydra_edge import conf_dir

    tree = yaml.safe_load((conf_dir() / "precision" / f"{name}.yaml").read_text())
    return Precision(**{**tree, "scaler": type(Precision().scaler)(**tree["scaler"])})


def _check_fault(config: Config) -> list[str]:
    """A fault that can be made; a note where this strategy cannot have it."""
    if config.fault._target_ is None:
        return []
    fault = locate(config.fault._target_, "fault._target_")
    try:
        fault(**config.fault.kwargs)
    except TypeError as error:
        raise ConfigError(f"fault._target_={config.fault._target_} does not take fault.kwargs: {error}") from error
    strategies = getattr(fault, "strategies", (config.strategy.name,))
    if config.strategy.name in strategies:
        return []
    why = getattr(fault, "why_not", None) or f"it is for strategy={' or '.join(strategies)}"
    return [f"fault={config.fault.name} does nothing under strategy={config.strategy.name}: {why}"]


def _meta_model(config: Config) -> nn.Module | None:
    """The model without storage. None where a user's factory cannot run on the meta device; the ranks then check."""
    if not isinstance(config.model, CustomModel):
        with torch.device("meta"):
            return build_model(config.model, config.seed.model)
    with torch.device("meta"):
        try:
            return build_model(config.model, config.seed.model)
        except UserModelError:
            raise
        except Exception:
            # Factories that load files or compute with their weights need real storage; the ranks build it for real
            # and report what is wrong with it, if anything is.
            return None


def _check_start(config: Config, model: nn.Module, start: Path) -> None:
    """A checkpoint fits, as far as its `train_state.json` tells: the ranks read the rest."""
    stored = DTYPES[config.precision.param_dtype]
    named = dict(model.named_parameters())
    forms = {name: form_of(p.to(stored) if p.is_floating_point() else p) for name, p in named.items()}
    optimizer = build_optimizer(config.optimizer, named.items(), {name: p.dim() for name, p in named.items()})
    read_state(start).check_fits(forms, type(optimizer).__name__, start)


def _check_batch_norm(precision: Precision, model: nn.Module) -> None:
    """torch's batch normalisation wants its weights and its running statistics in one dtype."""
    if precision.autocast or precision.compute_dtype in (precision.param_dtype, precision.buffer_dtype):
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            raise ConfigError(
                f"precision={precision.name} casts {name}'s weights to {precision.compute_dtype} but not its running "
                f"statistics, which torch's {type(module).__name__} refuses; set "
                f"precision.buffer_dtype={precision.compute_dtype}, or use precision={precision.compute_dtype}_autocast"
            )


def _check_units(config: Config, model: nn.Module) -> list[str]:
    if "wrap_policy" in not_applicable(config):
        return []
    names = unit_names(config.wrap_policy, model, block_classes(config.model, model))
    if config.strategy.name == "fsdp":
        _check_filled(model, names)
        if not config.strategy.use_orig_params:
            _check_uniform(model, names)
    if not names and config.wrap_policy.name == "size":
        return [
            f"wrap_policy=size: no module holds {config.wrap_policy.min_num_params:,.0f} parameters, so the whole model "
            f"({sum(p.numel() for p in model.parameters()):,}) is one unit; "
            "lower wrap_policy.min_num_params to split it"
        ]
    return []


def _check_filled(model: nn.Module, names: list[str]) -> None:
    """A flat parameter has an element at least."""
    for unit in describe_units(model, names):
        if unit.parameters and unit.num_parameters == 0:
            raise ConfigError(
                f"strategy=fsdp makes one flat parameter of unit {unit.name or '(root)'}, and all that it holds is empty: "
                f"{', '.join(unit.parameters)}; set a wrap_policy with which it is no unit, or leave the empty ones out"
            )


def _check_uniform(model: nn.Module, names: list[str]) -> None:
    """One flat parameter is trained or frozen as a whole."""
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for unit in describe_units(model, names):
        frozen = [name for name in unit.parameters if not trained[name]]
        if 0 < len(frozen) < len(unit.parameters):
            raise ConfigError(
                f"strategy.use_orig_params=false makes one flat parameter of unit {unit.name or '(root)'}, but "
                f"{frozen[0]} is frozen and others in it are not; set strategy.use_orig_params=true"
            )


def _slow_low_precision(config: Config, model: nn.Module) -> list[str]:
    """Low-precision matrix products are emulated on many CPUs (fp16 on most, bf16 without AVX-512 BF16 or AMX), up to
    hundreds of times slower than fp32: say how long the run will take.

    6 FLOPs per parameter and position (Kaplan et al., arXiv:2001.08361), at the rate of small products measured here.
    """
    precision = config.precision
    if precision.compute_dtype not in ("fp16", "bf16") or resolve_device(config) != "cpu":
        return []
    shape = config.data.input_shape if config.data.name == "synthetic" else [config.data.seq_len]
    positions = config.global_batch * (shape[0] if shape else 1) * config.steps
    flops = 6.0 * sum(p.numel() for p in model.parameters()) * positions
    cores = min(len(os.sched_getaffinity(0)), world_size(config) * threads_per_rank(config, world_size(config)))
    if flops / (SLOWEST_EMULATION * cores) / 3600 < SLOW_HOURS:
        return []
    hours = flops / (flops_per_second(DTYPES[precision.compute_dtype]) * cores) / 3600
    if hours < SLOW_HOURS:
        return []
    return [
        f"{precision.compute_dtype} is emulated on this CPU: about {hours:.1f} hours for this run (estimated from "
        "small matrix products); use a smaller model, batch or number of steps, or a precision that is fast here"
    ]


SLOWEST_EMULATION = 1e8
"""FLOP/s of one core below which no emulation was seen: runs short even at this rate need no measurement."""


def flops_per_second(dtype: torch.dtype, size: int = 128) -> float:
    """One core's rate over the three products of a linear layer's step: forward, gradient of input and of weight."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        a = torch.ones(size, size, dtype=dtype)
        products = (lambda: a @ a.t(), lambda: a @ a, lambda: a.t() @ a)
        for product in products:
            product()
        start = time.perf_counter()
        for product in products:
            product()
        return 3 * 2.0 * size**3 / (time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
