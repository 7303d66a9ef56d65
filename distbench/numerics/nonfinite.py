"""A step whose loss or gradient is not finite: what becomes of it, and where the first such number was made.

Both numbers are on the host and the same on every rank when the trainer asks, so all ranks go the same way, and may
communicate on it. Policies and the record's entries: docs/nonfinite.md.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from distbench.checkpoint.attributes import attributes_of
from distbench.checkpoint.manifest import complete
from distbench.config import Config, OnNonfinite
from distbench.data.batches import Batch
from distbench.errors import NonFiniteError
from distbench.numerics.baseline import Baseline
from distbench.numerics.buffers import set_buffers
from distbench.numerics.cache import BaselineEntry
from distbench.numerics.state import load_state, restore, snapshot
from distbench.precision import NAMES
from distbench.runs.files import write_atomic
from distbench.runs.folder import RunFolder, read_record
from distbench.stand_ins import in_backward
from distbench.trainer import Observer, StepMetrics, Trainer

MAX_EVENTS = 20
"""Steps of one process that are told, recorded and kept; of later ones only the metrics log tells."""


@dataclass
class Cause:
    """Where the first number that is not finite was made, as one rank found it."""

    kind: str
    """`parameter`, `inputs`, `cast` (of the inputs), `targets`, `forward`, `loss`, `backward` or `sum`."""
    text: str
    module: str | None = None
    """Name in the plain model; empty for the model itself, None where none of its modules made it."""
    module_class: str | None = None
    operation: str | None = None
    """Autograd's name of the backward function."""
    parameter: str | None = None
    micro_batch: int | None = None
    samples: list[int] = field(default_factory=list)
    """Global ids: those that are not finite, or all of the micro-batch."""


@dataclass
class Event:
    """An entry of the record's `nonfinite`."""

    step: int
    what: str
    """`loss` or `gradient norm`."""
    value: float
    policy: str
    cause: Cause | None = None
    reason: str | None = None
    """Why there is no cause."""
    ranks: list[int] | None = None
    """Those with this cause; without one, those whose own loss is not finite; None where that is not known."""
    gradients: list[str] = field(default_factory=list)
    """Where the loss is finite: parameters whose reduced gradient is not, at most ten."""
    files: list[str] = field(default_factory=list)
    """Kept micro-batches, by path in the run folder."""
    problem: str | None = None
    """Why a file is missing."""
    text: str = ""


class Guard(Observer):
    """Applies `on_nonfinite` to the steps after the gate, or to all where there is none."""

    def __init__(self, config: Config, folder: RunFolder, console: TextIO | None) -> None:
        """`console`: where events are told; None on all ranks but 0."""
        self.config, self.folder, self.console = config, folder, console
        self.policy = config.on_nonfinite
        self.num_events = 0
        self.recorded: list[dict[str, Any]] = []
        """Rank 0's."""
        self.in_gate: StepMetrics | None = None
        """The first of the gate's steps that was not finite."""
        self._begun = False

    def on_step(self, metrics: StepMetrics, trainer: Trainer) -> None:
        if not self._begun and self.in_gate is None and not _finite_step(trainer, metrics.loss, metrics.grad_norm):
            self.in_gate = metrics

    def begin(self, trainer: Trainer, entry: BaselineEntry | None = None) -> None:
        """Judge every step from here on, and one that the gate, as the baseline it agreed with, found not finite.

        A collective; raises NonFiniteError as `refuses` does. Called again it does nothing.
        """
        if self._begun:
            return
        self._begun, trainer.refuses = True, self.refuses
        if trainer.world.rank == 0:
            known = read_record(self.folder.path).get("nonfinite") or []
            self.recorded = [event for event in known if event["step"] <= trainer.step]  # others are done again
            self.folder.update_record(nonfinite=self.recorded)
        if self.in_gate is not None and entry is not None:
            self._look_back(trainer, Baseline(Path(entry.path)), self.in_gate)

    def _look_back(self, trainer: Trainer, baseline: Baseline, metrics: StepMetrics) -> None:
        """The gate judges differences, and there was none: the step is looked at from the baseline's state before it."""
        # The optimizer's is neither needed nor touched.
        state, trainer.optimizer.state = trainer.optimizer.state, defaultdict(dict)
        saved = snapshot(trainer)
        load_state(trainer, baseline, metrics.step - 1)
        batches = trainer.batches.micro_batches(metrics.step - 1)
        self._happened(trainer, batches, None, metrics.loss, metrics.grad_norm, "in the gate, as in its baseline, ")
        restore(trainer, saved)
        trainer.optimizer.state = state

    def refuses(self, trainer: Trainer, batches: list[Batch], loss_sum: Tensor, loss: float, norm: float) -> bool:
        """Whether the optimizer must not take this step. Raises NonFiniteError, on all ranks, where the run must end."""
        # Beyond the last step are those that are only looked at (measure/tracked.py).
        if _finite_step(trainer, loss, norm) or trainer.step >= self.config.steps:
            return False
        self._happened(trainer, batches, loss_sum, loss, norm)
        return self.policy is OnNonfinite.skip

    def _happened(
        self,
        trainer: Trainer,
        batches: list[Batch],
        loss_sum: Tensor | None,
        loss: float,
        norm: float,
        where: str = "",
    ) -> None:
        """Find the cause of the first event; keep, record and tell the first few."""
        self.num_events += 1
        if self.num_events > MAX_EVENTS:
            if self.num_events == MAX_EVENTS + 1:
                self._say("more steps are not finite: of these only metrics.jsonl tells")
            return
        event, saw = self._event(trainer, batches, loss_sum, loss, norm)
        self._keep(trainer, batches, event, saw)
        event.text = f"step {event.step}: {where}{_explained(event, trainer.world.size)}"
        if trainer.world.rank == 0:
            self.recorded.append(asdict(event))
            self.folder.update_record(nonfinite=self.recorded)
        trainer.world.barrier()  # once a rank has raised, the others are ended
        if self.policy is OnNonfinite.stop:
            for file in event.files[:1]:
                self._say(f"to look at its batch: {_command(self.folder.path / file)}")
            raise NonFiniteError(self._ending(event))
        overflowed = trainer.scaler.enabled and not math.isfinite(norm)
        taken = not overflowed and (self.policy is OnNonfinite.record or bool(where))
        self._say(f"{event.text}; {'taken as it is' if taken else 'not taken'}")

    def _event(
        self, trainer: Trainer, batches: list[Batch], loss_sum: Tensor | None, loss: float, norm: float
    ) -> tuple[Event, list[int]]:
        """The entry, and the ranks whose batch is worth keeping. A collective."""
        world, in_forward = trainer.world, not math.isfinite(loss)
        what, value = ("loss", loss) if in_forward else ("gradient norm", norm)
        event = Event(trainer.step + 1, what, value, self.policy.name)
        if not in_forward:
            event.gradients = _not_finite(trainer, gradients=True)[0][:10]
        if self.num_events == 1:
            self._say(f"step {event.step}: the {what} is {value}; looking for where it was made")
            event.cause, event.ranks, saw = find(trainer, batches, in_forward, self.policy is not OnNonfinite.stop)
            event.reason = None if event.cause else "it did not come again when the step was run again"
            return event, saw
        event.reason = "looked for at the first event only"
        if in_forward and loss_sum is not None:
            event.ranks = _ranks(world.gather(not bool(loss_sum.isfinite())))
        return event, event.ranks or list(range(world.size))

    def _say(self, text: str) -> None:
        if self.console is not None:
            clear = "\r\x1b[2K" if self.console.isatty() else ""  # the progress bar draws itself again
            print(f"{clear}distbench: {text}", file=self.console, flush=True)

    def _ending(self, event: Event) -> str:
        saved = complete(self.folder.checkpoints)
        kept = (
            f"its batch is kept in {', '.join(event.files)}"
            if event.files
            else f"its batch is not kept: {event.problem}"
        )
        checkpoint = f"checkpoints/{saved[-1].name}" if saved else "none"
        return f"{event.text}; {kept}; last checkpoint: {checkpoint}; on_nonfinite=skip leaves such steps out"

    def _keep(self, trainer: Trainer, batches: list[Batch], event: Event, ranks: list[int]) -> None:
        """Write each of these ranks' micro-batches. A collective; a full disk changes nothing of what becomes of the run."""
        name = f"nonfinite/step_{event.step:08d}_rank_{trainer.world.rank:05d}.safetensors"
        problem = None
        if trainer.world.rank in ranks:
            tensors, samples = {}, []
            for index, batch in enumerate(batches):
                tensors[f"inputs.{index}"] = batch.inputs.cpu().contiguous()
                tensors[f"targets.{index}"] = batch.targets.cpu().contiguous()
                samples.append(list(batch.ids))
            facts = {"step": event.step, "rank": trainer.world.rank, "seed": trainer.seed, "samples": samples}
            try:
                (self.folder.path / "nonfinite").mkdir(exist_ok=True)
                metadata = {key: json.dumps(value) for key, value in facts.items()}
                write_atomic(self.folder.path / name, save(tensors, metadata))
            except OSError as error:
                problem = f"cannot write {name}: {error.strerror}"
        shares = trainer.world.gather((name, problem))
        event.files = [shares[rank][0] for rank in ranks if shares[rank][1] is None]
        event.problem = next((problem for _, problem in shares if problem), None)


def _finite_step(trainer: Trainer, loss: float, norm: float) -> bool:
    """The loss is the unscaled one; a gradient that is not finite is a loss scaler's ordinary business."""
    return math.isfinite(loss) and (trainer.scaler.enabled or math.isfinite(norm))


def _explained(event: Event, size: int) -> str:
    """What it is, and where it came from, in words."""
    ranks, cause = "", event.cause
    if event.ranks and size > 1:
        ranks = f", on rank{'s' * (len(event.ranks) > 1)} {', '.join(map(str, event.ranks))} of {size}"
    text = f"the {event.what} is {event.value}"
    if cause is None:
        text += f"{ranks}: {event.reason}"
    else:
        text += f": {cause.text}{ranks}"
    if cause is not None and cause.micro_batch is not None:
        text += f", micro-batch {cause.micro_batch} (samples {_listed(cause.samples)})"
    elif event.gradients and event.what != "loss":
        text += f"; gradient of {event.gradients[0]}"
    return text


def _listed(ids: list[int]) -> str:
    """Ids that follow each other as a span, at most five others."""
    if len(ids) > 2 and ids == list(range(ids[0], ids[-1] + 1)):
        return f"{ids[0]} to {ids[-1]}"
    return ", ".join(map(str, ids[:5])) + ", ..." * (len(ids) > 5)


def _command(file: Path) -> str:
    return f"python -c \"from safetensors.torch import load_file; print(load_file('{os.path.relpath(file)}'))\""


# --- where it was made


def find(
    trainer: Trainer, batches: list[Batch], in_forward: bool, keep_gradients: bool
) -> tuple[Cause | None, list[int] | None, list[int]]:
    """The first cause on any rank, the ranks that have the same, and all that saw one. A collective.

    Runs the step again, but for the optimizer: with the random state it had, and with the buffers and attributes
    that it left, which are put back. `in_forward`: the loss is not finite; otherwise the gradient is not.
    """
    world = trainer.world
    everyone = list(range(world.size))
    names, ranks = _not_finite(trainer, gradients=False)
    if names:
        return Cause("parameter", f"parameter {names[0]} is itself not finite", parameter=names[0]), ranks, everyone
    own, summed = _run_again(trainer, batches, in_forward, keep_gradients)
    shares = world.gather(own)
    found = [(cause.micro_batch or 0, rank) for rank, cause in enumerate(shares) if cause is not None]
    if not found:
        return summed, None, everyone
    first = shares[min(found)[1]]
    ranks = [rank for _, rank in found if (shares[rank].kind, shares[rank].module) == (first.kind, first.module)]
    return first, ranks, [rank for _, rank in found]


def _run_again(
    trainer: Trainer, batches: list[Batch], in_forward: bool, keep_gradients: bool
) -> tuple[Cause | None, Cause | None]:
    """This rank's first cause, and one that is nobody's own. Forward and backward communicate, so every rank comes here,
    and goes all the way."""
    module, strategy = trainer.module, trainer.strategy
    buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    attributes = attributes_of(trainer).collect().copy()
    gradients = [
        (p, p.grad, strategy.local(p.grad).clone() if keep_gradients and p.grad is not None else None)
        for p in module.parameters()
    ]
    trainer.optimizer.zero_grad(set_to_none=True)
    factor = trainer.world.size / trainer.loss.count(batches, trainer.world)
    cause: Cause | None = None
    with watch(modules_by_name(trainer)) as calls:
        for index, batch in enumerate(batches):
            trainer.beat("nonfinite", trainer.step + 1)
            calls.clear()
            sync = trainer.sync_each_micro_batch or index == len(batches) - 1
            with strategy.backward_sync(module, sync):
                loss = trainer.forward(batch)
                if in_forward and cause is None and not _all_finite(loss):
                    cause = _in_forward(trainer, calls, index, batch)
                made: list[tuple[str, int]] = []
                if not in_forward and cause is None:
                    watch_backward(loss, made)
                trainer.backward(loss, factor)
                if made:
                    cause = _odd_inputs(trainer, index, batch) or _in_backward(calls, index, batch, made[0])
    summed = None if in_forward else _in_sum(trainer)
    set_buffers(module, buffers)
    attributes_of(trainer).put(attributes)
    trainer.optimizer.zero_grad(set_to_none=True)
    if keep_gradients:
        # The very tensors: clipping still holds them. Their memory may have been used, as a view of DDP's bucket.
        for parameter, gradient, values in gradients:
            parameter.grad = gradient
            if gradient is not None:
                strategy.local(gradient).copy_(values)
    return cause, summed


def _in_forward(trainer: Trainer, calls: list[Call], index: int, batch: Batch) -> Cause:
    """What made a micro-batch's loss not finite."""
    if odd := _odd_inputs(trainer, index, batch):
        return odd
    bad = next((call for call in calls if not call.finite_output), None)
    if bad is None:
        if odd := _odd_samples("targets", "the targets are not finite", batch.targets, index, batch):
            return odd
        text = f"made by the {trainer.loss.kind.name} loss of finite outputs"
        return Cause("loss", text, micro_batch=index, samples=list(batch.ids))
    made = bad.maker()
    text = f"made by {_who(made)}, in forward from finite inputs"
    return Cause("forward", text, made.name, made.kind, micro_batch=index, samples=list(batch.ids))


def _in_backward(calls: list[Call], index: int, batch: Batch, made: tuple[str, int]) -> Cause:
    operation, number = made
    where = next((call.at(number) for call in calls if call.first <= number < call.last), None)
    if where is None:
        text = f"made outside of the model's modules, in backward: {operation} of finite gradients"
        return Cause("backward", text, operation=operation, micro_batch=index, samples=list(batch.ids))
    text = f"made by {_who(where)}, in backward: {operation} of finite gradients"
    return Cause("backward", text, where.name, where.kind, operation, micro_batch=index, samples=list(batch.ids))


def _in_sum(trainer: Trainer) -> Cause | None:
    """What is not finite once gradients are added up. A collective."""
    if _not_finite(trainer, gradients=True)[0]:
        return Cause("sum", "every rank's own gradients are finite, their sum over micro-batches and ranks is not")
    nothing = torch.zeros((), dtype=torch.float64, device=trainer.world.device)
    _, norm = trainer.agree(nothing, trainer.strategy.gradients(trainer.module))
    text = "every gradient is finite, the sum of their squares is not"
    return None if math.isfinite(norm) else Cause("sum", text)


def _odd_inputs(trainer: Trainer, index: int, batch: Batch) -> Cause | None:
    """What comes in is not finite."""
    policy, inputs = trainer.policy, batch.inputs
    if found := _odd_samples("inputs", "the inputs are not finite", inputs, index, batch):
        return found
    if policy.autocast or not inputs.is_floating_point():
        return None
    text = f"the inputs are not finite in {NAMES[policy.compute_dtype]}"
    return _odd_samples("cast", text, inputs.to(policy.compute_dtype), index, batch)


def _odd_samples(kind: str, text: str, tensor: Tensor, index: int, batch: Batch) -> Cause | None:
    rows = tensor.isfinite().reshape(len(batch.ids), -1).all(dim=1).tolist()
    samples = [number for number, finite in zip(batch.ids, rows, strict=True) if not finite]
    return Cause(kind, text, micro_batch=index, samples=samples) if samples else None


def _who(call: Call) -> str:
    return f"{call.name} ({call.kind})" if call.name else f"the model itself ({call.kind}), outside of its modules"


# --- watching forward and backward


@dataclass
class Call:
    """One call of a module in forward."""

    name: str
    kind: str
    finite_inputs: bool
    first: int
    """Number of the first autograd node made in it."""
    last: int = 0
    """One more than that of the last one."""
    finite_output: bool = True
    calls: list[Call] = field(default_factory=list)
    """Of modules inside, in order."""

    def maker(self) -> Call:
        """The innermost call that had finite inputs and made the output of this one not finite."""
        suspect: Call | None = None
        for inner in self.calls:
            if inner.finite_inputs and not inner.finite_output:
                suspect = suspect or inner
            elif not inner.finite_inputs and inner.finite_output:
                suspect = None  # scores masked with -inf, say, and the softmax of them
            elif not inner.finite_inputs:
                suspect = suspect or self  # made between two modules
        return self if suspect is None or suspect is self else suspect.maker()

    def at(self, number: int) -> Call:
        """The innermost call that made an autograd node."""
        return next((inner.at(number) for inner in self.calls if inner.first <= number < inner.last), self)


def modules_by_name(trainer: Trainer) -> dict[str, nn.Module]:
    """By the plain model's names; of a wrapper and what it wraps, the wrapped."""
    canonical = trainer.strategy.canonical_name
    return {canonical(f"{name}.").rstrip("."): module for name, module in trainer.module.named_modules()}


@contextmanager
def watch(modules: dict[str, nn.Module]) -> Iterator[list[Call]]:
    """Yields the outermost calls, in order; forwards that checkpointing runs again in backward are none."""
    outermost: list[Call] = []
    running: list[Call] = []

    def before(name: str, kind: str) -> Callable[..., None]:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            if not in_backward():
                call = Call(name, kind, _all_finite((args, kwargs)), torch.autograd._get_sequence_nr())
                (running[-1].calls if running else outermost).append(call)
                running.append(call)

        return enter

    def after(_: nn.Module, args: Any, output: Any) -> None:
        if not in_backward():
            call = running.pop()
            call.finite_output, call.last = _all_finite(output), torch.autograd._get_sequence_nr()

    handles = []
    try:
        for name, module in modules.items():
            kind = type(module).__mro__[2] if isinstance(module, FSDPModule) else type(module)  # fully_shard's subclass
            # Inputs are looked at before: the module may change them in place.
            handles.append(module.register_forward_pre_hook(before(name, kind.__name__), with_kwargs=True))
            handles.append(module.register_forward_hook(after))
        yield outermost
    finally:
        for handle in handles:
            handle.remove()


def watch_backward(loss: Tensor, made: list[tuple[str, int]]) -> None:
    """Let backward append (name, number) of the first function that makes a gradient not finite of gradients that are."""

    def hook(name: str, number: int) -> Callable[[Any, Any], None]:
        def ran(inputs: Any, outputs: Any) -> None:
            if not made and _all_finite(outputs) and not _all_finite(inputs):
                made.append((name, number))

        return ran

    seen, left = set(), [loss.grad_fn]
    while left:
        node = left.pop()
        # Nodes without a next one accumulate gradients, and stay beyond this backward.
        if node is not None and node not in seen and node.next_functions:
            seen.add(node)
            node.register_hook(hook(node.name(), node._sequence_nr()))
            left += [following for following, _ in node.next_functions]


@torch.no_grad()
def _all_finite(tree: Any) -> bool:
    """Of every floating-point tensor in a tree of them. Adds nothing to the graph, whose size checkpointing compares."""
    return all(
        bool(leaf.isfinite().all())
        for leaf in tree_leaves(tree)
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
    )


def _not_finite(trainer: Trainer, gradients: bool) -> tuple[list[str], list[int]]:
    """Parameters, or parameters' gradients, that are not finite, in the plain model's order, and the ranks that hold them.
    A collective."""
    own = []
    for slot in trainer.strategy.slots(trainer.module):
        tensor = slot.parameter.grad if gradients else slot.parameter.detach()
        if tensor is not None and not _all_finite(slot.cut(trainer.strategy.local(tensor))):
            own.append(slot.name)
    shares = trainer.world.gather(own)
    order = {slot.name: place for place, slot in enumerate(trainer.strategy.slots(trainer.module))}
    names = sorted({name for share in shares for name in share}, key=lambda name: order[name])
    return names, _ranks([names[:1] == share[:1] for share in shares] if names else [])


def _ranks(flags: list[bool]) -> list[int]:
    return [rank for rank, flag in enumerate(flags) if flag]
