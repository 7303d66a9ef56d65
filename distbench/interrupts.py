"""Signals that ask this process to end. As exceptions alone they can get lost: what is raised while a library's native code
has Python's run, as many imports do, may be swallowed there."""

from __future__ import annotations

import signal

asked: list[int] = []
"""Those that came."""


def listen(*numbers: signal.Signals) -> None:
    """From now on these interrupt, as Ctrl-C does: nothing started outlives this process."""
    for number in numbers:
        signal.signal(number, _interrupt)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # and is not ignored, as under nohup
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number: int, frame: object) -> None:
    asked.append(number)
    raise KeyboardInterrupt


def heed() -> None:
    """Raise KeyboardInterrupt where one that came got lost."""
    if asked:
        raise KeyboardInterrupt
