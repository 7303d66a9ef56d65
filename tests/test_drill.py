"""`distbench drill`: a case of each, and that it says so where something does not end as promised."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distbench import drill
from distbench.__main__ import main
from distbench.checkpoint.format import Source, read_header
from distbench.checkpoint.manifest import Entry, read_manifest, write_manifest
from distbench.checkpoint.shards import shard_name
from distbench.drills import damage, full_disk, kill, leaks, site, two_at_once
from distbench.drills.aim import PHASES, Aim
from distbench.drills.base import Case, Promises, Skipped, Try, rows
from distbench.drills.catalogue import DRILLS
from distbench.drills.site import Site
from distbench.errors import CheckpointError, ExitCode
from tests.warm import SUBPROCESS


@pytest.fixture(autouse=True, scope="module")
def warm() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("distbench.drills.command.subprocess", SUBPROCESS)
        yield


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("ground"))


@pytest.fixture
def straight(ground: Site, tmp_path: Path) -> Path:
    """A copy of a run that nothing happened to."""
    shutil.copytree(ground.straight(damage.SETTINGS), tmp_path / "straight")
    return tmp_path / "straight"


# --- the command


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nope"], "there is no drill 'nope'; there are kill, freeze, "),
        (["kill", "--number", "0"], "--number 0 is no number of cases; use --number 1 or more"),
        (["--write", "no/such/file.md"], "--write no/such/file.md: there is no folder "),
        (["--write", "/dev/null"], "--write /dev/null is there and is no regular file; name another file"),
    ],
)
def test_bad_usage_is_one_message_and_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drill, "hold", lambda *_: pytest.fail("something was begun"))
    assert main(["drill", *words]) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert error.startswith(f"distbench: {message}") and len(error.splitlines()) == 1


def test_the_list_names_every_drill_and_its_promise(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drill", "--list"]) == ExitCode.OK
    listed = capsys.readouterr().out
    for name, one in DRILLS.items():
        assert name == one.name and f"{name} " in listed and one.promise in listed


def test_a_case_of_each_ends_as_promised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "table.md"
    code = main(["drill", "--number", "1", "--seed", "5", "--write", str(file)])
    said = capsys.readouterr().out
    assert code == ExitCode.OK, said
    table = file.read_text()
    assert "python -m distbench drill --number 1 --seed 5" in table
    for name in DRILLS:
        section = table.partition(f"## {name}\n")[2].partition("\n## ")[0]
        assert "**1 of 1 ended as promised.**" in section or "skipped" in section, name
    assert "kept:" not in said


def test_cases_are_drawn_from_the_seed() -> None:
    for one in DRILLS.values():
        few = [str(case) for case in one.draw(random.Random(1), 9)]
        assert few == [str(case) for case in one.draw(random.Random(1), 9)]
        assert 1 <= len(few) <= 9
    assert [*kill.draw(random.Random(1), 9)] != [*kill.draw(random.Random(2), 9)]
    aims = [case.aim for case in kill.draw(random.Random(0), 70) if isinstance(case, kill.Kill)]
    assert {phase: sum(aim.phase == phase for aim in aims) for phase in PHASES} == dict.fromkeys(PHASES, 10)
    assert {aim.rank for aim in aims} == {0, 1} and len({aim.step for aim in aims}) > 10
    assert len({str(case) for case in damage.draw(random.Random(0), 99)}) == damage.DRILL.number


# --- what is told where something does not end as promised


class Odd(Case):
    """Ends as it is told."""

    def __init__(self, how: Callable[[Promises], None]) -> None:
        self.how = how

    def __str__(self) -> str:
        return "odd | case"

    def run(self, site: Site, folder: Path, promised: Promises) -> dict[str, str]:
        (folder / "evidence").touch()
        self.how(promised)
        return {"found": "it"}


def broken(promised: Promises) -> None:
    promised(1 + 1 == 3, "two and one")


def damaged(promised: Promises) -> None:
    raise CheckpointError("a file is damaged")


def skipped(promised: Promises) -> None:
    raise Skipped("no such disk")


def test_what_is_not_as_promised_is_told_and_kept(tmp_path: Path) -> None:
    ground = Site(tmp_path)
    good = drill.attempt(Odd(lambda _: None), ground, tmp_path / "good")
    assert not good.broken and not (tmp_path / "good").exists()
    bad = drill.attempt(Odd(broken), ground, tmp_path / "bad")
    assert bad.broken == ["two and one"] and (tmp_path / "bad" / "evidence").exists()
    raised = drill.attempt(Odd(damaged), ground, tmp_path / "raised")
    assert raised.broken == ["a file is damaged"]
    none = drill.attempt(Odd(skipped), ground, tmp_path / "none")
    assert none.skipped == "no such disk" and not none.broken
    assert rows([good, bad, none])[2:] == [
        "| odd / case | it | yes |",
        "| odd / case | it | NO |",
        "| odd / case |  | skipped: no such disk |",
    ]
    text = drill.markdown([DRILLS["cache"]], {"cache": [bad, good, none]})
    assert "**1 of 2 ended as promised.**" in text and "NOT AS PROMISED odd | case: two and one" in text


def test_the_table_of_kills_counts_by_place_and_strategy() -> None:
    def made(strategy: str, place: str, seconds: float, **changes: str) -> Try:
        found = {"was in": place, "checkpoint": "step 3", "gone after": f"{seconds} s", "bitwise": "yes"}
        return Try(kill.Kill(strategy, False, Aim(0, "data", 1, 0.0)), found | changes)

    never = made("fsdp", "collective", 0.0, checkpoint="none yet", **{"gone after": "never", "bitwise": "NO"})
    never.broken = ["something still runs"]
    unmade = Try(never.case, broken=["was never there"])
    tries = [made("fsdp", "collective", 2.0), never, made("ddp", "data", 1.0), made("ddp", "data", 4.0), unmade]
    assert kill.table(tries)[2:] == [
        "| data | ddp | 2 | 2 | 2 of 2 | 2.5 s, 4.0 s | 2 of 2 |",
        "| collective | fsdp | 2 | 1 | 1 of 2 | 2.0 s, 2.0 s | 1 of 2 |",
        "| **all** | | 5 | 3 | 3 of 5 | 2.0 s, 4.0 s | 3 of 5 |",
    ]


def test_a_drill_that_fails_ends_with_1_and_says_where_it_is_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(
        drill, "hold", lambda drill, seed, number, site, tries: tries.append(Try(Odd(broken), broken=["x"]))
    )
    assert main(["drill", "cache"]) == ExitCode.DIFFERENT
    (kept,) = tmp_path.iterdir()
    assert f"kept: {kept}" in capsys.readouterr().out


def tamper(checkpoint: Path) -> None:
    """Another weight, under a manifest that says that it is right."""
    shard = checkpoint / shard_name(0)
    with Source(shard) as source:
        start = next(stored.start for name, stored in read_header(source).tensors.items() if name.startswith("P/"))
    data = bytearray(shard.read_bytes())
    data[start] ^= 1
    shard.write_bytes(data)
    write_manifest(checkpoint, [Entry.of(checkpoint / entry.name) for entry in read_manifest(checkpoint)])


def test_a_kill_whose_resume_is_not_bitwise_is_told(
    ground: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def whole(promised: Promises, checkpoints: Path) -> Path | None:
        found = site.whole(promised, checkpoints)
        assert found is not None
        tamper(found)
        return found

    monkeypatch.setattr(kill, "whole", whole)
    case = kill.Kill("ddp", True, Aim(rank=1, phase="writing", step=1, delay_s=0.0))
    one = drill.attempt(case, ground, tmp_path / "try")
    assert one.found["bitwise"] == "NO" and one.found["was in"] == "writing"
    assert any("model.safetensors is not the uninterrupted run's" in problem for problem in one.broken)
    assert (tmp_path / "try" / "run" / "record.json").exists()


def test_a_rank_that_is_not_there_to_be_hit_is_told(
    ground: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kill, "ATTEMPTS", 0)
    one = drill.attempt(kill.Kill("ddp", False, Aim(0, "data", 3, 0.0)), ground, tmp_path / "try")
    assert one.broken == ["rank 0 in data, step 3 was never there to be hit, in 0 runs"]


def problems(check: Callable[[Promises], object]) -> str:
    promised = Promises()
    check(promised)
    return "; ".join(promised.broken)


def test_a_run_that_is_another_in_any_bit_is_told(straight: Path, ground: Site, tmp_path: Path) -> None:
    reference = ground.straight(damage.SETTINGS)
    assert problems(lambda promised: site.same(promised, straight, reference)) == ""
    last = straight / "checkpoints" / f"step_{site.STEPS:08d}"

    def changed(file: Path, change: Callable[[bytes], bytes]) -> str:
        before = file.read_bytes()
        file.write_bytes(change(before))
        found = problems(lambda promised: site.same(promised, straight, reference))
        file.write_bytes(before)
        return found

    lines = changed(straight / "metrics.jsonl", lambda data: b"\n".join(data.split(b"\n")[:-2]) + b"\n")
    assert lines.startswith("the logged steps are [1, 2, ")
    loss = json.loads((straight / "metrics.jsonl").read_text().splitlines()[6])["loss"]
    assert (
        changed(straight / "metrics.jsonl", lambda data: data.replace(str(loss).encode(), str(loss + 1e-9).encode()))
        == "step 7 is not the uninterrupted run's"
    )
    for name in ("model.safetensors", shard_name(1)):
        said = f"{last.name}/{name} is not the uninterrupted run's"
        assert changed(last / name, lambda data: data[:-1] + bytes([data[-1] ^ 1])) == said
    assert "train_state.json is not" in changed(
        last / "train_state.json", lambda data: data.replace(b'"samples": 160', b'"samples": 161')
    )
    assert "status is crashed" in changed(
        straight / "record.json", lambda data: data.replace(b'"status": "passed"', b'"status": "crashed"')
    )


def test_a_damaged_checkpoint_and_a_wrong_latest_are_told(straight: Path) -> None:
    checkpoints = straight / "checkpoints"
    newest = site.whole(Promises(), checkpoints)
    assert newest is not None and newest.name == f"step_{site.STEPS:08d}"
    damage.flip_a_bit(newest / shard_name(0), random.Random(0))
    assert "rank_00000.safetensors is damaged" in problems(lambda promised: site.whole(promised, checkpoints))
    shutil.rmtree(newest)
    said = problems(lambda promised: site.whole(promised, checkpoints))
    assert said == f"latest names '{newest.name}', which is no complete checkpoint"


@pytest.mark.parametrize(
    ("code", "said", "wanted"),
    [
        (0, "", "exit code 0, not 2"),
        (2, "something is damaged", "rank_00000.safetensors is not named"),
        (2, "Traceback: {newest}/rank_00000.safetensors", "a traceback"),
    ],
)
def test_damage_that_is_not_refused_by_name_is_told(
    code: int, said: str, wanted: str, ground: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = tmp_path / "run" / "checkpoints" / "step_00000018"
    ground.straight(damage.SETTINGS)
    monkeypatch.setattr(damage, "run", lambda words, log: (code, said.format(newest=newest)))
    promised = Promises()
    damage.Damage(shard_name(0), "cut short", 0.5).run(ground, tmp_path, promised)
    assert wanted in "; ".join(promised.broken)


def test_checkpoints_that_a_refusal_changes_are_told(
    ground: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ground.straight(damage.SETTINGS)
    file = tmp_path / "run" / "checkpoints" / "step_00000018" / shard_name(0)

    def run(words: list[str], log: Path) -> tuple[int, str]:
        file.unlink()
        return 2, f"{file} is damaged"

    monkeypatch.setattr(damage, "run", run)
    promised = Promises()
    damage.Damage(shard_name(0), "cut short", 0.5).run(ground, tmp_path, promised)
    assert promised.broken == ["the checkpoints have changed"]


def test_every_way_of_damage_changes_its_file(tmp_path: Path) -> None:
    for name, spoil in damage.WAYS.items():
        file = tmp_path / name
        file.write_bytes(b"something")
        spoil(file, random.Random(0))
        assert not file.exists() or file.read_bytes() != b"something", name


def test_what_grows_is_told() -> None:
    def told(growth: dict[str, float]) -> str:
        flat = {"open files": 10.0, "memory, MiB": 300.0, "threads": 2.0}
        samples = [{key: value + growth.get(key, 0.0) * run for key, value in flat.items()} for run in range(200)]
        return problems(lambda promised: leaks.grown(promised, samples))

    assert told({}) == "" and told({"memory, MiB": 0.01}) == ""
    assert told({"open files": 0.1}).startswith("open files has grown from 1")
    assert told({"memory, MiB": 0.05}).startswith("memory, MiB has grown from 30")
    assert told({"threads": 1.0}).startswith("threads has grown from ")


def test_shared_memory_that_nobody_has_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "PATIENCE_S", 0.5)
    left = Path("/dev/shm") / f"sem.{tmp_path.parent.name}-{tmp_path.name}"
    left.touch()
    try:
        assert leaks.unused({left.name, "was there and is gone"}) == {left.name}
    finally:
        left.unlink()


def test_a_disk_is_not_mounted_by_everyone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getuid", lambda: 1000)
    with pytest.raises(Skipped, match="only root may mount"):
        full_disk.mount(tmp_path, 2**20)


def test_a_record_of_another_run_in_hydras_files_is_told(straight: Path) -> None:
    assert problems(lambda promised: two_at_once.own_hydra(promised, straight)) == ""
    file = straight / ".hydra" / "config.yaml"
    file.write_text(file.read_text().replace(f"steps: {site.STEPS}", "steps: 3"))
    assert "is of another run: steps=3" in problems(lambda promised: two_at_once.own_hydra(promised, straight))
