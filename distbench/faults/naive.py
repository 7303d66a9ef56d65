"""What simpler comparisons would have said of the same run: two curves, or fixed tolerances on whole gradients.

Each looks at what it is usually shown: the logged losses and gradient norms of the gate's steps, and the first step's
reduced gradients, against the single-process baseline's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from distbench.faults.trial import Trial
from distbench.numerics.baseline import Baseline
from distbench.precision import DTYPES

CURVE_TOLERANCE = {"fp64": 1e-4, "fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}
"""Two logged numbers that differ relatively by less than this look the same: four digits, two in a low precision."""


@dataclass
class Naive:
    """Whether each comparison would have noticed; None where it had nothing to compare."""

    loss: bool | None = None
    norm: bool | None = None
    assert_close: bool | None = None
    """`torch.testing.assert_close` with its default tolerances for the compute dtype, gradient by gradient."""
    depth_scaled: bool | None = None
    """Per parameter, relative L2 error above eps(compute dtype) x (layers with parameters): an allowance of one
    rounding a layer, all in the same direction, as Megatron-style checks scale theirs with depth."""


def naive_verdicts(trial: Trial, out: Path) -> Naive:
    """The four verdicts on a gated run that kept its gradients (gate.keep_gradients=true)."""
    if not trial.gate:
        return Naive()
    baseline = Baseline(out / ".baselines" / trial.gate["baseline"]["folder"])
    record = json.loads((trial.folder / "record.json").read_text())
    compute = str(record["config"]["precision"]["compute_dtype"])
    metrics = [json.loads(line) for line in (trial.folder / "metrics.jsonl").read_text().splitlines()]
    tolerance = CURVE_TOLERANCE[compute]
    verdict = Naive(
        loss=_curves_differ(metrics, baseline, "loss", "loss", tolerance),
        norm=_curves_differ(metrics, baseline, "grad_norm", "grad_norm", tolerance),
    )
    kept = trial.folder / "gradients" / "step_00000001.full.safetensors"
    if kept.exists():
        pairs = _pairs(kept, baseline)
        layers = len({name.rpartition(".")[0] for name in pairs})
        bound = torch.finfo(DTYPES[compute]).eps * layers
        verdict.assert_close = any(_not_close(own, reference, DTYPES[compute]) for own, reference in pairs.values())
        verdict.depth_scaled = any(_relative(own, reference) > bound for own, reference in pairs.values())
    return verdict


def _curves_differ(
    metrics: list[dict[str, Any]], baseline: Baseline, key: str, expected_key: str, tolerance: float
) -> bool:
    for row in metrics[: baseline.num_steps]:
        expected = float(baseline.step(int(row["step"]))[expected_key])
        own = float("nan") if row[key] is None else float(row[key])
        if not (abs(own - expected) <= tolerance * abs(expected) or own == expected):
            return True
    return False


def _pairs(kept: Path, baseline: Baseline) -> dict[str, tuple[Tensor, Tensor]]:
    pairs = {}
    with safe_open(kept, "pt") as own, baseline.tensors(1) as reference:
        there = set(reference.keys())
        for name in own.keys():  # noqa: SIM118  not a mapping
            if f"R/{name}" in there:
                pairs[name] = (own.get_tensor(name), reference.get_tensor(f"R/{name}"))
    return pairs


def _not_close(own: Tensor, reference: Tensor, dtype: torch.dtype) -> bool:
    try:
        torch.testing.assert_close(own.to(dtype), reference.to(dtype), equal_nan=True)
    except AssertionError:
        return True
    return False


def _relative(own: Tensor, reference: Tensor) -> float:
    norm = float(reference.double().norm())
    error = float((own.double() - reference.double()).norm())
    return 0.0 if error == 0 else error / norm if norm else float("inf")
