"""Putting a module's buffers into a state, whichever of them there were then: forward may make, grow and replace them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def stored_buffers(file: Any, rank: int) -> dict[str, Tensor]:
    """A rank's buffers in a baseline's open file, by plain name."""
    prefix = f"B{rank}/"
    return {key[len(prefix) :]: file.get_tensor(key) for key in file.keys() if key.startswith(prefix)}  # noqa: SIM118


@torch.no_grad()
def set_buffers(
    model: nn.Module, wanted: Mapping[str, Tensor], canonical: Callable[[str], str] = lambda name: name
) -> None:
    """Give a model these buffers and no others. `wanted`: by the names that `canonical` makes of the module's own.

    In place where the shape is still the same, so that whoever else holds the tensor sees it.
    """
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for key, buffer in list(module._buffers.items()):
            if buffer is None or id(buffer) in seen:
                continue  # one that several modules share has one name
            seen.add(id(buffer))
            value = wanted.get(canonical(f"{prefix}.{key}" if prefix else key))
            if value is None:
                del module._buffers[key]
            elif buffer.shape != value.shape or buffer.dtype != value.dtype or 0 in buffer.stride():
                module._buffers[key] = value.to(buffer.device, copy=True)
            else:
                buffer.copy_(value)
