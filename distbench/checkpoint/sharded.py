"""Checkpoints to train on from: each rank writes its own shards as safetensors, and any other number of ranks, under any
strategy, reads what it needs of them.

A tensor is stored as flat pieces, each with the index of its first element in the whole (`Slot.start`): that is all that a
reader has to know of how the writer held it. Format: docs/checkpoints.md.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from distbench.checkpoint.manifest import Entry, read_manifest, read_small, write_manifest
from distbench.errors import CheckpointError
from distbench.numerics.buffers import set_buffers
from distbench.numerics.state import plain_attributes, set_schedule
from distbench.runs.files import write_json
from distbench.strategies.slots import Slot
from distbench.trainer import Trainer

SCHEMA = 1
STATE = "train_state.json"
PIECES = "distbench_pieces"
"""Key of a shard file's metadata: name -> [first element, whole shape]."""


# --- writing


def save_shards(trainer: Trainer, checkpoints: Path, facts: dict[str, Any]) -> Path:
    """Write `step_XXXXXXXX/` of this moment. A collective; raises CheckpointError on every rank where one could not write.

    The folder gets its name only when all of it is on disk. `facts`: what else `train_state.json` should say.
    """
    world = trainer.world
    final = checkpoints / f"step_{trainer.step:08d}"
    temporary = checkpoints / f".step_{trainer.step:08d}.tmp"
    problem = None
    if world.rank == 0:
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        except OSError as error:
            problem = f"cannot make {temporary}: {error.strerror}"
    _agree(trainer, problem, temporary)

    entry: Entry | None = None
    try:
        entry = _write_shard(trainer, temporary)
    except (OSError, SafetensorError) as error:
        problem = (
            f"cannot write {temporary.name}/{_shard_name(world.rank)}: {getattr(error, 'strerror', None) or error}"
        )
    shares = world.gather((problem, entry, _rank_state(trainer)))
    problem = next((found for found, _, _ in shares if found), None)
    if world.rank == 0 and problem is None:
        try:
            entries = [entry for _, entry, _ in shares if entry is not None]
            _write_state(trainer, temporary, facts, [state for _, _, state in shares])
            write_manifest(temporary, [*entries, Entry.of(temporary / STATE)])
            _sync(temporary)
            if final.exists():  # of this step again, after a resume from an earlier one
                shutil.rmtree(final)
            temporary.rename(final)
            _sync(checkpoints)
        except OSError as error:
            problem = f"cannot write {final}: {error.strerror}"
    _agree(trainer, problem, temporary)
    return final


def _agree(trainer: Trainer, problem: str | None, temporary: Path | None = None) -> None:
    """Go on together, or give up together, and leave nothing half-written."""
    found = next((share for share in trainer.world.gather(problem) if share), None)
    if found is None:
        return
    if trainer.world.rank == 0 and temporary is not None:
        shutil.rmtree(temporary, ignore_errors=True)
    raise CheckpointError(found)


def _shard_name(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def _write_shard(trainer: Trainer, folder: Path) -> Entry:
    tensors: dict[str, Tensor] = {}
    pieces: dict[str, list[Any]] = {}
    for name, start, shape, values in _pieces(trainer):
        tensors[name] = values
        pieces[name] = [start, list(shape)]
    canonical = trainer.strategy.canonical_name
    tensors.update({f"B/{canonical(name)}": buffer.detach() for name, buffer in trainer.module.named_buffers()})
    tensors.update(_random_state())
    # One storage each, and no more of it than the piece: what safetensors asks for.
    plain = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    file = folder / _shard_name(trainer.world.rank)
    save_file(plain, file, metadata={PIECES: json.dumps(pieces)})
    with file.open("rb") as handle:
        os.fsync(handle.fileno())
    return Entry.of(file)


def _pieces(trainer: Trainer) -> Iterator[tuple[str, int, tuple[int, ...], Tensor]]:
    """(name, first element, whole shape, flat values) of what this rank has to write: where ranks hold copies, each
    writes a share of them."""
    strategy, world = trainer.strategy, trainer.world
    for slot in strategy.slots(trainer.module):
        if slot.numel > slot.run:
            raise CheckpointError(f"{slot.name} is not sharded along its first dimension; checkpoints do not know that")
        first, last = 0, slot.numel
        if strategy.num_replicas == world.size > 1:
            first, last = (slot.numel * rank // world.size for rank in (world.rank, world.rank + 1))
        yield (
            f"P/{slot.name}",
            slot.start + first,
            slot.shape,
            slot.cut(strategy.local(slot.parameter.detach()))[first:last],
        )
        for key, value in trainer.optimizer.state.get(slot.parameter, {}).items():
            if not isinstance(value, Tensor):
                raise CheckpointError(
                    f"optimizer state {key!r} of {slot.name} is no tensor; checkpoints do not know that"
                )
            name, here = f"O/{key}/{slot.name}", strategy.local(value)
            if here.dim() == 0:
                # Where a rank holds nothing of a parameter its counter may stand still.
                if slot.numel or 0 in slot.shape:
                    yield name, 0, (), here.reshape(1)
            else:
                yield name, slot.start + first, slot.shape, slot.cut(here)[first:last]


def _random_state() -> dict[str, Tensor]:
    found = {"R/torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        found["R/cuda"] = torch.cuda.get_rng_state()
    return found


def _rank_state(trainer: Trainer) -> dict[str, Any]:
    """What a rank keeps outside of tensors."""
    names = {id(module): name for name, module in _modules(trainer).items()}
    algorithm, keys, *rest = np.random.get_state(legacy=True)
    return {
        "attributes": {names[id(m)]: values for m, values in plain_attributes(trainer.module) if id(m) in names},
        "python_random": random.getstate(),
        "numpy_random": [algorithm, np.asarray(keys).tolist(), *rest],
    }


def _modules(trainer: Trainer) -> dict[str, nn.Module]:
    """By the plain model's names; of a wrapper and what it wraps, the wrapped."""
    canonical = trainer.strategy.canonical_name
    return {canonical(f"{name}.").rstrip("."): module for name, module in trainer.module.named_modules()}


def _write_state(trainer: Trainer, folder: Path, facts: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    tree = {
        "schema": SCHEMA,
        "step": trainer.step,
        "samples": trainer.step * trainer.batches.shape.global_batch,
        "world_size": trainer.world.size,
        "updates": trainer.schedule.last_epoch,
        "scaler": {"scale": trainer.scaler.scale, "good_steps": trainer.scaler.good_steps},
        "optimizer": type(trainer.optimizer).__name__,
        "parameters": _parameters(trainer),
        **facts,
        "ranks": ranks,
    }
    write_json(folder / STATE, tree)


def _sync(folder: Path) -> None:
    """Make names in a folder last."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- reading


@dataclass(frozen=True)
class Piece:
    """Where some elements of a tensor are."""

    file: Any
    start: int
    """Of the first one, in the whole tensor."""
    numel: int
    shape: tuple[int, ...]


class Shards:
    """The tensors of a checkpoint, whoever wrote which part of them. Opened files are memory-mapped."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        names = sorted(entry.name for entry in read_manifest(folder) if entry.name.startswith("rank_"))
        self.pieces: dict[str, list[Piece]] = {}
        self.files = []
        for name in names:
            try:
                file = stack.enter_context(safe_open(folder / name, "pt"))
                table = json.loads((file.metadata() or {})[PIECES])
                keys = set(file.keys())
                for key, (start, shape) in table.items():
                    (numel,) = file.get_slice(key).get_shape()
                    self.pieces.setdefault(key, []).append(Piece(file, int(start), numel, tuple(map(int, shape))))
            except (SafetensorError, KeyError, ValueError, TypeError, OSError) as error:
                raise CheckpointError(f"{folder / name} is damaged: {type(error).__name__}: {error}") from error
            self.files.append((file, keys))
        if not self.files:
            raise CheckpointError(f"{folder} has no shards: its manifest names none")
        self._optimizer: dict[str, list[str]] = {}
        for key in self.pieces:
            if key.startswith("O/"):
                _, kind, name = key.split("/", 2)
                self._optimizer.setdefault(name, []).append(kind)

    def optimizer_keys(self, name: str) -> list[str]:
        """Which optimizer state there is of a parameter."""
        return self._optimizer.get(name, [])

    def scalar(self, name: str) -> Tensor | None:
        """A tensor without dimensions, or None where it has some."""
        piece = self.pieces[name][0]
        return piece.file.get_tensor(name).reshape(()) if piece.shape == () else None

    def read(self, name: str, start: int, numel: int, shape: tuple[int, ...]) -> Tensor:
        """Elements `start` to `start + numel` of the flattened tensor, flat. Raises CheckpointError where any is missing."""
        pieces = self.pieces.get(name, [])
        if other := next((piece.shape for piece in pieces if piece.shape != shape), None):
            raise CheckpointError(f"{self.folder}: {name} has shape {other}, the model's is {shape}")
        if not pieces:
            raise CheckpointError(f"{self.folder} has no {name}")
        found = torch.empty(numel, dtype=pieces[0].file.get_slice(name)[:0].dtype)
        filled = 0
        for piece in pieces:
            first, last = max(start, piece.start), min(start + numel, piece.start + piece.numel)
            if first < last:
                found[first - start : last - start] = piece.file.get_slice(name)[
                    first - piece.start : last - piece.start
                ]
                filled += last - first
        if filled != numel:
            raise CheckpointError(f"{self.folder}: {name} has {filled:,} of the {numel:,} elements that are needed")
        return found

    def of_rank(self, rank: int, prefix: str) -> dict[str, Tensor]:
        """What a rank kept for itself; of one that there was not, what rank 0 did."""
        file, keys = self.files[rank if rank < len(self.files) else 0]
        return {key[len(prefix) :]: file.get_tensor(key) for key in sorted(keys) if key.startswith(prefix)}


def read_state(folder: Path) -> dict[str, Any]:
    """`train_state.json`. Raises CheckpointError."""
    tree: dict[str, Any] = read_small(folder / STATE)
    if not isinstance(tree.get("schema"), int) or not isinstance(tree.get("step"), int):
        raise CheckpointError(f"{folder / STATE} is not one of distbench's")
    if tree["schema"] > SCHEMA:
        raise CheckpointError(f"{folder / STATE} has schema {tree['schema']}, this distbench reads up to {SCHEMA}")
    return tree


def verify(folder: Path, part: int = 0, parts: int = 1) -> None:
    """Hold files against the manifest: every `parts`-th of them, from `part` on."""
    for entry in read_manifest(folder)[part::parts]:
        entry.verify(folder)


@torch.no_grad()
def load_shards(trainer: Trainer, folder: Path) -> None:
    """Put the trainer where the checkpoint was: weights, optimizer, buffers, schedule, scaler, random state, step.

    A collective. Raises CheckpointError on every rank where a file is damaged on any, or the model is another.
    """
    world = trainer.world
    problem = None
    try:
        verify(folder, world.rank, world.size)
        state = read_state(folder)
        _check_fits(trainer, state, folder)
    except CheckpointError as error:
        problem = str(error)
    _agree(trainer, problem)
    trainer.optimizer.zero_grad(set_to_none=True)
    with ExitStack() as stack:
        shards = Shards(folder, stack)
        for slot in trainer.strategy.slots(trainer.module):
            local = trainer.strategy.local(slot.parameter.detach())
            slot.write(local, shards.read(f"P/{slot.name}", slot.start, slot.numel, slot.shape))
            _load_optimizer(trainer, slot, shards)
        set_buffers(trainer.module, shards.of_rank(world.rank, "B/"), trainer.strategy.canonical_name)
        own = state["ranks"][world.rank if world.rank < len(state["ranks"]) else 0]
        _load_rank(trainer, own, shards.of_rank(world.rank, "R/"))
    trainer.step = state["step"]
    set_schedule(trainer, state["updates"])
    if trainer.scaler.enabled:
        trainer.scaler.scale, trainer.scaler.good_steps = state["scaler"]["scale"], state["scaler"]["good_steps"]


def _load_optimizer(trainer: Trainer, slot: Slot, shards: Shards) -> None:
    """A parameter's moments and counters; those that the trainer has and the checkpoint has not are dropped."""
    stored = shards.optimizer_keys(slot.name)
    if not stored:
        trainer.optimizer.state.pop(slot.parameter, None)
        return
    if slot.numel == 0 and slot.parameter not in trainer.optimizer.state:
        return  # FSDP1's optimizer never meets what this rank holds nothing of
    state = trainer.optimizer.state[slot.parameter]
    for key in set(state) - set(stored):
        del state[key]
    for key in stored:
        name = f"O/{key}/{slot.name}"
        if (scalar := shards.scalar(name)) is not None:
            if key in state:
                state[key].copy_(scalar)
            else:
                state[key] = scalar.clone()
            continue
        values = shards.read(name, slot.start, slot.numel, slot.shape)
        if key not in state:
            state[key] = torch.zeros_like(slot.parameter.detach(), dtype=values.dtype)
        slot.write(trainer.strategy.local(state[key]), values)


def _load_rank(trainer: Trainer, own: dict[str, Any], generators: dict[str, Tensor]) -> None:
    modules = _modules(trainer)
    for name, values in own["attributes"].items():
        if name in modules:
            vars(modules[name]).update(values)
    version, internal, gauss = own["python_random"]
    random.setstate((version, tuple(internal), gauss))
    algorithm, keys, *rest = own["numpy_random"]
    np.random.set_state((algorithm, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(generators["torch"])
    if "cuda" in generators and trainer.world.device.type == "cuda":
        torch.cuda.set_rng_state(generators["cuda"])


def _check_fits(trainer: Trainer, state: dict[str, Any], folder: Path) -> None:
    here, there = _parameters(trainer), state["parameters"]
    differing = [
        f"{name} is {_parameter(there.get(name))}, the model's is {_parameter(here.get(name))}"
        for name in sorted(here.keys() | there.keys())
        if here.get(name) != there.get(name)
    ]
    if differing:
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise CheckpointError(f"{folder} is of another model: {'; '.join(differing[:3])}{more}")
    optimizer = type(trainer.optimizer).__name__
    if state["optimizer"] != optimizer:
        raise CheckpointError(f"{folder} has the state of {state['optimizer']}, the run's optimizer is {optimizer}")


def _parameters(trainer: Trainer) -> dict[str, list[Any]]:
    """Name -> whole shape and dtype."""
    return {
        slot.name: [list(slot.shape), str(slot.parameter.dtype).removeprefix("torch.")]
        for slot in trainer.strategy.slots(trainer.module)
    }


def _parameter(row: Any) -> str:
    return "missing" if row is None else f"{tuple(row[0])} {row[1]}"
