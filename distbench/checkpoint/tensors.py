"""Tensors as safetensors files hold them: what is torch's of `format`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from distbench.checkpoint.format import CODES, DTYPES, Form, Stored, Writer
from distbench.checkpoint.manifest import Entry
from distbench.errors import CheckpointError


def form_of(tensor: Tensor) -> Form:
    """Raises CheckpointError for a dtype that the format does not have."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in CODES:
        raise CheckpointError(f"a tensor of {name} cannot be stored: safetensors has {', '.join(CODES)}")
    return Form(CODES[name], tuple(tensor.shape))


def dtype_of(form: Form | Stored) -> torch.dtype:
    found = getattr(torch, DTYPES[form.dtype][0])
    assert isinstance(found, torch.dtype)
    return found


def memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on CPU, shared with it."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def write_tensors(file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Entry:
    """Write a safetensors file that is on disk when this returns. Contiguous tensors on CPU are not copied, any other is
    one at a time. Raises OSError and CheckpointError."""
    with Writer(file, {name: form_of(tensor) for name, tensor in tensors.items()}, metadata) as writer:
        for name in writer.order:
            writer.write(memory(tensors[name].detach().to("cpu").contiguous()))
        return Entry(file.name, writer.size, writer.finish())
