"""`distbench doctor`: what this machine can run, and what to do about what it cannot."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from distbench.runs.text import readable_bytes

GOOD, MISSING = "ok", "--"
ROOM_BYTES, SHM_BYTES = 2 * 2**30, 64 * 2**20
EMULATED = 0.5
"""A dtype whose matrix products are slower than so much of fp32's has no hardware here."""


@dataclass(frozen=True)
class Line:
    """One thing, whether it is there, and the remedy where it is not."""

    what: str
    said: str
    remedy: str | None = None

    @property
    def good(self) -> bool:
        return self.remedy is None


def examine(output_dir: Path) -> Iterator[tuple[str, list[Line]]]:
    """(heading, its lines)."""
    yield "machine", [_processor(), _memory(), _shared_memory(), _room(output_dir)]
    yield "software", [_python(), *(_package(name) for name in ("torch", "hydra-core", "safetensors", "tensorboard"))]
    yield "devices", [_cpu(), _cuda()]
    yield "backends", [_gloo(), _nccl()]
    yield "precisions", list(_precisions())
    yield "meters", list(_meters())
    yield "launch", [_local(), _testbed(), _slurm(), *_sweepers()]


def _processor() -> Line:
    from distbench.runs.environment import environment

    cores = len(os.sched_getaffinity(0))
    said = f"{environment()['cpu'] or platform.machine()}, {cores} cores"
    return Line("processor", said, None if cores > 1 else "ranks of one core take turns: step times are of little use")


def _memory() -> Line:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Line("memory", readable_bytes(total))


def _shared_memory() -> Line:
    try:
        size = shutil.disk_usage("/dev/shm").total
    except OSError as error:
        return Line(
            "/dev/shm", error.strerror or "not there", "mount a tmpfs there: NCCL and data workers share memory in it"
        )
    remedy = "enlarge it (docker run --shm-size=1g): NCCL and data workers share memory in it"
    return Line("/dev/shm", readable_bytes(size), None if size > SHM_BYTES else remedy)


def _room(output_dir: Path) -> Line:
    """Of the nearest folder that is there."""
    place = output_dir.resolve()
    while not place.exists():
        place = place.parent
    what = f"output_dir={output_dir}"
    if not os.access(place, os.W_OK | os.X_OK):
        return Line(what, f"{place} cannot be written", "set output_dir=... to a folder of yours")
    free = shutil.disk_usage(place).free
    return Line(
        what, f"{readable_bytes(free)} free", None if free > ROOM_BYTES else "checkpoints may not fit: make room"
    )


def _python() -> Line:
    return Line("Python", platform.python_version())


def _package(name: str) -> Line:
    return Line(name, version(name))


def _cpu() -> Line:
    return Line("cpu", "always there: device=cpu")


def _cuda() -> Line:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return Line("cuda", f"{len(names)} x {', '.join(dict.fromkeys(names))}")
    if torch.version.cuda is None:
        return Line("cuda", "this torch was built without CUDA", "install torch's CUDA build to use a GPU")
    return Line(
        "cuda", f"torch has CUDA {torch.version.cuda}, and sees no GPU", "look at nvidia-smi, and CUDA_VISIBLE_DEVICES"
    )


def _gloo() -> Line:
    import torch.distributed as dist

    there = dist.is_available() and dist.is_gloo_available()
    return Line("gloo", "for device=cpu", None) if there else Line("gloo", "not in this torch", "install another build")


def _nccl() -> Line:
    import torch.distributed as dist

    there = dist.is_available() and dist.is_nccl_available()
    return (
        Line("nccl", "for device=cuda") if there else Line("nccl", "not in this torch", "comes with torch's CUDA build")
    )


def _precisions() -> Iterator[Line]:
    """Rates of small matrix products on one core, against fp32's."""
    from distbench.precision import DTYPES
    from distbench.preflight import flops_per_second

    yield Line("fp32", "always there")
    base = flops_per_second(DTYPES["fp32"])
    for name in ("bf16", "fp16"):
        ratio = flops_per_second(DTYPES[name]) / base
        slow = f"emulated on this CPU: use a small model for precision={name}, or a GPU"
        yield Line(name, f"on the CPU {ratio:.2g}x fp32's speed", None if ratio > EMULATED else slow)


def _meters() -> Iterator[Line]:
    import torch

    from distbench.measure import flight, recorder
    from distbench.measure.memory import HighWater

    yield _meter(
        "CPU tensor peak", recorder.scopes_alone(), "measured, but the meters cost more: see the window's overhead"
    )
    yield _meter(
        "resident set (VmHWM)", HighWater().available(), "run where /proc is writable; it is a cross-check only"
    )
    yield _meter(
        "collectives (flight recorder)", flight.unavailable(), "use the torch version that docs/window.md names"
    )
    there = torch.cuda.is_available()
    yield _meter("CUDA allocator", None if there else "no GPU", "needs device=cuda")


def _meter(what: str, why_not: str | None, remedy: str) -> Line:
    return Line(what, "available") if why_not is None else Line(what, why_not, remedy)


def _local() -> Line:
    return Line("launch=local", "always there; torchrun, too")


def _testbed() -> Line:
    from distbench.launching.testbed import why_not

    if why := why_not():
        return Line("launch=testbed", why, "run it on Linux as root; launch=local needs nothing")
    if why := why_not(delay=True):
        return Line("launch=testbed", f"without delay_ms: {why}", "make /dev/net/tun available to have delays")
    return Line("launch=testbed", "hosts and links can be made here")


def _slurm() -> Line:
    what = "hydra/launcher=distbench_slurm"
    if find_spec("hydra_plugins.hydra_submitit_launcher") is None:
        return Line(what, "hydra-submitit-launcher is not installed", "pip install 'distbench[slurm]'")
    if shutil.which("sbatch") is None:
        return Line(what, "there is no sbatch here", "run it where jobs are submitted from")
    return Line(what, "installed, with sbatch")


def _sweepers() -> Iterator[Line]:
    for package, option in (
        ("hydra-optuna-sweeper", "hydra/sweeper=optuna"),
        ("hydra-joblib-launcher", "hydra/launcher=joblib"),
    ):
        try:
            yield Line(option, f"{package} {version(package)}")
        except PackageNotFoundError:
            yield Line(option, "not installed", f"pip install {package}")
