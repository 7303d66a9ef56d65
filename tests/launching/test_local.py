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


@pytest.mark.parametrize(
    ("address", "why"), [("192.0.2.1", "Cannot assign requested address"), ("no.such.host.invalid", "[Nn]ame")]
)
@pytest.mark.parametrize("port", ["auto", 29500])
def test_an_address_that_is_not_this_machines_is_refused(address: str, why: str, port: str | int) -> None:
    config = replace(small(), launch=LocalLaunch(master_addr=address, master_port=port))
    message = (
        rf"launch\.master_addr={address} is not an address of this machine: .*{why}.*; ranks meet on launch\.master_"
    )
    with pytest.raises(ConfigError, match=message):
        check_port(config)


def test_any_port_needs_no_check() -> None:
    check_port(replace(small(), launch=LocalLaunch(master_addr="127.0.0.1")))
