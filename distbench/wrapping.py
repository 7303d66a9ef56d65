"""Wrap policies: from a model to the names of the modules that become units, the same for fsdp and fsdp2."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from distbench.config import BlockWrap, NoWrap, PatternWrap, SizeWrap
from distbench.errors import ConfigError

CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Have no forward of their own, so they cannot be units."""


@dataclass(frozen=True)
class Unit:
    """One wrapped module and the parameters it holds itself, not through a unit inside it."""

    name: str
    """Qualified module name; empty for the root."""
    module_class: str
    num_parameters: int
    """Elements."""
    num_bytes: int
    """In the master dtype."""
    parameters: tuple[str, ...]


def unit_names(
    policy: SizeWrap | BlockWrap | PatternWrap | NoWrap, model: nn.Module, block_classes: list[str]
) -> list[str]:
    """Qualified names of the modules to wrap, inner before outer; the root is always wrapped and not listed.

    A module that shares a parameter with the outside is never a unit: wrapping it would silently untie the two
    (facebookresearch/lingua#75). Raises ConfigError if the policy matches nothing.
    """
    if isinstance(policy, NoWrap):
        return []
    if isinstance(policy, SizeWrap):
        names = _by_size(model, int(policy.min_num_params))
        if not names:
            # torch's policy, too, leaves a small model in one piece: legal, and the record's unit list shows it.
            return []
    elif isinstance(policy, BlockWrap):
        classes = set(policy.classes or block_classes)
        if not classes:
            raise ConfigError(
                "wrap_policy=block does not know this model's block classes; set wrap_policy.classes=[MyBlock] (or "
                "model.block_classes), or use wrap_policy=size"
            )
        present = {type(module).__name__ for module in model.modules()}
        if not classes & present:
            raise ConfigError(
                f"wrap_policy.classes={sorted(classes)} matches no module of this model; it has {', '.join(sorted(present))}"
            )
        names = [name for name, module in model.named_modules() if type(module).__name__ in classes]
    else:
        names = [
            name
            for name, module in model.named_modules()
            if name and any(re.fullmatch(pattern, name) for pattern in policy.patterns)
        ]
        if not names:
            some = [name for name, _ in model.named_modules() if name][:8]
            raise ConfigError(
                f"wrap_policy.patterns={policy.patterns} matches no module name; names look like {', '.join(some)}"
            )
    shared = _sharing_with_outside(model)
    chosen = [name for name in names if name and name not in shared and not _is_container(model, name)]
    return sorted(chosen, key=lambda name: -name.count("."))


def _is_container(model: nn.Module, name: str) -> bool:
    return isinstance(model.get_submodule(name), CONTAINERS)


def _by_size(model: nn.Module, minimum: int) -> list[str]:
    """Post-order, as torch's size_based_auto_wrap_policy: what inner units hold no longer counts for the outer.

    Attention stays in its parent's unit, whole: its forward reads its output projection's weight past that one's own.
    """
    names: list[str] = []
    counted: set[int] = set()

    def visit(module: nn.Module, name: str) -> int:
        leaf = isinstance(module, nn.MultiheadAttention)
        children = () if leaf else module.named_children()
        remaining = sum(visit(child, f"{name}.{key}" if name else key) for key, child in children)
        for parameter in module.parameters(recurse=leaf):
            if id(parameter) not in counted:
                counted.add(id(parameter))
                remaining += parameter.numel()
        if name and remaining >= minimum and not leaf and not isinstance(module, CONTAINERS):
            names.append(name)
            return 0
        return remaining

    visit(model, "")
    return names


def _sharing_with_outside(model: nn.Module) -> set[str]:
    """Names of modules that hold a parameter which a module outside them holds too."""
    owners: dict[int, set[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(name)
    tied = [places for places in owners.values() if len(places) > 1]

    def inside(place: str, module: str) -> bool:
        return place == module or place.startswith(f"{module}.")

    return {
        name
        for name, _ in model.named_modules()
        if name
        for places in tied
        if any(inside(place, name) for place in places) and not all(inside(place, name) for place in places)
    }


def describe_units(model: nn.Module, names: list[str]) -> list[Unit]:
    """What each unit of a plain, not yet wrapped model holds; the root, with what is left, comes first."""
    owner: dict[str, list[tuple[str, nn.Parameter]]] = {name: [] for name in ["", *names]}
    for parameter_name, parameter in model.named_parameters():
        holder = max(
            (name for name in owner if not name or parameter_name.startswith(f"{name}.")), key=lambda name: len(name)
        )
        owner[holder].append((parameter_name, parameter))
    return [
        Unit(
            name=name,
            module_class=type(model.get_submodule(name)).__name__,
            num_parameters=sum(parameter.numel() for _, parameter in held),
            num_bytes=sum(parameter.numel() * parameter.element_size() for _, parameter in held),
            parameters=tuple(parameter_name for parameter_name, _ in held),
        )
        for name, held in owner.items()
    ]


def unit_rows(units: list[Unit]) -> list[dict[str, Any]]:
    """The record's rows."""
    return [
        {
            "name": unit.name or "(root)",
            "class": unit.module_class,
            "num_parameters": unit.num_parameters,
            "num_bytes": unit.num_bytes,
            "parameters": list(unit.parameters),
        }
        for unit in units
    ]
