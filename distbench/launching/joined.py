"""Ranks that torchrun (or any launcher that sets its variables) started.

Rank 0 composes with Hydra and publishes the frozen config and the run folder through the rendezvous store; the other
ranks never run Hydra, they wait for it there. The store is the job's own, so nothing can be mistaken for another run's.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distbench.config import Config, from_container, to_container
from distbench.runs.folder import RunFolder

if TYPE_CHECKING:
    import torch.distributed as dist

    from distbench.numerics.cache import BaselineEntry

KEY = "distbench/run"
FAILED = "distbench/failed"
RELEASED = "distbench/released"

_published: list[str] = []
"""Folders of the runs that this process, as rank 0, has told the others of: at most one."""


def _store(timeout_s: float) -> dist.Store:
    import torch.distributed as dist

    store, _, _ = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s))))
    return store


def lead(config: Config, folder: RunFolder, baseline: BaselineEntry | None) -> int:
    """Rank 0: publish the run, then be its first rank. Returns this process's exit code."""
    store = _store(config.launch.timeout_s)
    message = {
        "config": to_container(config),
        "folder": str(folder.path.resolve()),
        "baseline": None if baseline is None else asdict(baseline),
    }
    store.set(KEY, json.dumps(message))
    _published.append(str(folder.path))
    return _be_rank(config, folder, store, baseline)


def release(exit_code: int) -> None:
    """Rank 0, when it is done: if it published no run, let the waiting ranks go, with its exit code."""
    if _published:
        return
    store = _store(60.0)
    store.set(KEY, json.dumps({"exit_code": exit_code}))
    # Without torchrun the store is this process's own, and is gone when it ends: first all must have read it.
    store.wait([f"{RELEASED}{rank}" for rank in range(1, int(os.environ["WORLD_SIZE"]))])


def follow() -> int:
    """Any other rank: wait for rank 0's run and be part of it. Returns this process's exit code."""
    store = _store(600.0)
    from distbench.numerics.cache import BaselineEntry

    message: dict[str, Any] = json.loads(store.get(KEY))
    if "exit_code" in message:
        store.set(f"{RELEASED}{os.environ['RANK']}", "")
        return int(message["exit_code"])
    baseline = None if message["baseline"] is None else BaselineEntry(**message["baseline"])
    return _be_rank(from_container(message["config"]), RunFolder(Path(message["folder"])), store, baseline)


def _be_rank(config: Config, folder: RunFolder, store: dist.Store, baseline: BaselineEntry | None) -> int:
    import torch.distributed as dist

    from distbench.errors import StaleBaseline
    from distbench.experiment import EXIT_CODES, run_rank
    from distbench.launching.failure import write_rank_failure
    from distbench.launching.worker import redirect_output
    from distbench.numerics.cache import discard

    rank = int(os.environ["RANK"])
    console = redirect_output(folder, f"rank{rank}")
    try:
        status = run_rank(
            config, folder, console=console, baseline=baseline, store=dist.PrefixStore("distbench/group", store)
        )
        sys.stdout = console  # what is said about the finished run is for the console again
    except Exception as error:
        if isinstance(error, StaleBaseline) and baseline is not None:
            discard(baseline.path)
            error.args = (f"{error}; it is discarded now: start the run again",)
        failure = write_rank_failure(folder, rank, error)
        if store.add(FAILED, 1) == 1:  # the first to fail speaks, once for all
            from distbench.experiment import record_failure

            record_failure(folder, failure, [])
            print(f"distbench: rank {rank}: {failure['traceback']}", file=console, flush=True)
        sys.stdout.flush()
        return int(failure["exit_code"])
    return EXIT_CODES[status]
