"""Steps after training that are looked at, not trained on: what each collective means, FLOPs, memory by kind.

Their results are thrown away, so nothing here can change a run. Each may fail with a model that its tool does not
understand; then its reason is in the record instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from distbench.measure.collectives import dispatched
from distbench.measure.kinds import memory_by_kind
from distbench.measure.recorder import ScopeRecorder
from distbench.trainer import Trainer


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
    # FLOPs last: counting them shows Python what only C++ referred to (DDP's buckets), which would then count twice.
    for name, look in (("meanings", _meanings), ("memory", memory_by_kind), ("flops", _flops)):
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
