"""Where a failed step first disagrees: which module, in which direction, on which ranks, compute or communication.

Every rank plays its own part of the step twice in its own process: on a plain copy of the model, as the baseline did,
and through the run's wrapped model without reducing. The same rank's tensors are compared with each other, so nothing
has to be gathered. The run is over when this is called, so what it leaves behind in the trainer does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from distbench.config import Config
from distbench.data.batches import Batch
from distbench.numerics.baseline import Baseline, Replay
from distbench.numerics.digests import tensor_digest
from distbench.numerics.gate import Check, Verdict
from distbench.numerics.state import load_state
from distbench.precision import DTYPES
from distbench.trainer import Trainer

FOUND_BEFORE = ("structure", "initial_weights", "initial_buffers", "samples", "dtypes")
"""Checks that name the place themselves and come before any computation."""

FOUND_AFTER = (
    "weights_held",
    "scale",
    "representable",
    "plain_sgd",
    "reported",
    "next_scale",
    "coverage",
    "norm",
    "clip",
    "update",
    "optimizer_groups",
    "replicas_after",
    "buffers",
    "unused_weights",
)
"""Checks of what happens after the gradients, which agreed."""

PHASES = ("forward", "loss", "backward", "local_gradients", "reduction")
"""In the order in which a difference would first show."""


@dataclass
class Location:
    """The place of the first disagreement."""

    phase: str
    """One of PHASES, or the name of the check that named the place itself."""
    step: int
    module: str | None = None
    module_class: str | None = None
    direction: str | None = None
    """`forward` or `backward`, where a module was found; `backward` with phase `loss`: only what enters backward."""
    parameters: list[str] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    """Global ids of the micro-batch in which it first showed."""
    micro_batch: int | None = None
    inputs_agree: bool | None = None
    """What went into the module was the baseline's; None where no module's forward was found."""
    local_gradients_agree: bool | None = None
    """None where they were not compared."""
    confirmed: bool | None = None
    """A second pass found the same place; None where there was no pass."""
    evidence: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def locate(config: Config, baseline: Baseline, trainer: Trainer, verdict: Verdict) -> Location:
    """The place of the verdict's first failure, the same on every rank. A collective."""
    check = verdict.first_failure
    assert check is not None, "nothing failed"
    if check.name in FOUND_BEFORE or check.name in FOUND_AFTER:
        return _named_by_check(check)
    shares = trainer.world.gather(_own_location(config, baseline, trainer, check.step))
    return _first_of(shares, verdict, check)


def _named_by_check(check: Check) -> Location:
    module = None
    if check.parameter is not None:
        module = check.parameter.rpartition(".")[0] or None
    return Location(
        phase=check.name,
        step=check.step,
        module=module,
        parameters=[check.parameter] if check.parameter else [],
        ranks=check.ranks,
        evidence=[check.detail],
    )


def _first_of(shares: list[Location], verdict: Verdict, check: Check) -> Location:
    """The earliest phase that any rank saw, with all ranks that saw it there."""
    earliest = min(shares, key=lambda share: (PHASES.index(share.phase), share.micro_batch or 0))
    same = [
        rank for rank, share in enumerate(shares) if share.phase == earliest.phase and share.module == earliest.module
    ]
    agree = all(share.local_gradients_agree for share in shares)
    found = Location(**{**asdict(earliest), "ranks": same, "local_gradients_agree": agree})
    found.confirmed = all(shares[rank].confirmed for rank in same)
    if found.phase == "reduction":
        found.ranks = check.ranks or list(range(len(shares)))
        failed = [g for g in verdict.gradients if g.tier == "fail" and g.step == check.step]
        failed.sort(key=lambda g: -(g.relative_l2 if g.relative_l2 is not None else float("inf")))
        found.parameters = [g.name for g in failed]
    return found


# --- one rank's own two passes


@dataclass
class Pass:
    """What one pass over a rank's micro-batches produced, in order."""

    forward: list[tuple[int, str, str, str, str]] = field(default_factory=list)
    """(micro-batch, module, class, digest of inputs, digest of output), in the order in which forwards end."""
    backward: list[tuple[int, str, str, str]] = field(default_factory=list)
    """(micro-batch, module, class, digest of the output's gradient), in the order in which gradients arrive."""
    losses: list[str] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """This rank's own, unreduced, in the master dtype."""


def _own_location(config: Config, baseline: Baseline, trainer: Trainer, step: int) -> Location:
    batches = trainer.batches.micro_batches(step - 1)
    reference = _reference_pass(config, baseline, trainer, step)
    own = _run_pass(baseline, trainer, step, batches)
    location = _compare(reference, own, step, batches)
    # The wrapped model communicates in forward and backward, so every rank makes the second pass, whatever it saw.
    again = _compare(reference, _run_pass(baseline, trainer, step, batches), step, batches)
    location.confirmed = (again.phase, again.module) == (location.phase, location.module)
    return location


def _reference_pass(config: Config, baseline: Baseline, trainer: Trainer, step: int) -> Pass:
    """This rank's micro-batches on a plain model in the baseline's state, as the baseline replayed them."""
    replay = Replay(config, type(trainer.strategy).reduction(config), trainer.world.device)
    replay.load(baseline, step - 1)
    facts, rank = baseline.step(step), trainer.world.rank
    names = dict(replay.models[rank].named_modules())
    result = Pass()
    factor = replay.shape.world_size / facts["count"] * facts["scale"]
    totals: dict[str, Tensor] = {}
    dtype = DTYPES[replay.reduction.accumulate_dtype]
    with capture(names, result) as begin:
        for index, batch in enumerate(replay.batches[rank].micro_batches(step - 1)):
            begin(index)
            result.losses.append(repr(float(replay.backward(rank, batch, factor))))
            for name, gradient in replay.take_gradients(rank).items():
                if gradient is not None:
                    totals[name] = (totals[name] + gradient if name in totals else gradient).to(dtype)
    result.gradients = {name: value.to(replay.policy.param_dtype) for name, value in totals.items()}
    return result


def _run_pass(baseline: Baseline, trainer: Trainer, step: int, batches: list[Batch]) -> Pass:
    """The same through the run's own wrapped model, loss and backward, with every reduction left out."""
    load_state(trainer, baseline, step - 1)
    trainer.strategy.drop_local_gradients(trainer.module)
    names: dict[str, nn.Module] = {}
    for name, module in trainer.module.named_modules():
        names[trainer.strategy.canonical_name(f"{name}.").rstrip(".")] = (
            module  # the innermost of equal names is the user's
        )
    result = Pass()
    count = trainer.loss.count(batches, trainer.world)
    factor = trainer.world.size / count * trainer.scaler.scale
    with capture(names, result) as begin:
        for index, batch in enumerate(batches):
            begin(index)
            with trainer.strategy.backward_sync(trainer.module, False):
                loss = trainer.forward(batch)
                trainer.backward(loss, factor)
            result.losses.append(repr(float(loss.detach().double())))
    result.gradients = {
        name: gradient.to(trainer.policy.param_dtype)
        for name, gradient in trainer.strategy.local_gradients(trainer.module).items()
    }
    return result


@contextmanager
def capture(modules: dict[str, nn.Module], into: Pass) -> Iterator[Callable[[int], None]]:
    """Record digests of every module's inputs, output and output gradient; yields a function that names the micro-batch."""
    current = 0
    handles = []

    def begin(index: int) -> None:
        nonlocal current
        current = index

    def watch(name: str, module: nn.Module) -> Callable[..., None]:
        kind = type(module).__name__

        def after_forward(_: nn.Module, args: Any, output: Any) -> None:
            into.forward.append((current, name, kind, _digest(args), _digest(output)))
            index = current
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda g: into.backward.append((index, name, kind, _digest(g))))

        return after_forward

    try:
        for name, module in modules.items():
            handles.append(module.register_forward_hook(watch(name, module)))
        yield begin
    finally:
        for handle in handles:
            handle.remove()


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        return [tensor for value in tree.values() for tensor in _tensors(value)]
    if isinstance(tree, list | tuple):
        return [tensor for value in tree for tensor in _tensors(value)]
    return []


def _digest(tree: Any) -> str:
    return " ".join(tensor_digest(tensor) for tensor in _tensors(tree))


def _compare(reference: Pass, own: Pass, step: int, batches: list[Batch]) -> Location:
    differ = [
        name
        for name in dict.fromkeys([*reference.gradients, *own.gradients])
        if not _equal(own.gradients.get(name), reference.gradients.get(name))
    ]
    place = _first_forward(reference, own, step, batches) or _first_loss(reference, own, step, batches)
    place = place or _first_backward(reference, own, step, batches)
    if place is None and differ:
        place = Location("local_gradients", step, evidence=[f"this rank's own gradient of {differ[0]} differs"])
    if place is None:
        place = Location("reduction", step, evidence=["every rank's own gradients are the replay's, bit for bit"])
    place.parameters = differ
    place.local_gradients_agree = not differ
    return place


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    """Bit for bit; zeros stand for no gradient, as in a flat gradient of FSDP's."""
    if a is None or b is None:
        return not any(gradient is not None and bool(gradient.any()) for gradient in (a, b))
    return a.shape == b.shape and tensor_digest(a) == tensor_digest(b)


def _first_forward(reference: Pass, own: Pass, step: int, batches: list[Batch]) -> Location | None:
    """The first module, in the order in which forwards end, whose output is not the baseline's."""
    seen: dict[tuple[int, str], list[tuple[str, str]]] = {}
    for index, name, _, inputs, output in own.forward:
        seen.setdefault((index, name), []).append((inputs, output))
    for index, name, kind, inputs, output in reference.forward:
        calls = seen.get((index, name))
        if not calls:
            continue  # a module that the wrapper replaced by another of its own
        own_inputs, own_output = calls.pop(0)
        if own_output != output:
            same_inputs = own_inputs == inputs
            note = (
                "equal inputs, other output"
                if same_inputs
                else "its inputs differ already: the fault is between modules"
            )
            place = _at("forward", index, name, kind, step, batches, f"{name or '(root)'} in forward: {note}")
            place.inputs_agree = same_inputs
            return place
    return None


def _first_loss(reference: Pass, own: Pass, step: int, batches: list[Batch]) -> Location | None:
    for index, (a, b) in enumerate(zip(reference.losses, own.losses, strict=False)):
        if a != b:
            detail = f"equal outputs, loss sum {b} instead of {a}"
            return _at("loss", index, "", "loss", step, batches, detail)
    return None


def _first_backward(reference: Pass, own: Pass, step: int, batches: list[Batch]) -> Location | None:
    """The first module, in the order in which gradients arrive, whose output gradient is not the baseline's."""
    seen: dict[tuple[int, str], list[str]] = {}
    for index, name, _, gradient in own.backward:
        seen.setdefault((index, name), []).append(gradient)
    before: tuple[str, str] | None = None
    for index, name, kind, gradient in reference.backward:
        calls = seen.get((index, name))
        if not calls:
            continue
        if calls.pop(0) != gradient:
            if before is None:
                note = "equal losses, but the gradient that enters backward differs"
                return replace(_at("loss", index, "", "loss", step, batches, note), direction="backward")
            culprit, culprit_kind = before
            note = f"gradient of {name}'s output differs after equal gradients down to {culprit or '(root)'}"
            return _at("backward", index, culprit, culprit_kind, step, batches, note)
        before = (name, kind)
    return None


def _at(phase: str, index: int, name: str, kind: str, step: int, batches: list[Batch], detail: str) -> Location:
    return Location(
        phase=phase,
        step=step,
        module=name or None,
        module_class=kind,
        direction=phase if phase in ("forward", "backward") else None,
        micro_batch=index,
        samples=list(batches[index].ids) if index < len(batches) else [],
        evidence=[detail],
    )
