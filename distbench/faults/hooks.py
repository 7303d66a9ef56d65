"""Where a fault meets one parameter's own gradient, before any reduction, whatever wrapped it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

DEFAULT_PARAMETER = "layers.0.mlp.0.weight"
"""Of the self-test's model (model=simple)."""


def on_local_gradient(model: nn.Module, parameter: str, change: Callable[[Tensor], Tensor | None]) -> None:
    """Call `change` on each micro-batch's own gradient of one parameter of the plain model; its result replaces it.

    In forward the module holds what the wrapper put there: the parameter itself (ddp), a cast copy, a view of the
    gathered flat parameter (fsdp) or the gathered parameter (fsdp2). Its hook runs before any reduction.
    """
    owner, _, name = parameter.rpartition(".")

    def watch(module: nn.Module, args: Any) -> None:
        tensor = getattr(module, name)
        if not tensor.requires_grad or getattr(tensor, "_distbench_hooked", False):
            return
        tensor.register_hook(change)
        if tensor.is_leaf:
            tensor._distbench_hooked = True  # the same tensor comes again with the next micro-batch

    model.get_submodule(owner).register_forward_pre_hook(watch)
