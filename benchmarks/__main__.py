"""Runs the benchmarks, each in a process of its own, one after another."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
NAMES = ("cli", "trainer", "sweep", "checkpoints", "gate", "window", "gradient_summary", "diff_files", "rank")


def main(argv: list[str]) -> int:
    """Run the named benchmarks, or all; the exit code says whether one could not be run."""
    unknown = [name for name in argv if name not in NAMES]
    if unknown:
        print(f"no benchmark {unknown[0]!r}; there are {', '.join(NAMES)}", file=sys.stderr)
        return 2
    failed = [
        name
        for name in argv or NAMES
        if subprocess.run([sys.executable, str(HERE / f"{name}.py")], cwd=HERE.parent, check=False).returncode
    ]
    if failed:
        print(f"could not be run: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
