"""What ranks are started for. Each of these modules has

lead(config, folder, node) -> Outcome              what the first machine does
run_rank(config, folder, process, baseline)        what every rank does
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

RUN, NETWORK = "run", "network"
JOBS = {RUN: "distbench.experiment", NETWORK: "distbench.doctor.network"}


def job_module(job: str) -> Any:
    """Imported late: what leads imports the launching that starts its ranks."""
    return import_module(JOBS[job])
