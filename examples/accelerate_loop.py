"""The same loop with Hugging Face accelerate: record after `accelerator.backward`, before clipping.

    python examples/accelerate_loop.py grads/one
    torchrun --nproc-per-node 2 examples/accelerate_loop.py grads/two        (or `accelerate launch` on GPUs)
    python -m distbench diff grads/two grads/one --tolerance 1e-5

The recorder takes the module as `prepare` returns it, wrapped in DDP or FSDP or not at all.
"""

import sys

import torch
from accelerate import Accelerator
from torch import nn

from distbench import GradientRecorder

BATCH, STEPS = 8, 3


def main(folder: str) -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 13), nn.GELU(), nn.Linear(13, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    recorder = GradientRecorder(folder, model)
    world = accelerator.num_processes
    for step in range(1, STEPS + 1):
        inputs = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(step))
        mine = inputs.chunk(world)[accelerator.process_index]
        loss = (model(mine) - mine.sum(1, keepdim=True)).square().sum() / (BATCH / world)
        optimizer.zero_grad()
        accelerator.backward(loss)
        recorder.record(step)  # with a loss scaler: recorder.record(step, unscale=accelerator.scaler.get_scale())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    accelerator.end_training()
    if accelerator.is_main_process:
        print(f"compare with: python -m distbench diff {folder} OTHER_FOLDER")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "grads")
