"""The baseline's own process: same threads, kernels and determinism as a rank, no process group."""

from __future__ import annotations

import faulthandler
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from distbench.build import set_determinism
from distbench.config import from_container, resolve_device
from distbench.launching.failure import write_rank_failure
from distbench.launching.signals import end_with_parent
from distbench.launching.worker import redirect_output
from distbench.numerics.baseline import compute_baseline
from distbench.runs.folder import RunFolder

BASELINE_RANK = -1
"""Stands for the baseline's process where a rank is named."""


def main(tree: dict[str, Any], folder: str, run: str, threads: int) -> None:
    """Compute a baseline into `folder`; a failure is left in the run folder like a rank's."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    redirect_output(RunFolder(Path(run)), "baseline")
    faulthandler.enable()
    try:
        config = from_container(tree)
        set_determinism(config, threads)
        device = torch.device("cuda", 0) if resolve_device(config) == "cuda" else torch.device("cpu")
        compute_baseline(config, Path(folder), device)
    except BaseException as error:
        write_rank_failure(RunFolder(Path(run)), BASELINE_RANK, error)
        sys.exit(1)
