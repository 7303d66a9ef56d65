"""Run folders made of a record alone, with a window: what a decision is tested on."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np

from distbench.runs.files import strict
from tests.runs.noisy import Noise

GIB = 2**30
QUIET = Noise(between=0.0, windows=0.001, steps=0.002, hiccups=0.0)

CONFIG: dict[str, Any] = {
    "model": {"name": "simple", "num_layers": 4, "hidden_dim": 64, "seq_len": 32},
    "strategy": {"name": "ddp"},
    "precision": {"name": "fp32"},
    "wrap_policy": {"name": "block"},
    "prefetch": {"backward": "pre"},
    "data": {"name": "synthetic"},
    "loss": {"name": "mse"},
    "optimizer": {"name": "adamw", "lr": 0.001},
    "fault": {"name": "none"},
    "seed": {"model": 0, "data": 0},
    "global_batch": 8,
    "accumulation": 1,
    "clip_norm": 1.0,
}


def figure(median: Any, unit: str = "s", meter: str = "a meter", reason: str | None = None) -> dict[str, Any]:
    return {"median": median, "low": median, "high": median, "unit": unit, "meter": meter, "reason": reason}


def window(
    step_ms: float = 10.0,
    gib: float | None = 1.0,
    noise: Noise = QUIET,
    random: np.random.Generator | None = None,
    meter: str = "tensor peak",
) -> dict[str, Any]:
    """A window section with simulated step times."""
    windows = noise.run(random or np.random.default_rng(0), step_ms / 1e3)
    steps = np.concatenate(windows)
    median = float(np.median(steps))
    peak = {"bytes": None if gib is None else int(gib * GIB), "rank": 0, "meter": meter, "reason": None}
    timeline = [
        {"kind": kind, "name": kind, "start": start * median, "end": end * median}
        for kind, start, end in (("data", 0, 0.05), ("forward", 0.05, 0.4), ("backward", 0.4, 0.9))
    ] + [{"kind": "collective", "name": "all_reduce", "start": 0.6 * median, "end": 0.95 * median}]
    return {
        "name": "default",
        "accepted": True,
        "reason": None,
        "overhead": {**figure(0.01, ""), "limit": 0.05},
        "step_time": {
            **figure(median, meter="perf_counter, slowest rank"),
            "samples": steps.tolist(),
            "window_medians": [float(np.median(part)) for part in windows],
            "slowest_rank": 1,
        },
        "tokens_per_second": figure(256 / median, "tokens/s"),
        "split": {
            "data": 0.05 * median,
            "forward": 0.35 * median,
            "backward": 0.5 * median,
            "optimizer": 0.08 * median,
            "other": 0.02 * median,
            "rank": 1,
        },
        "exposed_comm": {**figure(0.1 * median, meter="spans"), "rank": 1},
        "memory": {"peak_allocated": peak},
        "memory_by_kind": {"parameters": 2**20, "gradients": 2**20, "optimizer_state": 2**21, "activations": 2**22},
        "memory_predicted": {"parameters": 2**20, "gradients": 2**20, "optimizer_state": 2**21, "activations": None},
        "timeline": [timeline, timeline],
    }


def record(config: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    """A record that passed. `config` holds dotted settings to change; other keywords replace sections."""
    tree = copy.deepcopy(CONFIG)
    for key, value in (config or {}).items():
        *parents, last = key.split(".")
        inner = tree
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
    return {
        "schema": 1,
        "status": "passed",
        "reason": None,
        "config": tree,
        "not_applicable": {},
        "environment": {"packages": {"torch": "2.13.0"}, "cpu": "cpu", "cores": 2},
        "topology": {"ranks": [{"rank": rank, "device_name": "cpu"} for rank in range(2)]},
        "batch": {"world_size": 2, "accumulation": 1, "global_batch": 8},
        "gate": {
            "passed": True,
            "tier": "bound",
            "text": "gate PASSED",
            "parallel_error": 1e-8,
            "precision_error": 1e-7,
        },
        "window": window(),
        **sections,
    }


def write(path: Path, tree: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "record.json").write_text(tree if isinstance(tree, str) else json.dumps(strict(tree)))
    return path


def candidate(
    root: Path,
    name: str,
    step_ms: float = 10.0,
    gib: float | None = 1.0,
    repeats: int = 1,
    noise: Noise = QUIET,
    seed: int = 0,
    **sections: Any,
) -> list[Path]:
    """The folders of one experiment, named as a sweep names them."""
    random = np.random.default_rng(seed)
    paths = []
    for repeat in range(1, repeats + 1):
        tail = f",repeat={repeat}" if repeats > 1 else ""
        tree = record(**{"effective": name, "window": window(step_ms, gib, noise, random), **sections})
        paths.append(write(root / f"{len(list(root.glob('*'))):03d}_{name}{tail}", tree))
    return paths
