"""Writing files so that a reader, or a crash, never sees half of one."""

from __future__ import annotations

import json
import math
import os
import re
import stat
import tempfile
from pathlib import Path
from typing import Any

import orjson

from distbench.errors import OutputError


def write_atomic(path: Path, content: bytes | str) -> None:
    """Write `content` to a temporary neighbour, flush it to disk, and rename it over `path`."""
    data = content.encode() if isinstance(content, str) else content
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files private to the user; a run folder is read by whoever may read its parent.
        Path(temporary).chmod(0o644)
        os.replace(temporary, path)  # noqa: PTH105
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def check_output(path: Path, option: str) -> None:
    """Refuse a file to write that is there and cannot be replaced by one: a device, a pipe, a link, a folder.

    Raises OutputError. `option`: which named it.
    """
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise OutputError(f"{option} {path} is there and is no regular file; name another file")


def write_json(path: Path, tree: Any) -> None:
    """Write strict JSON: a non-finite number becomes the string that names it, since JSON has none."""
    write_atomic(path, json_text(tree))


_INVISIBLE = re.compile("[\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
"""What drives terminals, or turns text around, and JSON does not have to escape."""


def json_text(tree: Any) -> str:
    """Strict JSON, indented, with a newline at its end; printable, since it may be printed."""
    tree = strict(tree)
    try:
        text = orjson.dumps(tree, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS).decode()
    except orjson.JSONEncodeError:  # a number of more than 64 bits
        text = json.dumps(tree, indent=2, allow_nan=False)
    return _INVISIBLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n"


def is_plain_name(name: Any) -> bool:
    """Whether a name from a file is that of an entry of one folder, and no path out of it."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")


def parse_json(data: bytes) -> Any:
    """JSON, and the `NaN` that other writers put where it has none. Raises ValueError, and RecursionError for what is too
    deep."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return json.loads(data)  # takes more, and its messages say where


def strict(value: Any) -> Any:
    """`value` with every non-finite float replaced by "nan", "inf" or "-inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k: strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [strict(v) for v in value]
    return value
