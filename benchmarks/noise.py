"""What a decision says of two configurations that are one and the same, and of two of which one takes a tenth longer.

    python benchmarks/noise.py [--sweeps 20] [--only same|slower] [--window long] [--repeats 5]

Targets: "no difference" in 19 of 20 sweeps of the first kind; the slower one found in the second. Repeats are interleaved;
the two configurations differ in a bucket size that holds all gradients either way.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
WIDTH, ROWS = 192, 512


STEPS = {"default": 40, "long": 260}
"""As many as a window has room for."""


def verdict(root: Path, slow: bool, window: str, repeats: int) -> tuple[str, float]:
    """(the decision's verdict on 26 against 25 MiB, how much longer it says 26 takes)."""
    subprocess.run(
        [
            sys.executable, "-m", "distbench", "-m", "strategy=ddp", "strategy.bucket_cap_mb=25,26",
            "model=custom", "model._target_=benchmarks.slowed.model", f"+model.kwargs={{width: {WIDTH}, slow: {slow}}}",
            f"model.input_shape=[{WIDTH}]", f"model.target_shape=[{WIDTH}]", f"global_batch={ROWS}",
            f"sweep.repeats={repeats}", "sweep.order=interleaved", f"window={window}", f"steps={STEPS[window]}",
            "window.track=false", "gate.fp64_reference=false",
            "checkpoint=off", f"output_dir={root}",
        ],
        cwd=REPO, check=True, capture_output=True,
    )  # fmt: skip
    (file,) = root.glob("*/decision.json")
    tree = json.loads(file.read_text())
    other = next(c for c in tree["candidates"] if not c["chosen"])
    if "no difference" in tree["why"]:
        ratio = other["versus_choice"]["value"]
        return "no difference", ratio if "=26" in other["name"] else 1 / ratio
    ratio = other["versus_choice"]["value"]
    return ("slower", ratio) if "=26" in other["name"] else ("faster", 1 / ratio)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--sweeps", type=int, default=20)
    parser.add_argument("--only", choices=("same", "slower"))
    parser.add_argument("--window", choices=STEPS, default="default")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    print(
        f"\n{options.sweeps} sweeps of two configurations x {options.repeats} repeats, window={options.window}, two ranks"
        "    target: 19 of 20"
    )
    for slow, what, wanted in ((False, "the same", "no difference"), (True, "a tenth slower", "slower")):
        if options.only not in (None, "slower" if slow else "same"):
            continue
        said: Counter[str] = Counter()
        ratios = []
        for _ in range(options.sweeps):
            with tempfile.TemporaryDirectory() as root:
                word, ratio = verdict(Path(root), slow, options.window, options.repeats)
            said[word] += 1
            ratios.append(ratio)
        ratios.sort()
        counts = ", ".join(f"{word} {count}" for word, count in said.most_common())
        print(
            f"  {what:<15} {said[wanted]:>2} of {options.sweeps} {wanted} ({counts}); ratio of step times "
            f"{ratios[0]:.3f} to {ratios[-1]:.3f}, median {ratios[len(ratios) // 2]:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
