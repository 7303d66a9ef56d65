"""The kernel's own count of bytes sent on the interface that Gloo uses: every process of the network namespace is in it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

TABLE = Path("/proc/self/net/dev")
"""Of this process's namespace (proc(5)); the files under /sys/class/net are of the one in which sysfs was mounted."""
SENT_COLUMN = 8
NAMESPACE = Path("/proc/self/ns/net")


def unavailable() -> str | None:
    """Why there is no counter to read, or None."""
    if bytes_sent() is None:
        name = os.environ.get("GLOO_SOCKET_IFNAME")
        return f"no counter for interface {name}" if name else "GLOO_SOCKET_IFNAME names no interface"
    return None


def host() -> str:
    """The same for all who share an interface's counter, and for nobody else: namespaces of one machine may be several."""
    return f"{socket.gethostname()} {NAMESPACE.readlink() if NAMESPACE.exists() else ''}"


def bytes_sent() -> int | None:
    """Of the interface that GLOO_SOCKET_IFNAME names, since it was made."""
    name = os.environ.get("GLOO_SOCKET_IFNAME")
    if not name or not TABLE.exists():
        return None
    for line in TABLE.read_text().splitlines():
        interface, colon, counters = line.partition(":")
        if colon and interface.strip() == name:
            return int(counters.split()[SENT_COLUMN])
    return None
