"""A network with delay between processes' networks, where the kernel has none (netem): carries packets between TUN devices.

    python -m distbench.launching.relay SECONDS BITS_PER_SECOND ADDRESS=PID ...

Gives the network of each process a device `eth0`, says `up`, and from then on hands each packet to the device whose address
it is for, so many seconds later, no faster than the speed (0: as it comes). Lives as long as who started it.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from itertools import count

from distbench.launching.signals import end_with_parent

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
"""linux/if_tun.h."""
PACKET_BYTES = 65536
IPV4 = 4
BATCH = 32
"""Packets of one device before others are looked after."""


def main(argv: list[str]) -> None:
    """Never returns."""
    end_with_parent()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)  # a cable does not wait for a processor
    devices = {}
    for number, end in enumerate(argv[2:]):
        address, _, pid = end.partition("=")
        devices[socket.inet_aton(address)] = _device(f"relay{number}", pid)
    print("up", flush=True)
    carry(devices, float(argv[0]), float(argv[1]) / 8)


def _device(name: str, pid: str) -> int:
    """A TUN device that is `eth0` in the network of a process; its file descriptor here."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    subprocess.run(["ip", "link", "set", name, "netns", pid, "name", "eth0"], check=True)
    return device


def carry(devices: Mapping[bytes, int], delay: float, bytes_per_second: float) -> None:
    """Address (4 bytes) -> device. Seconds; bytes a second, 0 without limit. Never returns.

    A packet has taken the time that its bytes need when it leaves the sender, whose own queue sees to that. On the way out
    it waits only where another is on its way out.
    """
    numbers, free = count(), dict.fromkeys(devices.values(), 0.0)
    on_the_way: list[tuple[float, int, int, bytes]] = []
    while True:
        now = time.monotonic()
        while on_the_way and on_the_way[0][0] <= now:
            _, _, device, packet = heapq.heappop(on_the_way)
            with contextlib.suppress(OSError):  # a full queue drops, as a network does
                os.write(device, packet)
        wait = max(0.0, on_the_way[0][0] - time.monotonic()) if on_the_way else None
        for device in select.select(list(devices.values()), [], [], wait)[0]:
            for _ in range(BATCH):
                try:
                    packet = os.read(device, PACKET_BYTES)
                except OSError:
                    break
                to = devices.get(packet[16:20]) if packet[0] >> 4 == IPV4 else None
                if to is not None:
                    due = max(time.monotonic() + delay, free[to])
                    free[to] = due + (len(packet) / bytes_per_second if bytes_per_second else 0.0)
                    heapq.heappush(on_the_way, (due, next(numbers), to, packet))


if __name__ == "__main__":
    main(sys.argv[1:])
