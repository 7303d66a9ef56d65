"""A sweep's runs as jobs of Slurm's, through submitit: one task a node, which starts the node's ranks (docs/cluster.md).

Imports hydra-submitit-launcher, of the extra `distbench[slurm]`. Jobs need what this process has: the package, the working
directory, and a file system that they share.
"""

from __future__ import annotations

import signal
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import BaseSubmititLauncher
from omegaconf import DictConfig, OmegaConf

from distbench import sweep
from distbench.errors import ExitCode
from distbench.launching import local
from distbench.runs import environment
from distbench.runs.folder import RunFolder, Status, now, read_record

COMMON = ("name", "nodes", "tasks_per_node", "gpus_per_node", "cpus_per_task", "mem_gb", "timeout_min")
"""What submitit calls the same for every scheduler."""
AT_START = ("submitit_folder", "python", "max_num_timeout")
"""What it wants when its executor is made."""
LOST = {"TIMEOUT": Status.interrupted, "PREEMPTED": Status.interrupted, "CANCELLED": Status.interrupted}
LOST |= {"OUT_OF_MEMORY": Status.oom}
"""What a run is that Slurm has ended before it could say what became of it; any other state: crashed."""


def register(name: str) -> None:
    """Let Hydra take this launcher under a name of its plugins' package: it takes no class from elsewhere. Cheap to call
    again."""
    Plugins.instance().class_name_to_class[name] = SlurmLauncher


class SlurmLauncher(BaseSubmititLauncher):
    """`hydra/launcher=distbench_slurm`. Every cell asks for what its own configuration says, so that a sweep may vary the
    number of nodes; those that ask for the same are one job array."""

    _EXECUTOR = "slurm"

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from hydra.core.singleton import Singleton

        assert self.config is not None and self.hydra_context is not None
        self.command = environment.launch_command()
        loader = self.hydra_context.config_loader
        alike = defaultdict(list)
        for number, overrides in enumerate(job_overrides, initial_job_idx):
            cell = loader.load_sweep_config(self.config, list(overrides))
            cell.hydra.job.num = number
            asked = OmegaConf.to_container(cell.hydra.launcher, resolve=True)
            path = Path(cell.hydra.sweep.dir) / cell.hydra.sweep.subdir
            alike[repr(asked)].append((asked, path, number, list(overrides)))
        jobs = {}
        for cells in alike.values():
            executor = _executor(cells[0][0])
            columns = [
                (overrides, "hydra.sweep.dir", number, f"cell{number}", Singleton.get_state())
                for *_, number, overrides in cells
            ]
            submitted = executor.map_array(self, *zip(*columns, strict=True))
            for job, (_, path, number, _) in zip(submitted, cells, strict=True):
                print(f"[{number}] {path.name.partition('_')[2]}: job {job.job_id}", flush=True)
                jobs[number] = job, path
        return [_result(*jobs[number], number) for number in sorted(jobs)]

    def __call__(self, *args: Any) -> JobReturn:
        """In a job's task: one run, and the queue again where Slurm has asked for an early end."""
        environment.started_by = self.command
        requeue = signal.getsignal(signal.SIGUSR2)  # submitit's
        returned = super().__call__(*args)
        if signal.SIGUSR2 in local.stopped_by and callable(requeue):
            requeue(signal.SIGUSR2, None)  # does not come back where the job is queued again
        if local.stopped_by:
            # Cancelled, preempted, or queued again for a node that is gone: whether this was the end is for Slurm to say,
            # and a job that leaves a result has ended.
            sys.exit(ExitCode.INTERRUPTED)
        return returned


def _executor(asked: Any) -> Any:
    import submitit

    options = {key: value for key, value in asked.items() if value not in (None, False) and not key.startswith("_")}
    executor = submitit.AutoExecutor(
        folder=options["submitit_folder"],
        cluster="slurm",
        **{f"slurm_{key}": options[key] for key in AT_START[1:] if key in options},
    )
    named = {key if key in COMMON else f"slurm_{key}": v for key, v in options.items() if key not in AT_START}
    executor.update_parameters(**named)
    return executor


def _result(job: Any, path: Path, number: int) -> JobReturn:
    """What became of a cell, once its job has ended, however it did."""
    import submitit

    name = f"[{number}] {path.name.partition('_')[2]}"
    try:
        returned: JobReturn = job.results()[0]
    except (submitit.core.utils.UncompletedJobError, submitit.core.utils.FailedJobError) as error:
        returned = JobReturn(
            overrides=[],
            cfg=DictConfig({}),
            hydra_cfg=DictConfig({}),
            task_name="distbench",
            status=JobStatus.COMPLETED,
        )
        returned.return_value = _lost(path, str(job.state), str(error).splitlines()[0])
    value = returned.return_value if returned.status == JobStatus.COMPLETED else {"status": "crashed"}
    reason = f" ({value['reason']})" if isinstance(value, dict) and value.get("reason") else ""
    print(f"{name}: {value.get('status') if isinstance(value, dict) else value}{reason}", flush=True)
    return returned


def _lost(path: Path, state: str, why: str) -> dict[str, Any]:
    """Of a job that ended without a word: its record says so, if it was still said to run."""
    status, reason = LOST.get(state.split()[0], Status.crashed).value, f"its job of Slurm's ended: {state}"
    known = read_record(path)["status"] if (path / "record.json").exists() else None
    if known == Status.running:
        RunFolder(path).update_record(status=status, reason=reason, finished=now())
    elif known is not None:
        status = known
    else:
        sweep.lost()
    return {"status": status, "reason": f"{reason} ({why})"}
