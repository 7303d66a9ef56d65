"""The unified trainer against a loop written by hand for the same wrapper and model.

Both train the same model in the same processes, in alternating blocks of steps, so that the machine's noise hits both.
Target: step time at most 1.02x, at a step of about 100 ms.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from distbench.build import build_trainer, set_determinism
from distbench.composing import compose
from distbench.config import from_container, to_container
from distbench.launching import local
from distbench.launching.world import World

BLOCKS, STEPS = 15, 6
OVERRIDES = ["model.hidden_dim=256", "model.seq_len=64", "model.num_layers=4", "global_batch=16", "gate=off"]


def by_hand(trainer: Any, step: int) -> None:
    """What a user would write for this wrapper: forward, backward, clip, step, read loss and norm."""
    (batch,) = trainer.batches.micro_batches(step)
    trainer.optimizer.zero_grad(set_to_none=True)
    loss = F.mse_loss(trainer.module(batch.inputs), batch.targets)
    loss.backward()
    if hasattr(trainer.module, "clip_grad_norm_"):
        norm = trainer.module.clip_grad_norm_(1.0)
    else:
        norm = torch.nn.utils.clip_grad_norm_(trainer.module.parameters(), 1.0)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    trainer.optimizer.step()
    trainer.schedule.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    float(mean), float(norm)


def rank(tree: dict[str, Any], out: str) -> None:
    config = from_container(tree)
    world = World.join("cpu", 120.0, needs_group=True)
    set_determinism(config, 1)
    trainer, _ = build_trainer(config, world)
    times: dict[str, list[float]] = {"trainer": [], "by hand": []}
    step = 0
    for block in range(2 * BLOCKS + 2):
        kind = ("trainer", "by hand")[block % 2]
        world.barrier()
        start = time.perf_counter()
        for _ in range(STEPS):
            if kind == "trainer":
                trainer.step = step
                trainer.train_step()
            else:
                by_hand(trainer, step)
            step += 1
        if block >= 2:  # the first block of each is warm-up
            times[kind].append((time.perf_counter() - start) / STEPS)
    if world.rank == 0:
        ratios = [a / b for a, b in zip(times["trainer"], times["by hand"], strict=True)]
        low, high = sorted(ratios)[len(ratios) // 4], sorted(ratios)[-len(ratios) // 4]
        by_hand_ms, trainer_ms = (statistics.median(times[kind]) * 1e3 for kind in ("by hand", "trainer"))
        row = f"{by_hand_ms:8.1f} ms {trainer_ms:8.1f} ms {statistics.median(ratios):8.3f}x   ({low:.3f} to {high:.3f})"
        Path(out).write_text(row)
    del trainer
    world.leave()


def main() -> None:
    import secrets

    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    local.warm_up()
    print(f"\ntrainer against a loop by hand, median of {BLOCKS} pairs of {STEPS} steps, two ranks")
    print("  target: at most 1.02x")
    print("  strategy      by hand     trainer    ratio   (quartiles)")
    for strategy in ("ddp", "fsdp", "fsdp2"):
        config = compose([f"strategy={strategy}", *OVERRIDES])
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "row"
            launch = LaunchConfig(
                1, 1, 2, run_id=secrets.token_hex(4), rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0",
                local_addr="127.0.0.1", max_restarts=0, monitor_interval=0.05, start_method="forkserver",
                logs_specs=DefaultLogsSpecs(log_dir=folder),
            )  # fmt: skip
            elastic_launch(launch, rank)(to_container(config), str(out))
            print(f"  {strategy:<8} {out.read_text()}", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main()
