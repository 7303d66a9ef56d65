"""The model at the end of a run, as plain safetensors: `load_file` gives what the unwrapped module loads."""

from __future__ import annotations

import os
import shutil

from safetensors.torch import save_file
from torch import Tensor

from distbench.runs.folder import RunFolder

NAME = "model.safetensors"


def save_model(folder: RunFolder, step: int, state: dict[str, Tensor]) -> str:
    """Write `checkpoints/step_XXXXXXXX/model.safetensors` and return its path in the run folder.

    The folder appears under its name only when it is complete and on disk.
    """
    final = folder.checkpoints / f"step_{step:08d}"
    temporary = folder.checkpoints / f".step_{step:08d}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    file = temporary / NAME
    save_file(_untied(state), file, metadata={"format": "pt", "step": str(step)})
    with file.open("rb") as handle:
        os.fsync(handle.fileno())
    if final.is_dir():  # beside the shards of the same step
        file.replace(final / NAME)
        temporary.rmdir()
    else:
        temporary.rename(final)
    return str((final / NAME).relative_to(folder.path))


def _untied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors with a storage each: safetensors refuses shared ones, and every name must load."""
    seen: set[int] = set()
    plain: dict[str, Tensor] = {}
    for name, tensor in state.items():
        storage = tensor.untyped_storage().data_ptr()
        plain[name] = tensor.contiguous() if storage not in seen else tensor.clone().contiguous()
        seen.add(storage)
    return plain
