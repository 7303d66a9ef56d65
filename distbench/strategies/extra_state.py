"""What modules return from `get_extra_state`: tensors are kept as buffers are; anything else would have to be pickled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

KEY = "_extra_state"
"""What a state dict calls it (`torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX`)."""


def extra_states(module: nn.Module, canonical: Callable[[str], str]) -> tuple[dict[str, Tensor], dict[str, nn.Module]]:
    """By their names in the plain model's state dict: those that are tensors, and the modules whose is none."""
    tensors: dict[str, Tensor] = {}
    others: dict[str, nn.Module] = {}
    for name, owner in module.named_modules():
        if type(owner).get_extra_state is not nn.Module.get_extra_state:
            key = canonical(f"{name}.{KEY}" if name else KEY)
            state = owner.get_extra_state()
            if isinstance(state, Tensor):
                tensors[key] = state
            else:
                others[key] = owner
    return tensors, others


@contextmanager
def tensors_only(module: nn.Module) -> Iterator[None]:
    """State dicts have None for extra state that is no tensor: torch cannot gather one of any kind."""
    _, others = extra_states(module, lambda name: name)
    for owner in others.values():
        vars(owner)["get_extra_state"] = lambda: None
    try:
        yield
    finally:
        for owner in others.values():
            del vars(owner)["get_extra_state"]
