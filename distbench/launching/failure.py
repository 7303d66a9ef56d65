"""What a rank leaves behind when it fails, and how the first failure is told from those it caused."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import traceback
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

from distbench.errors import DistbenchError, ExitCode
from distbench.launching.heartbeat import DONE, Beat
from distbench.launching.stalls import Stall
from distbench.runs.files import write_json
from distbench.runs.folder import RunFolder, Status

LAST_LINES, LAST_BYTES = 12, 8192
"""Of a log, shown where a rank died without an error."""
NOISE = "USDT:"
"""What Kineto writes whenever a recording begins and ends."""
FATAL = "Fatal Python error"
"""What faulthandler begins with, where a signal ends the process."""


def write_rank_failure(folder: RunFolder, rank: int, error: BaseException) -> dict[str, Any]:
    """Write `logs/failure_rank<r>.json` and return it. No collective, no process group: the peers may be gone."""
    failure = {
        "rank": rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time": time.time(),
        "type": type(error).__name__,
        "message": _message(error),
        "reason": f"{_name(rank)}: {type(error).__name__}: {_message(error)}",
        "user_error": isinstance(error, DistbenchError),
        "exit_code": int(error.exit_code) if isinstance(error, DistbenchError) else int(ExitCode.CRASHED),
        "status": _status(error).value,
        "lost_peer": _is_lost_peer(error),
        "traceback": _users_traceback(error),
        "full_traceback": "".join(traceback.format_exception(error)),
    }
    write_json(_failure_path(folder, rank), failure)
    return failure


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as own:
        return f"(its __str__ raises {type(own).__name__})"


def root_failure(
    folder: RunFolder,
    ranks: list[tuple[int, int]],
    num_ranks: int,
    beats: Mapping[int, Beat] | None = None,
    stall: Stall | None = None,
    out_of_memory: bool = False,
    lost: Sequence[str] = (),
) -> dict[str, Any]:
    """The failure that the others follow from, where it was, and whom it took with it.

    `ranks`: (rank, exit code) as far as the agent saw them, -1 for the baseline. `beats`: where each rank was.
    `out_of_memory`: whether the kernel has killed for want of memory meanwhile. `lost`: nodes that do not answer any more.
    """
    beats = beats or {}
    failure = _hung(stall) if stall is not None else _cause(folder, ranks, num_ranks, out_of_memory, lost)
    beat = beats.get(failure["rank"]) if stall is None else stall.beat
    others = (set(beats) or {rank for rank, _ in ranks}) - {failure["rank"], -1}
    return {
        **failure,
        "host": failure.get("host") or socket.gethostname(),
        "step": None if beat is None else beat.step,
        "phase": None if beat is None else beat.phase,
        "ended_with_it": sorted(rank for rank in others if rank not in beats or beats[rank].phase != DONE),
        "ranks": {str(rank): str(beat) for rank, beat in sorted(beats.items())},
    }


def _hung(stall: Stall) -> dict[str, Any]:
    return _without_traceback(stall.rank, "Stall", stall.message, Status.hung) | {"lines": list(stall.lines)}


def _without_traceback(rank: int, kind: str, message: str, status: Status) -> dict[str, Any]:
    return {
        "rank": rank,
        "time": time.time(),
        "type": kind,
        "message": message,
        "reason": message,
        "user_error": False,
        "exit_code": int(ExitCode.CRASHED),
        "status": status.value,
        "traceback": None,
    }


def _cause(
    folder: RunFolder, ranks: list[tuple[int, int]], num_ranks: int, out_of_memory: bool, lost: Sequence[str]
) -> dict[str, Any]:
    """The earliest failure that a rank wrote, unless it says only that a peer is gone while some rank wrote nothing. That
    one was killed: whoever raises writes first."""
    first, codes = first_failure(folder), dict(ranks)
    everyone = [-1] if -1 in codes else range(num_ranks)
    silent = [rank for rank in everyone if not _failure_path(folder, rank).exists()]
    if first is not None and not (first["lost_peer"] and silent):
        return first
    # SIGTERM is how the agent ends the rest.
    silent = [rank for rank in silent if codes.get(rank) not in (None, -signal.SIGTERM)] or silent or [0]
    names = [_name(rank) for rank in silent]
    code, words = codes.get(silent[0]), _last_words(folder, silent[0])
    fatal = next((line for line in words if line.startswith(FATAL)), None) if code is None else None
    ending = fatal or _ending(code, out_of_memory)
    if lost:
        ending = f"{', '.join(lost)} does not answer any more"
    message = f"{'one of ' * (len(names) > 1)}{', '.join(names)} died without an error: {ending}"
    status = Status.oom if out_of_memory and code in (None, -signal.SIGKILL) else Status.crashed
    return _without_traceback(silent[0], "RankDied", message, status) | {"lines": words}


def _last_words(folder: RunFolder, rank: int) -> list[str]:
    """The end of a rank's log: what native code says before it aborts, and then where Python was."""
    try:
        with (folder.logs / f"{_file_name(rank)}.log").open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    lines = [line for line in lines if line.strip() and not line.startswith(NOISE)]
    fatal = max((index for index, line in enumerate(lines) if line.startswith(FATAL)), default=None)
    if fatal is None:
        return lines[-LAST_LINES:]
    # The main thread's stack is the last one.
    main = max((index for index, line in enumerate(lines) if "hread 0x" in line), default=fatal)
    return [*lines[max(0, fatal - 1) : fatal + 1], *lines[max(main, fatal + 1) :]][:LAST_LINES]


def _file_name(rank: int) -> str:
    return "baseline" if rank < 0 else f"rank{rank}"


def _ending(code: int | None, out_of_memory: bool) -> str:
    """An exit code as multiprocessing gives it (negative for a signal; None: not seen), in words."""
    if code == 0:
        return "exit code 0, before it was done: os._exit, or a library that calls it"
    if code is not None and code > 0:
        return f"exit code {code}"
    how = "killed" if code is None else f"killed by signal {-code} ({signal.Signals(-code).name})"
    if out_of_memory and code in (None, -signal.SIGKILL):
        return f"{how} while the kernel killed for want of memory: a smaller model, batch or number of ranks needs less"
    if code == -signal.SIGKILL:
        return f"{how}, not for want of memory as far as the kernel says: a scheduler or a person does this"
    return how


def _name(rank: int) -> str:
    return "the baseline" if rank < 0 else f"rank {rank}"


def _failure_path(folder: RunFolder, rank: int) -> Path:
    return folder.logs / f"failure_{_file_name(rank)}.json"


def _status(error: BaseException) -> Status:
    if _is_out_of_memory(error):
        return Status.oom
    return Status.hung if _is_timeout(error) else Status.crashed


def _is_timeout(error: BaseException) -> bool:
    """Whether a collective has waited for a peer as long as it may."""
    late = ("Timed out waiting", "Watchdog caught collective operation timeout", "wait timeout after")
    return isinstance(error, RuntimeError) and any(words in _message(error) for words in late)


def _is_lost_peer(error: BaseException) -> bool:
    """Whether an error says no more than that another rank could not be reached."""
    gone = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed")
    return isinstance(error, RuntimeError) and any(words in _message(error) for words in gone)


def _is_out_of_memory(error: BaseException) -> bool:
    import torch

    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in _message(error)


def _users_traceback(error: BaseException) -> str:
    """The traceback from the first frame that is neither ours nor torch's; the whole one where there is none."""
    frame: TracebackType | None = error.__traceback__
    while frame is not None and _is_library(frame.tb_frame.f_code.co_filename):
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame or error.__traceback__))


def _is_library(filename: str) -> bool:
    package = str(Path(__file__).resolve().parents[1])
    return filename.startswith(package) or "/site-packages/torch/" in filename


def clear_failures(folder: RunFolder) -> None:
    """Forget the failures of an attempt that is made again."""
    for file in folder.logs.glob("failure_*.json"):
        file.unlink()


def put_aside(folder: RunFolder) -> None:
    """Keep what a failed attempt left, its logs with it, under logs/failed_N, out of the way of the next."""
    evidence = ("failure*.json", "stall.json", "stacks_rank*", "collectives_rank*")
    files = sorted(file for pattern in evidence for file in folder.logs.glob(pattern))
    if not files:
        return
    files += sorted(folder.logs.glob("*.log"))
    number = next(n for n in count(1) if not (folder.logs / f"failed_{n}").exists())
    aside = folder.logs / f"failed_{number}"
    aside.mkdir()
    for file in files:
        file.replace(aside / file.name)


def first_failure(folder: RunFolder) -> dict[str, Any] | None:
    """The earliest failure that a rank wrote: later ones are its consequences."""
    failures = []
    for file in folder.logs.glob("failure_*.json"):
        try:
            failures.append(json.loads(file.read_text()))
        except (OSError, ValueError):
            continue  # a rank was killed while it wrote; another one's, or its signal, tells the story
    return min(failures, key=lambda failure: failure["time"], default=None)
