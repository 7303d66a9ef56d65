"""`python -m tests.fuzz`: damaged files for every reader. Exit code 1 where one is neither read nor refused by name.

A finding names its case: `--reader NAME --first CASE --number 1 --keep DIR` makes that file again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from tests.fuzz.harness import fuzz
from tests.fuzz.targets import TARGETS


def main(argv: list[str]) -> int:
    """Print a line a reader, and the first findings."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--number", type=int, default=200, help="files for each reader")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--reader", action="append", choices=list(TARGETS), help="default: all")
    parser.add_argument("--keep", type=Path, help="copy the folders of findings there")
    parser.add_argument("--json", type=Path, help="write all outcomes there")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)  # threads of this process would not be there in its children
    outcomes = []
    for name in options.reader or TARGETS:
        start = time.perf_counter()
        outcome = fuzz(TARGETS[name], options.number, options.seed, options.first, options.keep)
        outcomes.append(outcome)
        seconds = time.perf_counter() - start
        counts = f"{outcome.read:6} read {outcome.refused:6} refused {len(outcome.findings):4} findings"
        print(f"{name:<18}{counts} {seconds:8.1f} s", flush=True)
        for finding in outcome.findings[:10]:
            print(f"\n{name}, case {finding['case']}, seed {options.seed}:\n{finding['problem']}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes]))
    return int(any(outcome.findings for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
