"""Floating-point operations of a step, and the rate of this machine's matrix products."""

from __future__ import annotations

import math
import time

import torch

from distbench.config import Config, SimpleModel, TextData, batch_shape

GPU_PEAKS = {
    "A100": {"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12, "fp64": 9.7e12},
    "H100": {"bf16": 989.4e12, "fp16": 989.4e12, "fp32": 66.9e12, "fp64": 33.5e12},
    "H200": {"bf16": 989.4e12, "fp16": 989.4e12, "fp32": 66.9e12, "fp64": 33.5e12},
}
"""Dense FLOP/s of the SXM parts from NVIDIA's data sheets, fp32 without TF32; sought in the device's name."""

CALIBRATION_SECONDS = 0.02
"""A product is large enough when it takes as long."""


def closed_form(config: Config) -> int | None:
    """Model FLOPs of one optimizer step on all ranks (2 a multiply-add) of the simple stack; None for other models.

    Forward 18 d^2 a row and block, backward twice that, less the first linear layer's input gradient where the input
    is data; with a vocabulary 6 d V a row for the head.
    """
    model = config.model
    if not isinstance(model, SimpleModel):
        return None
    rows, d = batch_shape(config).global_batch * rows_per_sample(config), model.hidden_dim
    blocks = 54 * model.num_layers * d * d * rows
    return blocks - 2 * d * d * rows if model.vocab_size is None else blocks + 6 * d * model.vocab_size * rows


def rows_per_sample(config: Config) -> int:
    """Rows of d elements that one sample is in the simple stack: what the data has, which `model.seq_len` need not be."""
    data = config.data
    if isinstance(data, TextData):
        return data.seq_len
    return math.prod(data.input_shape if data.vocab_size is not None else data.input_shape[:-1])


def known_peak(device: torch.device, dtype: str) -> tuple[float | None, str]:
    """(FLOP/s of one device, its source), or (None, why there is none)."""
    if device.type != "cuda":
        return None, "no vendor's peak for a CPU; see mfu_calibrated"
    name = torch.cuda.get_device_name(device)
    for part, peaks in GPU_PEAKS.items():
        if part in name and "PCIe" not in name:
            return peaks.get(dtype), f"NVIDIA's data sheet for {part} SXM, dense {dtype}"
    return None, f"no peak known for {name}"


def calibrate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of square matrix products on this rank, the best of three at a size that takes a while. All ranks should call
    it at once: they share the machine in a step, too."""
    size = 128
    while True:
        a = torch.randn(size, size, device=device).to(dtype)
        best = min(_seconds(a) for _ in range(3))
        if best >= CALIBRATION_SECONDS or size >= 8192:
            return 2 * size**3 / best
        size *= 2


def _seconds(a: torch.Tensor) -> float:
    start = time.perf_counter()
    a @ a
    if a.device.type == "cuda":
        torch.cuda.synchronize(a.device)
    return time.perf_counter() - start
