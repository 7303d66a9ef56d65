"""Steps after training that are looked at, not trained on: what each collective means, FLOPs, memory by kind.

Their results are thrown away, so nothing here can change a run. Each may fail with a model that its tool does not
understand; then its reason is in the record instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from distbench.measure.collectives import dispatched
from distbench.measure.recorder import ScopeRecorder
from distbench.strategies.torch_fsdp2 import is_fully_sharded
from distbench.trainer import Trainer

KINDS = {
    "Parameter": "parameters",
    "Buffer": "buffers",
    "Gradient": "gradients",
    "Activation": "activations",
    "Optstate": "optimizer_state",
    "Temp": "other",
    "Sharded Param": "parameters",
    "Unsharded Param": "gathered_parameters",
    "Sharded Grad": "gradients",
    "Unsharded Grad": "unreduced_gradients",
    "All Gather": "communication",
    "Reduce Scatter": "communication",
    "OptState": "optimizer_state",
    "Inputs": "other",
}
"""torch's memory trackers' names."""


@dataclass
class Tracked:
    """One rank's."""

    meanings: list[str] = field(default_factory=list)
    flops: int | None = None
    memory: dict[str, int] | None = None
    reasons: dict[str, str] = field(default_factory=dict)
    """meanings, flops or memory -> why it is missing."""


def track(trainer: Trainer) -> Tracked:
    """Run the tracked steps. A collective."""
    observers, trainer.observers = trainer.observers, []
    found = Tracked()
    for name, look in (("meanings", _meanings), ("flops", _flops), ("memory", _memory)):
        value, reason = _attempt(look, trainer)
        setattr(found, name, value if reason is None else getattr(found, name))
        if reason is not None:
            found.reasons[name] = reason
    trainer.observers = observers
    return found


def _attempt(look: Callable[[Trainer], Any], trainer: Trainer) -> tuple[Any, str | None]:
    try:
        return look(trainer), None
    except Exception as error:  # the tools are torch's own and private; what they cannot do is no fault of the run
        return None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _meanings(trainer: Trainer) -> list[str]:
    recorder = ScopeRecorder(trainer.world.device, ops=True)
    recorder.start()
    trainer.train_step()
    return dispatched(recorder.stop())


def _flops(trainer: Trainer) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        trainer.train_step()
    return int(counter.get_total_flops())


def _memory(trainer: Trainer) -> dict[str, int]:
    """Bytes by kind when this rank's tensors were largest."""
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed._tools.mem_tracker import MemTracker

    trainer.optimizer.zero_grad(set_to_none=True)
    if is_fully_sharded(trainer.module):
        tracker: Any = FSDPMemTracker(trainer.module, trainer.optimizer)
    else:
        tracker = MemTracker()
        tracker.track_external(trainer.module, trainer.optimizer)
    with tracker:
        trainer.train_step()
    peak = tracker.get_tracker_snapshot("peak")
    snapshot = next(values for device, values in peak.items() if device.type == trainer.world.device.type)
    found: dict[str, int] = {}
    for kind, size in snapshot.items():
        name = getattr(kind, "value", str(kind))
        if name != "Total":
            key = KINDS.get(name, "other")
            found[key] = found.get(key, 0) + int(size)
    return found
