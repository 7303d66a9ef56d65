"""What the plain model's state dict has beside its parameters, read from the wrapped one."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from distbench.strategies import torch_fsdp1
from distbench.strategies.extra_state import extra_states

FSDP1_MARKS = ("_is_fsdp_", "_fsdp_")
"""How the attributes begin that FullyShardedDataParallel leaves on the modules in it (seen in torch 2.13)."""


def persistent_buffers(module: nn.Module, canonical: Callable[[str], str]) -> list[str]:
    """Buffers in the state dict, and extra state that is a tensor, by every name that they have there.

    The only place that reads `nn.Module._non_persistent_buffers_set` (seen in torch 2.13): of a sharded module the state
    dict itself would have to be gathered.
    """
    found = []
    for name, _ in module.named_buffers(remove_duplicate=False):
        owner, _, key = name.rpartition(".")
        if key not in module.get_submodule(owner)._non_persistent_buffers_set:
            found.append(canonical(name))
    return found + sorted(extra_states(module, canonical)[0])


def aliases(module: nn.Module, canonical: Callable[[str], str]) -> dict[str, str]:
    """Other names of tied parameters and of shared buffers -> the name that `named_parameters` or `named_buffers` has."""
    tied = torch_fsdp1.aliases(module, canonical)
    found = {other: first for first, others in tied.items() for other in others}
    in_flat = torch_fsdp1.flattened(module)
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    firsts: dict[int, str] = {}
    for name, tensor in named:
        first = firsts.setdefault(id(tensor), canonical(name))
        if canonical(name) != first and id(tensor) not in in_flat:
            found[canonical(name)] = first
    return found
