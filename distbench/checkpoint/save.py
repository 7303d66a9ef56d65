"""The model at the end of a run, as plain safetensors: `load_file` gives what the unwrapped module loads."""

from __future__ import annotations

import shutil

from torch import Tensor

from distbench.checkpoint.manifest import MODEL, model_metadata
from distbench.checkpoint.tensors import write_tensors
from distbench.runs.folder import RunFolder


def save_model(folder: RunFolder, step: int, state: dict[str, Tensor]) -> str:
    """Write `checkpoints/step_XXXXXXXX/model.safetensors` and return its path in the run folder.

    The folder appears under its name only when it is complete and on disk.
    """
    final = folder.checkpoints / f"step_{step:08d}"
    temporary = folder.checkpoints / f".step_{step:08d}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    file = temporary / MODEL
    write_tensors(file, state, model_metadata(step))
    if final.is_dir():  # beside the shards of the same step
        file.replace(final / MODEL)
        temporary.rmdir()
    else:
        temporary.rename(final)
    return str((final / MODEL).relative_to(folder.path))
