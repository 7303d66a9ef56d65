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
from itertools import pairwise
from pathlib import Path

CELLS = 8
HAND_WRITTEN = '''
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
'''


def run_seconds(folder: Path) -> tuple[list[float], list[float]]:
    """(wall time between the ends of consecutive runs, their own step times), after the first run."""
    records = sorted(folder.glob("*/*/record.json"))
    ends = [file.stat().st_mtime for file in records]
    own = []
    for file in records:
        rows = [json.loads(line) for line in (file.parent / "metrics.jsonl").read_text().splitlines()]
        own.append(sum(row["step_seconds"] for row in rows))
    return [b - a for a, b in pairwise(ends)], own[1:]


def main() -> None:
    seeds = ",".join(str(seed) for seed in range(CELLS))
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        for gate in ("off", "default"):
            subprocess.run(
                [
                    sys.executable, "-m", "distbench", "-m", "strategy=ddp", "steps=4", f"gate={gate}",
                    "gate.fp64_reference=false", "checkpoint=off", f"seed.data={seeds}", f"output_dir={root / gate}",
                ],
                cwd=root, check=True, capture_output=True,
            )  # fmt: skip
        (root / "by_hand.py").write_text(HAND_WRITTEN)
        torchrun = []
        for _ in range(3):
            start = time.perf_counter()
            subprocess.run(
                [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "by_hand.py"],
                cwd=root, check=True, capture_output=True,
            )  # fmt: skip
            torchrun.append(time.perf_counter() - start)
        by_hand = statistics.median(torchrun)
        print(f"\na sweep's overhead, median of {CELLS - 1} runs of two ranks")
        print("  targets: at most 0.8 s, at least 6x less than torchrun")
        print(f"  one torchrun of a loop by hand            {by_hand:6.2f} s")
        for gate, label in (("off", "ungated run, beyond its steps"), ("default", "gated run, baseline computed each time")):
            gaps, own = run_seconds(root / gate)
            overhead = statistics.median(gap - steps for gap, steps in zip(gaps, own, strict=True))
            print(f"  {label:<41} {overhead:6.2f} s   {by_hand / overhead:5.1f}x less")


if __name__ == "__main__":
    main()
