"""`run_distributed`: a function on every rank of a small Gloo world, in fresh processes.

Ranks are forked from a forkserver that has imported what a run needs, so that after the first call a test pays a fork
and a rendezvous, not `import torch`.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from distbench.launching.world import World

P = ParamSpec("P")
T = TypeVar("T")

TIMEOUT_S = 180.0
"""For one call: long enough for a crowded machine, short enough to tell a deadlock from it."""

PRELOAD = [
    *("distbench.launching.local", "distbench.preflight", "distbench.report.console", "distbench.resume"),
    *("distbench.runs.rank", "distbench.sweep", "hydra.main", "torch.distributed.launcher.api"),
    *("pytest", "tests.distributed", "tests.warm", "distbench.launching.preload"),
]
"""What ranks would import, and the commands of tests/warm.py; last what freezes it all."""


class RankFailed(AssertionError):
    """A rank raised (the message is its traceback), died, or did not come back in time."""


def forkserver() -> ForkServerContext:
    """Where processes are forked from one that has imported what they need."""
    for variable, value in (("TORCH_CPP_LOG_LEVEL", "ERROR"), ("KINETO_LOG_LEVEL", "5")):
        os.environ.setdefault(variable, value)  # as distbench's own has them (launching/local.py)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def run_distributed(
    func: Callable[Concatenate[World, P], T],
    world_size: int,
    *args: P.args,
    timeout_s: float = TIMEOUT_S,
    **kwargs: P.kwargs,
) -> list[T]:
    """Call `func(world, *args)` on `world_size` ranks and return what they returned, in rank order.

    `func` must be importable by name, and its arguments and results picklable; tensors are copied. Raises RankFailed
    for the first rank that fails; no rank outlives the call.
    """
    context = forkserver()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks: list[tuple[BaseProcess, Connection]] = []
    try:
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(func, args, kwargs, rank, world_size, store.port, timeout_s, sender), daemon=True
            )
            process.start()
            sender.close()
            ranks.append((process, receiver))
        return _collect(ranks, time.monotonic() + timeout_s)
    finally:
        for process, receiver in ranks:
            process.kill()
            process.join()
            receiver.close()


def _collect(ranks: list[tuple[BaseProcess, Connection]], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    pending = {receiver: rank for rank, (_, receiver) in enumerate(ranks)}
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailed(f"ranks {sorted(pending.values())} did not return in time")
        # The earliest failure is the cause; those of its peers, which lost their connection, are its consequences.
        failures: list[tuple[float, str]] = []
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = pending.pop(receiver)
            try:
                when, failed, value = pickle.loads(receiver.recv_bytes())
            except EOFError:
                ranks[rank][0].join(timeout=5)
                failures.append((0.0, f"died with exit code {ranks[rank][0].exitcode}"))
                continue
            if failed:
                failures.append((when, f"rank {rank} failed:\n{value}"))
            results[rank] = value
        if failures:
            raise RankFailed(min(failures)[1])
    for rank, (process, _) in enumerate(ranks):
        process.join(timeout=max(0.0, deadline - time.monotonic()))
        if process.exitcode != 0:
            raise RankFailed(f"rank {rank} returned, then ended with exit code {process.exitcode}")
    return [results[rank] for rank in range(len(ranks))]


def _rank(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rank: int,
    size: int,
    port: int,
    timeout_s: float,
    sender: Connection,
) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the parent hosts the store
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)
    try:
        world = World.join("cpu", timeout_s, needs_group=True)
        result = func(world, *args, **kwargs)
        message = pickle.dumps((time.time(), False, result))
        world.leave()
    except BaseException:
        message = pickle.dumps((time.time(), True, traceback.format_exc()))
    sender.send_bytes(message)
    sender.close()
