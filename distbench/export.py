"""`python -m distbench export RUN`: the plain model of a checkpoint, as one safetensors file (docs/checkpoints.md).

Bytes are copied from the shards: nothing is built, nothing of the config is run, and torch is not needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from distbench.checkpoint.format import CHUNK, Form, Source, Stored, Writer
from distbench.checkpoint.manifest import MANIFEST, MODEL, complete, model_metadata, step_of
from distbench.checkpoint.shards import Shards, Whole
from distbench.checkpoint.state import TrainState, read_state
from distbench.errors import CheckpointError, ConfigError, ExitCode, OutputError
from distbench.runs.files import check_output
from distbench.runs.text import detail

DESCRIPTION = """\
Write the model of a run's newest checkpoint, whole, under the plain module's names, as one safetensors file:
`model.load_state_dict(safetensors.torch.load_file(FILE))`. It is the file that `checkpoint.final` writes, bit for bit.

exit codes: 0 written, 2 no such checkpoint, a damaged one, or a file that is there already"""


def main(argv: list[str]) -> int:
    """Find, verify, write, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m distbench export", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="a run folder, or one of its checkpoints")
    parser.add_argument("--step", type=int, metavar="N", help="default: the newest checkpoint")
    parser.add_argument("--output", type=Path, metavar="FILE", help=f"default: {MODEL} in the checkpoint's folder")
    parser.add_argument("--force", action="store_true", help="replace FILE where it is there already")
    options = parser.parse_args(argv)
    folder = find_checkpoint(options.run, options.step)
    output = options.output or folder / MODEL
    check_output(output, "--output")
    if output.exists() and not options.force:
        raise OutputError(f"{output} is there already; --force replaces it, --output FILE writes elsewhere")
    size = export(folder, output)
    print(f"{output}\n    model of step {step_of(folder)}, {size:,} bytes")
    return ExitCode.OK


def find_checkpoint(run: Path, step: int | None) -> Path:
    """The checkpoint of a run that was asked for. Raises ConfigError, with what there is."""
    if not run.is_dir():
        raise ConfigError(f"{run}: no such folder")
    if (run / MANIFEST).is_file():
        found = [run]
    else:
        found = complete(run / "checkpoints") or complete(run)
    if not found:
        raise ConfigError(f"{run}: there is no complete checkpoint; checkpoint.every=N writes one every N steps")
    chosen = [folder for folder in found if step in (None, step_of(folder))]
    if not chosen:
        there = ", ".join(str(step_of(folder)) for folder in found)
        raise ConfigError(f"--step {step}: {run} has no such checkpoint; it has those of steps {there}")
    return chosen[-1]


def export(folder: Path, output: Path) -> int:
    """Write the model of a checkpoint, and return the file's size in bytes. Raises CheckpointError where the checkpoint is
    damaged, and OutputError; a file that is there stays until the new one is whole."""
    state = read_state(folder)
    shards = Shards(folder, state)
    for entry in shards.entries:
        entry.verify(folder)
    tensors = dict(_model(state, shards))
    temporary = output.with_name(f".{output.name}.tmp")
    try:
        with Writer(temporary, tensors, model_metadata(state.step)) as writer:
            for name in writer.order:
                _copy(shards, tensors[name], writer)
            writer.finish()
        temporary.rename(output)
    except OSError as error:
        raise OutputError(f"cannot write {output}: {error.strerror}; use --output FILE") from error
    finally:
        with suppress(OSError):
            temporary.unlink()
    return writer.size


def _model(state: TrainState, shards: Shards) -> Iterator[tuple[str, Whole | Stored]]:
    """Everything in the plain model's state dict, and where it is."""
    for name, form in state.parameters.items():
        yield name, _parameter(shards, name, form)
    for name in state.buffers:
        yield name, _buffer(shards, state.aliases.get(name, name))
    for name, first in state.aliases.items():
        if first in state.parameters:
            yield name, _parameter(shards, first, state.parameters[first])


def _parameter(shards: Shards, name: str, form: Form) -> Whole:
    whole = shards[f"P/{name}"]
    if (whole.dtype, whole.shape) != (form.dtype, form.shape):
        raise CheckpointError(f"{shards.folder} is damaged: {detail(repr(name))} is {whole}, its state says {form}")
    return whole


def _buffer(shards: Shards, name: str) -> Stored:
    """Rank 0's."""
    if (stored := shards.own[0].get(f"B/{name}")) is None:
        raise CheckpointError(f"{shards.folder} is damaged: it has no buffer {detail(repr(name))}")
    return stored


def _copy(shards: Shards, tensor: Whole | Stored, writer: Writer) -> None:
    """A tensor's bytes, a chunk at a time."""
    scratch = memoryview(bytearray(CHUNK))
    if isinstance(tensor, Stored):
        places = [(0, tensor.start, tensor.stop)]
    else:
        places = [(piece.rank, piece.at, piece.at + piece.numel * tensor.itemsize) for piece in tensor.pieces]
    for rank, start, stop in places:
        with Source(shards.folder / shards.entries[rank].name) as source:
            for chunk in source.chunks(start, stop, scratch):
                writer.write(chunk)
