"""Gradient summaries from anybody's training loop, in the format that distbench's own runs write.

    recorder = distbench.GradientRecorder("grads/", model)
    ...
    loss.backward()
    recorder.record(step)            # after backward, before clipping

`python -m distbench diff grads_a grads_b` then says which gradients differ, and how. Calling it changes nothing in the
training. It is a collective where there are several ranks: every rank must call it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, reduce
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from distbench.errors import SummaryError
from distbench.numerics.shards import DTYPES, Shard
from distbench.numerics.summary import Summary, same_everywhere, summarize
from distbench.runs.sides import is_summary, summaries_in
from distbench.strategies import torch_fsdp1, torch_fsdp2
from distbench.strategies.slots import Slot

TRANSPARENT = frozenset(
    ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_cast_module", "_forward_module")
)
"""Attributes under which wrappers hold the module they wrap (torch.compile, FSDP1, activation checkpointing, distbench,
Lightning Fabric); no model uses them for itself. `module`, which one might, is looked up by the wrapper's class."""

Groups = tuple[dist.ProcessGroup, ...]
"""The ranks that shard a parameter, one group for each axis of the mesh it is sharded over."""


@dataclass(frozen=True)
class _Place:
    """One parameter's piece on this rank, and over which ranks the pieces add up to the whole."""

    slot: Slot
    groups: Groups


class GradientRecorder:
    """Writes `step_XXXXXXXX.safetensors` with a summary of every gradient (docs/gradient-summaries.md).

    Args:
        folder: made when the first summary is written.
        module: the module as it is trained. Its parameters may be plain tensors (also under DDP, torch.compile,
            activation checkpointing or accelerate's `prepare`), DTensors (fully_shard, tensor parallel, several mesh
            axes) or flat parameters of FullyShardedDataParallel.
        group: the ranks that hold this module; all by default. For pipeline stages, one recorder and folder a stage.
        seed: of the projections. Distances can be estimated between summaries of equal seeds only.
        overwrite: remove the summaries that an earlier recording left in `folder`, before the first one is written.

    Raises:
        FileExistsError: `folder` holds an earlier recording and `overwrite` is not set: steps of both would be mixed. Or
            a file in it is named like a summary and is none; that is never removed.
    """

    def __init__(
        self,
        folder: str | Path,
        module: nn.Module,
        *,
        group: dist.ProcessGroup | None = None,
        seed: int = 0,
        overwrite: bool = False,
    ) -> None:
        self.folder, self.module, self.group, self.seed = Path(folder), module, group, seed
        self._earlier = _earlier_recording(self.folder, overwrite)

    @torch.no_grad()
    def record(self, step: int, *, unscale: float = 1.0, metadata: Mapping[str, str] | None = None) -> Summary:
        """Summarise the gradients as they are now and, on the first rank, write them.

        Args:
            step: a whole number from 0 on. It names the file; `diff` compares equal steps.
            unscale: what the loss was multiplied by, if gradients still carry it: `scaler.get_scale()`. Gradients are
                divided by it in a copy. Needless after `scaler.unscale_(optimizer)`.
            metadata: a few words of your own, kept in the file.

        Returns:
            The whole summary, on every rank.

        Raises:
            ValueError: a step or an unscale that is none, before any communication.
            SummaryError: no gradient anywhere, one that is Partial, sparse or of a dtype without summaries, one that is
                not reduced yet, or ranks that hold different parameters.
        """
        step, unscale = _checked_step(step), _checked_scale(unscale)
        canonical = naming(self.module)
        summary = self._whole(_places(self.module, canonical), _aliases(self.module, canonical), unscale)
        if not summary.names or all(parameter.is_none for parameter in summary):
            raise SummaryError("no parameter has a gradient: record after backward and before zero_grad")
        facts = {
            "step": str(step),
            "torch": torch.__version__,
            "world_size": str(self._size),
            "replicas": self._replicas(summary),
        }
        if self._rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            while self._earlier:
                self._earlier.pop().unlink(missing_ok=True)
            summary.save(self.folder / f"step_{step:08d}.safetensors", {**(metadata or {}), **facts})
        return summary

    def _whole(self, places: list[_Place], tied: dict[str, list[str]], unscale: float) -> Summary:
        """Parameters sharded over the same ranks are reduced together; those that are not sharded not at all."""
        together: dict[tuple[str, ...], list[_Place]] = {}
        for place in places:
            together.setdefault(tuple(group.group_name for group in place.groups), []).append(place)
        parts = []
        for same in together.values():
            part = summarize((_shard(place.slot, unscale) for place in same), self.seed, tied)
            parts.append(reduce(Summary.reduce, same[0].groups, part))
        if not parts:
            return summarize([], self.seed)
        merged = reduce(Summary.merge, parts)
        return merged.select(list(dict.fromkeys(place.slot.name for place in places)))

    def _replicas(self, summary: Summary) -> str:
        """`agree`, or who does not: after reduction every rank must have come to the same gradients."""
        if self._size == 1:
            return "agree"
        group = self.group or dist.group.WORLD
        assert group is not None
        digests = [parameter.digest for parameter in summary]
        same_names, same_digests = same_everywhere(["\n".join(summary.names), str(digests)], group)
        if not same_names:
            raise SummaryError("ranks hold different parameters; give each set its own recorder and group=")
        if same_digests:
            return "agree"
        everywhere: list[list[int]] = [[]] * self._size
        dist.all_gather_object(everywhere, digests, group=group)
        others = [rank for rank, theirs in enumerate(everywhere) if theirs != everywhere[0]]
        first = next(name for name, *found in zip(summary.names, *everywhere, strict=True) if len(set(found)) > 1)
        return f"{len(others)} of {self._size} ranks differ from the first (rank {others[0]} on), from {first} on"

    @property
    def _size(self) -> int:
        return dist.get_world_size(self.group) if dist.is_available() and dist.is_initialized() else 1

    @property
    def _rank(self) -> int:
        return dist.get_rank(self.group) if self._size > 1 else 0


def _earlier_recording(folder: Path, overwrite: bool) -> list[Path]:
    """Summaries that may be removed. Every rank looks when the recorder is made: none can have written by then."""
    files = summaries_in(folder)
    if files and not overwrite:
        raise FileExistsError(
            f"{folder} holds {len(files)} steps of an earlier recording ({files[0].name} is the first): choose another "
            "folder, or GradientRecorder(..., overwrite=True) to remove them"
        )
    for file in files:
        if not is_summary(file):
            raise FileExistsError(f"{file} is named like a gradient summary and is none: choose another folder")
    return files


def _checked_step(step: int) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number < 10**18:
        raise ValueError(f"step={step!r} must be a whole number from 0 on: it names the file")
    return number


def _checked_scale(unscale: float) -> float:
    if not (math.isfinite(unscale) and unscale > 0):
        raise ValueError(
            f"unscale={unscale!r} must be positive and finite: it is what the loss was multiplied by, such as "
            "scaler.get_scale()"
        )
    return float(unscale)


def naming(module: nn.Module) -> Callable[[str], str]:
    """A function from names inside wrappers to the plain model's: `module._orig_mod.head.weight` is `head.weight`."""
    data_parallel = [
        n for n, inner in module.named_modules() if isinstance(inner, DistributedDataParallel | DataParallel)
    ]
    prefixes = [f"{name}.module." if name else "module." for name in reversed(data_parallel)]  # inner ones first

    @cache
    def canonical(name: str) -> str:
        for prefix in prefixes:
            if f"{name}.".startswith(prefix):
                name = prefix.removesuffix("module.") + name[len(prefix) :]
        return ".".join(part for part in name.split(".") if part not in TRANSPARENT)

    return canonical


# --- where gradients are


def _places(module: nn.Module, canonical: Callable[[str], str]) -> list[_Place]:
    """Every parameter once, in the plain model's order."""
    places, in_flat = [], torch_fsdp1.flattened(module)
    groups = torch_fsdp1.shard_groups(module, canonical)
    for slot in torch_fsdp1.slots(module, canonical):
        group = groups[slot.name]
        places.append(_Place(slot, () if group is None else (group,)))
    for name, parameter in module.named_parameters():
        if id(parameter) not in in_flat:
            places.append(_plain_place(canonical(name), parameter))
    order: dict[str, int] = {}
    for index, (name, _) in enumerate(module.named_modules()):
        order.setdefault(canonical(name), index)
    return sorted(places, key=lambda place: order.get(place.slot.name.rpartition(".")[0], len(order)))


def _plain_place(name: str, parameter: nn.Parameter) -> _Place:
    if not isinstance(parameter, DTensor):
        return _Place(Slot.whole(name, parameter), ())
    try:
        return _Place(torch_fsdp2.slot(name, parameter), torch_fsdp2.shard_groups(parameter))
    except ValueError as error:
        raise SummaryError(str(error)) from error


def _aliases(module: nn.Module, canonical: Callable[[str], str]) -> dict[str, list[str]]:
    """The other names of tied parameters, by the first."""
    tied = torch_fsdp1.aliases(module, canonical)
    in_flat = torch_fsdp1.flattened(module)
    first: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), canonical(name))
        if known != canonical(name) and id(parameter) not in in_flat:
            tied.setdefault(known, []).append(canonical(name))
    return tied


def _shard(slot: Slot, unscale: float) -> Shard:
    """This rank's piece of one gradient."""
    gradient = slot.parameter.grad
    if gradient is None:
        return slot.shard(None)
    local = _local(slot.name, gradient, slot.parameter)
    if local.layout is not torch.strided:
        raise SummaryError(f"gradient of {slot.name} is sparse; make its layer with sparse=False to record it")
    if local.dtype not in DTYPES:
        raise SummaryError(f"gradient of {slot.name} is {local.dtype}; there are summaries of {DTYPES} only")
    values = slot.cut(local).contiguous()
    return Shard(
        slot.name, slot.shape, values if unscale == 1.0 else values * (1.0 / unscale), slot.start, slot.run, slot.stride
    )


def _local(name: str, gradient: Tensor, parameter: nn.Parameter) -> Tensor:
    if isinstance(gradient, DTensor):
        if any(placement.is_partial() for placement in gradient.placements):
            raise SummaryError(
                f"gradient of {name} is Partial over a mesh axis: each rank holds a summand, not a value. Redistribute "
                "it before recording: p.grad = p.grad.redistribute(placements=p.placements)"
            )
        if not isinstance(parameter, DTensor) or gradient.placements != parameter.placements:
            raise SummaryError(
                f"gradient of {name} is placed as {gradient.placements}, its parameter otherwise: redistribute it "
                "before recording: p.grad = p.grad.redistribute(placements=p.placements)"
            )
        gradient, parameter = gradient.to_local(), parameter.to_local()
    if gradient.shape != parameter.shape:
        raise SummaryError(
            f"gradient of {name} has shape {list(gradient.shape)} here, its parameter {list(parameter.shape)}: it is "
            "not reduced yet. Record after the last micro-batch's backward, outside no_sync"
        )
    return gradient
