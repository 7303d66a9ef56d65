"""What the record says about the machine and the software. Parent side: nothing here imports torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from distbench import __version__

PACKAGES = ("torch", "hydra-core", "omegaconf", "tensorboard", "safetensors", "numpy", "numba")
VARIABLES = (
    "NCCL_",
    "GLOO_",
    "TORCH_",
    "CUDA_",
    "OMP_",
    "MKL_",
    "PYTORCH_",
    "SLURM_JOB_ID",
    "SLURM_NODELIST",
    "SLURM_RESTART_COUNT",
)


@cache
def environment() -> dict[str, Any]:
    """Versions, machine, git commit, and the environment variables that steer torch, Gloo, NCCL and OpenMP."""
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "distbench": __version__,
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "host": platform.node(),
        "git": _git(),
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)},
    }


started_by: str | None = None
"""The command line that this process works for, where that is another one's: a job's, of a sweep."""


def launch_command() -> str:
    """The command line of this run, as one could type it again."""
    if started_by is not None:
        return started_by
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name.split(".")[0] == "distbench":
        return shlex.join(["python", "-m", "distbench", *sys.argv[1:]])
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)


def _git() -> dict[str, Any] | None:
    """The working directory's repository (the name of its folder), its commit and whether it was dirty; None outside one."""

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    if commit is None:
        return None
    top = git("rev-parse", "--show-toplevel")
    return {
        "repository": Path(top).name if top else None,
        "commit": commit,
        "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
    }
