"""The only place that reads torch's flight recorder (seen in torch 2.13): every collective of every process group with
its sizes and dtypes, in order. A ledger of bytes, not a clock: Gloo's entries have no times.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import torch

DTYPES = {
    "Float": torch.float32,
    "Double": torch.float64,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
}
"""The recorder's names (C++ scalar types)."""


@dataclass(frozen=True)
class Entry:
    """One collective as the backend was asked for it."""

    record: int
    backend_op: str
    """What the backend runs, such as `all_reduce`; Gloo's reduce-scatter appears as the all-reduce that it is."""
    group: str
    dtype: torch.dtype
    input_bytes: int
    output_bytes: int


def unavailable() -> str | None:
    """Why there is no flight recorder, or None."""
    module = getattr(torch._C, "_distributed_c10d", None)
    if module is None or not hasattr(module, "_dump_fr_trace_json"):
        return f"torch {torch.__version__} has no flight recorder for every backend"
    return None


def read(after: int = -1) -> tuple[list[Entry], str | None]:
    """Entries with record ids above `after`, in order, and why some are missing if the recorder's buffer overflowed."""
    if reason := unavailable():
        return [], reason
    raw = sorted((entry for entry in _dump() if entry["record_id"] > after), key=lambda e: e["record_id"])
    if raw and raw[0]["record_id"] > after + 1:
        lost = raw[0]["record_id"] - after - 1
        return [], f"the flight recorder lost {lost} collectives: set TORCH_FR_BUFFER_SIZE higher than {len(raw)}"
    return [_entry(item) for item in raw if not item["is_p2p"]], None


def last_record() -> int:
    """Record id of the latest collective, -1 before the first."""
    if unavailable():
        return -1
    return max((entry["record_id"] for entry in _dump()), default=-1)


def _dump() -> list[dict[str, Any]]:
    """The recorder's raw entries, its buffer's worth."""
    return list(json.loads(torch._C._distributed_c10d._dump_fr_trace_json(True, False)).get("entries", []))


def _entry(item: dict[str, Any]) -> Entry:
    inputs, outputs = _bytes(item, "input"), _bytes(item, "output")
    dtype = (item["input_dtypes"] or item["output_dtypes"] or ["Byte"])[0]
    return Entry(
        record=item["record_id"],
        backend_op=item["profiling_name"].partition(":")[2].removeprefix("_").removesuffix("_base"),
        group=item["process_group"][0],
        dtype=DTYPES[dtype],
        input_bytes=inputs,
        output_bytes=outputs,
    )


def _bytes(item: dict[str, Any], side: str) -> int:
    sizes, dtypes = item[f"{side}_sizes"], item[f"{side}_dtypes"]
    return sum(math.prod(size) * DTYPES[dtype].itemsize for size, dtype in zip(sizes, dtypes, strict=True))


def members() -> dict[str, tuple[int, ...]]:
    """Global ranks of each process group that this rank knows, by the recorder's name of it."""
    import torch.distributed as dist

    names = dist.distributed_c10d._world.pg_names
    return {name: tuple(dist.get_process_group_ranks(group)) for group, name in names.items()}


KEPT = 200
"""Collectives of a dump: what a rank did before it stopped moving."""


def dump() -> dict[str, Any]:
    """For a report on ranks that do not move: `groups` (name -> global ranks) and `entries`, the newest, each with its
    group, number in it, operation, dtype, shapes, and whether it has `ended`; or `reason`, why there are none."""
    if reason := unavailable():
        return {"groups": {}, "entries": [], "reason": reason}
    entries = [
        {
            "group": item["process_group"][0],
            "number": item["p2p_seq_id"] if item["is_p2p"] else item["collective_seq_id"],
            "operation": item["profiling_name"].partition(":")[2],
            "dtype": (item["input_dtypes"] or item["output_dtypes"] or ["-"])[0],
            "shapes": item["input_sizes"],
            "ended": item["retired"] or item["state"] == "completed",
        }
        for item in sorted(_dump(), key=lambda item: item["record_id"])[-KEPT:]
    ]
    return {"groups": {name: list(ranks) for name, ranks in members().items()}, "entries": entries, "reason": None}
