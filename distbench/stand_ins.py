"""Tensors that modules compute with instead of their parameters: cast copies, or views as FSDP1 makes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

Place = tuple[nn.Module, str]
"""A module and the name of a parameter that it holds itself."""


class StandIns:
    """`module.weight` is the stand-in while `module.parameters()` are still the parameters themselves: a plain attribute
    comes before a registered parameter. An optimizer, a wrapper and a state dict see nothing of it."""

    def __init__(self) -> None:
        self._places: set[Place] = set()

    def put(self, place: Place, tensor: Tensor) -> None:
        module, name = place
        vars(module)[name] = tensor
        self._places.add(place)

    def clear(self) -> None:
        for module, name in self._places:
            vars(module).pop(name, None)
        self._places.clear()


def places(modules: Iterable[nn.Module]) -> list[Place]:
    """Where these modules hold parameters themselves; tied ones at each of their places."""
    return [
        (module, name) for module in modules for name, parameter in module._parameters.items() if parameter is not None
    ]


class ViewsPerCall:
    """Before each call of a unit its parameters become views of themselves, made anew, as FSDP1's views of its flat
    parameter are.

    Each parameter is still used with the same values, but its gradients add up otherwise: first those within a call, then
    the calls'. And autocast casts a view at each use, where it casts a parameter once.
    """

    def __init__(self, model: nn.Module, units: list[str]) -> None:
        """`units`: names of the wrapped modules without the root, as `wrapping.unit_names` gives them."""
        self._views = StandIns()
        held: dict[str, list[nn.Module]] = {name: [] for name in ["", *units]}
        for name, module in model.named_modules():
            unit = max((unit for unit in held if not unit or f"{name}.".startswith(f"{unit}.")), key=len)
            held[unit].append(module)
        for unit, modules in held.items():
            # Before the hooks that a model brings: FSDP1 wraps around them.
            model.get_submodule(unit).register_forward_pre_hook(self._renew(places(modules)), prepend=True)

    def _renew(self, own: list[Place]) -> Any:
        def before(module: nn.Module, args: Any) -> None:
            if torch._C._current_graph_task_id() != -1:
                return  # checkpointing runs this forward again in backward: it keeps the views, as in FSDP1
            views: dict[int, Tensor] = {}
            with torch.enable_grad():
                for place in own:
                    # Registered while forward runs: the parameter, or what `CastParameters` made of it.
                    parameter = place[0]._parameters[place[1]]
                    assert parameter is not None
                    self._views.put(place, views.setdefault(id(parameter), parameter.view_as(parameter)))

        return before
