"""What the window's meters cost, by the run's own reference steps: the default window on steps of about 100 ms.

Target: at most 2 % of a step.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

MODEL = ["model.hidden_dim=192", "model.seq_len=64", "global_batch=16"]
WINDOW = [
    "window=long",
    "window.repeats=6",
    "window.track=false",
    "steps=260",
    "gate.fp64_reference=false",
    "checkpoint=off",
]


def main() -> None:
    print("\nthe window's meters, two ranks, 120 metered steps against 120 reference steps    target: at most 2 %")
    with tempfile.TemporaryDirectory() as root:
        subprocess.run(
            [sys.executable, "-m", "distbench", "-m", "strategy=ddp,fsdp,fsdp2", *MODEL, *WINDOW, f"output_dir={root}"],
            cwd=root,
            check=True,
            capture_output=True,
        )
        for file in sorted(Path(root).glob("*/*/record.json")):
            record = json.loads(file.read_text())
            overhead, step = record["window"]["overhead"], record["window"]["step_time"]
            print(
                f"  {record['config']['strategy']['name']:<6} step {step['median'] * 1e3:6.1f} ms   meters "
                f"{overhead['median']:+7.2%}  (95 %: {overhead['low']:+.2%} to {overhead['high']:+.2%})"
            )


if __name__ == "__main__":
    main()
