"""What every test may rely on."""

from __future__ import annotations

import os

import pytest
import torch

for _name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(_name, None)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """What is computed in this process is computed as a rank of `run_distributed` does it, bit for bit, every time."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
