"""A plain PyTorch loop that records its gradients: three lines of it are distbench.

    python examples/plain_loop.py grads/one
    torchrun --nproc-per-node 2 examples/plain_loop.py grads/two
    python -m distbench diff grads/two grads/one --tolerance 1e-5

Both make the same global batches, so their gradients differ by rounding only. Take `/ world` away below, and diff says
which parameters are wrong, and by which factor.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distbench import GradientRecorder

BATCH, STEPS = 8, 3


def main(folder: str) -> None:
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(6, 13), nn.GELU(), nn.Linear(13, 1))
    if world > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    recorder = GradientRecorder(folder, model)
    for step in range(1, STEPS + 1):
        inputs = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(step))
        mine = inputs.chunk(world)[rank]
        loss = (model(mine) - mine.sum(1, keepdim=True)).square().sum() / (BATCH / world)
        optimizer.zero_grad()
        loss.backward()
        recorder.record(step)  # after backward, before clipping
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    if world > 1:
        dist.destroy_process_group()
    if rank == 0:
        print(f"compare with: python -m distbench diff {folder} OTHER_FOLDER")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "grads")
