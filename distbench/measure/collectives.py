"""Collectives of the window: which, how many bytes, how long in transfer, how long waiting for a late peer."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distbench.measure.flight import Entry
from distbench.measure.recorder import Recording, Span
from distbench.measure.traffic import SENT, on_wire, sent

DISPATCHED = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "broadcast_": "broadcast",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "barrier": "barrier",
}
"""c10d's operators, by what they mean."""


Key = tuple[str | None, str, str, int]
"""Operation (None: not known), the backend's, dtype, group size."""


@dataclass(frozen=True)
class Call:
    """One collective of one rank, in a measured step."""

    step: int
    backend_op: str
    dtype: str
    ranks: tuple[int, ...]
    buffer_bytes: int
    """Of the whole buffer: an all-gather's output, everything else's input."""
    seconds: float | None
    """Execution on the backend's thread, waiting for late peers included, queueing not; None where it has no clock."""


def is_collective(span: Span) -> bool:
    return span.name.startswith("gloo:") or (span.device and span.name.startswith(("ncclDevKernel", "ncclKernel")))


def dispatched(recording: Recording) -> list[str]:
    """The meaning of each collective of a fully recorded step, in order, barriers left out."""
    names = [span.name.removeprefix("c10d::") for span in recording.spans if span.name.startswith("c10d::")]
    found = [DISPATCHED.get(name, name) for name in names]
    return [name for name in found if name != "barrier"]


def calls(
    recording: Recording,
    entries: Sequence[Entry],
    steps: Sequence[tuple[int, int]],
    members: dict[str, tuple[int, ...]],
) -> list[Call]:
    """Match the recorder's intervals with the flight recorder's sizes: both have every collective, in order.

    `steps`: the intervals of the measured steps. `members`: ranks of each group. Collectives outside the steps are
    left out.
    """
    spans = [span for span in recording.spans if is_collective(span) and not span.name.endswith(":barrier")]
    known = [entry for entry in entries if entry.backend_op != "barrier"]
    timed = len(spans) == len(known)
    found: list[Call] = []
    if timed:
        placed = [_step_of(span.start, steps) for span in spans]
    else:  # sizes without times: as many in each step, so divide them evenly
        placed = [_share(index, len(known), len(steps)) for index in range(len(known))]
    for index, entry in enumerate(known):
        step = placed[index]
        if step is None:
            continue
        seconds = (spans[index].end - spans[index].start) / 1e9 if timed else None
        size = entry.output_bytes if entry.backend_op == "all_gather" else entry.input_bytes
        dtype = str(entry.dtype).removeprefix("torch.")
        found.append(Call(step, entry.backend_op, dtype, members.get(entry.group, ()), size, seconds))
    return found


def _step_of(time: int, steps: Sequence[tuple[int, int]]) -> int | None:
    return next((index for index, (start, end) in enumerate(steps) if start <= time < end), None)


def _share(index: int, total: int, steps: int) -> int | None:
    """The absorbed step's come first and belong to no measured one."""
    place = index * (steps + 1) // total - 1
    return None if place < 0 else place


def _meaning(backend_op: str, backend: str | None) -> str | None:
    """What was asked for, where the backend's own name of it says so."""
    return None if backend_op in {on_wire(op, backend) for op in SENT if on_wire(op, backend) != op} else backend_op


def rows(
    windows: Sequence[Sequence[Sequence[Call]]], meanings: Sequence[str], steps: int, backend: str | None
) -> list[dict[str, Any]]:
    """The record's `collectives`: per step, medians over all measured steps.

    `windows`: for each window every rank's calls, in rank order. `meanings`: of one step's collectives, in order (empty
    where not known). `steps`: measured steps of a window.
    """
    samples: dict[Key, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for ranks in windows:
        for step in range(steps):
            found: dict[Key, dict[str, float]] = defaultdict(lambda: defaultdict(float))
            here = [[call for call in own if call.step == step] for own in ranks]
            for position, call in enumerate(here[0]):
                peers = {rank: own[position] for rank, own in enumerate(here) if position < len(own)}
                same = [peers[rank].seconds for rank in call.ranks or peers if rank in peers]
                meaning = meanings[position] if len(meanings) == len(here[0]) else _meaning(call.backend_op, backend)
                row = found[meaning, call.backend_op, call.dtype, len(call.ranks)]
                row["calls"] += 1
                row["buffer_bytes"] += call.buffer_bytes
                times = [seconds for seconds in same if seconds is not None]
                if times and len(times) == len(same):
                    row["transfer"] += min(times)
                    row["wait"] += max(times) - min(times)
                else:
                    row["untimed"] += 1
            for key, row in found.items():
                for name in ("calls", "buffer_bytes", "transfer", "wait", "untimed"):
                    samples[key][name].append(row[name])
    return [
        _row(key, {name: statistics.median(values) for name, values in row.items()}) for key, row in samples.items()
    ]


def _row(key: Key, row: dict[str, float]) -> dict[str, Any]:
    op, backend_op, dtype, size = key
    timed = row["untimed"] == 0 and row["transfer"] > 0
    algbw = row["buffer_bytes"] / row["transfer"] / 1e9 if timed else None
    return {
        "op": op,
        "backend_op": backend_op,
        "dtype": dtype,
        "group_size": size,
        "calls": row["calls"],
        "buffer_bytes": row["buffer_bytes"],
        "op_reason": None if op else f"not tracked: an {backend_op} of this backend may stand for something else",
        "logical_bytes": sent(op, row["buffer_bytes"], size) if op in SENT else None,
        "wire_bytes": sent(backend_op, row["buffer_bytes"], size) if backend_op in SENT else None,
        "transfer": row["transfer"] if timed else None,
        "wait": row["wait"] if timed else None,
        "algbw": algbw,
        "busbw": None if algbw is None or op not in SENT else algbw * SENT[op] * (size - 1) / size,
        "reason": None if timed else "the backend's recorder has no times for these",
    }
