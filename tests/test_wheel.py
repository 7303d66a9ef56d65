"""The built wheel in a clean environment, from a foreign directory: nothing of the checkout is needed."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from distbench.hydra_edge import conf_dir
from tests.cli import REPOSITORY, SMALL, Command, Finished


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    words = ["-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(REPOSITORY)]
    built = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (file,) = folder.glob("distbench-*.whl")
    return file


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment that holds the wheel, and sees our dependencies, but not our checkout.

    A line in a .pth file puts a folder on the path and does not read the .pth files in it: the checkout's own editable
    installation stays out.
    """
    root = tmp_path_factory.mktemp("clean")
    venv.create(root, with_pip=False)
    python = root / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index", "--no-deps", "--quiet"]
    subprocess.run([*pip, "--disable-pip-version-check", str(wheel)], check=True)
    site = sysconfig.get_path("purelib", vars={"base": str(root), "platbase": str(root)})
    (Path(site) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return root / "bin"


def run(*words: str | Path, cwd: Path) -> Finished:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return Command(*map(str, words), cwd=cwd, env=env).finish()


def test_the_wheel_holds_the_configuration_and_no_tests(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {f"distbench/conf/{path.relative_to(conf_dir())}" for path in conf_dir().rglob("*.yaml")} | {
        f"distbench/conf/recipes/{path.name}" for path in (REPOSITORY / "recipes").glob("*.yaml")
    }
    assert wanted <= names
    assert not {name for name in names if name.startswith(("tests/", "conf/", "benchmarks/")) or name.endswith(".nbi")}


def test_the_environment_sees_the_wheel_and_not_the_checkout(installed: Path, tmp_path: Path) -> None:
    ended = run(installed / "python", "-c", "import distbench; print(distbench.__file__)", cwd=tmp_path)
    assert ended.code == 0, ended.said
    assert Path(ended.out.strip()).is_relative_to(installed.parent)


def test_the_console_script_runs(installed: Path, tmp_path: Path) -> None:
    ended = run(installed / "distbench", "strategy=ddp", *SMALL, cwd=tmp_path)
    assert ended.code == 0, ended.said
    record = ended.record
    assert record["status"] == "passed" and record["run"]["command"].startswith("distbench strategy=ddp ")
    log = (ended.run / "logs" / "rank0.log").read_text()
    assert str(REPOSITORY) not in log.replace(sysconfig.get_path("purelib"), "")


def test_a_recipe_runs(installed: Path, tmp_path: Path) -> None:
    words = ["strategy=single,fsdp", "precision=fp32", "steps=2", "gate=off", "model.hidden_dim=8", "model.seq_len=8"]
    ended = run(installed / "python", "-m", "distbench", "+recipes=ddp_vs_fsdp", *words, cwd=tmp_path)
    assert ended.code == 0, ended.said
    assert "2 of 2 runs passed" in ended.out
    assert {run.parent.name.split("_", 2)[2] for run in ended.runs} == {"ddp_vs_fsdp_sweep"}
