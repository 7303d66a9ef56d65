"""What a rank leaves behind when it fails, and how the first failure is told from those it caused."""

from __future__ import annotations

import json
import os
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

LIBRARY_FRAMES = ("/distbench/", "/torch/", "/torch/distributed/")


def write_rank_failure(folder: RunFolder, rank: int, error: BaseException) -> dict[str, Any]:
    """Write `logs/failure_rank<r>.json` and return it. No collective, no process group: the peers may be gone."""
    failure = {
        "rank": rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time": time.time(),
        "type": type(error).__name__,
        "message": str(error),
        "user_error": isinstance(error, DistbenchError),
        "exit_code": int(error.exit_code) if isinstance(error, DistbenchError) else int(ExitCode.CRASHED),
        "status": (Status.oom if _is_out_of_memory(error) else Status.crashed).value,
        "traceback": _users_traceback(error),
        "full_traceback": "".join(traceback.format_exception(error)),
    }
    write_json(folder.logs / f"failure_{'baseline' if rank < 0 else f'rank{rank}'}.json", failure)
    return failure


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
