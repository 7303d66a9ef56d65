"""The kernel's own count of bytes sent on the interface that Gloo uses: every process of the network namespace is in it."""

from __future__ import annotations

import os
from pathlib import Path


def _counter() -> Path | None:
    name = os.environ.get("GLOO_SOCKET_IFNAME", "")
    path = Path("/sys/class/net") / name / "statistics" / "tx_bytes"
    return path if name and path.exists() else None


def unavailable() -> str | None:
    """Why there is no counter to read, or None."""
    if _counter() is None:
        name = os.environ.get("GLOO_SOCKET_IFNAME")
        return f"no counter for interface {name}" if name else "GLOO_SOCKET_IFNAME names no interface"
    return None


def bytes_sent() -> int | None:
    counter = _counter()
    return None if counter is None else int(counter.read_text())
