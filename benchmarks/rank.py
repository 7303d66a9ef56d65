"""How fast thousands of records become a decision, and a thousand runs a report.

    python benchmarks/rank.py [--records 10000] [--runs 1000]

Targets: 10,000 records under 5 s and 500 MB; a report of 1,000 runs under 30 s. Each is measured in a process of its own,
which has read nothing before; the records, of the size that a run with a window leaves, are in the page cache.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

STRATEGIES = ("ddp", "fsdp", "fsdp2")
PRECISIONS = ("fp32", "bf16", "fp16")
RANKS, UNITS, WINDOWS, STEPS, METRICS = 2, 12, 3, 10, 200
MEASURED = """
import resource, sys, time
from distbench.__main__ import main
start = time.perf_counter()
code = main(sys.argv[1:])
wall, usage = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
print(code, wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, file=sys.stderr)
"""


def timeline(median: float) -> list[dict[str, Any]]:
    """One rank's step: each unit gathered and computed, forward and backward, as FSDP does."""
    slot = median / (4 * UNITS)
    kinds = [(kind, unit) for kind in ("forward", "backward") for unit in range(UNITS)]
    spans = [{"kind": "data", "name": "next", "start": 0.0, "end": slot}]
    for index, (kind, unit) in enumerate(kinds):
        at = slot * (1 + index)
        spans.append({"kind": kind, "name": f"layers.{unit}", "start": at, "end": at + slot})
        spans.append({"kind": "collective", "name": "all_gather", "start": at, "end": at + slot / 2})
    return spans


def record(index: int, rng: random.Random) -> dict[str, Any]:
    """As a run with a window leaves it; every third is a repeat of the same experiment."""
    cell = index // 3
    strategy, precision = STRATEGIES[cell % 3], PRECISIONS[cell // 3 % 3]
    median = 0.1 * (1 + cell % 97 / 97) * rng.gauss(1, 0.02)
    samples = [median * rng.gauss(1, 0.03) for _ in range(WINDOWS * STEPS)]

    def figure(value: float, unit: str, meter: str) -> dict[str, Any]:
        return {
            "median": value,
            "low": 0.99 * value,
            "high": 1.01 * value,
            "unit": unit,
            "meter": meter,
            "reason": None,
        }

    collectives = [
        {
            "op": op,
            "backend_op": "all_reduce",
            "dtype": "float32",
            "group": "world",
            "group_size": RANKS,
            "calls": UNITS,
        }
        | {"logical_bytes": 123456789, "wire_bytes": 246913578, "transfer": 0.01234567, "wait": 0.001234567}
        | {"algbw": 1.23456789, "busbw": 1.23456789}
        for op in ("all_gather", "reduce_scatter", "all_reduce")
    ]
    peak = {"bytes": 2**30 + 2**20 * (cell % 89), "rank": 0, "meter": "tensor peak", "reason": None}
    kinds = dict.fromkeys(("parameters", "gradients", "optimizer_state", "activations", "buffers", "other"), 2**24)
    return {
        "schema": 1, "status": "passed", "reason": None, "run": {"name": f"run {index}", "command": "python", "pid": 1},
        "config": {
            "model": {"name": "simple", "num_layers": UNITS, "hidden_dim": 64}, "strategy": {"name": strategy},
            "precision": {"name": precision}, "wrap_policy": {"name": "block"}, "prefetch": {"backward": "pre"},
            "data": {"name": "synthetic"}, "loss": {"name": "mse"}, "optimizer": {"name": "adamw", "lr": 0.001},
            "seed": {"model": 0, "data": 0}, "global_batch": 8, "clip_norm": 1.0, "sweep": {"repeat": index % 3 + 1},
        },
        "effective": f"{cell:016x}", "not_applicable": {},
        "environment": {"packages": {"torch": "2"}, "cpu": "cpu", "cores": 2, "variables": {"A" * 40: "b" * 200}},
        "batch": {"world_size": RANKS, "accumulation": 1},
        "units": [{"name": f"layers.{unit}", "class": "Block", "bytes": 200000} for unit in range(UNITS)],
        "topology": {"ranks": [{"rank": rank, "device_name": "cpu"} for rank in range(RANKS)]},
        "gate": {"passed": True, "tier": "bound", "text": "gate PASSED", "parallel_error": 1e-8, "precision_error": 1e-7},
        "window": {
            "accepted": True, "reason": None,
            "step_time": {
                **figure(median, "s", "perf_counter, slowest rank"), "samples": samples,
                "window_medians": [median] * WINDOWS,
            },
            "tokens_per_second": figure(256 / median, "tokens/s", "perf_counter"),
            "split": {"data": 0.01, "forward": median / 3, "backward": median / 2, "optimizer": 0.01, "rank": 0},
            "exposed_comm": figure(0.1 * median, "s", "spans"), "collectives": collectives,
            "memory": {"peak_allocated": peak}, "memory_by_kind": kinds, "memory_predicted": kinds,
            "timeline": [timeline(median) for _ in range(RANKS)],
        },
    }  # fmt: skip


def gate() -> dict[str, Any]:
    rows = [
        {"name": f"layers.{unit}.weight", "step": step, "relative_l2": 1e-7, "margin": 0.1, "tier": "bound"}
        for step in (1, 2, 3)
        for unit in range(4 * UNITS)
    ]
    return {"schema": 1, "text": "gate PASSED", "gradients": rows}


def measure(words: list[str]) -> tuple[float, float, float]:
    """(seconds, seconds of CPU with start-up and imports, peak resident bytes) of one command, in its own process."""
    done = subprocess.run([sys.executable, "-c", MEASURED, *words], capture_output=True, text=True, check=True)
    code, seconds, cpu, peak = done.stderr.split()[-4:]
    if code != "0":
        raise SystemExit(f"{' '.join(words)} ended with {code}: {done.stderr}")
    return float(seconds), float(cpu), float(peak)


def main() -> None:
    """Make the folders, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--records", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=1_000)
    options = parser.parse_args()
    rng = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="rank_") as temporary:
        root = Path(temporary)
        metrics = "".join(json.dumps({"step": s, "loss": 5 / s, "lr": 0.001}) + "\n" for s in range(1, METRICS + 1))
        size = 0
        for name, count in (("records", options.records), ("runs", options.runs)):
            for index in range(count):
                folder = root / name / f"{index:05d}_cell={index // 3},repeat={index % 3 + 1}"
                folder.mkdir(parents=True)
                text = json.dumps(record(index, rng), indent=2)
                size = len(text)
                (folder / "record.json").write_text(text)
                if name == "runs":
                    (folder / "gate.json").write_text(json.dumps(gate(), indent=2))
                    (folder / "metrics.jsonl").write_text(metrics)
        ranked = measure(["rank", str(root / "records"), "--json"])
        page = root / "report.html"
        reported = measure(["report", str(root / "runs"), "--out", str(page)])
        print(f"records of {size / 1e3:.0f} kB; targets: 5 s and 500 MB, 30 s")
        for what, (seconds, cpu, peak) in (
            (f"rank {options.records:,} records", ranked),
            (f"report of {options.runs:,} runs", reported),
        ):
            print(f"  {what:<24} {seconds:6.2f} s ({cpu:.2f} s of CPU)   peak {peak / 1e6:5.0f} MB")
        print(f"  the report's page is {page.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
