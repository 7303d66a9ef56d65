"""How fast two safetensors files are compared, beside what the same machine needs to read them at all.

    python benchmarks/diff_files.py [--gib 2] [--repeats 5] [--dtype float32] [--identical]

Writes two files of that size to a temporary folder (TMPDIR says where) and removes them. All ways take turns in
one process, so that whatever else the machine does hits them alike; figures are medians. Both files are read
once before, so they come from the page cache if it has room for them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from distbench.numerics.compare import compare_files

GIB = 2**30
NUM_TENSORS = 32


def write_pair(folder: Path, size: int, dtype: torch.dtype, identical: bool) -> tuple[Path, Path]:
    """Two files of `size` bytes each, of equally large tensors that differ in one element of a hundred."""
    generator = torch.Generator().manual_seed(0)
    rows = size // dtype.itemsize // NUM_TENSORS // 4096
    tensors = {f"layers.{i}.weight": torch.randn(rows, 4096, generator=generator).to(dtype) for i in range(NUM_TENSORS)}
    a, b = folder / "a.safetensors", folder / "b.safetensors"
    save_file(tensors, a)
    if not identical:
        for tensor in tensors.values():
            tensor.view(-1)[::97] *= 1.01
    save_file(tensors, b)
    return a, b


def read_and_sum(a: Path, b: Path) -> None:
    """The least that any comparison must do: look at every element of both files."""
    for path in (a, b):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                file.get_tensor(name).sum().item()


def load_and_compare(a: Path, b: Path) -> None:
    """What one writes by hand: both files loaded, `allclose` and three norms a tensor."""
    tensors_a, tensors_b = load_file(a), load_file(b)
    for name, x in tensors_a.items():
        y = tensors_b[name]
        torch.allclose(x, y)
        for tensor in (x, y, x - y):
            torch.linalg.vector_norm(tensor).item()


def resident(kind: str) -> int:
    """Resident bytes of this process: `RssAnon` is its own memory, `RssFile` its share of the page cache."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith(kind))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gib", type=float, default=2.0, help="size of each file")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="float32", choices=["float64", "float32", "bfloat16", "float16"])
    parser.add_argument("--identical", action="store_true", help="compare two files of the same content")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="diff_files_") as folder:
        a, b = write_pair(Path(folder), int(options.gib * GIB), getattr(torch, options.dtype), options.identical)
        grown = {"RssAnon": 0, "RssFile": 0}
        before: dict[str, int] = {}

        def compare(fused: bool) -> Callable[[], None]:
            def run() -> None:
                before.update({kind: resident(kind) for kind in grown})
                compare_files(a, b, fused=fused, progress=watch)

            return run

        def watch(done: int, total: int) -> None:
            for kind in grown:
                grown[kind] = max(grown[kind], resident(kind) - before[kind])

        ways: dict[str, Callable[[], None]] = {
            "read and sum both files": lambda: read_and_sum(a, b),
            "compare_files": compare(fused=True),
            "compare_files, NumPy only": compare(fused=False),
            "load, allclose and norms": lambda: load_and_compare(a, b),
        }
        read_and_sum(a, b)
        started = time.perf_counter()
        compare_files(a, b, fused=True)
        cold = time.perf_counter() - started
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(options.repeats):
            for name, way in ways.items():
                started = time.perf_counter()
                way()
                seconds[name].append(time.perf_counter() - started)

    size = 2 * options.gib * GIB
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    least = medians["read and sum both files"]
    print(f"two {options.dtype} files of {options.gib:g} GiB, {torch.get_num_threads()} threads")
    print(f"{'':28}{'seconds':>9}{'spread':>16}{'GB/s':>8}{'of read and sum':>17}")
    for name, median in medians.items():
        spread = f"{min(seconds[name]):.2f} to {max(seconds[name]):.2f}"
        print(f"{name:28}{median:9.3f}{spread:>16}{size / median / 1e9:8.2f}{least / median:17.2f}")
    by_hand = medians["load, allclose and norms"] / medians["compare_files"]
    print(f"compare_files is {by_hand:.1f} times as fast as loading both; first call, importing numba: {cold:.2f} s")
    print(
        "memory while comparing, beyond that before: "
        f"{grown['RssAnon'] / 2**20:.0f} MiB of its own, {grown['RssFile'] / 2**20:.0f} MiB of mapped page cache"
    )


if __name__ == "__main__":
    main()
