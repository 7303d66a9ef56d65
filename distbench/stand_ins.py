"""What wrappers put between modules and their tensors: cast copies and views of parameters, copies of inputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

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

    def drop(self, places: Iterable[Place]) -> None:
        for module, name in places:
            vars(module).pop(name, None)

    def clear(self) -> None:
        self.drop(self._places)
        self._places.clear()


def places(modules: Iterable[nn.Module]) -> list[Place]:
    """Where these modules hold parameters themselves; tied ones at each of their places."""
    return [
        (module, name) for module in modules for name, parameter in module._parameters.items() if parameter is not None
    ]


def parts(model: nn.Module, units: list[str]) -> dict[str, list[nn.Module]]:
    """Each unit's own modules, not those of a unit inside it; the root's under an empty name.

    `units`: names of the wrapped modules without the root, as `wrapping.unit_names` gives them.
    """
    held: dict[str, list[nn.Module]] = {name: [] for name in ["", *units]}
    for name, module in model.named_modules():
        unit = max((unit for unit in held if not unit or f"{name}.".startswith(f"{unit}.")), key=len)
        held[unit].append(module)
    return held


def pack(model: nn.Module, units: list[str], multiple: int) -> None:
    """Lay each unit's parameters one after another into one buffer, each at a multiple of so many elements, as FSDP1's
    flat parameter does: MKL's product with a single row rounds by the address of the weight."""
    for modules in parts(model, units).values():
        own = [p for p in dict.fromkeys(module._parameters[name] for module, name in places(modules)) if p is not None]
        floating = [parameter for parameter in own if parameter.is_floating_point()]
        starts = [0]
        for parameter in floating:
            starts.append(-(-(starts[-1] + parameter.numel()) // multiple) * multiple)
        buffer = torch.empty(0) if not floating else floating[0].new_empty(starts[-1])
        for parameter, start in zip(floating, starts, strict=False):
            piece = buffer[start : start + parameter.numel()].view(parameter.shape)
            parameter.data = piece.copy_(parameter.detach())


class CastInPlace(torch.autograd.Function):
    """A cast copy as many elements into its buffer as the original is into its own; the gradient is cast back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = tensor.dtype
        start = tensor.storage_offset()
        buffer = tensor.new_empty(start + tensor.numel(), dtype=dtype)
        return buffer[start:].view(tensor.shape).copy_(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A cast copy that lies in its buffer where the original does in its own, so that kernels round alike."""
    if tensor.storage_offset() == 0 or tensor.dtype is dtype or not tensor.is_contiguous():
        return tensor.to(dtype)
    result: Tensor = CastInPlace.apply(tensor, dtype)
    return result


def views_per_call(model: nn.Module, units: list[str]) -> None:
    """Before each call of a unit, let its parameters become views of themselves, made anew, as FSDP1's views of its flat
    parameter are.

    Each parameter is used with the same values, but its gradients add up otherwise: first those within a call, then the
    calls'. And autocast casts a view at each use, where it casts a parameter once.
    """
    views = StandIns()

    def renew(own: list[Place]) -> Any:
        def before(module: nn.Module, args: Any) -> None:
            if in_backward():
                return  # checkpointing runs this forward again: it keeps the views, as in FSDP1
            made: dict[int, Tensor] = {}
            with torch.enable_grad():
                for place in own:
                    # Registered while forward runs: the parameter, or what `CastParameters` made of it.
                    parameter = place[0]._parameters[place[1]]
                    assert parameter is not None
                    views.put(place, made.setdefault(id(parameter), parameter.view_as(parameter)))

        return before

    for unit, modules in parts(model, units).items():
        # Before the hooks that a model brings: FSDP1 wraps around them.
        model.get_submodule(unit).register_forward_pre_hook(renew(places(modules)), prepend=True)


def inputs_per_call(model: nn.Module, units: list[str]) -> None:
    """Pass what goes into each unit, and needs a gradient, through an autograd function, as fully_shard does.

    Its gradients add up within the unit before they meet those from outside (a residual's). And one tensor that goes in
    twice becomes two, so attention that asks whether its query is its key takes another path.
    """

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        found = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not found or not torch.is_grad_enabled() or in_backward():
            return None
        passed = iter(_Pass.apply(*found))
        return tree_unflatten(
            [next(passed) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf for leaf in leaves], spec
        )

    for unit in ["", *units]:
        model.get_submodule(unit).register_forward_pre_hook(before, prepend=True, with_kwargs=True)


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


UNIT_CALLS = {"views": views_per_call, "inputs": inputs_per_call}
"""What a wrapper does at each call of a unit, by the name that `Reduction.unit_calls` has for it."""


def in_backward() -> bool:
    """Private, and what torch's own checkpointing asks (seen in torch 2.13)."""
    return torch._C._current_graph_task_id() != -1
