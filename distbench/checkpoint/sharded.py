"""Checkpoints to train on from: each rank writes its own shard, and any other number of ranks, under any strategy, reads
what it needs of them.

A tensor is stored as flat pieces, each with the index of its first element in the whole (`Slot.start`): that is all that a
reader has to know of how the writer held it. Format: docs/checkpoints.md.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from distbench.checkpoint.attributes import ODD_WORDS, Attributes, Kept, attributes_of
from distbench.checkpoint.format import DTYPES, Form
from distbench.checkpoint.plain import aliases, persistent_buffers
from distbench.checkpoint.saving import Save, agree, save_together
from distbench.checkpoint.shards import PIECES, RANK, STEP, Shards, Target
from distbench.checkpoint.state import SCHEMA, RankState, TrainState, read_state
from distbench.checkpoint.tensors import dtype_of, form_of, memory
from distbench.errors import CheckpointError
from distbench.numerics.buffers import set_buffers
from distbench.numerics.state import set_schedule
from distbench.runs.files import parse_json
from distbench.runs.text import detail, plain
from distbench.strategies import extra_state
from distbench.strategies.extra_state import extra_states
from distbench.strategies.slots import Slot
from distbench.trainer import Trainer

# --- writing


def save_shards(trainer: Trainer, checkpoints: Path, facts: dict[str, Any]) -> Path:
    """Write `step_XXXXXXXX/` of this moment, and return it. A collective; raises CheckpointError on every rank where one
    could not write.

    The folder gets its name only when all of it is on disk. `facts`: what else `train_state.json` should say.
    """
    save = begin(trainer, checkpoints, facts)
    save_together(trainer.world, save)
    return save.final


def begin(trainer: Trainer, checkpoints: Path, facts: dict[str, Any]) -> Save:
    """What this rank has to write, sharing the trainer's memory, and a folder for it. A collective; raises
    CheckpointError on every rank."""
    world, problem, save = trainer.world, None, None
    try:
        save = _collect(trainer, checkpoints, facts)
        if world.rank == 0:
            save.prepare()
    except CheckpointError as error:
        problem = str(error)
    agree(world, problem)
    assert save is not None
    return save


@torch.no_grad()
def _collect(trainer: Trainer, checkpoints: Path, facts: dict[str, Any]) -> Save:
    tensors: dict[str, Tensor] = {}
    pieces: dict[str, list[Any]] = {}
    slots = trainer.strategy.slots(trainer.module)
    for name, start, shape, values in _pieces(trainer, slots):
        tensors[name] = values
        pieces[name] = [start, list(shape)]
    canonical = trainer.strategy.canonical_name
    tensors.update({f"B/{canonical(name)}": buffer.detach() for name, buffer in trainer.module.named_buffers()})
    tensors.update({f"B/{name}": state.detach() for name, state in extra_states(trainer.module, canonical)[0].items()})
    tensors.update({f"R/{name}": state for name, state in _generators(trainer).items()})
    attributes = attributes_of(trainer)
    kept = attributes.collect(trainer.initial)
    tensors.update(_attribute_tensors(trainer, attributes, kept))
    return Save(
        checkpoints=checkpoints,
        step=trainer.step,
        rank=trainer.world.rank,
        size=trainer.world.size,
        tensors=tensors,
        metadata={PIECES: json.dumps(pieces), STEP: str(trainer.step), RANK: str(trainer.world.rank)},
        own=_rank_state(kept),
        shared={
            "schema": SCHEMA,
            "step": trainer.step,
            "samples": trainer.step * trainer.batches.shape.global_batch,
            "world_size": trainer.world.size,
            "updates": trainer.schedule.last_epoch,
            "scaler": {"scale": trainer.scaler.scale, "good_steps": trainer.scaler.good_steps},
            "optimizer": type(trainer.optimizer).__name__,
            "parameters": {
                name: [list(form.shape), DTYPES[form.dtype][0]] for name, form in _parameters(slots).items()
            },
            "buffers": persistent_buffers(trainer.module, canonical),
            "aliases": aliases(trainer.module, canonical),
            **facts,
        },
    )


def _pieces(trainer: Trainer, slots: list[Slot]) -> Iterator[tuple[str, int, tuple[int, ...], Tensor]]:
    """(name, first element, whole shape, flat values) of what this rank has to write: where ranks hold copies, each
    writes a share of them."""
    strategy, world = trainer.strategy, trainer.world
    for slot in slots:
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


def _generators(trainer: Trainer) -> dict[str, Tensor]:
    """State of torch's random generators."""
    found = {"torch": torch.get_rng_state()}
    if trainer.world.device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(trainer.world.device)
    return found


def _rank_state(kept: Kept) -> dict[str, Any]:
    """What a rank keeps outside of tensors."""
    algorithm, keys, *rest = np.random.get_state(legacy=True)
    return {
        "attributes": kept.plain,
        "python_random": random.getstate(),
        "numpy_random": [algorithm, np.asarray(keys).tolist(), *rest],
    }


TREE = "tree"
"""Key of what says what the tensors under `A/` are, as JSON: with many ranks it may be more than train_state.json holds."""


def _attribute_tensors(trainer: Trainer, attributes: Attributes, kept: Kept) -> dict[str, Tensor]:
    """Attributes that are more than a number or a word, and what training has made that was not there in the beginning."""
    made: dict[str, Any] = {"attributes": {}, "buffers": []}
    if (initial := trainer.initial) is not None:
        buffers = {trainer.strategy.canonical_name(name) for name, _ in trainer.module.named_buffers()}
        made["buffers"] = sorted(buffers - initial.buffers)
        for name, keys in kept.names.items():
            if new := sorted(keys - initial.names.get(name, frozenset())):
                made["attributes"][name] = new
    if not (kept.trees or made["attributes"] or made["buffers"]):
        return {}
    text = json.dumps({"values": kept.trees, "made": made}, separators=(",", ":"), allow_nan=False).encode()
    tree = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return {f"A/{key}": tensor for key, tensor in {**kept.tensors, TREE: tree}.items()}


def _parameters(slots: list[Slot]) -> dict[str, Form]:
    """Name -> whole shape and dtype."""
    return {slot.name: Form(form_of(slot.parameter).dtype, slot.shape) for slot in slots}


# --- reading


@torch.no_grad()
def load_shards(trainer: Trainer, folder: Path) -> None:
    """Put the trainer where the checkpoint was: weights, optimizer, buffers, schedule, scaler, random state, step.

    A collective. Raises CheckpointError on every rank where a file is damaged on any, or the model is another; the trainer
    is of no use then.
    """
    problem, rest = None, None
    try:
        state = read_state(folder)
        slots = trainer.strategy.slots(trainer.module)
        state.check_fits(_parameters(slots), type(trainer.optimizer).__name__, folder)
        shards = Shards(folder, state)
        rest = _Rest(trainer, state, shards)
        trainer.optimizer.zero_grad(set_to_none=True)
        # Each file is verified by one rank, which takes what it wants of it on the way: where ranks read what they wrote,
        # every byte is read once.
        rank, size = trainer.world.rank, trainer.world.size
        shards.read(_targets(trainer, slots, shards), verify=lambda file: file % size == rank)
    except CheckpointError as error:
        problem = str(error)
    agree(trainer.world, problem)
    assert rest is not None
    rest.put()


def _targets(trainer: Trainer, slots: list[Slot], shards: Shards) -> Iterator[Target]:
    """Where this rank's parts of parameters and optimizer state shall go."""
    for slot in slots:
        local = trainer.strategy.local(slot.parameter.detach())
        yield from _slot_targets(shards, f"P/{slot.name}", slot, local)
        yield from _optimizer_targets(trainer, slot, shards)


def _optimizer_targets(trainer: Trainer, slot: Slot, shards: Shards) -> Iterator[Target]:
    """A parameter's moments and counters; those that the trainer has and the checkpoint has not are dropped."""
    stored = shards.kinds(slot.name)
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
        form = shards[name]
        counter = form.shape == ()
        if key not in state:
            like = torch.zeros(()) if counter else slot.parameter.detach()
            state[key] = torch.zeros_like(like, dtype=dtype_of(form))
        here = trainer.strategy.local(state[key])
        if counter != (here.dim() == 0):
            raise CheckpointError(f"{shards.folder}: {name} is {form}, the optimizer's has {here.dim()} dimensions")
        if counter:
            direct = here.view(1) if here.device.type == "cpu" else None
            target = _Destination(1, here.dtype, direct, lambda values, here=here: here.copy_(values[0]))  # type: ignore[misc]
            yield from target.reads(shards, name, Form(form_of(here).dtype, ()), 0)
        else:
            yield from _slot_targets(shards, name, slot, here)


def _slot_targets(shards: Shards, name: str, slot: Slot, local: Tensor) -> list[Target]:
    direct = slot.cut(local) if local.is_contiguous() and local.device.type == "cpu" else None
    target = _Destination(slot.numel, local.dtype, direct, lambda values: slot.write(local, values))
    return target.reads(shards, name, Form(form_of(local).dtype, slot.shape), slot.start)


class _Destination:
    """Where flat values go: straight into a tensor's memory, or, where that is on a device or in another order, through
    memory of its own, for as long as it takes them to come."""

    def __init__(self, numel: int, dtype: torch.dtype, direct: Tensor | None, put: Callable[[Tensor], object]) -> None:
        self.numel, self.dtype, self.direct, self.put = numel, dtype, direct, put
        self._host, self._missing = direct, numel

    def reads(self, shards: Shards, name: str, form: Form, first: int) -> list[Target]:
        """What to read. Raises CheckpointError where the checkpoint has something else under the name."""
        whole = shards[name]
        if (whole.dtype, whole.shape) != (form.dtype, form.shape):
            raise CheckpointError(f"{shards.folder}: {name} is {whole}, the model's is {form}")
        return shards.targets(name, first, self.numel, self._view, self._done)

    def _view(self, first: int, last: int) -> memoryview:
        if self._host is None:
            self._host = torch.empty(self.numel, dtype=self.dtype)
        return memory(self._host[first:last])

    def _done(self, count: int) -> None:
        self._missing -= count
        if not self._missing and self.direct is None:
            assert self._host is not None
            self.put(self._host)
            self._host = None


class _Rest:
    """What is not written while files are read, but once all ranks have found them whole: checked when this is made."""

    def __init__(self, trainer: Trainer, state: TrainState, shards: Shards) -> None:
        self._trainer, self._state = trainer, state
        rank = trainer.world.rank
        self._own = state.ranks[rank if rank < len(state.ranks) else 0]
        self._buffers = _tensors(shards.read_own(rank, "B/"))
        self._attributes = attributes_of(trainer)
        self._kept, self._made = self._read_attributes(shards)
        self._extra = {name: self._buffers.pop(name) for name in list(self._buffers) if _is_extra(name)}
        self._check_buffers(shards.folder)
        self._generators = self._checked_generators(shards)

    def put(self) -> None:
        trainer, state, own = self._trainer, self._state, self._own
        set_buffers(trainer.module, self._buffers, trainer.strategy.canonical_name)
        for name in self._new_buffers:
            owner, _, key = name.rpartition(".")
            buffer = self._buffers[name].to(trainer.world.device)
            self._attributes.everything[owner].register_buffer(key, buffer, persistent=name in state.buffers)
        for name, value in self._extra.items():
            self._set_extra(self._attributes.everything[_owner(name)], value)
        self._attributes.put(self._kept, trainer.initial or self._attributes.initial(), trainer.world.device)
        random.setstate(own.python_random)
        np.random.set_state(_numpy_state(own))
        torch.set_rng_state(self._generators["torch"])
        if "cuda" in self._generators:
            torch.cuda.set_rng_state(self._generators["cuda"], trainer.world.device)
        trainer.step = state.step
        set_schedule(trainer, state.updates)
        if trainer.scaler.enabled:
            trainer.scaler.scale, trainer.scaler.good_steps = state.scale, state.good_steps

    def _check_buffers(self, folder: Path) -> None:
        """One that is on one side only must have been made by training, there or here."""
        canonical, initial = self._trainer.strategy.canonical_name, self._trainer.initial
        here = {canonical(name) for name, _ in self._trainer.module.named_buffers(remove_duplicate=False)}
        for name, _ in self._trainer.module.named_buffers():
            name = canonical(name)
            if name not in self._buffers and (initial is None or name in initial.buffers):
                raise CheckpointError(f"{folder} has no buffer {name}, which the model has")
        self._new_buffers = sorted(self._buffers.keys() - here)
        for name in self._new_buffers:
            owner, _, key = name.rpartition(".")
            module = self._attributes.everything.get(owner)
            if name not in self._made["buffers"] or module is None or not key or hasattr(module, key):
                raise CheckpointError(f"{folder} has buffer {detail(plain(name))}, which the model has not")

        for name in self._extra:
            if (
                type(self._attributes.everything.get(_owner(name), nn.Module())).get_extra_state
                is nn.Module.get_extra_state
            ):
                raise CheckpointError(f"{folder} has {detail(plain(name))}, which the model has not")

    @staticmethod
    def _set_extra(module: nn.Module, value: Tensor) -> None:
        if type(module).set_extra_state is not nn.Module.set_extra_state:
            now = module.get_extra_state()
            module.set_extra_state(value.to(now.device) if isinstance(now, Tensor) else value)

    def _read_attributes(self, shards: Shards) -> tuple[Kept, dict[str, Any]]:
        """They replace attributes of the same module and name, whatever their kind, or are new where training has made
        them."""
        folder, own = shards.folder, self._own.attributes
        tensors = _tensors(shards.read_own(self._trainer.world.rank, "A/"))
        for module, values in own.items():
            here = self._attributes.of(module) if module in self._attributes.modules else {}
            for name, value in values.items():
                if type(here.get(name)) is float and value in ODD_WORDS:
                    values[name] = float(value)  # before there were trees JSON had to say it
        tree: dict[str, Any] = {"values": {}, "made": {"attributes": {}, "buffers": []}}
        try:
            if (text := tensors.pop(TREE, None)) is not None:
                tree = _checked_tree(parse_json(memory(text).tobytes()))
            kept = Kept(own, tree["values"], tensors)
            self._attributes.check(kept, tree["made"]["attributes"])
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{folder} is of another model, or damaged: {detail(error)}") from error
        return kept, tree["made"]

    def _checked_generators(self, shards: Shards) -> dict[str, Tensor]:
        """Tried on generators that nobody uses."""
        trainer = self._trainer
        found = _tensors(shards.read_own(trainer.world.rank, "R/"))
        if trainer.world.device.type != "cuda":
            found.pop("cuda", None)
        try:
            random.Random().setstate(self._own.python_random)
            np.random.RandomState().set_state(_numpy_state(self._own))
            torch.Generator().set_state(found["torch"])
            if "cuda" in found:
                torch.Generator(trainer.world.device).set_state(found["cuda"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{shards.folder} is damaged: random state: {detail(error)}") from error
        return found


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == extra_state.KEY


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _checked_tree(tree: Any) -> dict[str, Any]:
    """Raises ValueError where it is not made as `_attribute_tensors` makes it; what the values are is checked later."""
    match tree:
        case {"values": dict(values), "made": {"attributes": dict(attributes), "buffers": list(buffers)}}:
            words = [*buffers, *(word for words in attributes.values() for word in _list(words))]
            if all(isinstance(word, str) for word in words) and all(isinstance(v, dict) for v in values.values()):
                return tree
    raise ValueError("its attributes are no tree")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [None]


def _numpy_state(own: RankState) -> tuple[str, np.ndarray[Any, Any], int, int, float]:
    algorithm, keys, position, has_gauss, gauss = own.numpy_random
    return algorithm, np.array(keys, dtype=np.uint32), position, has_gauss, gauss


def _tensors(stored: dict[str, tuple[Form, bytearray]]) -> dict[str, Tensor]:
    found = {}
    for name, (form, data) in stored.items():
        found[name] = torch.empty(form.shape, dtype=dtype_of(form))
        memory(found[name])[:] = data
    return found
