"""What the gate adds to a run whose baseline is cached.

Target: at most two step times plus 0.3 s on top of the same run ungated.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

REPEATS = 7
MODEL = ["model.hidden_dim=256", "model.seq_len=64", "global_batch=16", "steps=6", "checkpoint=off"]


def main() -> None:
    print(
        f"\nthe gate on a run with a cached baseline, median of {REPEATS} interleaved pairs    target: 2 steps + 0.3 s"
    )
    for strategy in ("ddp", "fsdp2"):
        with tempfile.TemporaryDirectory() as temporary:
            root = Path(temporary)
            tags = ",".join(f"r{number}" for number in range(REPEATS + 1))
            subprocess.run(
                [
                    sys.executable, "-m", "distbench", "-m", f"strategy={strategy}", *MODEL, f"+fault.kwargs.tag={tags}",
                    "gate=default,off", "gate.fp64_reference=false", f"output_dir={root}",
                ],
                cwd=root, check=True, capture_output=True,
            )  # fmt: skip
            seconds: dict[str, list[float]] = {"default": [], "off": []}
            steps = []
            last = None
            for file in sorted(root.glob("*/*/record.json")):
                record = json.loads(file.read_text())
                end = file.stat().st_mtime
                if last is not None:
                    seconds[record["config"]["gate"]["name"]].append(end - last)
                last = end
                steps.append(record["result"]["step_seconds_median"])
            step = statistics.median(steps)
            extra = statistics.median(seconds["default"]) - statistics.median(seconds["off"])
            print(
                f"  {strategy:<6} step {step * 1e3:6.1f} ms   gate adds {extra:5.2f} s   allowed {2 * step + 0.3:5.2f} s"
            )


if __name__ == "__main__":
    main()
