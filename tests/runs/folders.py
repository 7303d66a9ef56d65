"""Small run folders made of files alone, as a run leaves them: what `diff` and other readers are tested on."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor

from distbench.numerics.shards import Shard
from distbench.numerics.summary import Summary, summarize
from distbench.runs.files import strict

CONFIG: dict[str, Any] = {
    "model": {"name": "simple", "hidden_dim": 4},
    "strategy": {"name": "ddp", "bucket_cap_mb": 25.0},
    "prefetch": {"backward": "pre"},
    "optimizer": {"name": "adamw", "lr": 0.001, "betas": [0.9, 0.95]},
    "seed": {"model": 0, "data": 0},
    "global_batch": 8,
    "name": "a",
}

RECORD: dict[str, Any] = {
    "schema": 1,
    "status": "passed",
    "environment": {"python": "3.11", "packages": {"torch": "2.13.0"}},
    "batch": {"world_size": 2, "text": "4 x 1 x 2 = 8"},
    "dtypes": {"compute": "fp32"},
    "topology": {"backend": "gloo", "ranks": [{"rank": 0, "host": "h", "pid": 1, "device_name": "cpu", "threads": 1}]},
    "not_applicable": {"prefetch": "strategy=ddp gathers no parameters"},
    "initial_weights": "abc",
}

NAMES = ("embed.weight", "layers.2.weight", "layers.10.weight", "head.bias")


def gradients(seed: int = 0, scale: float = 1.0) -> dict[str, Tensor]:
    """One step's gradients; the names are not in alphabetical order."""
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(5, 7, generator=generator) for name in NAMES}


def summary(tensors: dict[str, Tensor | None], seed: int = 0, shape: tuple[int, ...] = (5, 7)) -> Summary:
    return summarize([Shard.whole(name, tensor, shape) for name, tensor in tensors.items()], seed)


def make_run(
    path: Path,
    *,
    losses: list[float] | None = None,
    grads: dict[int, dict[str, Any]] | None = None,
    weights: dict[int, dict[str, Tensor]] | None = None,
    config: dict[str, Any] | None = None,
    **record: Any,
) -> Path:
    """A run folder. `config` holds dotted settings to change; other keywords replace sections of the record."""
    path.mkdir(parents=True)
    tree = copy.deepcopy(CONFIG)
    for key, value in (config or {}).items():
        *parents, last = key.split(".")
        inner = tree
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
    (path / "record.json").write_text(json.dumps(strict({**RECORD, "config": tree, **record})))
    (path / "resolved.yaml").write_text(yaml.safe_dump(tree))
    if losses is not None:
        rows = [{"step": step, "loss": loss, "lr": 0.1} for step, loss in enumerate(losses, 1)]
        (path / "metrics.jsonl").write_text("".join(json.dumps(strict(row)) + "\n" for row in rows))
    for step, tensors in (grads or {}).items():
        (path / "gradients").mkdir(exist_ok=True)
        summary(tensors).save(path / "gradients" / f"step_{step:08d}.safetensors", {"step": str(step)})
    for step, tensors in (weights or {}).items():
        folder = path / "checkpoints" / f"step_{step:08d}"
        folder.mkdir(parents=True)
        save_file(tensors, folder / "model.safetensors")
    return path


def usual_run(path: Path, **changes: Any) -> Path:
    """Three steps with everything there."""
    parts: dict[str, Any] = {
        "losses": [2.0, 1.5, 1.25],
        "grads": {1: gradients(1), 2: gradients(2)},
        "weights": {3: gradients(3)},
    }
    return make_run(path, **{**parts, **changes})
