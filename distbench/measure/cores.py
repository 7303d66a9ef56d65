"""How long threads that could have run waited for a core: what else the machine had to do meanwhile."""

from __future__ import annotations

from pathlib import Path

TASKS = Path("/proc/self/task")
METER = "time that the thread which waited longest could run and had no core (Linux, proc_schedstat), a step"

CROWDED = 0.25
"""Share of a step that a thread waits for a core, from which on it is told."""

Queued = dict[str, int]
"""Thread -> ns since it began."""


def queued() -> Queued:
    """Of this process's threads as they are now. Empty where the system does not say."""
    found = {}
    for task in TASKS.iterdir() if TASKS.is_dir() else []:
        try:
            found[task.name] = int((task / "schedstat").read_text().split()[1])
        except (OSError, IndexError, ValueError):
            continue  # a thread that has ended; or no such file
    return found


def waited(before: Queued, after: Queued) -> float | None:
    """Seconds between the two, of the thread that waited longest; None where the system does not say."""
    shared = before.keys() & after.keys()
    return max(after[thread] - before[thread] for thread in shared) / 1e9 if shared else None
