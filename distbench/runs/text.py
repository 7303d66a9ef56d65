"""Text that came from a file, as it may be shown: it must not drive a terminal, nor fill it."""

from __future__ import annotations

from typing import Any

MAX_DETAIL = 300
"""Characters of what a message quotes from a file, or from a library that quotes it."""


def plain(value: Any) -> str:
    """Text from a file with every character that is not printable escaped."""
    text = "-" if value is None else str(value)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def complaint(error: object) -> str:
    """What the console says of an error, which may quote a file: its lines, without what would drive a terminal."""
    return "distbench: " + "\n".join(map(plain, str(error).split("\n")))


def detail(value: Any) -> str:
    """What a message says of an error, or quotes from a file: one line, and not longer than a line may be."""
    text = " ".join(str(value).split())
    return text if len(text) <= MAX_DETAIL else f"{text[:MAX_DETAIL]}..."


def counted(number: int, what: str) -> str:
    """`1 run`, `2 runs`."""
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def readable_bytes(num_bytes: float) -> str:
    """Bytes as people read them."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}" if num_bytes < 1000 * size else f"{num_bytes / size:,.0f} {unit}"
    return f"{num_bytes:.0f} B"
