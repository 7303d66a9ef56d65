"""Cost of a gradient summary, as multiples of `torch.nn.utils.get_total_norm` on the same gradients.

    python benchmarks/gradient_summary.py [--elements 64000000] [--rounds 9]

Both are measured alternately in one process and with the same number of threads, so that a busy machine slows
both; the table shows medians, and the quartiles of the ratios of neighbours.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from distbench.models.simple import SimpleTransformer
from distbench.numerics.shards import Shard
from distbench.numerics.summary import prepare, summarize

TARGET = 8.0
"""Times the norm, for float32 (issue 3)."""


def gradients(elements: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Layers of a transformer block of width 1024: large matrices and small vectors."""
    shapes = [(1024, 1024), (1024,), (4096, 1024), (4096,), (1024, 4096), (1024,)]
    made: list[torch.Tensor] = []
    while elements > 0:
        rows, *rest = shapes[len(made) % len(shapes)]
        made.append(torch.randn(min(rows, -(-elements // (rest[0] if rest else 1))), *rest).mul_(1e-3).to(dtype))
        elements -= made[-1].numel()
    return made


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def alternate(rounds: int, *functions: Callable[[], object]) -> list[list[float]]:
    """Seconds of each function in each round, after a round to warm up."""
    times = [[seconds(function) for function in functions] for _ in range(rounds + 1)]
    return [list(column) for column in zip(*times[1:], strict=True)]


def measure(tensors: list[torch.Tensor], ranks: int, rounds: int) -> str:
    """One row of the table: milliseconds of both, ratio of the medians, quartiles of the ratios."""
    shards = [_shard(f"layer.{i}", tensor, ranks) for i, tensor in enumerate(tensors)]
    norms, summaries = alternate(rounds, lambda: torch.nn.utils.get_total_norm(tensors), lambda: summarize(shards))
    norm, summary = statistics.median(norms), statistics.median(summaries)
    low, _, high = statistics.quantiles([s / n for s, n in zip(summaries, norms, strict=True)], n=4)
    return f"{1e3 * norm:>8.1f} {1e3 * summary:>10.1f} {summary / norm:>6.2f}  {low:>5.2f} .. {high:.2f}"


def _shard(name: str, tensor: torch.Tensor, ranks: int) -> Shard:
    """The tensor, or the tensor as one rank's columns of a matrix `ranks` times as wide."""
    if ranks == 1 or tensor.dim() < 2:
        return Shard.whole(name, tensor)
    return Shard.along(name, tensor, (tensor.shape[0], ranks * tensor.shape[1]), 1, 0)


def share_of_a_step(elements: int, rounds: int) -> str:
    """A summary against a training step of a model of about that many parameters on 512 tokens."""
    model = SimpleTransformer(round(elements / (9 * 1024**2)), 1024)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(4, 128, 1024)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    step()
    shards = [Shard.whole(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    steps, summaries = alternate(rounds, step, lambda: summarize(shards))
    share = statistics.median(summaries) / statistics.median(steps)
    return f"{1e3 * statistics.median(steps):8.0f} ms a step, of which a summary is {100 * share:.1f} %"


def first_call() -> float:
    """Seconds of the first call in a fresh process: importing numba, and loading kernels from its disk cache."""
    code = (
        "import time, torch; from distbench.numerics.summary import summarize;"
        "from distbench.numerics.shards import Shard; start = time.perf_counter();"
        "summarize([Shard.whole('w', torch.ones(100))]); print(time.perf_counter() - start)"
    )
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=64_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    prepare()

    millions = arguments.elements / 1e6
    print(f"{millions:.0f} million elements, torch {torch.__version__}, medians of {arguments.rounds} rounds")
    print(f"target for float32: a ratio of at most {TARGET}")
    print(f"{'gradients':>30} threads  norm ms summary ms  ratio  quartiles")
    for label, dtype, ranks in (
        ("float32", torch.float32, 1),
        ("bfloat16", torch.bfloat16, 1),
        ("float16", torch.float16, 1),
        ("float32, columns over 4 ranks", torch.float32, 4),
    ):
        tensors = gradients(arguments.elements, dtype)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            print(f"{label:>30} {threads:>7} {measure(tensors, ranks, arguments.rounds)}", flush=True)
    print("a training step of such a model, float32, 512 tokens, AdamW; target: at most 5 %")
    for threads in (1, 2):
        torch.set_num_threads(threads)
        print(f"{threads:>8} thread(s) {share_of_a_step(arguments.elements, arguments.rounds)}", flush=True)
    cold = statistics.median(first_call() for _ in range(3))
    print(f"first call of a process, kernels in the disk cache: {cold:.2f} s")


if __name__ == "__main__":
    main()
