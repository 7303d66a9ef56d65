"""The record's `window` section, from what every rank measured (docs/window.md)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from distbench.config import Config
from distbench.measure import flops
from distbench.measure.collectives import rows
from distbench.measure.cores import CROWDED, METER
from distbench.measure.phases import PHASES
from distbench.measure.spread import WALL, figure, missing
from distbench.measure.tracked import Tracked
from distbench.measure.traffic import Traffic, on_wire
from distbench.measure.window import Measurement, Step, Take

MEMORY = ("peak_allocated", "peak_active", "peak_reserved", "device_used", "rss_peak")
BUSY = {"gloo": "Gloo's execution intervals (torch profiler, user scopes)", "nccl": "NCCL kernels (torch profiler)"}
INTERFACE_SLACK = 0.015
"""Share by which the interface's counter may lie below the ledger. Above it lie headers, and other processes' traffic."""

Ranks = Sequence[Measurement]


def section(
    config: Config,
    ranks: Ranks,
    tracked: Sequence[Tracked],
    predicted: Sequence[dict[str, int | None]],
    promised: Sequence[Traffic],
    peak: tuple[float | None, str],
    rates: Sequence[float],
    backend: str | None,
    untracked: str = "window.track=false",
) -> dict[str, Any]:
    """`ranks`, `tracked`, `predicted` (memory): every rank's, in rank order; `untracked`: why nothing is tracked, if so.
    `promised`: the strategy's and the trainer's traffic of one step. `peak`: one device's known FLOP/s and its source.
    `rates`: each rank's calibrated FLOP/s."""
    window = config.window
    step_time = _slowest(ranks)
    overhead = _overhead(ranks)
    too_much = _costs_too_much(ranks, overhead, window.max_overhead)
    table = _collectives(ranks, tracked, window.measured, backend)
    memory = {column: _memory(ranks, column) for column in MEMORY}
    flop = _flops(config, tracked, untracked)
    return {
        "name": window.name,
        "warm_up": window.warm_up,
        "measured": window.measured,
        "reference": window.reference,
        "repeats": len(ranks[0].takes),
        "accepted": not too_much,
        "reason": f"the meters cost {overhead['median']:.1%} of a step, more than window.max_overhead"
        if too_much
        else None,
        "overhead": {**overhead, "limit": window.max_overhead},
        "step_time": step_time,
        "tokens_per_second": _tokens(ranks),
        "split": _split(ranks[step_time["slowest_rank"]], step_time["slowest_rank"]),
        "data_wait": _worst(ranks, lambda step: step.phases.get("data"), "the data phase's wall time", None),
        "core_wait": _core_wait(ranks),
        **_communication(ranks, backend),
        "overlap_transfers_to_cuda": backend == "nccl",
        "collectives": table,
        "collectives_reason": next((t.calls_reason for t in ranks[0].takes if t.calls_reason), None),
        "memory": memory,
        **_by_kind(memory["peak_allocated"]["rank"], tracked, predicted, untracked),
        "bytes": audit(promised, table, ranks, backend),
        "flops": flop,
        **_mfu(flop["per_step"], step_time["median"], peak, rates),
        "timeline": [measurement.takes[-1].timeline for measurement in ranks],
        "ranks": [_rank(rank, measurement, backend) for rank, measurement in enumerate(ranks)],
    }


# --- times


def _each(ranks: Ranks, value: Callable[[Step], float | None]) -> list[list[list[float | None]]]:
    """[rank][window][step]."""
    return [[[value(step) for step in take.steps] for take in measurement.takes] for measurement in ranks]


def _slowest(ranks: Ranks) -> dict[str, Any]:
    """Per step the slowest rank's time; the rank that was it most often."""
    table = np.array(_each(ranks, lambda step: step.seconds), dtype=np.float64)
    windows = table.max(axis=0)
    counts = np.bincount(table.argmax(axis=0).ravel(), minlength=len(ranks))
    return {
        **figure(windows.tolist(), "s", WALL),
        "samples": windows.tolist(),
        "window_medians": np.median(windows, axis=1).tolist(),
        "slowest_rank": int(counts.argmax()),
    }


def _tokens(ranks: Ranks) -> dict[str, Any]:
    seconds = np.array(_each(ranks, lambda step: step.seconds), dtype=np.float64).max(axis=0)
    tokens = np.array(_each(ranks[:1], lambda step: float(step.tokens)), dtype=np.float64)[0]
    return figure((tokens / seconds).tolist(), "tokens/s", WALL)


def _split(measurement: Measurement, rank: int) -> dict[str, Any]:
    """Medians of the phases and of what lies between them."""
    steps = [step for take in measurement.takes for step in take.steps]
    found: dict[str, Any] = {name: statistics.median(step.phases.get(name, 0.0) for step in steps) for name in PHASES}
    found["other"] = statistics.median(
        max(0.0, step.seconds - sum(step.phases.get(name, 0.0) for name in PHASES)) for step in steps
    )
    return {**found, "rank": rank}


def _worst(ranks: Ranks, value: Callable[[Step], float | None], meter: str, reason: str | None) -> dict[str, Any]:
    """The figure of the rank whose median is largest, with the rank."""
    table = _each(ranks, value)
    if reason is not None or any(v is None for rank in table for take in rank for v in take):
        return {**missing("s", meter, reason or "not measured on every rank"), "rank": None}
    known = [[[v for v in take if v is not None] for take in rank] for rank in table]
    medians = [statistics.median(v for take in rank for v in take) for rank in known]
    worst = medians.index(max(medians))
    return {**figure(known[worst], "s", meter), "rank": worst}


def _core_wait(ranks: Ranks) -> dict[str, Any]:
    """Of the rank that waited most, with the rank."""
    shares = [_core_share(measurement) for measurement in ranks]
    known = [[take.core_wait for take in m.takes if take.core_wait is not None] for m in ranks]
    if None in shares:
        return {**missing("s", METER, "/proc/self/task has no schedstat here"), "share": None, "rank": None}
    medians = [statistics.median(row) for row in known]
    worst = medians.index(max(medians))
    return {**figure([[value] for value in known[worst]], "s", METER), "share": shares[worst], "rank": worst}


def _core_share(measurement: Measurement) -> float | None:
    """How much of a rank's mean step its thread that waited longest had no core; None where a window does not say."""
    waits = [take.core_wait for take in measurement.takes if take.core_wait is not None]
    if len(waits) < len(measurement.takes):
        return None
    step = statistics.fmean(step.seconds for take in measurement.takes for step in take.steps)
    return min(1.0, statistics.fmean(waits) / step)


def _overhead(ranks: Ranks) -> dict[str, Any]:
    """Metered over reference step time, less 1; from pairs of a metered and a reference step of the same window."""
    metered = np.array(_each(ranks, lambda step: step.seconds), dtype=np.float64).max(axis=0)
    reference = np.array([[take.reference for take in m.takes] for m in ranks], dtype=np.float64).max(axis=0)
    pairs = min(metered.shape[1], reference.shape[1])
    ratios = metered[:, :pairs] / reference[:, :pairs] - 1
    return figure(ratios.tolist(), "ratio", "metered over unmetered steps of the same window, paired in order")


ENOUGH_PAIRS = 10
"""Of metered and reference steps, below which their ratio's interval says more of the machine than of the meters."""
ENOUGH_WINDOWS = 3
"""Alike, for the same reason: two that something else slowed down are no rare thing."""


def _costs_too_much(ranks: Ranks, overhead: dict[str, Any], limit: float) -> bool:
    """For sure only: cores for everyone, enough pairs, all of the interval above the limit, and every window alike."""
    takes = ranks[0].takes
    pairs = sum(min(len(take.steps), len(take.reference)) for take in takes)
    if overhead["low"] is None or overhead["low"] <= limit or pairs < ENOUGH_PAIRS or len(takes) < ENOUGH_WINDOWS:
        return False
    if any((_core_share(measurement) or 0.0) >= CROWDED for measurement in ranks):
        return False  # what shares the cores may have slowed down the metered steps and not the others
    slower = [
        statistics.median(s.seconds for s in take.steps) > (1 + limit) * statistics.median(take.reference)
        for measurement in ranks
        for take in measurement.takes
    ]
    return all(slower)


def _communication(ranks: Ranks, backend: str | None) -> dict[str, Any]:
    if backend is None:
        reason = "one process: nothing is communicated"
        return {
            "comm_busy": {**missing("s", "", reason), "rank": None},
            "exposed_comm": {**missing("s", "", reason), "rank": None},
            "overlap": missing("ratio", "", reason),
        }
    busy = _worst(ranks, lambda step: step.comm_busy, BUSY[backend], None)
    exposed = _worst(ranks, lambda step: step.exposed, ranks[0].exposed_meter, ranks[0].exposed_reason)
    meter = "1 - exposed / busy"
    if exposed["median"] is None:
        return {"comm_busy": busy, "exposed_comm": exposed, "overlap": missing("ratio", meter, exposed["reason"])}
    shares = [
        [1 - (step.exposed or 0.0) / step.comm_busy for step in take.steps if step.comm_busy > 0]
        for take in ranks[exposed["rank"]].takes
    ]
    return {"comm_busy": busy, "exposed_comm": exposed, "overlap": figure(shares, "ratio", meter)}


def _rank(rank: int, measurement: Measurement, backend: str | None) -> dict[str, Any]:
    steps = [step for take in measurement.takes for step in take.steps]
    busy = [step.comm_busy for step in steps if backend is not None]
    exposed = [step.exposed for step in steps if backend is not None and step.exposed is not None]
    return {
        "rank": rank,
        "step_time": statistics.median(step.seconds for step in steps),
        "data_wait": statistics.median(step.phases.get("data", 0.0) for step in steps),
        "comm_busy": statistics.median(busy) if busy else None,
        "exposed_comm": statistics.median(exposed) if exposed else None,
        "memory": {column: _peak(measurement, column) for column in MEMORY},
    }


# --- bytes and memory


def _collectives(ranks: Ranks, tracked: Sequence[Tracked], measured: int, backend: str | None) -> list[dict[str, Any]]:
    windows = [[measurement.takes[w].calls for measurement in ranks] for w in range(len(ranks[0].takes))]
    return rows(windows, tracked[0].meanings if tracked else [], measured, backend)


def audit(
    promised: Sequence[Traffic], table: Sequence[dict[str, Any]], ranks: Ranks, backend: str | None
) -> dict[str, Any]:
    """Bytes that one rank sends in a step, by three ways: what the strategy promises, what the backend was asked for, what
    the kernel's interface counted."""
    if backend is None:
        return {"formula": 0, "ledger": 0, "interface": None, "interface_reason": "nothing is sent", "warnings": []}
    formula = sum(traffic.wire_bytes(backend) for traffic in promised)
    reason = next((t.calls_reason for t in ranks[0].takes if t.calls_reason), None)
    ledger = None if reason else sum(row["wire_bytes"] or 0 for row in table)
    found = _interface(ranks)
    interface_reason = ranks[0].network_reason if found is None else None
    warnings = []
    if ledger is not None and ledger != formula:
        warnings.append(_mismatch(formula, ledger, promised, table, backend))
    residual = found / ledger - 1 if ledger and found is not None else None
    if residual is not None and residual < -INTERFACE_SLACK:
        warnings.append(
            f"the interface sent {-residual:.1%} less than the ledger: ranks use other interfaces or hosts, too"
        )
    return {
        "formula": formula,
        "formula_rows": [
            {"what": t.what, "op": t.op, "group_size": t.group_size, "wire_bytes": t.wire_bytes(backend)}
            for t in promised
        ],
        "ledger": ledger,
        "ledger_reason": reason,
        "interface": found,
        "interface_residual": residual,
        "interface_reason": interface_reason,
        "warnings": warnings,
    }


def _mismatch(
    formula: float, ledger: float, promised: Sequence[Traffic], table: Sequence[dict[str, Any]], backend: str
) -> str:
    """Name the operation that differs, and the likely cause."""
    known = all(row["op"] for row in table)
    wanted: dict[str, float] = {}
    for traffic in promised:
        op = traffic.op if known else on_wire(traffic.op, backend)
        wanted[op] = wanted.get(op, 0) + traffic.wire_bytes(backend)
    got: dict[str, float] = {}
    for row in table:
        op = row["op"] if known else row["backend_op"]
        got[op] = got.get(op, 0) + (row["wire_bytes"] or 0)
    parts = [
        f"{op} {got.get(op, 0):,.0f} instead of {wanted.get(op, 0):,.0f}"
        for op in sorted(set(wanted) | set(got))
        if got.get(op, 0) != wanted.get(op, 0)
    ]
    reductions = ("all_reduce", "reduce_scatter")
    more = sum(got.get(op, 0) for op in reductions) > sum(wanted.get(op, 0) for op in reductions)
    cause = (
        "gradients are reduced more often than configured: a no_sync that does nothing, or units called several times a step"
        if more
        else "units that are called several times a step, or not in every one"
    )
    return (
        f"a rank sends {ledger:,.0f} bytes a step, the formula says {formula:,.0f}: {'; '.join(parts)}; likely: {cause}"
    )


def _interface(ranks: Ranks) -> float | None:
    """Bytes that a rank sent a step, on average; the counter of a host has all of its ranks."""
    sent = 0.0
    first = {measurement.host: measurement for measurement in reversed(ranks)}
    for measurement in first.values():
        takes: list[Take] = measurement.takes
        counted = [take.network_bytes for take in takes if take.network_bytes is not None]
        if not counted:
            return None
        sent += statistics.median(counted)
    return sent / len(ranks)


def _peak(measurement: Measurement, column: str) -> int | None:
    values = [take.memory[column] for take in measurement.takes if column in take.memory]
    return max(values) if values else None


def _memory(ranks: Ranks, column: str) -> dict[str, Any]:
    """The largest rank's."""
    peaks = [_peak(measurement, column) for measurement in ranks]
    known = [peak for peak in peaks if peak is not None]
    if len(known) < len(peaks):
        reason = next((m.unavailable[column] for m in ranks if column in m.unavailable), "not read on every rank")
        return {"bytes": None, "rank": None, "meter": None, "reason": reason}
    return {"bytes": max(known), "rank": peaks.index(max(known)), "meter": ranks[0].meters[column], "reason": None}


def _by_kind(
    rank: int | None, tracked: Sequence[Tracked], predicted: Sequence[dict[str, int | None]], untracked: str
) -> dict[str, Any]:
    """Tracked and predicted, both of one rank: the one with the window's peak, or, where that is not known, the one with the
    largest sum."""
    known = [t.memory for t in tracked if t.memory is not None]
    reason = None
    if not known or len(known) < len(tracked):
        reason = next((t.reasons["memory"] for t in tracked if "memory" in t.reasons), untracked)
    if rank is None:
        rank = 0 if reason else max(range(len(known)), key=lambda one: sum(known[one].values()))
    return {
        "memory_by_kind": None if reason else {**known[rank], "rank": rank},
        "memory_by_kind_reason": reason,
        "memory_predicted": {**predicted[rank], "rank": rank},
    }


# --- FLOPs


def _flops(config: Config, tracked: Sequence[Tracked], untracked: str) -> dict[str, Any]:
    form = flops.closed_form(config)
    counted = [t.flops for t in tracked if t.flops is not None]
    if not counted or len(counted) < len(tracked):
        reason = next((t.reasons["flops"] for t in tracked if "flops" in t.reasons), untracked)
        if form is not None:
            return {"per_step": form, "meter": "closed form", "closed_form": form, "reason": None}
        return {"per_step": None, "meter": None, "closed_form": None, "reason": reason}
    return {"per_step": sum(counted), "meter": "torch FlopCounterMode, all ranks", "closed_form": form, "reason": None}


def _mfu(
    per_step: int | None, step_time: float | None, peak: tuple[float | None, str], rates: Sequence[float]
) -> dict[str, Any]:
    achieved = None if per_step is None or not step_time else per_step / step_time

    def share(of: float | None, meter: str, reason: str) -> dict[str, Any]:
        if achieved is None or of is None:
            return {"value": None, "peak": of, "meter": meter, "reason": reason}
        return {"value": achieved / of, "peak": of, "meter": meter, "reason": None}

    known, source = peak
    measured = sum(rates) if rates else None
    unknown = "FLOPs of a step are not known" if achieved is None else source
    return {
        "mfu": share(None if known is None else known * max(1, len(rates)), source, unknown),
        "mfu_calibrated": share(
            measured, "square matrix products in the compute dtype on all ranks at once", "not calibrated"
        ),
    }
