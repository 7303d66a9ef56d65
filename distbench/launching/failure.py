"""What a rank leaves behind when it fails, and how the first failure is told from those it caused."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from distbench.errors import DistbenchError, ExitCode
from distbench.runs.files import write_json
from distbench.runs.folder import RunFolder, Status


def write_rank_failure(folder: RunFolder, rank: int, error: BaseException) -> dict[str, Any]:
    """Write `logs/failure_rank<r>.json` and return it. No collective, no process group: the peers may be gone."""
    failure = {
        "rank": rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time": time.time(),
        "type": type(error).__name__,
        "message": str(error),
        "reason": f"{_name(rank)}: {type(error).__name__}: {error}",
        "user_error": isinstance(error, DistbenchError),
        "exit_code": int(error.exit_code) if isinstance(error, DistbenchError) else int(ExitCode.CRASHED),
        "status": (Status.oom if _is_out_of_memory(error) else Status.crashed).value,
        "lost_peer": _is_lost_peer(error),
        "traceback": _users_traceback(error),
        "full_traceback": "".join(traceback.format_exception(error)),
    }
    write_json(_failure_path(folder, rank), failure)
    return failure


def root_failure(folder: RunFolder, ranks: list[tuple[int, int]], num_ranks: int) -> dict[str, Any]:
    """The failure that the others follow from: the earliest that a rank wrote, unless it says only that a peer is gone
    while some rank wrote nothing. That one was killed: whoever raises writes first.

    `ranks`: (rank, exit code) as far as the agent saw them, -1 for the baseline.
    """
    first, codes = first_failure(folder), dict(ranks)
    everyone = [-1] if -1 in codes else range(num_ranks)
    silent = [rank for rank in everyone if not _failure_path(folder, rank).exists()]
    if first is not None and not (first["lost_peer"] and silent):
        return first
    # SIGTERM is how the agent ends the rest.
    silent = [rank for rank in silent if codes.get(rank) not in (None, 0, -signal.SIGTERM)] or silent or [0]
    names = [_name(rank) for rank in silent]
    message = f"{'one of ' * (len(names) > 1)}{', '.join(names)} died without an error: {_ending(codes.get(silent[0]))}"
    return {
        "rank": silent[0],
        "time": time.time(),
        "type": "RankDied",
        "message": message,
        "reason": message,
        "user_error": False,
        "exit_code": int(ExitCode.CRASHED),
        "status": Status.crashed.value,
        "traceback": None,
    }


def _ending(code: int | None) -> str:
    """An exit code as multiprocessing gives it (negative for a signal; None: not seen), in words."""
    if code is not None and code >= 0:
        return f"exit code {code}"
    how = "killed" if code is None else f"killed by signal {-code} ({signal.Signals(-code).name})"
    hint = "; the kernel's out-of-memory killer does this, see `dmesg`" if code in (None, -signal.SIGKILL) else ""
    return how + hint


def _name(rank: int) -> str:
    return "the baseline" if rank < 0 else f"rank {rank}"


def _failure_path(folder: RunFolder, rank: int) -> Path:
    return folder.logs / f"failure_{'baseline' if rank < 0 else f'rank{rank}'}.json"


def _is_lost_peer(error: BaseException) -> bool:
    """Whether an error says no more than that another rank could not be reached."""
    gone = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed")
    return isinstance(error, RuntimeError) and any(words in str(error) for words in gone)


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


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


def first_failure(folder: RunFolder) -> dict[str, Any] | None:
    """The earliest failure that a rank wrote: later ones are its consequences."""
    failures = []
    for file in folder.logs.glob("failure_*.json"):
        try:
            failures.append(json.loads(file.read_text()))
        except (OSError, ValueError):
            continue  # a rank was killed while it wrote; another one's, or its signal, tells the story
    return min(failures, key=lambda failure: failure["time"], default=None)
