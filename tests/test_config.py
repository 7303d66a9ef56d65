"""The typed config: what it refuses, that it survives the way through YAML, and what makes two runs the same."""

from __future__ import annotations

import copy
import json
import math
import re
import shlex
from dataclasses import asdict, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from distbench import config as module
from distbench import validation
from distbench.config import (
    GROUPS,
    MONOMORPHIC,
    BatchShape,
    Config,
    FSDP2Strategy,
    ShardingStrategy,
    batch_shape,
    digest,
    effective,
    from_container,
    not_applicable,
    threads_per_rank,
    to_container,
    world_size,
)
from distbench.errors import ConfigError, ExitCode
from distbench.hydra_edge import conf_dir
from distbench.validation import validate
from tests.composing import compose, compose_tree


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 0)


def gpus(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    for place in (module, validation):
        monkeypatch.setattr(place, "num_cuda_devices", lambda: number)


@cache
def default_tree() -> dict[str, Any]:
    return to_container(compose())


def config(**changes: Any) -> Config:
    """The default config with `group__key=value` set; a dict replaces a whole group."""
    tree = copy.deepcopy(default_tree())
    for path, value in changes.items():
        *parents, leaf = path.split("__")
        node = tree
        for parent in parents:
            node = node[parent]
        node[leaf] = copy.deepcopy(value)
    return from_container(tree)


FSDP = {"name": "fsdp"}
FSDP2 = {"name": "fsdp2"}
SGD = {"name": "sgd"}
TOKENS = {"model__vocab_size": 16, "data__vocab_size": 16, "data__input_shape": [4], "data__target_shape": [4]}
TEXT = {"data": {"name": "text", "path": "/"}, "loss__name": "cross_entropy", "model__vocab_size": 256}


# --------------------------------------------------------------------------------------------------------------
# Refusals
# --------------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    # numbers
    ({"steps": 0}, "steps=0 is too small; it must be at least 1"),
    ({"global_batch": 0}, "global_batch=0 is too small"),
    ({"accumulation": -1}, "accumulation=-1 is too small"),
    ({"clip_norm": 0.0}, "clip_norm=0.0 must be positive; clip_norm=null turns clipping off"),
    ({"clip_norm": float("nan")}, "clip_norm=nan must be positive"),
    ({"model__hidden_dim": 0}, "model.hidden_dim=0 is too small"),
    ({"model__num_layers": 0}, "model.num_layers=0 is too small"),
    ({"model__seq_len": -3}, "model.seq_len=-3 is too small"),
    ({"model__vocab_size": 1}, "model.vocab_size=1 is too small; it must be at least 2"),
    ({"optimizer__lr": -1.0}, "optimizer.lr=-1.0 must not be negative"),
    ({"optimizer__lr": float("nan")}, "optimizer.lr=nan must not be negative"),
    ({"optimizer__weight_decay": -1.0}, "optimizer.weight_decay=-1.0 must not be negative"),
    ({"optimizer__eps": -1.0}, "optimizer.eps=-1.0 must not be negative"),
    ({"optimizer": {**SGD, "momentum": -0.5}}, "optimizer.momentum=-0.5 must not be negative"),
    ({"optimizer__warmup_steps": -1}, "optimizer.warmup_steps=-1 must not be negative"),
    ({"optimizer__min_lr_ratio": 1.5}, "optimizer.min_lr_ratio=1.5 must lie between 0 and 1"),
    ({"optimizer__betas": [0.9]}, "optimizer.betas=[0.9] must be two numbers in [0, 1)"),
    ({"optimizer__betas": [0.9, 1.0]}, "optimizer.betas=[0.9, 1.0] must be two numbers in [0, 1)"),
    ({"optimizer": {**SGD, "nesterov": True}}, "optimizer.nesterov=true needs optimizer.momentum above 0"),
    ({"strategy__bucket_cap_mb": 0.0}, "strategy.bucket_cap_mb=0.0 is too small"),
    (
        {"strategy__static_graph": True, "accumulation": 2},
        "strategy.static_graph=true with accumulation=2: torch cannot learn the graph from a backward that reduces",
    ),
    # precision
    ({"precision__param_dtype": "fp8"}, "precision.param_dtype='fp8' is not one of fp64, fp32, bf16, fp16"),
    ({"precision__compute_dtype": ""}, "precision.compute_dtype='' is not one of"),
    ({"precision__reduce_dtype": "int8"}, "precision.reduce_dtype='int8' is not one of"),
    ({"precision__buffer_dtype": "fp8"}, "precision.buffer_dtype='fp8' is not one of"),
    ({"precision__autocast": True}, "precision.autocast=true needs precision.compute_dtype bf16 or fp16, not fp32"),
    ({"precision__param_dtype": "bf16"}, "never narrower than compute; set precision.param_dtype=fp32"),
    ({"precision__scaler__enabled": True}, "precision.scaler.enabled=true is for fp16; compute_dtype is fp32"),
    (
        {"precision__param_dtype": "fp64", "precision__compute_dtype": "fp64"},
        "precision.reduce_dtype=fp32 with fp64 compute: a reference must not be rounded on the way; set precision=fp64",
    ),
    ({"precision__fallback": "bf16"}, "precision.fallback='bf16' must be fp16, fp32 or null"),
    ({"precision__scaler__init_scale": 0.0}, "precision.scaler.init_scale=0.0 must be positive and finite"),
    ({"precision__scaler__init_scale": float("inf")}, "precision.scaler.init_scale=inf must be positive and finite"),
    ({"precision__scaler__growth_factor": 0.5}, "precision.scaler.growth_factor=0.5 must be at least 1"),
    ({"precision__scaler__backoff_factor": 0.0}, "precision.scaler.backoff_factor=0.0 must lie between 0 and 1"),
    ({"precision__scaler__backoff_factor": 1.0}, "precision.scaler.backoff_factor=1.0 must lie between 0 and 1"),
    ({"precision__scaler__growth_interval": 0}, "precision.scaler.growth_interval=0 is too small"),
    # data and loss
    ({**TEXT, "data__path": "/no/such/file"}, "data.path=/no/such/file does not exist; name a text file or a folder"),
    ({**TEXT, "data__seq_len": 0}, "data.seq_len=0 is too small"),
    (
        {**TEXT, "loss__name": "mse"},
        "data=text: it needs loss=cross_entropy, not loss=mse; use loss=cross_entropy data=text",
    ),
    (
        {**TEXT, "model__vocab_size": None},
        "bytes but model.vocab_size=None; use model=simple_text data=text data.path=/",
    ),
    ({**TEXT, "model__vocab_size": 255}, "data=text: it yields bytes but model.vocab_size=255"),
    ({"data__input_shape": []}, "data.input_shape=[] must be sizes of at least 1, such as [64,128]"),
    ({"data__input_shape": [0, 64]}, "data.input_shape=[0, 64] must be sizes"),
    ({"data__target_shape": []}, "data.target_shape=[] must be sizes"),
    ({"data__input_shape": [32, 63]}, "data.input_shape=[32, 63] must end in model.hidden_dim=64"),
    ({"data__target_shape": [1]}, "data.target_shape=[1] must be data.input_shape=[32, 64]"),
    ({"loss__name": "cross_entropy"}, "loss=cross_entropy with data.vocab_size=None: cross_entropy is for token ids"),
    (TOKENS, "loss=mse with data.vocab_size=16"),
    ({**TOKENS, "data__vocab_size": 17}, "data.vocab_size=17 draws token ids that model.vocab_size=16 does not have"),
    ({"data__vocab_size": 17}, "data.vocab_size=17 draws token ids that model.vocab_size=None does not have"),
    # wrapping
    ({"strategy": FSDP, "wrap_policy": {"name": "size", "min_num_params": 0}}, "wrap_policy.min_num_params=0 is too"),
    ({"strategy": FSDP2, "wrap_policy": {"name": "pattern"}}, "wrap_policy=pattern needs wrap_policy.patterns, such"),
    (
        {"strategy": FSDP2, "wrap_policy": {"name": "pattern", "patterns": ["ok", "("]}},
        "wrap_policy.patterns: '(' is not a regular expression: missing )",
    ),
    (
        {"strategy": {**FSDP, "use_orig_params": False}, "optimizer__decay_1d": False},
        "optimizer.decay_1d=false needs original parameters, but strategy.use_orig_params=false flattens them; set",
    ),
    # ranks
    ({"launch__nproc": "abc"}, "launch.nproc='abc' must be a number of ranks or auto"),
    ({"launch__nproc": 0}, "launch.nproc=0 is too small"),
    ({"launch__threads_per_rank": 0}, "launch.threads_per_rank=0 must be at least 1 or auto"),
    ({"launch__threads_per_rank": "many"}, "launch.threads_per_rank='many' must be at least 1 or auto"),
    ({"launch__timeout_s": 0.0}, "launch.timeout_s=0.0 must be a positive number of seconds"),
    ({"launch__stall_timeout_s": -1.0}, "launch.stall_timeout_s=-1.0 must be a positive number of seconds"),
    ({"launch__stall_timeout_s": math.inf}, "launch.stall_timeout_s=inf must be a positive number of seconds"),
    ({"launch__grace_s": 0.0}, "launch.grace_s=0.0 must be a positive number of seconds"),
    ({"launch__max_restarts": -1}, "launch.max_restarts=-1 must be 0 or more"),
    ({"launch__master_port": 0}, "launch.master_port=0 must be a port number or auto"),
    ({"launch__master_port": 65536}, "launch.master_port=65536 must be a port number or auto"),
    ({"launch__master_port": "http"}, "launch.master_port='http' must be a port number or auto"),
    (
        {"launch": {"name": "torchrun"}},
        "launch=torchrun joins ranks that torchrun started, but RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not",
    ),
    ({"strategy": {"name": "single"}, "launch__nproc": 2}, "strategy=single is one process, but this run has 2 ranks"),
    ({"global_batch": 7}, "global_batch=7 does not divide into 2 ranks x accumulation=1; use a multiple of 2"),
    ({"accumulation": 3}, "global_batch=8 does not divide into 2 ranks x accumulation=3; use a multiple of 6"),
    (
        {"strategy": {**FSDP, "sync_module_states": True}},
        "strategy.sync_module_states=true broadcasts through GPU memory",
    ),
    ({"device": "cuda"}, "device=cuda but no CUDA device is visible here; use device=cpu"),
    *(
        (
            {"strategy": {**FSDP2, "reshard_after_forward": value}, "launch__nproc": 4, "gate__enabled": False},
            f"strategy.reshard_after_forward={value} must divide the world size 4 and lie strictly between 1 and 4;",
        )
        for value in (3, 0, 1, 4, -2)
    ),
    # gate
    ({"gate__steps": 0}, "gate.steps=0 is too small"),
    ({"gate__steps": 5, "steps": 3}, "gate.steps=5 is more than steps=3; use steps=5 or gate.steps=3"),
    ({"gate__tolerance": 0.0}, "gate.tolerance=0.0 must be positive; null uses the proven bound"),
    ({"gate__kappa": 0.0}, "gate.kappa=0.0 must be positive"),
    # decide, sweep
    ({"decide__rule": "fastest_within_memory"}, "decide=fastest_within_memory needs decide.memory_gib=..."),
    ({"decide__memory_gib": 0.0}, "decide.memory_gib=0.0 must be positive, in GiB a rank"),
    ({"decide__memory_gib": float("nan")}, "decide.memory_gib=nan must be positive"),
    ({"decide__within_percent": -1.0}, "decide.within_percent=-1.0 must be a percentage from 0 on"),
    ({"decide__rule": "best"}, "decide.rule"),
    ({"sweep__repeats": 0}, "sweep.repeats=0 is too small"),
    ({"sweep__repeat": 0}, "sweep.repeat=0 is too small"),
    ({"gate__max_replay": 1}, "2 ranks are more than gate.max_replay=1"),
    (
        {"strategy": FSDP, "strategy__sync_module_states": True},
        "strategy.sync_module_states=true broadcasts through GPU memory, which device=cpu does not have; set ",
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message[:60] for _, message in REFUSED])
def test_refusals_name_the_value_and_the_remedy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        validate(config(**changes))
    assert message in str(refusal.value)
    assert refusal.value.exit_code == ExitCode.USAGE == 2


def test_every_refusal_of_the_schema_is_tested() -> None:
    """Each `raise ConfigError(...)` of config.py is met by a case here or in the tests below."""
    source = Path(module.__file__).read_text()
    literals = re.findall(r"raise ConfigError\(\s*r?f?\"([^\"{]*)", source)
    covered = " ".join(message for _, message in REFUSED) + ELSEWHERE
    missing = [start for start in literals if start.strip() and start.split(", such")[0].strip(" =") not in covered]
    assert not missing, missing


ELSEWHERE = """
launch.nproc=3 but
data.padding=
"""
"""Starts of messages that other tests look for."""


@pytest.mark.parametrize(
    "changes",
    [
        {},
        TEXT,
        {**TOKENS, "loss__name": "cross_entropy"},
        {"loss__name": "sum", "data__target_shape": [1]},
        {"strategy": {**FSDP2, "reshard_after_forward": 2}, "launch__nproc": 4},
        {"strategy": {**FSDP2, "reshard_after_forward": False}},
        {"strategy": {"name": "single"}, "global_batch": 7},
        {"precision__compute_dtype": "fp16", "precision__scaler__enabled": True},
        {"model": {"name": "custom", "_target_": "a.b"}, "data__vocab_size": 9, "loss__name": "cross_entropy"},
        {"wrap_policy": {"name": "pattern"}},
        {"clip_norm": None, "optimizer__lr": 0.0},
        {"strategy__static_graph": True, "accumulation": 2, "accumulation_sync": True},
    ],
)
def test_what_can_be_run_is_not_refused(changes: dict[str, Any]) -> None:
    validate(config(**changes))


def test_text_says_at_once_all_that_it_lacks(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt", "c.md"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError) as refused:
        validate(config(data={"name": "text", "path": str(tmp_path), "glob": "*.py"}))
    message = str(refused.value)
    assert (
        "it yields bytes but model.vocab_size=None; it needs loss=cross_entropy, not loss=mse; no file in " in message
    )
    assert "matches data.glob=*.py (2 match *.txt, 1 match *.md)" in message
    words = f"model=simple_text loss=cross_entropy data=text data.path={tmp_path} 'data.glob=*.txt'"
    assert message.endswith(f"; use {words}")
    validate(config(**{**TEXT, "data": {"name": "text", "path": str(tmp_path), "glob": "*.txt"}}))


def test_a_path_of_home_is_quoted_for_hydra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError) as refused:
        validate(config(data={"name": "text", "path": "~"}))
    (word,) = [word for word in shlex.split(str(refused.value)) if word.startswith("data.path='")]
    assert word == "data.path='~'"


@pytest.mark.parametrize(("padding", "vocabulary"), [(1.0, 16), (-0.1, 16), (0.5, None)])
def test_padding_must_leave_something(padding: float, vocabulary: int | None) -> None:
    changes = {**TOKENS, "loss__name": "cross_entropy"} if vocabulary else {}
    with pytest.raises(ConfigError, match=rf"data\.padding={padding} must lie in \[0, 1\)"):
        validate(config(**changes, data__padding=padding))


# --------------------------------------------------------------------------------------------------------------
# Types
# --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": "abc"}, "steps: Value 'abc' of type 'str' could not be converted to Integer"),
        ({"steps": 1.5}, "Value '1.5' of type 'float' could not be converted to Integer"),
        ({"steps": None}, "steps: Incompatible value 'None' for field of type 'int'"),
        ({"deterministic": "maybe"}, "Value 'maybe' is not a valid bool"),
        ({"launch__nproc": 2.5}, "launch.nproc: Value '2.5' of type 'float' is incompatible with type hint"),
        ({"strategy": {**FSDP, "sharding_strategy": "HALF"}}, "Invalid value 'HALF', expected one of [FULL_SHARD"),
        ({"prefetch__backward": "later"}, "Invalid value 'later', expected one of [pre, post, none]"),
        ({"optimizer__schedule": "step"}, "Invalid value 'step', expected one of [constant, linear, cosine]"),
        ({"device": "tpu"}, "Invalid value 'tpu', expected one of [auto, cpu, cuda]"),
        ({"loss__name": "huber"}, "Invalid value 'huber', expected one of [mse, cross_entropy, sum]"),
        ({"seed": 3}, "Seeds"),
        ({"optimizer__betas": 0.9}, "optimizer.betas: Invalid value assigned"),
        ({"stepz": 3}, "Key 'stepz' not in 'Config'\nDid you mean steps?"),
        ({"model__hidden": 3}, "model.hidden: Key 'hidden' not in 'SimpleModel'"),
        ({"strategy": {"name": "ddp", "reshard_after_forward": 2}}, "Key 'reshard_after_forward' not in 'DDPStrategy'"),
        ({"strategy": {"name": "zero3"}}, "strategy.name='zero3' is not one of single, ddp, fsdp, fsdp2"),
        ({"strategy": {}}, "strategy.name=None is not one of"),
        ({"model": {"name": "custom"}}, "model._target_ has no value; set model._target_=..."),
        ({"data": {"name": "text"}}, "data.path has no value; set data.path=..."),
    ],
)
def test_wrong_types_keys_and_options_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        config(**changes)
    assert message in str(refusal.value)


@pytest.mark.parametrize("text", ["true", "false", "2"])
def test_reshard_after_forward_keeps_its_type(text: str) -> None:
    """A bool and an int mean different things, and True == 1."""
    value = json.loads(text)
    strategy = from_container(to_container(config(strategy={**FSDP2, "reshard_after_forward": value}))).strategy
    assert isinstance(strategy, FSDP2Strategy)
    assert type(strategy.reshard_after_forward) is type(value) and strategy.reshard_after_forward == value


# --------------------------------------------------------------------------------------------------------------
# Through YAML and back
# --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"strategy": {**FSDP, "sharding_strategy": "NO_SHARD"}, "wrap_policy": {"name": "pattern", "patterns": ["a"]}},
        {"model": {"name": "custom", "_target_": "a.b", "kwargs": {"deep": {"list": [1, 2.5, None, "x"]}}}},
        {**TEXT, "optimizer": SGD, "clip_norm": None, "name": "mine", "launch__nproc": 4},
        {"launch": {"name": "torchrun"}, "precision__buffer_dtype": "bf16", "gate__tolerance": 1e-3},
    ],
)
def test_a_config_survives_yaml(changes: dict[str, Any]) -> None:
    original = config(**changes)
    tree = to_container(original)
    assert from_container(tree) == original
    assert from_container(yaml.safe_load(yaml.safe_dump(tree, sort_keys=False))) == original
    assert to_container(from_container(tree)) == tree
    json.dumps(tree)


# --------------------------------------------------------------------------------------------------------------
# conf/
# --------------------------------------------------------------------------------------------------------------

OPTIONS = [
    (group.name, option.stem)
    for group in sorted(conf_dir().iterdir())
    if group.is_dir() and group.name not in ("recipes", "hydra")
    for option in sorted(group.glob("*.yaml"))
]
JOINED = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
RUNS = [
    "model=simple strategy=single precision=fp32 wrap_policy=size prefetch=none data=synthetic loss=mse "
    "optimizer=adamw gate=off window=off checkpoint=off launch=local decide=fastest",
    "model=simple_text strategy=ddp precision=bf16 wrap_policy=block prefetch=backward_post data=text "
    "loss=cross_entropy optimizer=sgd gate=strict window=long checkpoint=default "
    "decide=fastest_within_memory decide.memory_gib=2",
    "model=article strategy=fsdp precision=fp16 wrap_policy=none prefetch=backward_pre loss=sum gate=default window=quick "
    "decide=smallest_within",
    "model=custom model._target_=a.b model.input_shape=[2] model.target_shape=[2] strategy=fsdp2 precision=fp64 "
    "wrap_policy=pattern wrap_policy.patterns=['a.*'] launch=torchrun",
    "precision=bf16_autocast window=default decide=most_accurate_within",
    "precision=fp16_autocast launch=testbed",
]
"""Few compositions that together choose every option; each takes Hydra a third of a second."""


@pytest.mark.parametrize("overrides", RUNS)
def test_every_option_composes_and_can_be_run(overrides: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "torchrun" in overrides:
        for name, value in JOINED.items():
            monkeypatch.setenv(name, value)
    monkeypatch.setattr("distbench.launching.testbed.why_not", lambda delay: None)  # it may need root, and more
    composed = compose(*overrides.split())
    validate(composed)
    assert from_container(to_container(composed)) == composed
    for override in overrides.split():
        group, _, option = override.partition("=")
        if group in GROUPS and option not in ("simple_text", "article"):
            assert getattr(composed, group).name == option


def test_the_compositions_above_choose_every_option() -> None:
    chosen = {tuple(override.split("=", 1)) for overrides in RUNS for override in overrides.split()}
    assert not {choice for choice in OPTIONS if choice[0] != "fault"} - chosen


def test_every_schema_has_its_option_and_every_option_its_schema() -> None:
    for group, options in GROUPS.items():
        assert {option for chosen, option in OPTIONS if chosen == group} >= set(options)
    assert {group for group, _ in OPTIONS} == GROUPS.keys() | MONOMORPHIC.keys()


@pytest.mark.parametrize("recipe", sorted(path.stem for path in (conf_dir() / "recipes").glob("*.yaml")))
def test_every_recipe_composes_and_says_what_it_asks(recipe: str) -> None:
    tree = compose_tree(f"+recipes={recipe}", "hydra.mode=RUN") if recipe == "ddp_vs_fsdp" else None
    if tree is not None:
        assert tree.model.name == "simple" and tree.data.name == "text"
    text = (conf_dir() / "recipes" / f"{recipe}.yaml").read_text()
    assert text.startswith("# @package _global_\n# Question ")
    assert f"python -m distbench +recipes={recipe}" in text
    for heading in ("Held fixed", "Varies", "Read", "Takes"):
        assert f"# {heading} " in text


SELF_EXPLAINING = re.compile(
    r"^\s*(name|lr|eps|betas|momentum|nesterov|weight_decay|warmup_steps|num_layers|hidden_dim|seq_len|vocab_size|"
    r"input_shape|target_shape|init_scale|growth_factor|backoff_factor|growth_interval|scaler|seed|logging|classes|"
    r"min_num_params|backward|final|min_lr_ratio|_target_|kwargs|enabled|threads_per_rank|timeout_s|"
    r"partition|account|qos|constraint|exclude|gpus_per_node):"
)


@pytest.mark.parametrize(("group", "option"), [choice for choice in OPTIONS if choice[0] != "fault"])
def test_every_key_is_explained(group: str, option: str) -> None:
    """By a comment on its line, by the file's first line, or by a name that is the field's standard term."""
    lines = (conf_dir() / group / f"{option}.yaml").read_text().splitlines()
    assert lines[0].startswith("#") or group in ("optimizer", "checkpoint"), "what is this option?"
    keys = [line for line in lines if re.match(r"^\s*[a-z_]+:", line) and not line.startswith("defaults")]
    unexplained = [line for line in keys if "#" not in line and not SELF_EXPLAINING.match(line)]
    assert not unexplained


def test_every_key_of_the_root_is_explained() -> None:
    own = (conf_dir() / "config.yaml").read_text().split("\nhydra:")[0]
    keys = [line for line in own.splitlines() if re.match(r"^\s*[a-z_]+: \S", line)]
    assert keys and not [line for line in keys if "#" not in line]


def test_yaml_and_dataclasses_have_the_same_defaults() -> None:
    """A config made in Python is the one that the command line makes."""
    for group, options in GROUPS.items():
        for option, schema in options.items():
            text = yaml.safe_load((conf_dir() / group / f"{option}.yaml").read_text())
            for key, value in text.items():
                derived = isinstance(value, str | list) and "${" in str(value)
                if key not in ("defaults", "glob") and not derived and value != "???":
                    held = getattr(schema(), key)
                    plain = asdict(held) if is_dataclass(held) else getattr(held, "name", held)
                    assert plain == value, f"{group}={option}: {key}"
    composed = compose("wrap_policy=block")
    assert composed.optimizer == GROUPS["optimizer"]["adamw"]() and composed.strategy == GROUPS["strategy"]["ddp"]()
    plain = Config()
    for key in ("steps", "global_batch", "accumulation", "accumulation_sync", "clip_norm", "deterministic"):
        assert getattr(plain, key) == getattr(composed, key), key
    assert (plain.seed, plain.logging, plain.precision, plain.prefetch, plain.gate) == (
        composed.seed,
        composed.logging,
        composed.precision,
        composed.prefetch,
        composed.gate,
    )


# --------------------------------------------------------------------------------------------------------------
# Derived facts
# --------------------------------------------------------------------------------------------------------------


def test_world_size(monkeypatch: pytest.MonkeyPatch) -> None:
    assert world_size(config()) == 2
    assert world_size(config(strategy={"name": "single"})) == 1
    assert world_size(config(launch__nproc=5)) == 5
    gpus(monkeypatch, 8)
    assert world_size(config()) == 8
    assert world_size(config(device="cpu")) == 2
    for name, value in JOINED.items():
        monkeypatch.setenv(name, value)
    assert world_size(config(launch__nproc=5)) == int(JOINED["WORLD_SIZE"])


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 2)
    validate(config(device="cuda", launch__nproc=2))
    with pytest.raises(ConfigError, match=r"launch\.nproc=3 but 2 CUDA devices are visible, .* set launch\.nproc=2 or"):
        validate(config(device="cuda", launch__nproc=3))


def test_visible_devices_are_counted_without_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    present = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert module.num_cuda_devices() == present
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert module.num_cuda_devices() == 0


def test_threads_are_shared_equally(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda pid: set(range(8)))
    assert threads_per_rank(config(), 2) == 4
    assert threads_per_rank(config(), 3) == 2
    assert threads_per_rank(config(), 16) == 1
    assert threads_per_rank(config(launch__threads_per_rank=5), 2) == 5


def test_the_batch_says_how_it_is_divided() -> None:
    shape = batch_shape(config(global_batch=24, accumulation=3, launch__nproc=4))
    assert shape == BatchShape(24, 4, 3)
    assert str(shape) == "2 x 3 x 4 = 24"
    assert shape.to_dict() == {"global_batch": 24, "world_size": 4, "accumulation": 3, "per_rank": 6, "micro_batch": 2}


def test_not_applicable() -> None:
    assert set(not_applicable(config())) == {"wrap_policy", "prefetch", "accumulation_sync", "precision.scaler"}
    assert set(not_applicable(config(strategy=FSDP))) == {"accumulation_sync", "precision.scaler"}
    no_shard = {**FSDP, "sharding_strategy": ShardingStrategy.NO_SHARD.name}
    assert "prefetch" in not_applicable(config(strategy=no_shard))
    assert "accumulation_sync" not in not_applicable(config(accumulation=2))
    assert "accumulation_sync" in not_applicable(config(strategy={"name": "single"}, accumulation=2))
    fp16 = not_applicable(config(precision__compute_dtype="fp16", precision__scaler__enabled=True))
    assert "precision.scaler" not in fp16
    assert all(reason for reason in not_applicable(config()).values())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"name": "another name", "output_dir": "elsewhere", "logging__histograms": True}),
        ({}, {"wrap_policy": {"name": "size"}, "prefetch__backward": "none"}),
        ({}, {"accumulation_sync": True}),
        ({}, {"decide__rule": "smallest_within", "sweep__repeats": 3, "sweep__repeat": 2}),
        ({}, {"precision__scaler__init_scale": 8.0}),
        ({}, {"launch__nproc": 2, "launch__master_port": 1234}),
    ],
)
def test_runs_that_differ_in_nothing_that_is_computed_are_the_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    first, second = effective(config(**one)), effective(config(**other))
    first["launch"].pop("nproc"), second["launch"].pop("nproc")
    assert digest(first) == digest(second)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"steps": 21}),
        ({}, {"seed__model": 1}),
        ({}, {"seed__data": 1}),
        ({}, {"launch__nproc": 4}),
        ({}, {"strategy__bucket_cap_mb": 1.0}),
        ({}, {"launch__threads_per_rank": 1}),
        ({"strategy": FSDP}, {"strategy": FSDP, "wrap_policy": {"name": "none"}}),
        ({"strategy": FSDP}, {"strategy": FSDP, "prefetch__backward": "none"}),
        ({"strategy": FSDP}, {"strategy": {**FSDP, "limit_all_gathers": False}}),
        ({"accumulation": 2}, {"accumulation": 2, "accumulation_sync": True}),
    ],
)
def test_runs_that_differ_in_what_is_computed_are_not(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert digest(effective(config(**one))) != digest(effective(config(**other)))
