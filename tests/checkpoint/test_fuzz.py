"""Damaged checkpoints: each is loaded or refused by name, in bounded memory and time. More of them:
`DISTBENCH_FUZZ=5000 python -m pytest tests/checkpoint/test_fuzz.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.checkpoint.fuzzing import WAYS
from tests.cli import REPOSITORY

NUMBER = int(os.environ.get("DISTBENCH_FUZZ", "60"))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    words = ["-m", "tests.checkpoint.fuzzing", str(NUMBER), "1"]
    done = subprocess.run([sys.executable, *words], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {outcome["target"]: outcome for outcome in json.loads(done.stdout)}


@pytest.mark.parametrize("way", WAYS)
def test_damaged_checkpoints_are_loaded_or_refused_by_name(way: str, outcomes: dict[str, dict[str, Any]]) -> None:
    outcome = outcomes[way]
    assert not outcome["findings"], outcome["findings"][0]["problem"]
    assert outcome["read"] + outcome["refused"] == NUMBER and outcome["refused"]
    if "signed" not in way and way != "manifest":
        assert outcome["read"] <= NUMBER // 20, "what is not what was written was taken"
