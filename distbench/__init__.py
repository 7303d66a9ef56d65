"""distbench: choose between DDP, FSDP and their settings by experiment.

Importing this package must stay cheap (no torch): `python -m distbench --help` and every refused config rest on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distbench.recording import GradientRecorder

__version__ = "0.1.0"

__all__ = ["GradientRecorder", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "GradientRecorder":
        from distbench.recording import GradientRecorder

        return GradientRecorder
    raise AttributeError(f"module 'distbench' has no attribute {name!r}")
