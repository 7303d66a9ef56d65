"""No clean run is flagged: hundreds of different legal configurations, drawn from a seed, through the gate.

    python benchmarks/clean_matrix.py --number 300 --write docs/clean-matrix.md

takes about half an hour on two cores. One configuration again: `distbench selftest --clean 1 --start INDEX`.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIERS = ("bitwise", "bound", "noise")


@dataclass
class Case:
    """One configuration and what the gate said of it."""

    index: int
    overrides: list[str]
    status: str
    tier: str | None
    margin: float
    text: str | None
    command: str

    def value(self, key: str, default: str = "") -> str:
        return next((o.partition("=")[2] for o in self.overrides if o.partition("=")[0] == key), default)

    @property
    def model(self) -> str:
        target = self.value("model._target_").rpartition(".")[2]
        if not target:
            return "text" if self.value("model") == "simple_text" else "simple"
        words = [word for word in ("tied", "frozen", "unused") if self.has(f"{word}: true")]
        words += ["dropout"] * self.has("dropout: 0.2")
        kind = {"LanguageModel": "attention", "Normed": "batch normalisation", "Mixed": "linear"}[target]
        return ", ".join([kind, *words])

    def has(self, text: str) -> bool:
        return any(text in o for o in self.overrides)

    @property
    def flagged(self) -> bool:
        return self.status != "passed"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--number", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, help="a Markdown file for the table, beside printing it")
    options = parser.parse_args(argv)

    from distbench.launching import local

    local.warm_up()
    cases: list[Case] = []
    with tempfile.TemporaryDirectory(prefix="clean-matrix-") as folder:
        for index in range(options.number):
            case = _run(options.seed, index, Path(folder))
            cases.append(case)
            print(f"[{index + 1}/{options.number}] {case.tier if not case.flagged else 'FLAGGED'}", flush=True)
    text = render(cases, options.seed)
    print(text)
    if options.write:
        options.write.write_text(text)
    return int(any(case.flagged for case in cases))


def _run(seed: int, index: int, folder: Path) -> Case:
    from distbench.faults.clean import draw
    from distbench.faults.trial import run_trial

    overrides = draw(seed, index)
    trial = run_trial(overrides, folder, f"{index:04d}")
    margins = [g["margin"] for g in trial.gate.get("gradients", []) if g["tier"] != "bitwise"]
    return Case(
        index,
        overrides,
        trial.status,
        trial.gate.get("tier"),
        max(margins, default=0.0),
        trial.gate.get("text", trial.reason),
        trial.command,
    )


def render(cases: list[Case], seed: int) -> str:
    """The document: totals by what varies, then anything that was flagged."""
    import torch

    flagged = [case for case in cases if case.flagged]
    margins = [case.margin for case in cases if case.tier == "bound"]
    lines = [
        "# Clean runs are not flagged",
        "",
        f"{len(cases)} legal configurations drawn from seed {seed} over strategy and its options, precision, wrapping, "
        "prefetch, accumulation, ranks, odd sizes, model, loss, data, optimizer, schedule and clipping "
        "(`distbench/faults/clean.py`), each through the gate as any run is.",
        "",
        f"**{len(cases) - len(flagged)} passed, {len(flagged)} were flagged.** Largest error over its bound, where "
        f"not bitwise: {max(margins, default=0.0):.2f} of 1.",
        "",
        f"    python benchmarks/clean_matrix.py --number {len(cases)} --seed {seed} --write docs/clean-matrix.md",
        "",
        f"Made with torch {torch.__version__}, Python {platform.python_version()}, "
        f"{torch.backends.cpu.get_cpu_capability()}, {len(os.sched_getaffinity(0))} cores. One configuration again: "
        f"`python -m distbench selftest --clean 1 --start INDEX --seed {seed}`.",
        "",
    ]
    tables: list[tuple[str, Callable[[Case], str]]] = [
        ("strategy and ranks", lambda case: f"{case.value('strategy')}, {case.value('launch.nproc')} ranks"),
        ("strategy and precision", lambda case: f"{case.value('strategy')}, {case.value('precision')}"),
        ("wrapping", lambda case: case.value("wrap_policy", "not sharded")),
        ("prefetch", lambda case: case.value("prefetch", "not sharded")),
        ("accumulation", _accumulation),
        ("model", lambda case: case.model),
        ("optimizer", lambda case: f"{case.value('optimizer')}, {case.value('optimizer.schedule')}"),
        ("clip_norm", lambda case: case.value("clip_norm")),
    ]
    for title, key in tables:
        lines += _table(title, key, cases)
    for case in flagged:
        lines += [f"Flagged, index {case.index} ({case.status}): {case.text}", "", f"    {case.command}", ""]
    return "\n".join(lines).rstrip() + "\n"


def _accumulation(case: Case) -> str:
    synced = case.value("accumulation_sync") == "true"
    return case.value("accumulation") + (", every micro-batch reduced" if synced else "")


def _table(title: str, key: Callable[[Case], str], cases: list[Case]) -> list[str]:
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(key(case), []).append(case)
    lines = [f"| {title} | runs | {' | '.join(TIERS)} | flagged |", "|---" * (len(TIERS) + 3) + "|"]
    for name, same in sorted(groups.items()):
        tiers: Counter[Any] = Counter(case.tier for case in same if not case.flagged)
        counts = [str(tiers[tier]) for tier in TIERS]
        lines.append(f"| {name} | {len(same)} | {' | '.join(counts)} | {sum(case.flagged for case in same)} |")
    return [*lines, ""]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
