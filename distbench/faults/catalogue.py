"""The catalogue: faults that happened to somebody, and what the self-test must know to inject and judge each.

`conf/fault/<id>.yaml` names each one, so `fault=<id>` injects it into any run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from distbench.faults.base import Fault

DDP, SHARDED, ALL = ("ddp",), ("fsdp", "fsdp2"), ("ddp", "fsdp", "fsdp2")


class CatalogueFault(Fault):
    """A fault that the self-test injects: the docstring says what is wrong, the attributes where and what to expect."""

    seen_in: ClassVar[str | None] = None
    """The thread where it happened to somebody."""
    strategies: ClassVar[tuple[str, ...]] = ALL
    why_not: ClassVar[str | None] = None
    """Why the other strategies cannot have it."""
    ranks: ClassVar[tuple[int, ...]] = (2, 4)
    """World sizes it is tried at."""
    precisions: ClassVar[tuple[str, ...]] = ("fp32", "bf16")
    overrides: ClassVar[tuple[str, ...]] = ()
    """What the run must be like for the fault to do anything, as command-line overrides."""
    overrides_on: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """The same, for one strategy, precision or number of ranks (`"4"`) only."""
    checks: ClassVar[tuple[str, ...]] = ()
    """The gate's checks, one of which must be the first to fail."""
    location: ClassVar[tuple[str, ...]] = ()
    """Parameters or modules, one of which must be the first that the gate names; empty: none is singled out."""
    diagnosis: ClassVar[tuple[str, ...]] = ()
    """Classes of causes (distbench/numerics/diagnose.py) that are right."""

    @classmethod
    def title(cls) -> str:
        """The docstring's first line."""
        return (cls.__doc__ or "").strip().splitlines()[0]

    @classmethod
    def overrides_for(cls, strategy: str, precision: str, ranks: int) -> list[str]:
        more = [cls.overrides_on.get(key, ()) for key in (strategy, precision, str(ranks))]
        return [override for part in [cls.overrides, *more] for override in part]


def catalogue() -> dict[str, type[CatalogueFault]]:
    """Every fault of `conf/fault/` by its id. Raises UserModelError if a `_target_` cannot be imported."""
    import yaml

    from distbench.hydra_edge import conf_dir
    from distbench.models.build import locate

    found: dict[str, type[CatalogueFault]] = {}
    for file in sorted((conf_dir() / "fault").glob("*.yaml")):
        target = yaml.safe_load(file.read_text()).get("_target_")
        if target is None:
            continue
        fault = locate(target, f"{file.name}: _target_")
        if isinstance(fault, type) and issubclass(fault, CatalogueFault):
            found[file.stem] = fault
    return found
