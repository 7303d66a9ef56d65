"""Through which network card a host reaches another."""

from __future__ import annotations

import fcntl
import socket
import struct

SIOCGIFADDR = 0x8915
"""linux/sockios.h."""


def interface_to(address: str) -> str | None:
    """The network interface through which this host reaches `address`; None where it cannot be told."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 1))  # chooses a route, sends nothing
            own = probe.getsockname()[0]
        except OSError:
            return None
    return next((name for name, ip in _addresses().items() if ip == own), None)


def _addresses() -> dict[str, str]:
    """Interface -> its IPv4 address."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # without an address
            found[name] = socket.inet_ntoa(answer[20:24])
    return found
