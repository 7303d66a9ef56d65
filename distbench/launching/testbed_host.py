"""The process that is one host of a testbed (launching/testbed.py): the first leads each run, the others follow.

    python -m distbench.launching.testbed_host NAME FILE_DESCRIPTOR

Reads what to do from standard input, a line a run, and says what became of it through the file descriptor.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from distbench.errors import DistbenchError, ExitCode
from distbench.launching import local
from distbench.launching.jobs import job_module
from distbench.launching.nodes import Node, take_part
from distbench.launching.signals import end_with_parent
from distbench.runs import environment
from distbench.runs.text import complaint


def main(argv: list[str]) -> None:
    """Be this host until standard input ends."""
    name, answers = argv[0], int(argv[1])
    end_with_parent()
    os.set_inheritable(answers, False)
    socket.sethostname(name)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, where no ranks run
    with os.fdopen(answers, "w", buffering=1) as stream:
        print("{}", file=stream)
        local.warm_up()
        for line in sys.stdin:
            request = json.loads(line)
            environment.started_by = request["command"]
            leads = "config" in request
            answer = _lead(request) if leads else _follow(Node(int(name.removeprefix("node")) - 1, **request["node"]))
            print(json.dumps(answer), file=stream)


def _lead(request: dict[str, Any]) -> dict[str, Any]:
    from distbench.config import from_container
    from distbench.runs.folder import RunFolder

    try:
        lead = job_module(request["job"]).lead
        outcome = lead(from_container(request["config"]), RunFolder(Path(request["folder"])), Node(**request["node"]))
    except DistbenchError as error:
        return {"refused": str(error), "exit_code": error.exit_code}
    except KeyboardInterrupt:
        return {}
    except Exception as error:
        traceback.print_exc()
        return {"refused": f"{type(error).__name__}: {error}", "exit_code": ExitCode.CRASHED}
    return {"status": outcome.status.value, "exit_code": outcome.exit_code}


def _follow(node: Node) -> dict[str, Any]:
    try:
        take_part(node)
    except DistbenchError as error:
        print(complaint(error), file=sys.stderr, flush=True)
        return {"exit_code": error.exit_code}
    return {"exit_code": ExitCode.OK}


if __name__ == "__main__":
    main(sys.argv[1:])
