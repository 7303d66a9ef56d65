"""What a run of a sweep costs beyond its own steps, against one `torchrun` of a loop written by hand.

Targets: at most 0.8 s a run of two ranks after the first; at least 6x less than one torchrun.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CELLS = (2, 10)
REPEATS = 3
HAND_WRITTEN = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    optimizer.zero_grad()
    model(torch.randn(4, 32, 64)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def sweep_seconds(gate: str, cells: int, root: Path) -> tuple[float, float]:
    """(wall time of the whole command, the time its runs spent in their steps), of a sweep over `cells` data seeds."""
    folder = root / f"{gate}_{cells}"
    start = time.perf_counter()
    subprocess.run(
        [
            sys.executable, "-m", "distbench", "-m", "strategy=ddp", "steps=4", f"gate={gate}",
            "gate.fp64_reference=false", "checkpoint=off", f"seed.data=range({cells})", f"output_dir={folder}",
        ],
        cwd=root, check=True, capture_output=True,
    )  # fmt: skip
    wall = time.perf_counter() - start
    rows = [json.loads(line) for file in folder.glob("*/*/metrics.jsonl") for line in file.read_text().splitlines()]
    return wall, sum(row["step_seconds"] for row in rows)


def overhead(gate: str, root: Path) -> float:
    """Seconds that one more run adds to a sweep beyond its own steps: everything the command does for it is in it."""
    (short, short_steps), (long, long_steps) = (sweep_seconds(gate, cells, root) for cells in CELLS)
    return (long - long_steps - short + short_steps) / (CELLS[1] - CELLS[0])


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        (root / "by_hand.py").write_text(HAND_WRITTEN)
        torchrun = []
        seconds: dict[str, list[float]] = {"off": [], "default": []}
        for repeat in range(REPEATS):
            start = time.perf_counter()
            subprocess.run(
                [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "by_hand.py"],
                cwd=root, check=True, capture_output=True,
            )  # fmt: skip
            torchrun.append(time.perf_counter() - start)
            for gate, values in seconds.items():
                (root / str(repeat)).mkdir(exist_ok=True)
                values.append(overhead(gate, root / str(repeat)))
    by_hand = statistics.median(torchrun)
    print(f"\nwhat one more run of two ranks adds to a sweep beyond its own steps, median of {REPEATS}")
    print("  targets: at most 0.8 s, at least 6x less than torchrun")
    print(f"  one torchrun of a loop by hand            {by_hand:6.2f} s")
    for gate, label in (("off", "ungated run"), ("default", "gated run, baseline computed each time")):
        added = statistics.median(seconds[gate])
        print(f"  {label:<41} {added:6.2f} s   {by_hand / added:5.1f}x less")


if __name__ == "__main__":
    main()
