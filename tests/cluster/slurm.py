"""A real Slurm on one machine, without systemd: controller, accounting, and a slurmd on each of some hosts. Needs root and
Debian's packages slurmctld, slurmd, slurm-client, slurmdbd, munge, mariadb-server. Nothing is written outside of its folder.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from distbench.launching.watch import is_gone, process_state
from tests.cluster import hosts as made
from tests.cluster.hosts import CONTROLLER, NETWORK, Host

PROGRAMS = ("slurmctld", "slurmd", "slurmdbd", "munged", "sbatch", "mariadbd", "mariadb-install-db")
CTLD_PORT, NODE_PORT, DBD_PORT = 26817, 26818, 26819


def why_not() -> str | None:
    """Why there can be no Slurm here; None: there can."""
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        return f"{', '.join(missing)} not installed"
    return made.why_not()


class Slurm:
    """A cluster that is up."""

    def __init__(self, root: Path, hosts: list[Host]) -> None:
        self.root, self.hosts = root, hosts
        self.env = {**os.environ, "SLURM_CONF": str(root / "slurm.conf")}

    def call(self, *words: str) -> str:
        """Output of one of Slurm's commands."""
        return subprocess.run(words, env=self.env, capture_output=True, text=True, check=True).stdout

    def queue(self) -> list[tuple[str, str]]:
        """(job, state) of what has not ended."""
        return [
            (job, state)
            for job, state in (line.split() for line in self.call("squeue", "-h", "-o", "%A %T").splitlines())
        ]

    def pid(self, name: str) -> int:
        """Of a daemon."""
        return int((self.root / "pid" / f"{name}.pid").read_text())

    def stop_daemon(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        with suppress(FileNotFoundError, ProcessLookupError, ValueError):
            pid = self.pid(name)
            os.kill(pid, number)
            until(lambda: is_gone(process_state(pid)), 15.0)


def until(so: Callable[[], Any], seconds: float, period: float = 0.1) -> Any:
    """What `so` says, once it says something; whatever it says last, when the time is up."""
    deadline = time.monotonic() + seconds
    while not (said := so()) and time.monotonic() < deadline:
        time.sleep(period)
    return said


@contextmanager
def cluster(root: Path, nodes: int, cpus: int = 2) -> Iterator[Slurm]:
    """Bring one up, and take it down."""
    root.mkdir(parents=True, exist_ok=True)
    for name in ("munge", "state", "log", "pid", "mysql", *(f"spool/node{n}" for n in range(1, nodes + 1))):
        (root / name).mkdir(parents=True)
    root.chmod(0o755)
    with made.hosts(root, nodes) as found:
        slurm = Slurm(root, found)
        _configure(root, nodes, cpus)
        try:
            _start(slurm)
            yield slurm
        finally:
            subprocess.run(["scancel", "--user=root"], env=slurm.env, check=False, capture_output=True, timeout=60)
            until(lambda: not slurm.queue(), 20.0)
            for name in (*(f"slurmd.{host.name}" for host in found), "slurmctld", "slurmdbd", "mariadbd", "munged"):
                slurm.stop_daemon(name)


def _configure(root: Path, nodes: int, cpus: int) -> None:
    key = root / "munge" / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    socket = root / "munge" / "munge.sock"
    settings = {
        "ClusterName": "distbench",
        "SlurmctldHost": f"{os.uname().nodename}({CONTROLLER})",
        "SlurmctldPort": CTLD_PORT,
        "SlurmUser": "root",
        "SlurmdUser": "root",
        # Credentials that last seconds: a requeued job waits for them to expire, two minutes otherwise.
        "AuthInfo": f"socket={socket},cred_expire=5",
        "StateSaveLocation": root / "state",
        "SlurmdSpoolDir": root / "spool/%n",
        "SlurmctldPidFile": root / "pid/slurmctld.pid",
        "SlurmdPidFile": root / "pid/slurmd.%n.pid",
        "SlurmctldLogFile": root / "log/slurmctld.log",
        "SlurmdLogFile": root / "log/slurmd.%n.log",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "SchedulerParameters": "sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0",
        "SlurmdParameters": "config_overrides",
        "ReturnToService": 2,
        "KillWait": 10,
        "SlurmdTimeout": 10,
        "JobRequeue": 1,
        "AccountingStorageType": "accounting_storage/slurmdbd",
        "AccountingStorageHost": "127.0.0.1",
        "AccountingStoragePort": DBD_PORT,
        "AccountingStoragePass": socket,
    }
    lines = [f"{key}={value}" for key, value in settings.items()]
    place = f"NodeHostname=node[1-{nodes}] NodeAddr={NETWORK}.[1-{nodes}] Port={NODE_PORT}"
    lines.append(f"NodeName=node[1-{nodes}] {place} CPUs={cpus} RealMemory=4000 State=UNKNOWN")
    lines.append("PartitionName=main Nodes=ALL Default=YES MaxTime=60 OverSubscribe=NO State=UP")
    (root / "slurm.conf").write_text("\n".join(lines) + "\n")
    accounting = {
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={socket}",
        "DbdHost": "localhost",
        "DbdAddr": "127.0.0.1",
        "DbdPort": DBD_PORT,
        "SlurmUser": "root",
        "LogFile": root / "log/slurmdbd.log",
        "PidFile": root / "pid/slurmdbd.pid",
        "StorageType": "accounting_storage/mysql",
        "StorageHost": "localhost",
        "StorageUser": "root",
        "StorageLoc": "slurm_acct_db",
    }
    file = root / "slurmdbd.conf"
    file.write_text("\n".join(f"{key}={value}" for key, value in accounting.items()) + "\n")
    file.chmod(0o600)


def _start(slurm: Slurm) -> None:
    root, env = slurm.root, slurm.env
    munge = {
        "socket": "munge/munge.sock",
        "pid-file": "pid/munged.pid",
        "log-file": "log/munged.log",
        "seed-file": "munge/seed",
    }
    options = [f"--{key}={root / value}" for key, value in munge.items()]
    subprocess.run(["munged", "--force", *options], check=True)
    _start_database(root)
    # The client library reads the socket's path from this variable.
    subprocess.run(["slurmdbd"], env={**env, "MYSQL_UNIX_PORT": str(root / "mysql.sock")}, check=True)
    manager = ["sacctmgr", "--immediate", "--quiet"]
    assert until(lambda: _runs([*manager, "list", "cluster"], env), 30.0), (root / "log/slurmdbd.log").read_text()
    subprocess.run([*manager, "add", "cluster", "distbench"], env=env, check=False, capture_output=True)
    subprocess.run(["slurmctld", "-c"], env=env, check=True)
    for host in slurm.hosts:
        subprocess.run(host.command("slurmd", "-c", "-N", host.name), env=env, check=True)
    idle = until(
        lambda: slurm.call("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").count("node") == len(slurm.hosts), 30.0
    )
    assert idle, slurm.call("sinfo", "-N", "-l")


def _start_database(root: Path) -> None:
    data, socket = root / "mysql", root / "mysql.sock"
    install = ["mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={data}", "--skip-test-db"]
    subprocess.run([*install, "--auth-root-authentication-method=normal"], check=True, capture_output=True)
    serve = ["mariadbd", "--no-defaults", "--user=root", f"--datadir={data}", f"--socket={socket}", "--skip-networking"]
    subprocess.Popen(
        [*serve, f"--pid-file={root / 'pid/mariadbd.pid'}", f"--log-error={root / 'log/mariadb.log'}"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    client = ["mariadb", "--no-defaults", "-uroot", f"--socket={socket}", "-e"]
    assert until(lambda: _runs([*client, "select 1"], dict(os.environ)), 30.0), (root / "log/mariadb.log").read_text()
    subprocess.run([*client, "create database slurm_acct_db"], check=True)


def _runs(words: list[str], env: dict[str, str]) -> bool:
    with suppress(subprocess.TimeoutExpired):
        return subprocess.run(words, env=env, capture_output=True, timeout=5, check=False).returncode == 0
    return False
