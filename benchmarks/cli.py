"""How soon the command line answers: help and a refused configuration against `import hydra`.

Target: at most 0.5 s more; torch is not imported for either.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time

REPEATS = 7
CASES = {
    "import hydra": ["-c", "import hydra"],
    "--help": ["-m", "distbench", "--help"],
    "refused config": ["-m", "distbench", "model.hidden_dim=0"],
    "unknown override": ["-m", "distbench", "stratgy=fsdp"],
}


def main() -> None:
    seconds: dict[str, list[float]] = {name: [] for name in CASES}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(REPEATS):
            for name, words in CASES.items():  # interleaved, so that drift hits all alike
                start = time.perf_counter()
                subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, check=False)
                seconds[name].append(time.perf_counter() - start)
    base = statistics.median(seconds["import hydra"])
    print(f"\ncommand line, median of {REPEATS}    target: at most 0.5 s more than `import hydra`")
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"  {name:<18} {median:6.2f} s   {median - base:+.2f} s   {median / base:5.2f}x")


if __name__ == "__main__":
    main()
