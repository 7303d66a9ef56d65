"""launch/kubernetes without Kubernetes: manifests against the published schemas, their commands as processes here.

What a cluster does is emulated, each fact with its source. No cluster was ever used.
"""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from kubeflow.training import ApiClient
from kubeflow_trainer_api import models

from distbench.errors import ExitCode
from distbench.runs.folder import read_record
from tests.cli import REPOSITORY, Command, Finished, environment
from tests.cluster.slurm import until

FOLDER = REPOSITORY / "launch" / "kubernetes"
JOBS = ("jobset", "trainjob", "pytorchjob")
Tree = dict[str, Any]
Place = tuple[str | int, ...]

# --------------------------------------------------------------------------------------------------------------
# Against the schemas
# --------------------------------------------------------------------------------------------------------------

MODELS = {
    "JobSet": ("jobset.x-k8s.io/v1alpha2", models.JobsetV1alpha2JobSet),
    "PersistentVolumeClaim": ("v1", models.IoK8sApiCoreV1PersistentVolumeClaim),
    "PyTorchJob": ("kubeflow.org/v1", None),
    "TrainJob": ("trainer.kubeflow.org/v1alpha1", models.TrainerV1alpha1TrainJob),
    "TrainingRuntime": ("trainer.kubeflow.org/v1alpha1", models.TrainerV1alpha1TrainingRuntime),
}
WORDS = {
    "accessModes": {"ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"},
    "action": {"FailJob", "FailIndex", "Ignore", "Count", "FailJobSet", "RestartJobSet"},
    "cleanPodPolicy": {"All", "Running", "None"},
    "completionMode": {"Indexed", "NonIndexed"},
    "medium": {"Memory", ""},
    "onJobFailureReasons": {"BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "PodFailurePolicy"},
    "operator": {"In", "NotIn"},
    "restartPolicy": {"Always", "ExitCode", "Never", "OnFailure"},
}
"""What may stand in fields that the models take any string for. From the fields' documentation: Job, Pod and
PersistentVolumeClaim of Kubernetes, FailurePolicyRule of JobSet, RunPolicy and ReplicaSpec of the Training Operator."""
MAPS = {"labels", "matchLabels", "requests", "limits", "pytorchReplicaSpecs"}
"""Fields whose keys are the user's."""


def refuse(manifest: Tree) -> None:
    """Raise ValueError where a manifest is not what its kind's schema has.

    Models drop fields that they do not know, and some make the type they want of a value: then what comes out of them is not
    what went in.
    """
    version, model = MODELS[manifest["kind"]]
    if manifest["apiVersion"] != version or not manifest["metadata"]["name"] or not manifest["spec"]:
        raise ValueError(f"a {manifest['kind']} of {version} has a name and a spec")
    if model is None:
        client = ApiClient()
        read = client.deserialize(SimpleNamespace(data=json.dumps(manifest)), "KubeflowOrgV1PyTorchJob")
        check_types(read)
        out = client.sanitize_for_serialization(read)
    else:
        out = model.from_dict(manifest).to_dict()
    if json.dumps(out, sort_keys=True) != json.dumps(manifest, sort_keys=True):
        raise ValueError(f"of {manifest} the schema knows {out}")
    for place, value in walk(manifest):
        for key in {name for name in place[-2:] if name in WORDS}:
            if isinstance(value, str) and value not in WORDS[key]:
                raise ValueError(f"{place}: {value} is none of {WORDS[key]}")


def check_types(read: Any) -> None:
    """The Kubernetes client leaves a value that it cannot turn into a field's type as it is."""
    if isinstance(read, (list, dict)):
        for value in read.values() if isinstance(read, dict) else read:
            check_types(value)
    for name, kind in getattr(read, "openapi_types", {}).items():
        value = getattr(read, name)
        if value is not None and kind in ("bool", "int", "str") and type(value).__name__ != kind:
            raise ValueError(f"{name} is {value!r}, and must be of type {kind}")
        check_types(value)


def walk(tree: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Everything in a manifest, with where it is."""
    yield place, tree
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from walk(value, (*place, key))


def at(tree: Any, place: Place) -> Any:
    for key in place:
        tree = tree[key]
    return tree


def put(manifest: Tree, place: Place, value: Any) -> Tree:
    """A manifest with another value at one place."""
    changed = copy.deepcopy(manifest)
    at(changed, place[:-1])[place[-1]] = value
    return changed


def without(manifest: Tree, place: Place) -> Tree:
    changed = copy.deepcopy(manifest)
    del at(changed, place[:-1])[place[-1]]
    return changed


def documents(name: str) -> list[Tree]:
    # Through JSON: what YAML has as an anchor is two parts of the tree, then.
    return json.loads(json.dumps(list(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text()))))


def with_settings(text: str) -> str:
    """With what a manifest has as settings to take in: `#key`, where prose has `# word`."""
    taken, found = re.subn(r"^( *)#(?=[\w-])", r"\1", text, flags=re.MULTILINE)
    assert found
    return taken


@pytest.mark.parametrize("name", ["volume", *JOBS])
def test_a_manifest_is_what_the_schema_has(name: str) -> None:
    for manifest in documents(name):
        refuse(manifest)


@pytest.mark.parametrize("name", ["volume", *JOBS])
def test_and_so_it_is_with_the_settings_that_are_comments(name: str) -> None:
    taken = list(yaml.safe_load_all(with_settings((FOLDER / f"{name}.yaml").read_text())))
    assert taken != documents(name)
    for manifest in taken:
        refuse(manifest)
    if name in JOBS:
        said = json.dumps(taken)
        assert all(word in said for word in ('"nvidia.com/gpu": "8"', '"GLOO_SOCKET_IFNAME"', '"NCCL_SOCKET_IFNAME"'))


@pytest.mark.parametrize("name", ["volume", *JOBS])
def test_an_unknown_field_is_refused_wherever_it_is(name: str) -> None:
    tried = 0
    for manifest in documents(name):
        for place, value in walk(manifest):
            if isinstance(value, dict) and not (place and place[-1] in MAPS):
                with pytest.raises(ValueError):
                    refuse(put(manifest, (*place, "noSuchField"), "x"))
                tried += 1
    assert tried > 3


@pytest.mark.parametrize("name", ["volume", *JOBS])
def test_a_value_of_another_type_is_refused_wherever_it_is(name: str) -> None:
    tried = 0
    for manifest in documents(name):
        for place, value in walk(manifest):
            others: dict[type, list[Any]] = {str: [7, ["x"]], int: ["7", True, [7]], list: [{"x": "x"}], dict: [["x"]]}
            quantity = len(place) > 1 and place[-2] in ("requests", "limits")
            for other in others[type(value)]:
                if place and not (quantity and other == 7):  # which a quantity may be
                    with pytest.raises((ValueError, TypeError, AttributeError, KeyError)):
                        refuse(put(manifest, place, other))
                    tried += 1
    assert tried > 10


REQUIRED: dict[str, list[Place]] = {
    "JobSet": [("spec", "replicatedJobs", 0, "name"), ("spec", "failurePolicy", "rules", 0, "action")],
    "PersistentVolumeClaim": [("metadata", "name"), ("spec",)],
    "PyTorchJob": [("spec", "pytorchReplicaSpecs"), ("spec", "runPolicy")],
    "TrainJob": [("spec", "runtimeRef"), ("spec", "runtimeRef", "name")],
    "TrainingRuntime": [("spec", "template", "spec", "replicatedJobs", 0, "template")],
}
IN_EVERY_POD = {"claimName", "containers", "fieldPath", "mountPath", "topologyKey"}


@pytest.mark.parametrize("name", ["volume", *JOBS])
def test_a_field_that_must_be_there_is_missed(name: str) -> None:
    for manifest in documents(name):
        everywhere = [place for place, _ in walk(manifest) if place and place[-1] in IN_EVERY_POD]
        for place in [*REQUIRED[manifest["kind"]], *everywhere]:
            with pytest.raises((ValueError, KeyError)):
                refuse(without(manifest, place))


@pytest.mark.parametrize("name", ["volume", *JOBS])
def test_a_word_that_no_controller_knows_is_refused(name: str) -> None:
    for manifest in documents(name):
        for place, value in walk(manifest):
            if isinstance(value, str) and set(place[-2:]) & WORDS.keys():
                with pytest.raises(ValueError, match=r"is none of|must be one of"):
                    refuse(put(manifest, place, "Sometimes"))


def test_another_version_is_refused() -> None:
    (manifest,) = documents("jobset")
    with pytest.raises(ValueError, match="v1alpha2"):
        refuse({**manifest, "apiVersion": "jobset.x-k8s.io/v1"})


# --------------------------------------------------------------------------------------------------------------
# What the schemas do not see
# --------------------------------------------------------------------------------------------------------------


def job_spec(name: str) -> Tree:
    """The batch/v1 Job's, of a JobSet or a runtime."""
    manifest = documents(name)[0]
    spec = manifest["spec"] if name == "jobset" else manifest["spec"]["template"]["spec"]
    return spec["replicatedJobs"][0]["template"]["spec"]


def pod_specs(name: str) -> list[Tree]:
    """Of a pod for each kind of pod in a manifest."""
    if name != "pytorchjob":
        return [job_spec(name)["template"]["spec"]]
    return [replica["template"]["spec"] for replica in documents(name)[0]["spec"]["pytorchReplicaSpecs"].values()]


@pytest.mark.parametrize("name", JOBS)
def test_names_in_a_manifest_go_together(name: str) -> None:
    (volume,) = documents("volume")
    for spec in pod_specs(name):
        (container,) = spec["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        volumes = {entry["name"]: entry for entry in spec["volumes"]}
        assert mounts == {"shared": container["workingDir"], "shm": "/dev/shm"} and mounts.keys() == volumes.keys()
        assert volumes["shared"]["persistentVolumeClaim"]["claimName"] == volume["metadata"]["name"]
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
        assert spec["terminationGracePeriodSeconds"] > 30
        # What Trainer (pkg/constants) and the Training Operator (PytorchJobDefaultContainerName) look for.
        assert container["name"] == ("pytorch" if name == "pytorchjob" else "node")
    assert volume["spec"]["accessModes"] == ["ReadWriteMany"]


def test_the_number_of_nodes_is_one_number() -> None:
    job = job_spec("jobset")
    (container,) = job["template"]["spec"]["containers"]
    (told,) = (entry["value"] for entry in container["env"] if entry["name"] == "DISTBENCH_NODES")
    assert job["completions"] == job["parallelism"] == int(told) and job["completionMode"] == "Indexed"


def test_the_job_finds_its_runtime() -> None:
    runtime, job = documents("trainjob")
    assert job["spec"]["runtimeRef"] == {"kind": runtime["kind"], "name": runtime["metadata"]["name"]}
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["name"] == "node"
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}


def tried_again(name: str, exit_code: int) -> bool:
    """Whether a pod's end is followed by another start, as the Job's podFailurePolicy and the JobSet's failurePolicy say.

    kubernetes.io/docs/concepts/workloads/controllers/job (pod failure policy: it needs restartPolicy Never, and a rule that
    fails the Job gives it the reason PodFailurePolicy), jobset.sigs.k8s.io/docs/tasks/failure_policy (the first rule that
    matches; RestartJobSet where none does). The Training Operator's Never is Kubernetes' own.
    """
    if name == "pytorchjob":
        replicas = documents(name)[0]["spec"]["pytorchReplicaSpecs"].values()
        assert {replica["restartPolicy"] for replica in replicas} == {"Never"}
        return False
    manifest, job = documents(name)[0], job_spec(name)
    policy = (manifest["spec"] if name == "jobset" else manifest["spec"]["template"]["spec"])["failurePolicy"]
    (rule,), (above,) = job["podFailurePolicy"]["rules"], policy["rules"]
    assert job["template"]["spec"]["restartPolicy"] == "Never" and job["backoffLimit"] == 0
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["operator"] == "In"
    assert rule["onExitCodes"]["containerName"] == job["template"]["spec"]["containers"][0]["name"]
    values = rule["onExitCodes"]["values"]
    assert values == sorted(set(values)) and 0 not in values, "as the API wants them"
    assert above["action"] == "FailJobSet" and above["onJobFailureReasons"] == ["PodFailurePolicy"]
    return policy["maxRestarts"] > 0 and exit_code not in values


@pytest.mark.parametrize("name", ["jobset", "trainjob"])
def test_what_would_end_the_same_again_is_not_tried_again(name: str) -> None:
    final = {code for code in (*ExitCode, 126, 127, 128 + signal.SIGTERM, 128 + signal.SIGKILL) if code}
    final = {int(code) for code in final if not tried_again(name, code)}
    assert final == {ExitCode.DIFFERENT, ExitCode.USAGE, ExitCode.GATE, 126, 127}


def test_all_three_start_the_same_way() -> None:
    """Once the node knows which it is."""
    scripts = [spec["containers"][0]["command"] for name in JOBS for spec in pod_specs(name)]
    assert len({script[2][script[2].index("until") :] for script in scripts}) == 1
    assert {(*script[:2], script[3]) for script in scripts} == {("bash", "-euc", "distbench")}


def test_a_sweep_is_a_jobset_a_run(tmp_path: Path) -> None:
    """With a kubectl that keeps what it is given."""
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n[ "$1" != apply ] || cat > {tmp_path}/$$.yaml\n')
    kubectl.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run([FOLDER / "sweep.sh"], env=env, check=True)
    applied = {
        tree["metadata"]["name"]: tree for tree in map(yaml.safe_load, map(Path.read_text, tmp_path.glob("*.yaml")))
    }
    assert applied.keys() == {"distbench-ddp", "distbench-fsdp", "distbench-fsdp2"}
    (plain,) = documents("jobset")
    (arg,) = (place for place, value in walk(plain) if value == "strategy=fsdp2")
    for name, manifest in applied.items():
        refuse(manifest)
        changed = {place for place, value in walk(plain) if isinstance(value, str) and at(manifest, place) != value}
        assert changed - {arg} == {("metadata", "name")}
        assert at(manifest, arg) == f"strategy={name.removeprefix('distbench-')}"
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.split()[0] for call in calls] == ["apply", "wait"] * 3


# --------------------------------------------------------------------------------------------------------------
# The commands, as they stand
# --------------------------------------------------------------------------------------------------------------

_UNSHARE = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
_NAMES = ["sh", "-c", 'mount --bind "$1" /etc/hosts && shift && exec "$@"', "sh"]
_can = subprocess.run([*_UNSHARE, *_NAMES, "/dev/null", "true"], capture_output=True, check=False).returncode == 0
names_resolve = pytest.mark.skipif(not _can, reason="no mount namespaces here: names of a cluster's DNS do not resolve")

SMALL = [
    *("launch.nproc=1", "model.hidden_dim=6", "model.num_layers=2", "model.seq_len=3"),
    *("gate.fp64_reference=false", "window=off"),
]
_used = count(1)


def expanded(value: str, env: dict[str, str]) -> str:
    """`$(NAME)` in a variable's value, of variables before it (kubernetes.io: define dependent environment variables)."""
    return re.sub(r"\$\(([\w-]+)\)", lambda found: env.get(found[1], found[0]), value)


def container_env(container: Tree, labels: dict[str, str]) -> dict[str, str]:
    env: dict[str, str] = {}
    for entry in container.get("env", []):
        if "value" in entry:
            env[entry["name"]] = expanded(entry["value"], env)
        else:
            (label,) = re.findall(r"^metadata\.labels\['(.*)'\]$", entry["valueFrom"]["fieldRef"]["fieldPath"])
            env[entry["name"]] = labels[label]
    return env


def of_jobset(index: int) -> tuple[Tree, dict[str, str], str]:
    """A pod's container, its environment, and the first pod's name in the cluster's DNS.

    Job puts JOB_COMPLETION_INDEX into an indexed job's containers (kubernetes.io/docs/concepts/workloads/controllers/job);
    JobSet labels pods with its name, and the name in DNS is
    <jobset>-<replicated job>-<job index>-<pod index>.<subdomain>, the subdomain being the JobSet's name
    (kubernetes-sigs/jobset: api/jobset/v1alpha2/jobset_types.go, Network, JobSetNameKey).
    """
    (manifest,) = documents("jobset")
    name, (replicated,) = manifest["metadata"]["name"], manifest["spec"]["replicatedJobs"]
    (container,) = job_spec("jobset")["template"]["spec"]["containers"]
    env = container_env(container, {"jobset.sigs.k8s.io/jobset-name": name})
    return container, {**env, "JOB_COMPLETION_INDEX": str(index)}, f"{name}-{replicated['name']}-0-0.{name}"


def of_trainjob(index: int) -> tuple[Tree, dict[str, str], str]:
    """Trainer makes a JobSet of the job's name, puts the job's args in the place of the runtime's, and sets PET_*.

    kubeflow/trainer: pkg/runtime/framework/plugins/torch/torch.go, EnforceMLPolicy; pkg/constants, ContainerTrainerPort.
    """
    job = documents("trainjob")[1]
    name, trainer = job["metadata"]["name"], job["spec"]["trainer"]
    (container,) = job_spec("trainjob")["template"]["spec"]["containers"]
    first = f"{name}-node-0-0.{name}"
    env = {
        **container_env(container, {"jobset.sigs.k8s.io/jobset-name": name}),
        "JOB_COMPLETION_INDEX": str(index),
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": "4",  # of the cpu in resourcesPerNode
        "PET_NODE_RANK": str(index),
        "PET_MASTER_ADDR": first,
        "PET_MASTER_PORT": "29500",
    }
    return {**container, "args": trainer["args"]}, env, first


def of_pytorchjob(index: int) -> tuple[Tree, dict[str, str], str]:
    """The operator counts the master as rank 0, calls it by its service, and sets these; 23456 and `auto` are its defaults.

    kubeflow/training-operator: pkg/controller.v1/pytorch/envvar.go, setPodEnv, and master.go; the label is JobNameLabel.
    """
    (manifest,) = documents("pytorchjob")
    name, replicas = manifest["metadata"]["name"], manifest["spec"]["pytorchReplicaSpecs"]
    total = sum(replica["replicas"] for replica in replicas.values())
    (container,) = replicas["Worker" if index else "Master"]["template"]["spec"]["containers"]
    env = {
        **container_env(container, {"training.kubeflow.org/job-name": name}),
        "PYTHONUNBUFFERED": "0",
        "MASTER_PORT": "23456",
        "MASTER_ADDR": f"{name}-master-0",
        "WORLD_SIZE": str(total),  # pods times nprocPerNode, which counts as 1 where it is `auto`
        "RANK": str(index),
        "PET_NPROC_PER_NODE": "auto",
        "PET_NODE_RANK": str(index),
        "PET_NNODES": str(total),
    }
    return container, env, f"{name}-master-0"


POD = {"jobset": of_jobset, "trainjob": of_trainjob, "pytorchjob": of_pytorchjob}


class Cluster:
    """Starts a manifest's pods on this machine: the volume is a folder, the first pod's address one of the loopback's."""

    def __init__(self, name: str, volume: Path) -> None:
        self.name, self.volume = name, volume
        pid = os.getpid()
        self.address = f"127.{100 + pid // 250 % 100}.{1 + pid % 250}.{next(_used)}"  # nobody else's: ports are fixed
        self.run = volume / "outputs" / "distbench"

    def start(self, *words: str, pods: tuple[int, ...] = (0, 1)) -> list[Command]:
        started = []
        for index in pods:
            container, own, first = POD[self.name](index)
            names = self.volume / f"hosts{index}"
            names.write_text(f"127.0.0.1 localhost {os.uname().nodename}\n{self.address} {first}\n")
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            command = [*container["command"], *container["args"], *SMALL, *words]
            env = {**environment(), **own, "PATH": path}
            started.append(Command(*_UNSHARE, *_NAMES, str(names), *command, cwd=self.volume, env=env))
        return started

    def reach(self, steps: int, started: list[Command]) -> None:
        """Wait until the run has done so many, or fail with what its commands said."""
        there = until(lambda: self.steps() >= steps or any(c.process.poll() is not None for c in started), 120.0)
        if not there or self.steps() < steps:
            for command in started:
                command.signal(signal.SIGKILL)
            pytest.fail("\n".join(f"{ended.code}: {ended.said}" for ended in finish(started)))

    def steps(self) -> int:
        log = self.run / "metrics.jsonl"
        return len(log.read_text().splitlines()) if log.exists() else 0


def finish(started: list[Command]) -> list[Finished]:
    return [command.finish() for command in started]


def codes(ended: list[Finished]) -> list[int]:
    return [one.code for one in ended]


@names_resolve
@pytest.mark.parametrize("name", JOBS)
def test_a_run_on_two_nodes(name: str, tmp_path: Path) -> None:
    cluster = Cluster(name, tmp_path)
    cluster.run.mkdir(parents=True)  # as a run has left it that ended before its first checkpoint
    ended = finish(cluster.start("steps=4"))
    assert codes(ended) == [ExitCode.OK, ExitCode.OK], [one.said for one in ended]
    record = read_record(cluster.run)
    assert record["status"] == "passed" and record["gate"]["passed"] is True
    assert record["config"]["strategy"]["name"] == "fsdp2" and record["config"]["launch"]["nodes"] == 2
    assert record["batch"]["world_size"] == 2 and cluster.steps() == 4
    assert len(list(cluster.run.parent.glob("distbench.*"))) == 1, "what was there is kept"


@names_resolve
@pytest.mark.parametrize(
    ("name", "asked"), [("jobset", (0,)), ("jobset", (1,)), ("trainjob", (0, 1)), ("pytorchjob", (0, 1))]
)
def test_a_pod_that_is_asked_to_end_leaves_a_checkpoint_and_the_next_start_goes_on(
    name: str, asked: tuple[int, ...], tmp_path: Path
) -> None:
    """SIGTERM, as on a drained node to one pod, or to all when the job is deleted."""
    cluster = Cluster(name, tmp_path)
    started = cluster.start("steps=100000", "checkpoint.every=50000")
    cluster.reach(4, started)
    for index in asked:
        os.kill(started[index].process.pid, signal.SIGTERM)  # the container's first process, which bash has become
    ended = finish(started)
    assert codes(ended) == [ExitCode.INTERRUPTED, ExitCode.OK], [one.said for one in ended]
    assert tried_again(name, ended[0].code) is (name != "pytorchjob")
    steps = cluster.steps()
    assert read_record(cluster.run)["status"] == "interrupted"
    assert (cluster.run / "checkpoints" / f"step_{steps:08d}").is_dir()

    again = cluster.start()
    cluster.reach(steps + 4, again)
    for command in again:
        os.kill(command.process.pid, signal.SIGTERM)
    assert codes(finish(again)) == [ExitCode.INTERRUPTED, ExitCode.OK]
    assert [entry["step"] for entry in read_record(cluster.run)["resumes"]] == [steps]


@names_resolve
def test_a_lost_pod_is_tried_again(tmp_path: Path) -> None:
    """The first pod is killed: its follower ends by itself, and neither end is final."""
    cluster = Cluster("jobset", tmp_path)
    started = cluster.start("steps=100000", "launch.max_restarts=0")
    cluster.reach(4, started)
    os.kill(started[0].process.pid, signal.SIGKILL)
    ended = finish(started)
    assert codes(ended) == [-signal.SIGKILL, ExitCode.CRASHED], [one.said for one in ended]
    assert tried_again("jobset", 128 + signal.SIGKILL) and tried_again("jobset", ended[1].code)


@names_resolve
def test_a_failed_gate_and_a_wrong_word_are_final(tmp_path: Path) -> None:
    cluster = Cluster("jobset", tmp_path)
    ended = finish(cluster.start("steps=4", "strategy=ddp", "fault=missing_world_scale"))
    assert codes(ended) == [ExitCode.GATE, ExitCode.OK], [one.said for one in ended]
    (wrong,) = finish(Cluster("jobset", tmp_path).start("steps=-1", pods=(0,)))  # the Job ends the other pod
    assert wrong.code == ExitCode.USAGE and "steps" in wrong.said
    assert not tried_again("jobset", ExitCode.GATE) and not tried_again("jobset", ExitCode.USAGE)
