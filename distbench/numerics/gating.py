"""The gate's place in a run: hold the first steps against the baseline, explain a failure, write gate.json."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from distbench.build import EffectiveDtypes
from distbench.config import Config
from distbench.numerics.baseline import Baseline
from distbench.numerics.cache import BaselineEntry
from distbench.numerics.gate import Gate, StopGate, Verdict, verdict_tree
from distbench.numerics.recorder import GradientLog, WholeGradients
from distbench.runs.files import write_json
from distbench.runs.folder import RunFolder
from distbench.trainer import Trainer


def pass_gate(
    config: Config, entry: BaselineEntry | None, trainer: Trainer, dtypes: EffectiveDtypes, folder: RunFolder
) -> dict[str, Any]:
    """Run the gate's steps and return the record's `gate` section; `passed` is None where the gate is off.

    The trainer is left where the run itself is: after the gate's free steps. A collective.
    """
    if entry is None:
        log = GradientLog(folder, trainer)
        trainer.observers = [log, *trainer.observers]
        trainer.run(until=1)
        return {"passed": None, "tier": None, "text": "gate off: ungated, never ranked", "name": config.gate.name}

    baseline = Baseline(Path(entry.path))
    gate = Gate(baseline, config, type(trainer.strategy).reduction(config), trainer, dtypes, entry.reused)
    observers = trainer.observers
    keep = [WholeGradients(folder, gate.num_steps)] if config.gate.keep_gradients else []
    # Last, so that a failing step is in the logs before it ends the run.
    trainer.observers = [*observers, gate, *keep]
    with suppress(StopGate):
        gate.run(trainer)
    trainer.observers = observers

    verdict = gate.verdict()
    tree = verdict_tree(verdict, baseline, entry.reused)
    if not verdict.passed and config.gate.locate:
        from distbench.numerics.diagnose import diagnose
        from distbench.numerics.locate import locate

        location = locate(config, baseline, trainer, verdict)
        diagnosis = diagnose(verdict, location, config)
        tree["location"], tree["diagnosis"] = location.to_dict(), diagnosis.to_dict()
        tree["text"] = f"{tree['text']} -> {diagnosis.text}"
    if trainer.world.rank == 0:
        write_json(folder.path / "gate.json", tree)
        for step, summary in gate.summaries.items():
            folder.write_gradients(step, summary)
    return gate_section(tree, config, verdict)


def gate_section(tree: dict[str, Any], config: Config, verdict: Verdict) -> dict[str, Any]:
    """What of gate.json the record repeats."""
    precision = tree["precision_error"]
    worst = max((g.margin for g in verdict.gradients), default=None)
    return {
        "name": config.gate.name,
        "passed": tree["passed"],
        "tier": tree["tier"],
        "text": tree["text"],
        "worst_margin": worst,
        "by_step": by_step(verdict),
        "parallel_error": tree["parallel_error"],
        "precision_error": None if precision is None else precision["relative_l2"],
        "precision_error_reason": tree["precision_error_reason"],
        "power": tree["power"],
        "baseline": tree["baseline"],
        "diagnosis": tree.get("diagnosis"),
        "location": tree.get("location"),
    }


def by_step(verdict: Verdict) -> list[dict[str, Any]]:
    """The worst margin and relative error of each step, for charts."""
    rows = []
    for step, mode in dict.fromkeys((g.step, g.mode) for g in verdict.gradients):
        compared = [g for g in verdict.gradients if (g.step, g.mode) == (step, mode)]
        rows.append(
            {
                "step": step,
                "mode": mode,
                "worst_margin": max(g.margin for g in compared),
                "worst_relative_l2": max((g.relative_l2 for g in compared if g.relative_l2 is not None), default=None),
            }
        )
    return rows
