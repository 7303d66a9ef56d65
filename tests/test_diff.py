"""`python -m distbench diff`: exit codes, console, JSON and the page."""

from __future__ import annotations

import json
import os
import re
import runpy
import socket
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from distbench.__main__ import main
from distbench.report.svg import CHARACTER, WIDTH, Plot, padded, ticks
from tests.cli import distbench
from tests.distributed import forkserver
from tests.runs.folders import gradients, make_run, summary, usual_run

EXAMPLES = Path(__file__).parent.parent / "examples"
HOSTILE = "<script>alert(1)</script>[red]\x1b[31m\x07\u202e\n&\"'.weight"


class Page(HTMLParser):
    """Every tag and attribute of a page, and whether its tags nest."""

    VOID = ("meta", "br", "line", "circle", "polyline")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.values: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.values += [f"{key}={value}" for key, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.values += [f"{key}={value}" for key, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def two_runs(tmp_path: Path) -> tuple[str, str]:
    grads = {1: gradients(1), 2: gradients(2, 0.5)}
    a = usual_run(tmp_path / "a", losses=[2.0, 1.5, 1.0], grads=grads, config={"strategy.name": "fsdp2"})
    return str(a), str(usual_run(tmp_path / "b"))


def test_console(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = two_runs(tmp_path)
    assert main(["diff", a, b]) == 1
    out = capsys.readouterr().out
    assert re.search(r"strategy.name +fsdp2 +ddp", out)
    assert "losses  1 of 3 steps differ, first step 3; largest relative difference 0.2 at step 3" in out
    assert "step 1: 4 of 4 parameters equal" in out and "step 2: 0 of 4 parameters equal, 4 beyond" in out
    assert re.search(r"layers\.10\.weight +!different +0\.5 +1 +0\.5", out), "a factor is known to all digits"
    assert (
        "step 1: 4 of 4 parameters equal, 0 beyond the tolerance\n" in out and "(estimated where digests differ)" in out
    )
    assert out.splitlines()[-1].startswith("DIFFERENT: losses (first at step 3); gradients at step 2")
    assert main(["diff", b, b]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "EQUAL bit for bit: losses, gradients, weights"
    assert main(["diff", a, b, "--tolerance", "5"]) == 0
    assert main(["diff", a, b, "--step", "1"]) == 0
    assert main(["diff", a, str(tmp_path / "nothing")]) == 2
    assert "nothing: no such file or folder" in capsys.readouterr().err


def test_long_tables_are_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in (("a", 1.0), ("b", 2.0)):
        tensors = {f"layers.{i}.weight": torch.full((3,), value) for i in range(50)}
        save_file({**tensors, **{f"{name}.{i}": torch.zeros(1) for i in range(30)}}, tmp_path / f"{name}.safetensors")
    assert main(["diff", str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")]) == 1
    out = capsys.readouterr().out
    assert out.count("layers.") == 20 + 1 and "and 30 more, 30 of them beyond the tolerance" in out
    assert "only in A (30): a.0, a.1" in out and "and 10 more" in out


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = two_runs(tmp_path)
    assert main(["diff", a, b, "--json", "-"]) == 1
    tree = json.loads(capsys.readouterr().out)
    assert main(["diff", a, b, "--json", str(tmp_path / "diff.json")]) == 1
    assert json.loads((tmp_path / "diff.json").read_text()) == tree
    assert tree["schema"] == 1 and tree["differs"] is True and tree["tolerance"] == 0
    assert tree["a"] == {"path": a, "kind": "run", "status": "passed", "gate": None}
    assert tree["losses"]["a"] == [2.0, 1.5, 1.0] and tree["losses"]["largest_step"] == 3
    second = tree["gradients"][1]
    assert second["num_differing"] == 4 and second["parameters"][0]["exact"] is False
    assert {p["name"]: p["alpha"] for p in second["parameters"]}["head.bias"] == pytest.approx(0.5)
    assert tree["weights"]["method"] == "exact" and tree["weights"]["differs"] is False


def test_json_has_no_nan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = {name: torch.full_like(g, float("nan")) for name, g in gradients(1).items()}
    a = make_run(tmp_path / "a", losses=[float("nan")], grads={1: bad}, weights={1: bad})
    b = make_run(tmp_path / "b", losses=[1.0], grads={1: gradients(1)}, weights={1: gradients(1)})
    assert main(["diff", str(a), str(b), "--json", "-"]) == 1
    json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert main(["diff", str(a), str(b), "--html", str(tmp_path / "x.html")]) == 1
    Page((tmp_path / "x.html").read_text())


def test_page(tmp_path: Path) -> None:
    a, b = two_runs(tmp_path)
    assert main(["diff", a, b, "--html", str(tmp_path / "diff.html"), "--tolerance", "0.1"]) == 1
    text = (tmp_path / "diff.html").read_text()
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert not any(value.startswith(("href=", "src=", "on")) for value in page.values) and "http" not in text.replace(
        "http-equiv", ""
    )
    assert page.tags.count("svg") == 2 + 1  # two of losses, one of the step whose gradients differ
    assert "prefers-color-scheme: dark" in text and "tolerance 0.1" in text and "layers.10" in text


def test_text_from_files_is_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names, settings and verdicts may come from anybody: no markup, no control characters, no tags."""
    for name, scale in (("a", 1.0), ("b", 2.0)):
        grads = {1: {HOSTILE: torch.full((5, 7), scale), **gradients(1)}}
        config = {f"<img src=x>{HOSTILE}": f"<b>{name}{HOSTILE}"}
        gate = {"text": f"{name}{HOSTILE}"}
        make_run(tmp_path / name, grads=grads, weights={1: grads[1]}, config=config, gate=gate, losses=[scale])
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--html", str(tmp_path / "diff.html")]) == 1
    out = capsys.readouterr().out
    assert not set(out) & {"\x1b", "\x07", "\u202e"} and "[red]" in out and r"\x1b[31m" in out
    page = Page((tmp_path / "diff.html").read_text())
    assert not {"script", "img", "b"} & set(page.tags)


def test_bad_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = two_runs(tmp_path)
    for words in (
        [a],
        [a, b, "--tolerance", "x"],
        [a, b, "--tolerance", "-1"],
        [a, b, "--tolerance", "nan"],
        [a, b, "-q"],
    ):
        with pytest.raises(SystemExit) as exit_info:
            main(["diff", *words])
        assert exit_info.value.code == 2
    assert main(["diff", a, b, "--json", str(tmp_path / "no" / "folder.json")]) == 2
    assert "cannot write" in capsys.readouterr().err
    os.mkfifo(tmp_path / "pipe")
    for option in ("--json", "--html"):
        assert main(["diff", a, b, option, str(tmp_path / "pipe")]) == 2
        assert f"{option} {tmp_path / 'pipe'} is there and is no regular file" in capsys.readouterr().err
    assert (tmp_path / "pipe").is_fifo()


def test_as_a_command(tmp_path: Path) -> None:
    summary(gradients(1)).save(tmp_path / "a.safetensors")
    summary(gradients(2)).save(tmp_path / "b.safetensors")
    others = ("a.safetensors", "b.safetensors", "c.safetensors")
    codes = [distbench("diff", "a.safetensors", other, cwd=tmp_path).code for other in others]
    assert codes == [0, 1, 2]


@pytest.mark.parametrize("example", ["plain_loop.py", "accelerate_loop.py"])
def test_examples(tmp_path: Path, example: str) -> None:
    """Alone and on two ranks; their gradients differ by rounding, and by a factor where the mean is forgotten."""
    if example.startswith("accelerate"):
        pytest.importorskip("accelerate")
    run_example(EXAMPLES / example, tmp_path / "one", ranks=1)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, **ONE_THREAD}
    words = [*launcher, str(EXAMPLES / example), str(tmp_path / "two")]
    subprocess.run(words, check=True, env=environment, timeout=180)
    assert main(["diff", str(tmp_path / "two"), str(tmp_path / "one"), "--tolerance", "1e-5"]) == 0
    assert main(["diff", str(tmp_path / "two"), str(tmp_path / "one")]) == 1
    wrong = tmp_path / "wrong.py"
    wrong.write_text((EXAMPLES / example).read_text().replace("(BATCH / world)", "BATCH"))
    run_example(wrong, tmp_path / "wrong", ranks=2)
    assert main(["diff", str(tmp_path / "wrong"), str(tmp_path / "one"), "--step", "1", "--tolerance", "0.1"]) == 1


ONE_THREAD = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}


def run_example(script: Path, folder: Path, ranks: int) -> None:
    """As a launcher starts its ranks, in processes that have imported torch."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    every = [{**ONE_THREAD, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    environments = every if ranks > 1 else [ONE_THREAD]
    processes = [forkserver().Process(target=rank_of, args=(script, folder, one)) for one in environments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(180)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * ranks


def rank_of(script: Path, folder: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.argv = [str(script), str(folder)]
    runpy.run_path(str(script), run_name="__main__")


def test_labels_neither_overlap_nor_leave_the_page() -> None:
    plot = Plot.frame("x", (-0.5, 19.5), (0.0, 1.0))
    plot.x_ticks((float(index), f"transformer.layer{index}") for index in range(20))
    found = [re.fullmatch(r'<text x="([\d.]+)" .*>(.*)</text>', part) for part in plot.parts]
    labels = [(float(m[1]), len(m[2]) * CHARACTER / 2) for m in found if m and m[2].startswith("transformer")]
    assert 4 < len(labels) < 10
    assert all(half <= at <= WIDTH - half for at, half in labels)
    assert all(a + half_a < b - half_b for (a, half_a), (b, half_b) in pairwise(labels))


def test_ticks_are_round() -> None:
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10] and ticks(1.9, 2.06)[0] == pytest.approx(1.9)
    assert padded([]) == (-1.0, 1.0) and padded([3.0]) == (2.85, 3.15)
    for low, high in ((0, 1e-300), (-1e300, 1e300), (5, 5.0000001)):
        assert 2 <= len(ticks(low, high)) <= 8
