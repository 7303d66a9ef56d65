"""What the forkserver imports before it forks the first rank: everything a run imports, the lazy parts too.

A name that a torch version does not have is left out: preloading is speed, never correctness.
"""

from __future__ import annotations

import contextlib
import gc
import importlib

from distbench.launching.signals import end_with_parent

MODULES = (
    "distbench.launching.worker",
    "distbench.experiment",
    "distbench.build",
    "distbench.checkpoint.keeping",
    "distbench.checkpoint.sharded",
    "distbench.measure.measuring",
    "distbench.numerics.diagnose",
    "distbench.numerics.gating",
    "distbench.numerics.locate",
    "distbench.runs.log",
    "distbench.strategies.ddp",
    "distbench.strategies.fsdp",
    "distbench.strategies.fsdp2",
    "distbench.data.synthetic",
    "distbench.data.text",
    "distbench.report.tensorboard",
    "omegaconf.grammar_parser",
    "rich.console",
    "rich.progress",
    # Imported lazily by DDP's and FSDP's constructors and first steps: 822 modules, more than a second a rank.
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.elastic.multiprocessing.errors",
    "torch.distributed.tensor",
    "torch.utils.flop_counter",
    "safetensors.torch",
    "tensorboard.plugins.hparams.api_pb2",
)

# Its children hold the pipe by which it would notice that its parent has gone.
end_with_parent()

for _name in MODULES:
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module(_name)

from distbench.numerics.summary import prepare  # noqa: E402

prepare()  # a second a rank otherwise

# What is here lives as long as the forkserver. Ranks need not look through it for garbage, which would also copy every
# page of it.
gc.collect()
gc.freeze()
