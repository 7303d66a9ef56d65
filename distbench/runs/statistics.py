"""Gradient, weight and activation statistics for TensorBoard, every so many steps."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from distbench.numerics.recorder import summarize_gradients, summarize_weights
from distbench.numerics.summary import Summary
from distbench.trainer import Backward, Observer, StepMetrics, Trainer

Write = Callable[[dict[str, float], int], None]
"""Takes values by tag, and the step."""


class Statistics(Observer):
    """Root mean square and largest magnitude at step 1 and every `every`-th: of each parameter's reduced gradient and
    weight, whole, and of each block's output on rank 0's last micro-batch. On every rank, since shards are summed;
    `write` is rank 0's.

    Finite elements only, as a gradient summary's fields; without blocks, the modules that have no modules of their own.
    """

    reads_state = True

    def __init__(self, every: int, blocks: Collection[str], trainer: Trainer, write: Write | None) -> None:
        self.every, self.write = every, write
        self.values: dict[str, float] = {}
        if write is not None:
            for name, module in _watched(trainer.module, blocks):
                name = trainer.strategy.canonical_name(f"{name}.").removesuffix(
                    "."
                )  # a module's name, not a parameter's
                module.register_forward_hook(lambda _module, _inputs, output, name=name: self._output(name, output))
        self._trainer = trainer

    def due(self, step: int) -> bool:
        return step == 1 or step % self.every == 0

    def _output(self, name: str, output: Any) -> None:
        if not self.due(self._trainer.step + 1):
            return
        tensors = output if isinstance(output, list | tuple) else [output]
        value = next(
            (t.detach() for t in tensors if isinstance(t, Tensor) and t.is_floating_point() and t.numel()), None
        )
        if value is not None:
            self.values[f"activation_rms/{name}"] = float(torch.linalg.vector_norm(value, dtype=torch.float64)) / (
                value.numel() ** 0.5
            )
            self.values[f"activation_max/{name}"] = float(value.abs().max())

    def on_gradients(self, backward: Backward, trainer: Trainer) -> None:
        if self.due(backward.step):
            self._take("gradient", summarize_gradients(trainer))

    def on_step(self, metrics: StepMetrics, trainer: Trainer) -> None:
        if not self.due(metrics.step):
            return
        self._take("weight", summarize_weights(trainer))
        if self.write is not None:
            self.write(self.values, metrics.step)
        self.values = {}

    def _take(self, kind: str, summary: Summary) -> None:
        for p in summary:
            if p.elements:
                self.values[f"{kind}_rms/{p.name}"] = (p.sum_squares / p.elements) ** 0.5
                self.values[f"{kind}_max/{p.name}"] = p.max_abs


def _watched(module: nn.Module, blocks: Collection[str]) -> list[tuple[str, nn.Module]]:
    """Blocks by class name (FSDP2 makes a subclass of a wrapped module's class), or else the innermost modules."""
    named = list(module.named_modules())
    names = set(blocks) or {name for _, m in named for name in getattr(m, "block_classes", ())}
    found = [(n, m) for n, m in named if names & {c.__name__ for c in type(m).__mro__}]
    return found or [(n, m) for n, m in named if next(m.children(), None) is None]
