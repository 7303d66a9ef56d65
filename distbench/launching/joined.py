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
from distbench.errors import ExitCode
from distbench.runs.folder import RunFolder

if TYPE_CHECKING:
    import torch.distributed as dist

    from distbench.numerics.cache import BaselineEntry

KEY = "distbench/run"
FAILED = "distbench/failed"


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
    return _be_rank(config, folder, store, baseline)


def refuse() -> None:
    """Rank 0, where there is nothing to run: let the waiting ranks go."""
    _store(60.0).set(KEY, json.dumps(None))


def follow() -> int:
    """Any other rank: wait for rank 0's run and be part of it. Returns this process's exit code."""
    store = _store(600.0)
    from distbench.numerics.cache import BaselineEntry

    message: dict[str, Any] | None = json.loads(store.get(KEY))
    if message is None:
        return ExitCode.USAGE
    baseline = None if message["baseline"] is None else BaselineEntry(**message["baseline"])
    return _be_rank(from_container(message["config"]), RunFolder(Path(message["folder"])), store, baseline)


def _be_rank(config: Config, folder: RunFolder, store: dist.Store, baseline: BaselineEntry | None) -> int:
    import torch.distributed as dist

    from distbench.experiment import run_rank
    from distbench.launching.failure import write_rank_failure
    from distbench.launching.worker import redirect_output

    rank = int(os.environ["RANK"])
    console = redirect_output(folder, f"rank{rank}")
    try:
        run_rank(config, folder, console=console, baseline=baseline, store=dist.PrefixStore("distbench/group", store))
    except Exception as error:
        failure = write_rank_failure(folder, rank, error)
        if store.add(FAILED, 1) == 1:  # the first to fail speaks, once for all
            from distbench.experiment import record_failure

            record_failure(folder, failure, [])
            print(f"distbench: rank {rank}: {failure['traceback']}", file=console, flush=True)
        sys.stdout.flush()
        return int(failure["exit_code"])
    return ExitCode.OK
