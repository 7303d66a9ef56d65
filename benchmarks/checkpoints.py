"""Checkpoints against safetensors' own writer and reader, on the same bytes and disk; what an asynchronous one holds up; how
soon a resumed run goes on.

Two ranks of fully_shard hold parameters and AdamW's moments; one process holds the same bytes whole. Rates are bytes over
wall seconds and ranks. Everything is interleaved, and files are removed and the disk is idle before each.
Targets: at least 0.8x of safetensors' rate; an asynchronous save holds the run up for at most 15 % of a synchronous one; a
resume is at its first step at most 1.5 s later than a fresh start.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from distbench.build import build_trainer, set_determinism
from distbench.checkpoint.keeping import Keeper
from distbench.checkpoint.sharded import load_shards, save_shards
from distbench.composing import compose
from distbench.config import Config, from_container, to_container
from distbench.launching import local
from distbench.launching.world import World
from distbench.runs.folder import RunFolder

RANKS, REPEATS, STARTS = 2, 9, 5
OVERRIDES = [
    *("model.hidden_dim=1024", "model.num_layers=4", "model.seq_len=4", "global_batch=2", "gate=off", "window=off"),
    *("checkpoint.every=1", "checkpoint.async_=true", "checkpoint.keep_last=1"),
]
CLI = ["strategy=fsdp2", "gate=off", "window=off", "checkpoint.every=2", "checkpoint.final=false"]


class Bench:
    """What one rank does, and how long it took."""

    def __init__(self, config: Config, world: World, root: Path) -> None:
        self.world, self.root = world, root
        self.trainer, _ = build_trainer(config, world)
        self.trainer.run(until=1)  # the optimizer has its moments
        self.keeper = Keeper(config, RunFolder.create(root / "run"), self.trainer)
        self.seconds: dict[str, list[float]] = {}
        save_shards(self.trainer, root / "sharded", {})
        shards = sorted((root / "sharded" / "step_00000001").glob("rank_*"))
        self.bytes = sum(file.stat().st_size for file in shards)
        self.part = {name: tensor.clone() for name, tensor in load_file(shards[world.rank]).items()}
        save_file(self.part, root / f"part{world.rank}")
        self.whole: dict[str, Tensor] = {}
        if world.rank == 0:
            self.whole = {f"{file.name}/{name}": t for file in shards for name, t in load_file(file).items()}
            self.whole = {name: tensor.clone() for name, tensor in self.whole.items()}
            save_file(self.whole, root / "whole")

    def timed(self, name: str, action: Callable[[], Any], alone: bool = False) -> None:
        """Seconds until all ranks have done it; `alone`: rank 0 does, the others wait."""
        if self.world.rank == 0:
            os.sync()
        self.world.barrier()
        began = time.perf_counter()
        if not alone or self.world.rank == 0:
            action()
        self.world.barrier()
        self.seconds.setdefault(name, []).append(time.perf_counter() - began)

    def repeat(self) -> None:
        root, sharded = self.root, self.root / "sharded"
        self.timed("save_file", lambda: save_file(self.whole, root / "new"), alone=True)
        self.remove(root / "new")
        self.timed("save_file, fsync", lambda: self.save_and_sync(self.whole, "new"), alone=True)
        self.remove(root / "new")
        mine = f"new{self.world.rank}"
        self.timed("save_file a rank, fsync", lambda: self.save_and_sync(self.part, mine))
        (root / mine).unlink()
        self.timed("save", lambda: save_shards(self.trainer, root / "new", {}))
        self.remove(root / "new")
        self.save_and_train_on()

        self.timed("load_file", lambda: load_file(root / "whole"), alone=True)
        self.timed("load_file, read", lambda: self.load_into(self.whole, "whole"), alone=True)
        self.timed("load_file a rank, read", lambda: self.load_into(self.part, f"part{self.world.rank}"))
        self.timed("load", lambda: load_shards(self.trainer, sharded / "step_00000001"))
        self.forget(root / "whole", *(sharded / "step_00000001").iterdir())
        self.timed("load_file, read, cold", lambda: self.load_into(self.whole, "whole"), alone=True)
        self.timed("load, cold", lambda: load_shards(self.trainer, sharded / "step_00000001"))

    def save_and_train_on(self) -> None:
        """As a run does it: what it was held up for, until the optimizer may step, is in its record."""
        before = self.blocked()
        self.keeper.save()
        self.trainer.run(until=self.trainer.step + 1)
        self.keeper.settle()
        self.seconds.setdefault("async", []).append(self.blocked() - before)

    def blocked(self) -> float:
        record = self.root / "run" / "record.json"
        return float(json.loads(record.read_text())["saving"]["blocked_seconds"]) if record.exists() else 0.0

    def save_and_sync(self, tensors: dict[str, Tensor], name: str) -> None:
        save_file(tensors, self.root / name)
        with (self.root / name).open("rb") as file:
            os.fsync(file.fileno())

    def load_into(self, tensors: dict[str, Tensor], name: str) -> None:
        """Into tensors that are there already, as a training run has them."""
        for key, tensor in load_file(self.root / name).items():
            tensors[key].copy_(tensor)

    def remove(self, path: Path) -> None:
        self.world.barrier()
        if self.world.rank == 0:
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def forget(self, *files: Path) -> None:
        """Nothing of them stays in memory."""
        self.world.barrier()
        if self.world.rank == 0:
            os.sync()
            for file in files:
                with file.open("rb") as opened:
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self.world.barrier()


def rank(tree: dict[str, Any], root: str, out: str) -> None:
    config = from_container(tree)
    world = World.join("cpu", 120.0, needs_group=True)
    set_determinism(config, 1)
    bench = Bench(config, world, Path(root))
    bench.repeat()
    bench.seconds.clear()  # memory is there now, and the first asynchronous save has its copy
    for _ in range(REPEATS):
        bench.repeat()
    if world.rank == 0:
        Path(out).write_text(json.dumps({"bytes": bench.bytes, "seconds": bench.seconds}))
    del bench
    world.leave()


def first_step(words: list[str], metrics: Path, cwd: Path) -> float:
    """Seconds from a command's start until the metrics log has one more line."""

    def lines() -> int:
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    before, began = lines(), time.perf_counter()
    with subprocess.Popen([sys.executable, "-m", "distbench", *words], cwd=cwd, stdout=subprocess.DEVNULL) as process:
        while lines() == before and process.poll() is None:
            time.sleep(0.005)
        seconds = time.perf_counter() - began
        if process.wait():
            raise SystemExit(f"could not be run: {' '.join(words)}")
    return seconds


def starts(root: Path) -> tuple[list[float], list[float]]:
    """Seconds to the first step of fresh runs, and of the same runs resumed."""
    fresh, resumed = [], []
    for repeat in range(STARTS + 1):
        metrics = root / f"run{repeat}" / "metrics.jsonl"
        fresh.append(first_step([*CLI, "steps=2", f"hydra.run.dir={metrics.parent}"], metrics, root))
        resumed.append(first_step([f"resume={metrics.parent}", "steps=4"], metrics, root))
    return fresh[1:], resumed[1:]  # the first of each reads torch from disk


def launch(config: Config, root: Path) -> dict[str, Any]:
    import secrets

    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    local.warm_up()
    launched = LaunchConfig(
        1, 1, RANKS, run_id=secrets.token_hex(4), rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1", max_restarts=0, monitor_interval=0.05, start_method="forkserver",
        logs_specs=DefaultLogsSpecs(log_dir=str(root / "logs")),
    )  # fmt: skip
    elastic_launch(launched, rank)(to_container(config), str(root), str(root / "out"))
    found = json.loads((root / "out").read_text())
    assert isinstance(found, dict)
    return found


def main() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as temporary:
        root = Path(temporary)
        found = launch(compose(["strategy=fsdp2", *OVERRIDES]), root)
        median = {name: statistics.median(values) for name, values in found["seconds"].items()}

        def rate(name: str, ranks: int = 1) -> float:
            return float(found["bytes"]) / median[name] / ranks / 2**30

        print(f"\ncheckpoints of {found['bytes'] / 2**20:.0f} MiB, {RANKS} ranks, median of {REPEATS}; GiB/s a rank")
        print("  target: at least 0.8x of one process of safetensors")
        print("                                            safetensors  distbench   ratio")
        for label, theirs, ranks, ours in (
            ("save, both on disk (fsync)", "save_file, fsync", 1, "save"),
            ("  theirs in as many processes at once", "save_file a rank, fsync", RANKS, "save"),
            ("save, theirs in the page cache only", "save_file", 1, "save"),
            ("load from the page cache, digests verified", "load_file, read", 1, "load"),
            ("  theirs in as many processes at once", "load_file a rank, read", RANKS, "load"),
            ("load from disk, digests verified", "load_file, read, cold", 1, "load, cold"),
        ):
            a, b = rate(theirs, ranks), rate(ours, RANKS)
            print(f"  {label:<43} {a:8.2f} {b:10.2f} {b / a:9.2f}x")
        print(f"  load_file alone, which maps and reads nothing: {median['load_file'] * 1e3:.1f} ms")
        print("\nwhat a save holds the run up    target: asynchronous at most 15 % of synchronous")
        share = median["async"] / median["save"]
        print(
            f"  synchronous {median['save'] * 1e3:7.1f} ms   asynchronous {median['async'] * 1e3:7.1f} ms   {share:.0%}"
        )

        fresh, resumed = starts(root)
        later = statistics.median(b - a for a, b in zip(fresh, resumed, strict=True))
        print(f"\ncommand to first step, median of {STARTS}    target: a resume at most 1.5 s later")
        print(
            f"  fresh {statistics.median(fresh):5.2f} s   resumed {statistics.median(resumed):5.2f} s   {later:+.2f} s"
        )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    torch.set_num_threads(1)
    main()
