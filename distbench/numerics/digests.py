"""Bit-exact digests of whole tensors of any dtype."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def tensor_digest(tensor: Tensor) -> str:
    """BLAKE2b (hex, 16 characters) of shape, dtype and bits."""
    data = tensor.detach().cpu().contiguous()
    digest = hashlib.blake2b(f"{tuple(data.shape)}{data.dtype}".encode(), digest_size=8)
    if data.numel():
        digest.update(memoryview(data.reshape(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()
