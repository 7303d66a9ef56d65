"""Commands on real run folders that someone has filled with hostile text, or damaged: answers and named errors, no more."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from markdown import markdown

from distbench.report.decision import to_markdown
from distbench.runs.rank import rank
from tests.cli import Command, distbench, start
from tests.fuzz.harness import fuzz
from tests.fuzz.mutations import CONTROL, MARKUP
from tests.fuzz.pages import Page, check_console, check_page
from tests.fuzz.targets import ROW, command, command_targets, diff_runs, rank_runs, report_runs, runs

NUMBER = 8
"""Damaged files for each command and file of the real runs."""
SWEEP = [
    *("-m", "strategy=ddp,fsdp", "model.hidden_dim=8", "model.num_layers=2", "model.seq_len=4"),
    *("steps=16", "window.repeats=1", "gate.keep_gradients=true", "checkpoint.every=16"),
]
"""Two runs with all that a report shows of one: window, tracked steps, timeline, gate."""

Text = Callable[[str], str]
"""From a string in a file to what is there instead."""


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs that passed, as `000_a` and `001_b`."""
    done = distbench(*SWEEP, cwd=tmp_path_factory.mktemp("real"))
    assert done.code == 0, done.said
    root = tmp_path_factory.mktemp("runs")
    for folder, name in zip(done.runs, ("000_a", "001_b"), strict=True):
        shutil.copytree(folder, root / name, ignore=shutil.ignore_patterns("tb", "logs", ".hydra"))
    return root


@pytest.fixture(params=["real", "made"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder of runs to write into; the made ones have what real ones have only on other machines."""
    root = tmp_path / "runs"
    if request.param == "real":
        return Path(shutil.copytree(request.getfixturevalue("real"), root))
    root.mkdir()
    runs(root)
    return root


# --- hostile text


KEPT = ("status", "tier", "fault")
"""Sections without whose own words a run is not ranked, and most of a page not there."""


def rewritten(tree: Any, text: Text, kept: tuple[str, ...] = KEPT) -> Any:
    """Every string of a tree, and every key of an object whose keys are names, replaced."""
    if isinstance(tree, dict):
        return {key: value if key in kept else rewritten(value, text, kept) for key, value in tree.items()}
    if isinstance(tree, list):
        return [rewritten(value, text, kept) for value in tree]
    return text(tree) if isinstance(tree, str) and tree not in ("nan", "inf", "-inf") else tree


def fill(folder: Path, text: Text, kept: tuple[str, ...] = KEPT) -> None:
    """Put text into all strings of all JSON files of the runs in a folder, and into keys that name something."""
    for path in sorted(folder.iterdir()):
        for file in (path / "record.json", path / "gate.json"):
            tree = rewritten(json.loads(file.read_text()), text, kept)
            if file.name == "record.json":
                tree["dtypes"] = {text(f"{path.name} dtype"): text("fp32")}
                tree["config"][text("key")] = text(f"{path.name} value")
                tree["not_applicable"] = {text("key"): text("reason")}
                tree["environment"]["variables"] = {text("NAME"): text(f"{path.name} value")}
            file.write_text(json.dumps(tree))


def pages(folder: Path) -> list[Page]:
    """Report and diff of a folder of two runs, once they are known to have nothing but what is ours."""
    command("report", str(folder))
    diff = folder.parent / "diff.html"
    command("diff", str(folder / "000_a"), str(folder / "001_b"), "--html", str(diff))
    return [check_page((folder / "report.html").read_text()), check_page(diff.read_text())]


def of_length(word: str) -> Text:
    """The word, and the string that it replaces, so that texts that differ still do; always as long as its payload."""
    return lambda old: f"{word}{old}"


@pytest.mark.parametrize("payload", MARKUP)
@pytest.mark.parametrize("kept", [KEPT, ()])
def test_markup_from_files_is_text_on_every_page(payload: str, kept: tuple[str, ...], folder: Path) -> None:
    """The same elements with the same attributes as with a harmless word in all those places."""
    harmless = folder.parent / "harmless" / "runs"
    shutil.copytree(folder, harmless)
    fill(harmless, of_length("w" * len(payload)), kept)
    fill(folder, of_length(payload), kept)
    for found, expected in zip(pages(folder), pages(harmless), strict=True):
        assert found.elements == expected.elements
        shown = [text for text in found.texts if payload[:8] in text]
        assert len(shown) == len([text for text in expected.texts if "wwwwwwww"[: len(payload[:8])] in text])
        assert len(shown) > 5
    assert kept == () or rank([folder]).chosen is not None


@pytest.mark.parametrize("payload", MARKUP)
def test_markup_from_files_is_text_in_decision_md(payload: str, folder: Path) -> None:
    fill(folder, of_length(payload))
    page = to_markdown(rank([folder]))
    assert not re.search(r"(?<!\\)~", page), "GitHub's own strikes text through"
    html = markdown(page, extensions=["tables", "extra"])
    assert set(Tags.of(html)) <= {
        "h1",
        "h2",
        "p",
        "strong",
        "ul",
        "li",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "code",
    }
    assert html.count("<tr>") == 1 + len(list(folder.glob("*/record.json"))), "a row a run"


class Tags(Page):
    """Elements alone; this page is another's."""

    @classmethod
    def of(cls, html: str) -> list[str]:  # type: ignore[override]
        read = cls()
        read.feed(html)
        read.close()
        return [tag for tag, _ in read.elements]

    def _take(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert all(name == "style" and (value or "").startswith("text-align") for name, value in attrs), (tag, attrs)
        self.elements.append((tag, ()))


@pytest.mark.parametrize("payload", CONTROL)
def test_control_characters_from_files_reach_no_console(payload: str, folder: Path) -> None:
    fill(folder, of_length(payload))
    a, b = str(folder / "000_a"), str(folder / "001_b")
    for words in (
        ["rank", str(folder)],
        ["rank", str(folder), "--json"],
        ["report", str(folder)],
        ["diff", a, b],
        ["diff", a, b, "--json", "-"],
    ):
        command(*words)
    assert "\\" in command("diff", a, b), "it is there, escaped"


@pytest.mark.parametrize("payload", [text for text in (*MARKUP, *CONTROL) if "/" not in text and "\0" not in text])
def test_names_of_folders_and_of_damaged_files(payload: str, folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        path.rename(folder / f"{path.name}{payload}")
    torn = folder / f"002_c{payload}torn"
    torn.mkdir()
    (torn / "record.json").write_text("{")
    check_console(command("rank", str(folder)))
    command("report", str(folder))
    check_page((folder / "report.html").read_text())
    with pytest.raises(Exception, match=r"record\.json is damaged"):
        command("diff", str(torn), str(torn))


@pytest.mark.parametrize("payload", (*MARKUP, *CONTROL))
def test_imported_rows(payload: str, tmp_path: Path) -> None:
    words = ("name", "strategy", "precision", "wrap", "prefetch", "model", "device", "torch", "reason", "imported_from")
    meters = ("step_time_meter", "memory_meter", "exposed_comm_meter")
    row = {**ROW, **{key: payload for key in (*words, *meters) if payload.strip()}}
    rows = [row, {**row, "name": f"second{payload}", "status": "crashed"}, {**row, "step_times_s": [0.02, 0.03]}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    command("import", str(tmp_path / "rows.json"), "--out", str(tmp_path / "runs"))
    check_console(command("rank", str(tmp_path / "runs")))
    command("report", str(tmp_path / "runs"))
    assert any(payload[:5] in text for text in check_page((tmp_path / "runs" / "report.html").read_text()).texts) or (
        not payload.isprintable()
    )


def test_names_that_are_no_utf8(folder: Path) -> None:
    """Files have any bytes as names; a console, JSON and a page have text."""
    odd = os.fsdecode(b"002_\xff\xfe")
    shutil.copytree(folder / "000_a", folder / odd)
    for words in (["rank", str(folder)], ["rank", str(folder), "--json"], ["report", str(folder)]):
        command(*words)
    command("diff", str(folder / "000_a"), str(folder / odd), "--html", str(folder / "d.html"), "--json", "-")
    check_page((folder / "report.html").read_text())


# --- numbers that no machine measures


EXTREMES = (5e-324, 1e-310, 1e-200, 1e200, 9e307, 10**400)


def of_windows(value: Any, record: dict[str, Any]) -> None:
    window = record["window"]
    window |= {part: dict.fromkeys(("parameters", "forward", "data"), value) for part in ("split", "memory_by_kind")}
    window["timeline"] = [[{"kind": "forward", "name": "x", "start": 0, "end": value}]]
    window["exposed_comm"]["median"] = window["tokens_per_second"]["median"] = value
    record["gate"]["precision_error"] = value


def of_step_times(value: Any, record: dict[str, Any]) -> None:
    record["window"]["step_time"] |= {"median": value, "samples": [value, value], "window_medians": [value]}


def of_memory(value: Any, record: dict[str, Any]) -> None:
    record["window"]["memory"]["peak_allocated"]["bytes"] = value


def of_rule(value: Any, record: dict[str, Any]) -> None:
    record["config"]["decide"] = {"rule": "fastest_within_memory", "memory_gib": value, "within_percent": value}


@pytest.mark.parametrize("value", [*EXTREMES, 0, -1, True, "x", None, [], {}])
@pytest.mark.parametrize("where", [of_windows, of_step_times, of_memory, of_rule])
def test_extremes_in_records(where: Callable[[Any, dict[str, Any]], None], value: Any, tmp_path: Path) -> None:
    """In one run of three, and in all of them."""
    runs(tmp_path)
    files = sorted(tmp_path.glob("*/record.json"))[:2]
    for file in files:
        record = json.loads(file.read_text())
        where(value, record)
        file.write_text(json.dumps(record))
        rank_runs(tmp_path)
        report_runs(tmp_path)
        diff_runs(tmp_path)


@pytest.mark.parametrize("value", EXTREMES[:-1])
@pytest.mark.parametrize("other", [1.0, -1e308, 5e-324])
def test_extremes_in_losses_and_margins(value: float, other: float, tmp_path: Path) -> None:
    runs(tmp_path)
    for name, loss in (("000_a", value), ("001_b", other)):
        with (tmp_path / name / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps({"step": step, "loss": loss}) + "\n" for step in (10, 11, 10**18 - 1))
        gate = json.loads((tmp_path / name / "gate.json").read_text())
        for row in gate["gradients"]:
            row |= {"margin": value, "relative_l2": value, "step": value}
        (tmp_path / name / "gate.json").write_text(json.dumps(gate))
    report_runs(tmp_path)
    diff_runs(tmp_path)


# --- damage to real runs


@pytest.mark.parametrize("name", [target.name for target in command_targets(runs)])
def test_damaged_real_runs(name: str, real: Path) -> None:
    def corpus(folder: Path) -> None:
        shutil.copytree(real, folder, dirs_exist_ok=True)

    weights = "000_a/checkpoints/step_00000016/model.safetensors"
    (target,) = [target for target in command_targets(corpus, weights) if target.name == name]
    outcome = fuzz(target, NUMBER, seed=3)
    assert not outcome.findings, outcome.findings[0]["problem"]
    assert outcome.read + outcome.refused == NUMBER


def test_the_command_line_itself(real: Path, tmp_path: Path) -> None:
    """Once as processes, with their exit codes."""
    folder = Path(shutil.copytree(real, tmp_path / "runs"))
    (folder / "000_a" / "gradients" / "step_00000001.safetensors").write_bytes(b"\x1b[31m" * 20)
    (folder / "001_b" / "record.json").write_text('{"schema": 1, "status": "\x1b[31m"}')
    for words, code in (
        (["diff", "runs/000_a", "runs/001_b"], 2),
        (["rank", "runs"], 0),
        (["report", "runs"], 0),
        (["import", "runs/001_b/record.json", "--out", "out"], 2),
        (["resume=runs/001_b"], 2),
    ):
        done = start(*words, cwd=tmp_path).finish()
        check_console(done.said)
        assert done.code == code and (code != 2 or done.err.count("\n") == 1), done.said


@pytest.mark.parametrize("flag", ["--experimental-rerun", "--exp"])
@pytest.mark.parametrize("sign", ["=", " "])
def test_hydra_unpickles_nothing(flag: str, sign: str, tmp_path: Path) -> None:
    (tmp_path / "config.pickle").write_bytes(b"cos\nsystem\n(S'touch executed'\ntR.")
    done = start(*f"{flag}{sign}config.pickle".split(), cwd=tmp_path).finish()
    assert done.code == 2 and "would unpickle a file" in done.err and not (tmp_path / "executed").exists()


@pytest.mark.parametrize("how", [["-m", "distbench"], ["-c", "from distbench.__main__ import entry; entry()"]])
def test_nothing_is_imported_from_the_folder_that_is_read(how: list[str], real: Path, tmp_path: Path) -> None:
    """A file there that is called as a module of ours, or as what it imports."""
    folder = Path(shutil.copytree(real, tmp_path / "runs"))
    for name in ("rich", "numpy", "torch", "orjson", "yaml", "safetensors", "numba"):
        (folder / f"{name}.py").write_text(f"raise SystemExit('imported {name}')")
    for words in (["report", "."], ["diff", "000_a", "001_b"], ["export", "000_a", "--output", "model.safetensors"]):
        done = Command(sys.executable, *how, *words, cwd=folder).finish()
        assert done.code == 0 and "imported" not in done.said, done.said
        (folder / "model.safetensors").unlink(missing_ok=True)
