"""Every drill, by name."""

from __future__ import annotations

from distbench.drills import cache, damage, freeze, full_disk, kill, leaks, two_at_once
from distbench.drills.base import Drill

DRILLS: dict[str, Drill] = {
    module.DRILL.name: module.DRILL for module in (kill, freeze, full_disk, damage, cache, two_at_once, leaks)
}
