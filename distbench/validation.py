"""Refusals that need more than one field, or more than a type, to see. Nothing here imports torch."""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from pathlib import Path

from distbench.config import (
    AUTO,
    DTYPES,
    Config,
    Decide,
    LossKind,
    Rule,
    TestbedLaunch,
    Window,
    joined_world,
    not_applicable,
    num_cuda_devices,
    num_nodes,
    resolve_device,
    world_size,
)
from distbench.errors import ConfigError


def validate(config: Config, elsewhere: bool = False) -> None:
    """Refuse, before any process starts, what cannot be run. Raises ConfigError naming value and remedy.

    `elsewhere`: it will run on other machines, so what this one's devices say is left for them to say.
    """
    _validate_numbers(config)
    _validate_precision(config)
    _validate_data(config)
    _validate_wrapping(config)
    _validate_world(config, elsewhere)
    _validate_gate(config)
    _validate_window(config.window)
    _validate_decision(config)
    _validate_checkpoint(config)
    if isinstance(config.launch, TestbedLaunch):
        _validate_testbed(config, config.launch, elsewhere)


def _validate_checkpoint(config: Config) -> None:
    options = config.checkpoint
    for name in ("every", "keep_last", "keep_every"):
        if (value := getattr(options, name)) is not None:
            _positive(f"checkpoint.{name}", value)
    begins = config.resume is None  # a run that is resumed does not read again what it once started from
    if begins and config.start_from is not None and not Path(config.start_from).is_dir():
        raise ConfigError(f"start_from={config.start_from}: no such folder")


def _validate_testbed(config: Config, launch: TestbedLaunch, elsewhere: bool) -> None:
    from distbench.launching import testbed

    if elsewhere:
        raise ConfigError("launch=testbed makes its hosts on this machine; on Slurm's nodes use launch=local")
    if resolve_device(config) == "cuda":
        raise ConfigError("launch=testbed slows Gloo's network down, and GPUs do not use it; set device=cpu")
    testbed.check(launch)


def _validate_gate(config: Config) -> None:
    gate = config.gate
    if not gate.enabled:
        return
    _positive("gate.steps", gate.steps)
    if gate.steps > config.steps:
        raise ConfigError(
            f"gate.steps={gate.steps} is more than steps={config.steps}; use steps={gate.steps} or "
            f"gate.steps={config.steps}"
        )
    if gate.tolerance is not None and not gate.tolerance > 0:
        raise ConfigError(f"gate.tolerance={gate.tolerance} must be positive; null uses the proven bound")
    if not gate.kappa > 0:
        raise ConfigError(f"gate.kappa={gate.kappa} must be positive")
    if world_size(config) > gate.max_replay:
        raise ConfigError(
            f"{world_size(config)} ranks are more than gate.max_replay={gate.max_replay}, and replaying N ranks costs N "
            "steps; raise gate.max_replay, or gate a smaller world first and use gate=off here"
        )


def _validate_window(window: Window) -> None:
    for name in ("measured", "reference", "repeats"):
        _positive(f"window.{name}", getattr(window, name))
    _positive("window.warm_up", window.warm_up, minimum=0)
    if not window.max_overhead > 0:
        raise ConfigError(f"window.max_overhead={window.max_overhead} must be a share above 0, such as 0.05")


def validate_rule(decide: Decide) -> None:
    """Raises ConfigError for a rule that makes no sense."""
    if decide.memory_gib is None:
        if decide.rule is Rule.fastest_within_memory:
            raise ConfigError("decide=fastest_within_memory needs decide.memory_gib=..., the memory one rank may use")
    elif not 0 < decide.memory_gib < math.inf:
        raise ConfigError(f"decide.memory_gib={decide.memory_gib} must be positive, in GiB a rank")
    if not 0 <= decide.within_percent < math.inf:
        raise ConfigError(f"decide.within_percent={decide.within_percent} must be a percentage from 0 on")


def _validate_decision(config: Config) -> None:
    validate_rule(config.decide)
    _positive("sweep.repeats", config.sweep.repeats)
    _positive("sweep.repeat", config.sweep.repeat)


def _positive(name: str, value: float, minimum: float = 1) -> None:
    if value < minimum:
        raise ConfigError(f"{name}={value} is too small; it must be at least {minimum}")


def _validate_numbers(config: Config) -> None:
    _positive("steps", config.steps)
    _positive("global_batch", config.global_batch)
    _positive("logging.statistics_every", config.logging.statistics_every, minimum=0)
    _positive("accumulation", config.accumulation)
    if config.clip_norm is not None and not config.clip_norm > 0:
        raise ConfigError(f"clip_norm={config.clip_norm} must be positive; clip_norm=null turns clipping off")
    if config.model.name == "simple":
        for name in ("num_layers", "hidden_dim", "seq_len"):
            _positive(f"model.{name}", getattr(config.model, name))
    if config.model.vocab_size is not None:
        _positive("model.vocab_size", config.model.vocab_size, 2)
    optimizer = config.optimizer
    for name in ("lr", "weight_decay", "eps", "momentum", "warmup_steps"):
        value = getattr(optimizer, name, 0)
        if not value >= 0:
            raise ConfigError(f"optimizer.{name}={value} must not be negative")
    if not 0 <= optimizer.min_lr_ratio <= 1:
        raise ConfigError(f"optimizer.min_lr_ratio={optimizer.min_lr_ratio} must lie between 0 and 1")
    if optimizer.name == "adamw" and (len(optimizer.betas) != 2 or not all(0 <= beta < 1 for beta in optimizer.betas)):
        raise ConfigError(f"optimizer.betas={optimizer.betas} must be two numbers in [0, 1)")
    if optimizer.name == "sgd" and optimizer.nesterov and not optimizer.momentum > 0:
        raise ConfigError("optimizer.nesterov=true needs optimizer.momentum above 0")
    if config.strategy.name == "ddp":
        _positive("strategy.bucket_cap_mb", config.strategy.bucket_cap_mb, 0.001)
        if config.strategy.static_graph and config.accumulation > 1 and not config.accumulation_sync:
            raise ConfigError(
                f"strategy.static_graph=true with accumulation={config.accumulation}: torch cannot learn the graph "
                "from a backward that reduces nothing; set accumulation_sync=true or strategy.static_graph=false"
            )


def _validate_precision(config: Config) -> None:
    precision = config.precision
    for name in ("param_dtype", "compute_dtype", "reduce_dtype", "buffer_dtype"):
        value = getattr(precision, name)
        if value not in DTYPES and not (name == "buffer_dtype" and value is None):
            raise ConfigError(f"precision.{name}={value!r} is not one of {', '.join(DTYPES)}")
    if precision.autocast and precision.compute_dtype not in ("bf16", "fp16"):
        raise ConfigError(
            f"precision.autocast=true needs precision.compute_dtype bf16 or fp16, not {precision.compute_dtype}"
        )
    if precision.param_dtype in ("bf16", "fp16") and precision.compute_dtype != precision.param_dtype:
        raise ConfigError(
            f"precision.param_dtype={precision.param_dtype} with compute_dtype={precision.compute_dtype}: "
            f"master parameters are never narrower than compute; set precision.param_dtype=fp32"
        )
    if precision.scaler.enabled and precision.compute_dtype != "fp16":
        raise ConfigError(
            f"precision.scaler.enabled=true is for fp16; compute_dtype is {precision.compute_dtype}: "
            "set precision=fp16 or precision.scaler.enabled=false"
        )
    if precision.compute_dtype == "fp64" and precision.reduce_dtype != "fp64":
        raise ConfigError(
            f"precision.reduce_dtype={precision.reduce_dtype} with fp64 compute: a reference must not be rounded on "
            "the way; set precision=fp64"
        )
    if precision.fallback is not None and precision.fallback not in ("fp16", "fp32"):
        raise ConfigError(f"precision.fallback={precision.fallback!r} must be fp16, fp32 or null")
    scaler = precision.scaler
    if not 0 < scaler.init_scale < float("inf"):
        raise ConfigError(f"precision.scaler.init_scale={scaler.init_scale} must be positive and finite")
    if not scaler.growth_factor >= 1:
        raise ConfigError(f"precision.scaler.growth_factor={scaler.growth_factor} must be at least 1")
    if not 0 < scaler.backoff_factor < 1:
        raise ConfigError(f"precision.scaler.backoff_factor={scaler.backoff_factor} must lie between 0 and 1")
    _positive("precision.scaler.growth_interval", scaler.growth_interval)


def _validate_data(config: Config) -> None:
    data, loss, model = config.data, config.loss.name, config.model
    if data.name == "text":
        _validate_text(config)
    else:
        if model.name == "custom" and not model.input_shape and not data.input_shape:
            if model.vocab_size is not None:
                raise ConfigError(
                    f"model=custom: with model.vocab_size={model.vocab_size} a sample is token ids; set their number, "
                    "model.input_shape=[16] model.target_shape=[16] for 16 of them, or data=text data.seq_len=16"
                )
            raise ConfigError(
                "model=custom: model.input_shape=[] and data=synthetic draws inputs of that shape; set "
                "model.input_shape and model.target_shape to one sample's, such as model.input_shape=[64] "
                "model.target_shape=[64]"
            )
        if not data.input_shape or min(data.input_shape) < 1:
            option = "model" if data.input_shape == model.input_shape else "data"
            raise ConfigError(f"{option}.input_shape={data.input_shape} must be sizes of at least 1, such as [64,128]")
        if not data.target_shape or min(data.target_shape) < 1:
            option = "model" if data.target_shape == model.target_shape else "data"
            raise ConfigError(f"{option}.target_shape={data.target_shape} must be sizes of at least 1, such as [64]")
        if model.name == "simple" and model.vocab_size is None:
            if data.input_shape[-1] != model.hidden_dim:
                raise ConfigError(
                    f"data.input_shape={data.input_shape} must end in model.hidden_dim={model.hidden_dim}"
                )
            if loss is LossKind.mse and data.target_shape != data.input_shape:
                raise ConfigError(
                    f"data.target_shape={data.target_shape} must be data.input_shape={data.input_shape}: "
                    "model=simple maps a sequence to one of the same shape"
                )
        knows_vocabulary = model.name == "simple" or model.vocab_size is not None
        if data.vocab_size is not None and knows_vocabulary and data.vocab_size > (model.vocab_size or 0):
            raise ConfigError(
                f"data.vocab_size={data.vocab_size} draws token ids that model.vocab_size={model.vocab_size} does not "
                f"have; set model.vocab_size={data.vocab_size}, which data.vocab_size follows"
            )
        if not 0 <= data.padding < 1 or (data.padding and data.vocab_size is None):
            raise ConfigError(
                f"data.padding={data.padding} must lie in [0, 1), and above 0 it needs token ids (data.vocab_size)"
            )
        if (data.vocab_size is not None) != (loss is LossKind.cross_entropy):
            raise ConfigError(
                f"loss={loss.name} with data.vocab_size={data.vocab_size}: cross_entropy is for token ids (set "
                "data.vocab_size, or model.vocab_size which it follows); mse and sum are for regression"
            )


def _validate_text(config: Config) -> None:
    """All that data=text lacks at once, with one line that works."""
    data, model, loss = config.data, config.model, config.loss.name
    path = Path(data.path).expanduser()
    if not path.exists():
        raise ConfigError(f"data.path={data.path} does not exist; name a text file or a folder")
    _positive("data.seq_len", data.seq_len)
    wrong, words = [], []
    if model.vocab_size is None or model.vocab_size < 256:
        wrong.append(f"it yields bytes but model.vocab_size={model.vocab_size}")
        words.append("model=simple_text" if model.name == "simple" else "model.vocab_size=256")
    if loss is not LossKind.cross_entropy:
        wrong.append(f"it needs loss=cross_entropy, not loss={loss.name}")
        words.append("loss=cross_entropy")
    words += ["data=text", shlex.quote(f"data.path={_hydra_quoted(data.path)}")]
    if path.is_dir() and not any(file.is_file() for file in path.rglob(data.glob)):
        found = Counter(file.suffix for file in path.rglob("*") if file.is_file() and file.suffix).most_common(3)
        there = ", ".join(f"{count} match *{suffix}" for suffix, count in found) or "none has a suffix"
        wrong.append(f"no file in data.path={data.path} matches data.glob={data.glob} ({there})")
        words.append(f"'data.glob=*{found[0][0] if found else ''}'")
    if wrong:
        raise ConfigError(f"data=text: {'; '.join(wrong)}; use {' '.join(words)}")


def _hydra_quoted(value: str) -> str:
    """A value as Hydra's grammar takes it: bare where it can be."""
    return value if re.fullmatch(r"[\w./-]+", value) else f"'{value}'"


def _validate_wrapping(config: Config) -> None:
    if "wrap_policy" in not_applicable(config):
        return
    policy = config.wrap_policy
    if policy.name == "size":
        _positive("wrap_policy.min_num_params", int(policy.min_num_params))
    if policy.name == "pattern":
        if not policy.patterns:
            raise ConfigError(r"wrap_policy=pattern needs wrap_policy.patterns, such as ['layers\.\d+']")
        for pattern in policy.patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(f"wrap_policy.patterns: {pattern!r} is not a regular expression: {error}") from error
    strategy = config.strategy
    if strategy.name == "fsdp" and not strategy.use_orig_params and not config.optimizer.decay_1d:
        raise ConfigError(
            "optimizer.decay_1d=false needs original parameters, but strategy.use_orig_params=false flattens them; "
            "set strategy.use_orig_params=true"
        )


def _validate_world(config: Config, elsewhere: bool) -> None:
    nproc = getattr(config.launch, "nproc", AUTO)
    if nproc != AUTO and not isinstance(nproc, int):
        raise ConfigError(f"launch.nproc={nproc!r} must be a number of ranks or auto")
    nodes = num_nodes(config)
    _positive("launch.nodes", nodes)
    if elsewhere and nproc == AUTO:
        return
    device, strategy, joined = resolve_device(config), config.strategy, joined_world()
    if device == "cuda" and not num_cuda_devices() and not elsewhere:
        raise ConfigError("device=cuda but no CUDA device is visible here; use device=cpu")
    size = world_size(config)
    if config.launch.name == "torchrun" and joined is None:
        raise ConfigError(
            "launch=torchrun joins ranks that torchrun started, but RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT "
            "are not set; run `torchrun --nproc-per-node 2 -m distbench ...`, or use launch=local"
        )
    _positive("launch.nproc", size)
    if device == "cuda" and joined is None and not elsewhere and size // nodes > num_cuda_devices():
        raise ConfigError(
            f"launch.nproc={size // nodes} but {num_cuda_devices()} CUDA devices are visible, one per rank; set "
            f"launch.nproc={num_cuda_devices()} or device=cpu"
        )
    for key in ("timeout_s", "stall_timeout_s", "grace_s"):
        seconds = getattr(config.launch, key, None)
        if seconds is not None and not 0 < seconds < math.inf:
            raise ConfigError(f"launch.{key}={seconds} must be a positive number of seconds")
    if (restarts := getattr(config.launch, "max_restarts", 0)) < 0:
        raise ConfigError(f"launch.max_restarts={restarts} must be 0 or more")
    threads = config.launch.threads_per_rank
    if threads != AUTO and (not isinstance(threads, int) or threads < 1):
        raise ConfigError(f"launch.threads_per_rank={threads!r} must be at least 1 or auto")
    if strategy.name == "single" and size != 1:
        raise ConfigError(
            f"strategy=single is one process, but this run has {size} ranks; "
            "use strategy=ddp, fsdp or fsdp2, or one rank"
        )
    if config.global_batch % (size * config.accumulation):
        raise ConfigError(
            f"global_batch={config.global_batch} does not divide into {size} ranks x accumulation="
            f"{config.accumulation}; use a multiple of {size * config.accumulation}"
        )
    if strategy.name == "fsdp" and strategy.sync_module_states and device == "cpu":
        raise ConfigError(
            "strategy.sync_module_states=true broadcasts through GPU memory, which device=cpu does not have; set "
            "strategy.sync_module_states=false (every rank builds the same weights anyway)"
        )
    if strategy.name == "fsdp2":
        reshard = strategy.reshard_after_forward
        if not isinstance(reshard, bool) and (reshard < 1 or size % reshard or reshard in (1, size)):
            raise ConfigError(
                f"strategy.reshard_after_forward={reshard} must divide the world size {size} and lie strictly between "
                f"1 and {size}; use true to reshard to all {size} ranks or false to keep parameters gathered"
            )
    port = getattr(config.launch, "master_port", AUTO)
    if port != AUTO and (not isinstance(port, int) or not 0 < port < 65536):
        raise ConfigError(f"launch.master_port={port!r} must be a port number or auto")
