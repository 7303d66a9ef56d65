"""Every reader of files from others, and every command on a folder of them, with a small valid corpus to damage."""

from __future__ import annotations

import contextlib
import io
import json
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.numpy import load
from safetensors.torch import save_file

from distbench.__main__ import main
from distbench.config import Gate, to_container
from distbench.errors import RunFolderError
from distbench.numerics.compare import compare_files
from distbench.numerics.summary import FORMAT, Summary, _checksum
from distbench.resume import resumed_config
from distbench.runs.folder import read_record
from distbench.runs.imported import import_rows
from distbench.runs.sides import Side, read_gate, read_losses
from tests.configs import small
from tests.fuzz.harness import Target
from tests.fuzz.mutations import (
    Damage,
    csv_damaged,
    json_damaged,
    lines_damaged,
    split_tensors,
    tensors_damaged,
    with_header,
    yaml_damaged,
)
from tests.fuzz.pages import check_console, check_page
from tests.runs.folders import NAMES, gradients, make_run, summary
from tests.runs.records import record

Make = Callable[[Path], Any]

# --- corpora


def run(path: Path, **changes: Any) -> Path:
    """A run folder with all that a reader looks at."""
    sections = record(**changes)
    own = {
        "decide": {"rule": "fastest_within_memory", "memory_gib": 4.0, "within_percent": 5.0},
        "sweep": {"repeat": 1, "repeats": 1, "order": "interleaved"},
    }
    sections["config"] |= own
    sections["dtypes"] = {"compute": "fp32", "parameters": "fp32"}
    sections["initial_weights"] = "abc"
    config = sections.pop("config")
    make_run(
        path,
        losses=[2.0, 1.5, 1.25, float("nan")],
        grads={1: gradients(1), 2: gradients(2)},
        weights={3: gradients(3)},
        config=config,
        **sections,
    )
    rows = [
        {"name": name, "step": step, "mode": "free", "margin": 0.1 * step, "relative_l2": 1e-8}
        for name in NAMES
        for step in (1, 2)
    ]
    gate = {"schema": 1, "passed": True, "text": "gate PASSED (bound)", "gradients": rows, "checks": []}
    (path / "gate.json").write_text(json.dumps(gate))
    return path


def runs(folder: Path) -> None:
    """Three runs that may be compared: two candidates, one of them faster, and one that failed."""
    run(folder / "000_a", effective="a")
    run(folder / "001_b", effective="b", batch={"world_size": 4, "accumulation": 1})
    run(folder / "002_c", effective="c", status="oom", reason="out of memory", window=None)


def tensor_file(path: Path) -> None:
    tensors = {"w": torch.randn(5, 7), "half": torch.randn(9).bfloat16(), "count": torch.tensor(3)}
    save_file({**tensors, "none": torch.empty(0, 4)}, path, metadata={"format": "pt"})


def shards(folder: Path) -> None:
    """A folder of two files with an index, as other tools write them."""
    save_file({"a": torch.randn(3)}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": torch.randn(3)}, folder / "model-00002-of-00002.safetensors")
    places = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = {"metadata": {"total_size": 24}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


ROW = {
    "name": "theirs",
    "strategy": "fsdp",
    "precision": "bf16",
    "world_size": 2,
    "step_times_s": [0.011, 0.012],
    "peak_memory_bytes": 1e9,
    "gate_tier": "bound",
    "parallel_error": 1e-7,
    "status": "passed",
}


def rows(folder: Path) -> None:
    (folder / "rows.json").write_text(json.dumps([ROW, {**ROW, "name": "second", "step_time_s": 0.0115}]))
    cells = {**ROW, "step_times_s": "0.011;0.012"}
    table = [",".join(cells), ",".join(map(str, cells.values()))]
    (folder / "rows.csv").write_text("\n".join([*table, table[1]]) + "\n")


def stored(folder: Path) -> None:
    """What `resume=` reads of a run."""
    (folder / "record.json").write_text(
        json.dumps({"schema": 1, "config": to_container(small("ddp", gate=Gate(steps=1)))})
    )


# --- damage that gets past a checksum


ODD_WORDS = (0, 1, 2**64 - 1, 2**63 - 1, 2**63, 0x7FF8 << 48, 0x7FF0 << 48, 0xFFF0 << 48, 0x7FEF << 48, 0xBFF0 << 48)
"""As counts 0, 1, -1 and the extremes; as float64 NaN, infinities, the largest, -1."""


def summary_resigned(content: bytes, random: Random) -> bytes:
    """A gradient summary that says impossible things, and whose checksum is right: someone wrote it so."""
    header, data = split_tensors(content)
    inner = json.loads(header["__metadata__"][FORMAT])
    del inner["sha256"]
    if random.random() < 0.5:
        with contextlib.suppress(ValueError, RecursionError):
            inner = json.loads(json_damaged(json.dumps(inner).encode(), random))
    else:
        words = bytearray(data)
        for _ in range(random.randint(1, 8)):
            at = 8 * random.randrange(len(words) // 8)
            words[at : at + 8] = struct.pack("<Q", random.choice(ODD_WORDS))
        data = bytes(words)
    if isinstance(inner, dict):
        whole = json.dumps(header).encode()
        inner["sha256"] = _checksum(inner, load(struct.pack("<Q", len(whole)) + whole + data))
    header["__metadata__"][FORMAT] = json.dumps(inner)
    return with_header(json.dumps(header).encode(), data, random)


# --- what reads them


def command(*words: str) -> str:
    """Run a command line in this process and return what it said.

    Raises RunFolderError with its message for exit code 2, AssertionError for another code than 0, 1 or 2.
    """
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(words))
    said = out.getvalue() + err.getvalue()
    check_console(said)
    if code == 2:
        assert err.getvalue().startswith("distbench: "), said
        raise RunFolderError(err.getvalue().removesuffix("\n"))
    assert code in (0, 1), f"exit code {code}: {said[-2000:]}"
    return said


def diff_runs(folder: Path) -> None:
    page, tree = folder / "diff.html", folder / "diff.json"
    command("diff", str(folder / "000_a"), str(folder / "001_b"), "--html", str(page), "--json", str(tree))
    check_page(page.read_text())
    _strict(tree.read_text())


def rank_runs(folder: Path) -> None:
    command("rank", str(folder))
    _strict(command("rank", str(folder), "--json"))


def report_runs(folder: Path) -> None:
    command("report", str(folder))
    check_page((folder / "report.html").read_text())


def import_file(name: str) -> Make:
    def read(folder: Path) -> None:
        command("import", str(folder / name), "--out", str(folder / "imported"))
        made = [path.relative_to(folder).parts[0] for path in folder.rglob("*") if path.is_file()]
        assert set(made) == {"rows.json", "rows.csv", "imported"}, made
        command("rank", str(folder / "imported"))

    return read


def import_like(folder: Path) -> None:
    (folder / "rows.json").write_text(json.dumps([ROW]))
    import_rows(folder / "rows.json", folder / "imported", folder / "000_a")
    command("rank", str(folder))


def load_summary(folder: Path) -> None:
    Summary.load(folder / "a.safetensors")
    command("diff", str(folder / "a.safetensors"), str(folder / "b.safetensors"))


def _strict(text: str) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in JSON")

    json.loads(text, parse_constant=refuse)


def two_summaries(folder: Path) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        summary(gradients(seed)).save(folder / f"{name}.safetensors", {"step": "1", "replicas": "agree"})


def two_tensor_files(folder: Path) -> None:
    tensor_file(folder / "a.safetensors")
    tensor_file(folder / "b.safetensors")


def no_record(folder: Path) -> None:
    runs(folder)
    (folder / "000_a" / "record.json").unlink()


def duplicate(folder: Path) -> None:
    run(folder / "000_a")
    (folder / "001_b").mkdir()
    (folder / "001_b" / "duplicate_of.json").write_text(json.dumps({"duplicate_of": "000_a"}))


def command_targets(corpus: Make, weights: str = "000_a/checkpoints/step_00000003/model.safetensors") -> list[Target]:
    """Commands on a folder of runs, one target for each file that they read."""
    files: dict[str, tuple[str, Damage]] = {
        "record": ("000_a/record.json", json_damaged),
        "metrics": ("000_a/metrics.jsonl", lines_damaged),
        "gate": ("000_a/gate.json", json_damaged),
        "summary": ("000_a/gradients/step_00000001.safetensors", summary_resigned),
        "weights": (weights, tensors_damaged),
    }
    read_by = {"diff": (diff_runs, tuple(files)), "rank": (rank_runs, ("record",))}
    read_by["report"] = (report_runs, ("record", "metrics", "gate"))
    return [Target(f"{name}-{of}", *files[of], corpus, read) for name, (read, whole) in read_by.items() for of in whole]


TARGETS = {
    target.name: target
    for target in [
        Target("record", "000_a/record.json", json_damaged, runs, lambda folder: read_record(folder / "000_a")),
        Target("metrics", "000_a/metrics.jsonl", lines_damaged, runs, lambda f: read_losses(f / "000_a/metrics.jsonl")),
        Target("gate", "000_a/gate.json", json_damaged, runs, lambda folder: read_gate(folder / "000_a/gate.json")),
        Target("yaml", "000_a/resolved.yaml", yaml_damaged, no_record, diff_runs),
        Target("duplicate", "001_b/duplicate_of.json", json_damaged, duplicate, lambda f: Side.open(f / "001_b")),
        Target("summary", "a.safetensors", tensors_damaged, two_summaries, load_summary),
        Target("summary-resigned", "a.safetensors", summary_resigned, two_summaries, load_summary),
        Target(
            "tensors",
            "a.safetensors",
            tensors_damaged,
            two_tensor_files,
            lambda folder: compare_files(folder / "a.safetensors", folder / "b.safetensors"),
        ),
        Target(
            "index", "model.safetensors.index.json", json_damaged, shards, lambda folder: compare_files(folder, folder)
        ),
        Target("rows-json", "rows.json", json_damaged, rows, import_file("rows.json")),
        Target("rows-csv", "rows.csv", csv_damaged, rows, import_file("rows.csv")),
        Target("rows-like", "000_a/record.json", json_damaged, runs, import_like),
        Target("resume", "record.json", json_damaged, stored, lambda folder: resumed_config(folder, [])),
        *command_targets(runs),
    ]
}
