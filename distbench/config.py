"""The typed schema of every config group, and what follows from a config (its refusals: distbench/validation.py).

Hydra composes YAML from `conf/` over these dataclasses, so a wrong key or type is refused by Hydra itself.
`from_container` turns the composed tree into plain dataclasses; no DictConfig travels past this module.
Nothing here imports torch: refused configurations must answer at once.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Union

from distbench.errors import ConfigError

AUTO = "auto"
MISSING: Any = "???"
"""OmegaConf's mark for a value that must be given."""

# --------------------------------------------------------------------------------------------------------------
# Choices
# --------------------------------------------------------------------------------------------------------------


class ShardingStrategy(Enum):
    """`torch.distributed.fsdp.ShardingStrategy`, the members that need one mesh axis."""

    FULL_SHARD = "FULL_SHARD"
    SHARD_GRAD_OP = "SHARD_GRAD_OP"
    NO_SHARD = "NO_SHARD"


class BackwardPrefetch(Enum):
    """When the next unit's all-gather is issued in backward."""

    pre = "pre"
    """Before the current unit's gradient computation (torch's BACKWARD_PRE): most overlap, most memory."""
    post = "post"
    """After it (torch's BACKWARD_POST)."""
    none = "none"
    """Only when the unit itself is reached."""


class LossKind(Enum):
    mse = "mse"
    cross_entropy = "cross_entropy"
    sum = "sum"


class Schedule(Enum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class Rule(Enum):
    """What a decision chooses among runs that passed their gate (docs/decision.md)."""

    fastest = "fastest"
    fastest_within_memory = "fastest_within_memory"
    """Among those within `memory_gib`."""
    smallest_within = "smallest_within"
    """The least peak memory among those within `within_percent` of the fastest."""
    most_accurate_within = "most_accurate_within"
    """The least precision error among those within `within_percent` of the fastest."""


class Order(Enum):
    """How a sweep's repeats follow each other."""

    interleaved = "interleaved"
    """A B C, C B A: what drifts on the machine hits all alike."""
    grouped = "grouped"
    """A A B B C C."""


class OnError(Enum):
    proceed = "proceed"
    stop = "stop"


class OnNonfinite(Enum):
    """What becomes of a step whose loss, or gradient where no loss scaler minds it, is not finite (docs/nonfinite.md)."""

    stop = "stop"
    """The run ends, and says where the number was made."""
    skip = "skip"
    """The optimizer does not take the step."""
    record = "record"
    """The step is taken as it is."""


class Device(Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


# --------------------------------------------------------------------------------------------------------------
# Groups
# --------------------------------------------------------------------------------------------------------------


@dataclass
class SimpleModel:
    """The SimpleTransformerLayer stack."""

    name: str = "simple"
    num_layers: int = 4
    hidden_dim: int = 64
    seq_len: int = 32
    vocab_size: int | None = None
    """None: the model maps (seq_len, hidden_dim) to itself. An int: token ids in, logits out."""
    input_shape: list[int] = field(default_factory=list)
    target_shape: list[int] = field(default_factory=list)


@dataclass
class CustomModel:
    """The user's own module: `_target_` is called with `kwargs` and must return a `torch.nn.Module`."""

    _target_: str = "???"
    name: str = "custom"
    kwargs: dict[str, Any] = field(default_factory=dict)
    block_classes: list[str] = field(default_factory=list)
    input_shape: list[int] = field(default_factory=list)
    target_shape: list[int] = field(default_factory=list)
    vocab_size: int | None = None


@dataclass
class SingleStrategy:
    """One process, no wrapper."""

    name: str = "single"


@dataclass
class DDPStrategy:
    """`torch.nn.parallel.DistributedDataParallel`; fields carry torch's names and defaults."""

    name: str = "ddp"
    bucket_cap_mb: float = 25.0
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    find_unused_parameters: bool = False
    broadcast_buffers: bool = True


@dataclass
class FSDPStrategy:
    """`torch.distributed.fsdp.FullyShardedDataParallel`; fields carry torch's names and defaults."""

    name: str = "fsdp"
    sharding_strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    use_orig_params: bool = True
    limit_all_gathers: bool = True
    forward_prefetch: bool = False
    sync_module_states: bool = False


@dataclass
class FSDP2Strategy:
    """`torch.distributed.fsdp.fully_shard`; fields carry torch's names and defaults."""

    name: str = "fsdp2"
    reshard_after_forward: Union[bool, int] = True  # noqa: UP007  OmegaConf reads typing.Union only


@dataclass
class LossScaler:
    """Dynamic loss scaling for fp16: torch.amp.GradScaler's constants and meaning."""

    enabled: bool = False
    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000


@dataclass
class Precision:
    """What a precision means, for every strategy alike (docs/concepts.md)."""

    name: str = "fp32"
    param_dtype: str = "fp32"
    """The master parameters, which the optimizer updates."""
    compute_dtype: str = "fp32"
    """Parameters and inputs are cast to it for forward and backward."""
    reduce_dtype: str = "fp32"
    """Gradients cross the network in it."""
    buffer_dtype: str | None = None
    """Floating-point buffers; null leaves each as the model made it."""
    autocast: bool = False
    """True: torch.autocast chooses per operation instead of casting parameters."""
    scaler: LossScaler = field(default_factory=LossScaler)
    fallback: str | None = None
    """The precision to use instead where the device lacks this one; the record says when it was."""


@dataclass
class SizeWrap:
    """Wrap every submodule that still holds at least `min_num_params` unwrapped parameters."""

    name: str = "size"
    min_num_params: float = 1e6
    """A float, so that 1e6 can be written."""


@dataclass
class BlockWrap:
    """Wrap every module of the named classes; empty: the model's own block classes."""

    name: str = "block"
    classes: list[str] = field(default_factory=list)


@dataclass
class PatternWrap:
    """Wrap every module whose qualified name matches one of the regular expressions as a whole."""

    name: str = "pattern"
    patterns: list[str] = field(default_factory=list)


@dataclass
class NoWrap:
    """One unit: the whole model."""

    name: str = "none"


@dataclass
class Prefetch:
    backward: BackwardPrefetch = BackwardPrefetch.pre
    forward: bool = False


@dataclass
class SyntheticData:
    """Inputs and targets drawn from (data seed, sample id) alone."""

    name: str = "synthetic"
    input_shape: list[int] = field(default_factory=list)
    target_shape: list[int] = field(default_factory=list)
    vocab_size: int | None = None
    padding: float = 0.0
    """At most this share of each sample's trailing targets is `ignore_index`; how many, the sample's id decides."""
    ignore_index: int = -100


@dataclass
class TextData:
    """Byte-level next-token windows over a file or a folder."""

    name: str = "text"
    path: str = "???"
    glob: str = "*"
    seq_len: int = 32
    max_bytes: int = 64 * 2**20
    shuffle: bool = True


@dataclass
class Loss:
    name: LossKind = LossKind.mse
    ignore_index: int = -100


@dataclass
class AdamW:
    name: str = "adamw"
    lr: float = 1e-3
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay_1d: bool = True
    """False: parameters of one dimension (norms, biases) are not decayed."""
    schedule: Schedule = Schedule.constant
    warmup_steps: int = 0
    min_lr_ratio: float = 0.1


@dataclass
class SGD:
    name: str = "sgd"
    lr: float = 1e-2
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    decay_1d: bool = True
    schedule: Schedule = Schedule.constant
    warmup_steps: int = 0
    min_lr_ratio: float = 0.1


@dataclass
class Checkpoint:
    final: bool = True
    """Write the model as safetensors after the last step."""
    every: int | None = None
    """Steps between checkpoints to train on from, with one after the last step; None: none are written."""
    keep_last: int = 2
    """How many of those are kept."""
    keep_every: int | None = None
    """Those of steps that this divides are kept as well."""
    async_: bool = False
    """Write them while the run goes on. `checkpoint.async` on the command line (`SPELLINGS`)."""
    on_error: OnError = OnError.proceed
    """What a checkpoint that cannot be written does to the run."""


@dataclass
class Gate:
    """The numerics gate (docs/gate.md)."""

    name: str = "default"
    enabled: bool = True
    steps: int = 3
    """Optimizer steps held against the baseline."""
    fp64_reference: bool = True
    """Also compute the first step in fp64, to say what the precision costs."""
    tolerance: float | None = None
    """A relative L2 error of your own per parameter, instead of the proven bound; labelled so everywhere."""
    noise: bool = True
    """Allow the measured noise floor where local arithmetic legitimately differs from the replay's (CUDA)."""
    kappa: float = 4.0
    """How many noise floors are allowed."""
    locate: bool = True
    """On failure, find the first disagreeing module and name the cause."""
    keep_gradients: bool = False
    """Keep the gate steps' whole gradients as safetensors beside their summaries."""
    max_replay: int = 64
    """Replay at most so many ranks."""
    cache_gib: float = 10.0
    """Keep at most so much of `<output_dir>/.baselines`."""


@dataclass
class Window:
    """The measured steps (docs/window.md)."""

    name: str = "default"
    enabled: bool = True
    warm_up: int = 1
    """Steps after the gate's before anything is measured."""
    measured: int = 5
    """Metered steps of each window."""
    reference: int = 5
    """Steps without meters after them."""
    repeats: int = 3
    """Windows; fewer if the run has not enough steps."""
    max_overhead: float = 0.05
    """Share of a step; figures are rejected if the meters cost more for sure."""
    track: bool = True
    """After training, extra steps that are not trained: memory by kind, FLOPs, what each collective means."""
    trace: bool = False
    """Keep a Kineto trace of each window's metered steps."""


@dataclass
class Fault:
    """A deliberate bug, for the self-test: `_target_` is a `distbench.faults.base.Fault` class; null: none."""

    _target_: str | None = None
    name: str = "none"
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class Slurm:
    """What `hydra/launcher=distbench_slurm` asks Slurm for, for each run of a sweep; null: Slurm's own default."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    """Of the one task a node, which starts all of its ranks."""
    mem_gb: int | None = None
    """Of each node."""
    exclusive: bool = False
    time_min: int = 60
    signal_s: int = 90
    """So long before the time is up a run is asked for a checkpoint."""
    requeues: int = 10
    """How often a run whose time is up is queued again; one that is preempted always is."""
    at_once: int = 256
    """Runs that may be in the queue's hands at the same time."""
    setup: list[str] = field(default_factory=list)
    """Lines of the job's script before anything else: module load, source, export."""
    python: str | None = None
    """Command that starts Python, for containers: `apptainer exec --nv image.sif python`; null: this Python."""
    srun_args: list[str] = field(default_factory=list)
    """For srun, such as `--container-image=...`."""


@dataclass
class LocalLaunch:
    """This command starts its own ranks."""

    name: str = "local"
    nodes: int = 1
    """Machines; of more than one, each runs this command (docs/cluster.md)."""
    nproc: Union[int, str] = AUTO  # noqa: UP007
    """Ranks of each machine."""
    master_addr: str = "127.0.0.1"
    master_port: Union[int, str] = AUTO  # noqa: UP007
    threads_per_rank: Union[int, str] = AUTO  # noqa: UP007
    timeout_s: float = 1800.0
    """How long a collective may wait for a peer before the run is ended."""
    stall_timeout_s: float | None = 600.0
    """How long a rank may stay in one phase of one step before the run is ended as hung; None: as long as it likes."""
    grace_s: float = 10.0
    """How long the other ranks have to end once one has."""
    max_restarts: int = 0
    """How often a run whose ranks died is started again, from its newest complete checkpoint."""
    slurm: Slurm = field(default_factory=Slurm)


@dataclass
class Link:
    """What connects the hosts of `launch=testbed`."""

    rate: str | None = None
    """Of each host's link, each way, in tc's words: 100mbit, 1gbit; None: what this machine can copy."""
    delay_ms: float = 0.0
    """One way."""


@dataclass
class TestbedLaunch:
    """This command makes hosts on this machine, and a link between them, and starts the ranks there."""

    name: str = "testbed"
    nodes: int = 2
    """Hosts. `launch.testbed.nodes` on the command line, too (`SPELLINGS`)."""
    nproc: Union[int, str] = 1  # noqa: UP007
    """Ranks of each host."""
    testbed: Link = field(default_factory=Link)
    threads_per_rank: Union[int, str] = AUTO  # noqa: UP007
    """Hosts share this machine's cores."""
    timeout_s: float = 1800.0
    stall_timeout_s: float | None = 600.0
    grace_s: float = 10.0
    max_restarts: int = 0


@dataclass
class TorchrunLaunch:
    """Ranks were started by torchrun (or any launcher that sets its variables); they join."""

    name: str = "torchrun"
    threads_per_rank: Union[int, str] = AUTO  # noqa: UP007
    timeout_s: float = 1800.0
    stall_timeout_s: float | None = 600.0


@dataclass
class Seeds:
    model: int = 0
    data: int = 0


@dataclass
class Logging:
    statistics_every: int = 100
    """0: none."""
    histograms: bool = False
    progress: bool = True


@dataclass
class Decide:
    """How a sweep's decision is made. Changes nothing of what is computed."""

    rule: Rule = Rule.fastest
    memory_gib: float | None = None
    """Budget of peak memory a rank, for `fastest_within_memory`."""
    within_percent: float = 5.0
    """How much slower than the fastest is still good enough, for `smallest_within` and `most_accurate_within`."""


class Objective(Enum):
    """What a sweeper that looks for the best cell is told of each (docs/decision.md): less is better."""

    step_time = "step_time"
    exposed_comm = "exposed_comm"
    peak_memory = "peak_memory"


@dataclass
class SweepOptions:
    """How often a sweep runs each of its cells, and in which order. Changes nothing of what is computed."""

    repeats: int = 1
    order: Order = Order.interleaved
    repeat: int = 1
    """Which repeat a run is; a sweep sets it."""
    resume: bool = False
    """Go on with the newest sweep of the same command: what is finished is not run again."""
    objective: Objective = Objective.step_time
    """For sweepers that choose their cells themselves (hydra/sweeper=optuna)."""


@dataclass
class Config:
    """One run. Groups of more than one dataclass are `Any` here; `GROUPS` says which ones they hold."""

    model: Any = MISSING
    strategy: Any = MISSING
    precision: Precision = field(default_factory=Precision)
    wrap_policy: Any = MISSING
    prefetch: Prefetch = field(default_factory=Prefetch)
    data: Any = MISSING
    loss: Loss = field(default_factory=Loss)
    optimizer: Any = MISSING
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    gate: Gate = field(default_factory=Gate)
    window: Window = field(default_factory=Window)
    fault: Fault = field(default_factory=Fault)
    decide: Decide = field(default_factory=Decide)
    launch: Any = MISSING
    logging: Logging = field(default_factory=Logging)
    sweep: SweepOptions = field(default_factory=SweepOptions)
    seed: Seeds = field(default_factory=Seeds)
    device: Device = Device.auto
    steps: int = 40
    global_batch: int = 8
    accumulation: int = 1
    accumulation_sync: bool = False
    clip_norm: float | None = 1.0
    on_nonfinite: OnNonfinite = OnNonfinite.stop
    deterministic: bool = True
    name: str | None = None
    output_dir: str = "outputs"
    resume: str | None = None
    """A run folder of the same config, to train on in; the command line sets it."""
    start_from: str | None = None
    """A run folder, or a checkpoint in one, whose state this run starts from once its gate has passed."""


GROUPS: dict[str, dict[str, type]] = {
    "model": {"simple": SimpleModel, "custom": CustomModel},
    "strategy": {
        "single": SingleStrategy,
        "ddp": DDPStrategy,
        "fsdp": FSDPStrategy,
        "fsdp2": FSDP2Strategy,
    },
    "wrap_policy": {"size": SizeWrap, "block": BlockWrap, "pattern": PatternWrap, "none": NoWrap},
    "data": {"synthetic": SyntheticData, "text": TextData},
    "optimizer": {"adamw": AdamW, "sgd": SGD},
    "launch": {"local": LocalLaunch, "testbed": TestbedLaunch, "torchrun": TorchrunLaunch},
}
"""Groups whose options differ in their fields; an option's `name` says which dataclass it is."""

MONOMORPHIC: dict[str, type] = {
    "precision": Precision,
    "prefetch": Prefetch,
    "loss": Loss,
    "checkpoint": Checkpoint,
    "gate": Gate,
    "window": Window,
    "fault": Fault,
    "decide": Decide,
}
"""Groups whose options are presets of one dataclass, the type of their field in `Config`."""

DTYPES = ("fp64", "fp32", "bf16", "fp16")

SPELLINGS = {"checkpoint.async=": "checkpoint.async_=", "launch.testbed.nodes=": "launch.nodes="}
"""Words of the command line -> as the schema, made of Python's classes, can have them."""


def spelled(words: list[str]) -> list[str]:
    """Overrides by the schema's names."""
    return [
        next(
            (word.replace(said, meant, 1) for said, meant in SPELLINGS.items() if word.lstrip("+").startswith(said)),
            word,
        )
        for word in words
    ]


def register_schemas() -> None:
    """Store the schemas with Hydra's ConfigStore: `base_config`, and `schema/<group>/<option>` for what it leaves open."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    store.store(name="base_config", node=Config, provider="distbench")
    for group, options in GROUPS.items():
        for option, schema in options.items():
            store.store(group=f"schema/{group}", name=option, node=schema, provider="distbench")


# --------------------------------------------------------------------------------------------------------------
# Edge: container <-> dataclasses
# --------------------------------------------------------------------------------------------------------------


def from_container(container: dict[str, Any]) -> Config:
    """Build the typed config from a plain, resolved tree (Hydra's composition, or a `resolved.yaml`).

    Raises ConfigError for unknown options, unknown keys, wrong types and values left at `???`.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    root = OmegaConf.structured(Config)
    for group, options in GROUPS.items():
        chosen = (container.get(group) or {}).get("name")
        if chosen not in options:
            raise ConfigError(f"{group}.name={chosen!r} is not one of {', '.join(options)}")
        root[group] = OmegaConf.structured(options[chosen])
    try:
        merged = OmegaConf.merge(root, container)
        if missing := sorted(OmegaConf.missing_keys(merged)):
            raise ConfigError(f"{missing[0]} has no value; set {missing[0]}=...")
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        from distbench.hydra_edge import explain

        message = explain(error)
        where = "" if not error.full_key or error.full_key in message else f"{error.full_key}: "
        raise ConfigError(f"{where}{message}") from error
    assert isinstance(config, Config)
    return config


def to_container(config: Config) -> dict[str, Any]:
    """The plain tree of a config: dicts, lists, strings and numbers only; inverse of `from_container`."""

    def plain(value: Any) -> Any:
        if isinstance(value, Enum):
            return value.name
        if is_dataclass(value) and not isinstance(value, type):
            return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [plain(v) for v in value]
        return value

    tree = plain(config)
    assert isinstance(tree, dict)
    return tree


# --------------------------------------------------------------------------------------------------------------
# Derived facts
# --------------------------------------------------------------------------------------------------------------


def joined_world() -> int | None:
    """World size when this process was started by torchrun or a launcher that sets its variables, else None."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in names) else None


def num_cuda_devices() -> int:
    """CUDA devices visible to this process, without importing torch (which takes seconds)."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = len(list(Path("/proc/driver/nvidia/gpus").glob("*"))) if Path("/proc/driver/nvidia").exists() else 0
    if visible is None:
        return present
    return min(present, len([d for d in visible.split(",") if d.strip() not in ("", "-1")]))


def resolve_device(config: Config) -> str:
    """`cpu` or `cuda`: CUDA when asked for, or when present and not refused."""
    if config.device is Device.auto:
        return "cuda" if num_cuda_devices() else "cpu"
    return config.device.value


def num_nodes(config: Config) -> int:
    """Machines that the configuration asks for."""
    return int(getattr(config.launch, "nodes", 1))  # ranks that torchrun has made are where they are


def world_size(config: Config) -> int:
    """Number of ranks this run has: joined, asked for, or by default one a GPU, two on CPU, one for `single`."""
    joined = joined_world()
    if joined is not None:
        return joined
    nodes, nproc = num_nodes(config), getattr(config.launch, "nproc", AUTO)
    if nproc != AUTO:
        return nodes * int(nproc)
    if config.strategy.name == "single":
        return nodes
    return nodes * (num_cuda_devices() if resolve_device(config) == "cuda" else 2)


def threads_per_rank(config: Config, local_world_size: int) -> int:
    """Intra-op CPU threads of one rank: as asked, else an equal share of the cores this process may use."""
    asked = config.launch.threads_per_rank
    if asked != AUTO:
        return int(asked)
    here = local_world_size * (config.launch.nodes if isinstance(config.launch, TestbedLaunch) else 1)
    return max(1, len(os.sched_getaffinity(0)) // here)


def not_applicable(config: Config) -> dict[str, str]:
    """Options this run's strategy does not use, each with the reason. They do not change the experiment."""
    unused: dict[str, str] = {}
    strategy = config.strategy.name
    if strategy in ("single", "ddp"):
        unused["wrap_policy"] = f"strategy={strategy} does not shard"
        unused["prefetch"] = f"strategy={strategy} gathers no parameters"
    elif strategy == "fsdp" and config.strategy.sharding_strategy is ShardingStrategy.NO_SHARD:
        unused["prefetch"] = "sharding_strategy=NO_SHARD gathers no parameters"
    if config.accumulation == 1:
        unused["accumulation_sync"] = "accumulation=1 synchronises once"
    elif strategy == "single":
        unused["accumulation_sync"] = "strategy=single synchronises nothing"
    if not config.precision.scaler.enabled:
        unused["precision.scaler"] = "no loss scaling in this precision"
    return unused


OUTSIDE = ("master_addr", "master_port", "timeout_s", "stall_timeout_s", "grace_s", "max_restarts", "slurm")
"""Of `launch`: what changes nothing of what is computed."""


def effective(config: Config) -> dict[str, Any]:
    """The part of a config that changes what is computed: what two runs must share to be the same experiment."""
    tree = to_container(config)
    for path in not_applicable(config):
        *parents, leaf = path.split(".")
        node = tree
        for parent in parents:
            node = node[parent]
        node[leaf] = "not applicable"
    for ignored in ("name", "output_dir", "logging", "decide", "sweep", "resume"):
        tree.pop(ignored)
    for outside in OUTSIDE:
        tree["launch"].pop(outside, None)
    tree["world_size"] = world_size(config)
    return tree


def digest(tree: Any) -> str:
    """Short content hash of a plain tree (hex, 16 characters)."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class BatchShape:
    """How one optimizer step's samples are divided: micro_batch x accumulation x world_size = global_batch."""

    global_batch: int
    world_size: int
    accumulation: int

    @property
    def per_rank(self) -> int:
        return self.global_batch // self.world_size

    @property
    def micro_batch(self) -> int:
        return self.per_rank // self.accumulation

    def __str__(self) -> str:
        return f"{self.micro_batch} x {self.accumulation} x {self.world_size} = {self.global_batch}"

    def to_dict(self) -> dict[str, int]:
        return {**asdict(self), "per_rank": self.per_rank, "micro_batch": self.micro_batch}


def batch_shape(config: Config) -> BatchShape:
    return BatchShape(config.global_batch, world_size(config), config.accumulation)
