"""The parent's side of a local launch."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from distbench.config import LocalLaunch
from distbench.errors import ConfigError
from distbench.launching.local import check_port
from tests.configs import small


def test_a_taken_port_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = replace(small(), launch=LocalLaunch(master_port=port))
        with pytest.raises(ConfigError, match=rf"launch\.master_port={port} cannot be used on .*: Address already"):
            check_port(config)
    check_port(config)


def test_an_address_that_is_not_this_machines_is_refused() -> None:
    config = replace(small(), launch=LocalLaunch(master_addr="192.0.2.1", master_port=29500))
    with pytest.raises(ConfigError, match=r"cannot be used on 192\.0\.2\.1: Cannot assign requested address"):
        check_port(config)


def test_any_port_needs_no_check() -> None:
    check_port(replace(small(), launch=LocalLaunch(master_addr="127.0.0.1")))
