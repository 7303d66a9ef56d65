"""Through which network card a host reaches another."""

from __future__ import annotations

import socket

import psutil


def interface_to(address: str) -> str | None:
    """The network interface through which this host reaches `address`; None where it cannot be told."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 1))  # chooses a route, sends nothing
            own = probe.getsockname()[0]
        except OSError:
            return None
    cards = psutil.net_if_addrs()
    return next((name for name, entries in cards.items() if any(entry.address == own for entry in entries)), None)
