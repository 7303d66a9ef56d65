"""Seeded damage to files: what disks, editors and crashes do to them, and what someone would who wants to do harm.

Each function takes a whole file and a source of randomness, and returns another file. The same seed gives the same file.
"""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

Damage = Callable[[bytes, Random], bytes]

MARKUP = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</style></title></svg><svg onload=alert(1)>",
    "<!--",
    "]]>",
    "[a](javascript:alert(1))",
    "`|*_#~$&lt;b&gt;",
)
"""Text that would be more than text on a page that does not escape it."""
CONTROL = ("\x1b[31mred\x1b]0;title\x07", "\r\x1b[2K", "a\x00b", "\x9b2J", "a\nb\n\n# c", "\u202egnp", "\x7f\b\b")
"""Text that would drive a terminal, or break a line."""
PATHS = ("../../etc/passwd", "/etc/passwd", "..", ".", "", "a/b", "a\\..\\b", "a\x00.safetensors", "x" * 300)
ODD_TEXT = (
    *MARKUP,
    *CONTROL,
    *PATHS,
    "null",
    "nan",
    "-inf",
    "1e999",
    "{0}%s{a.__class__}",
    "${oc.env:HOME}",
    "???",
    "é" * 50,
)
ODD_NUMBERS = (0, -1, 1, 0.5, -0.0, 1e-320, 1e308, 2**31, 2**53 + 1, 2**63, -(2**63) - 1, 2**64, 2**200, float("nan"))
ODD_TREES: tuple[Any, ...] = (
    None,
    True,
    False,
    [],
    {},
    [[]],
    [None],
    {"a": None},
    [1, "a"],
    {"": 0},
    [[], {}],
    [{}] * 3,
)
RAW = (
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"1e999",
    b"-1e999",
    b"9" * 4000,
    b"9" * 6000,
    b"[" * 100_000,
    b"[" * 3000 + b"]" * 3000,
    b'{"a":' * 500 + b"1" + b"}" * 500,
    b'"' + b"x" * 200_000 + b'"',
    b'"\\ud800"',
    b'"\xff\xfe"',
    b'"\x1b[31m"',
    b'{"a": 1, "a": 2}',
    b"[" + b"0," * 20_000 + b"0]",
    b"01",
    b"'a'",
)
"""What `json.dumps` would not write: the value of some key, as it stands in the file."""
PIECES = (b"\xff\xfe", b"\x00", b"\xef\xbb\xbf", b"\xed\xa0\x80", b'"', b"{", b"]", b",")
DTYPES = ("F32", "F64", "BF16", "F16", "I64", "U8", "BOOL", "F8_E4M3", "F4", "C64", "", "f32", "F32\x00")


def bytes_damaged(content: bytes, random: Random) -> bytes:
    """One to three of: cut short, made longer, bits and bytes changed, pieces cut out, repeated, swapped, put in."""
    data = bytearray(content)
    for _ in range(random.randint(1, 3)):
        at = random.randrange(len(data) + 1)
        end = min(len(data), at + random.randint(1, 40))
        kind = random.randrange(8)
        if kind == 0:
            del data[at:]
        elif kind == 1:
            data += random.choice([b"\x00" * 100, random.randbytes(50), data[:200], b"\n" * 1000])
        elif kind == 2 and data:
            data[at % len(data)] ^= 1 << random.randrange(8)
        elif kind == 3:
            data[at:end] = random.randbytes(end - at)
        elif kind == 4:
            del data[at:end]
        elif kind == 5:
            data[at:at] = data[at:end] * random.randint(1, 3)
        elif kind == 6:
            other = random.randrange(len(data) + 1)
            data[at:end], data[other : other + end - at] = data[other : other + end - at], data[at:end]
        else:
            data[at:at] = random.choice(
                [*RAW[:5], b"\xff\xfe", b"\x00", b"\xef\xbb\xbf", b"\xed\xa0\x80", b'"', b"{", b"]", b","]
            )
    return bytes(data)


# --- JSON


def json_damaged(content: bytes, random: Random) -> bytes:
    """One to three values or keys changed to something else that parses, or nearly; now and then bytes as well."""
    tree = json.loads(content)
    raw: list[bytes] = []
    for _ in range(random.randint(1, 3)):
        tree = _changed(tree, random, raw)
    text = json.dumps(tree).encode()
    for index, value in enumerate(raw):
        text = text.replace(_placeholder(index).encode(), value)
    return bytes_damaged(text, random) if random.random() < 0.15 else text


def _placeholder(index: int) -> str:
    return f'"@raw{index}@"'


def _changed(tree: Any, random: Random, raw: list[bytes]) -> Any:
    places = list(_places(tree))
    if not places or random.random() < 0.02:
        return _odd(random, raw)
    parent, key = random.choice(places)
    kind = random.randrange(10)
    if kind == 0:
        del parent[key]
    elif kind == 1 and isinstance(parent, dict):
        parent[random.choice(ODD_TEXT)] = parent.pop(key)
    elif kind == 2 and isinstance(parent, dict):
        parent[random.choice(ODD_TEXT)] = _odd(random, raw)
    elif kind == 3:
        _, other = random.choice(places)
        parent[key] = copy.deepcopy(random.choice([inner[place] for inner, place in places if place == other]))
    elif kind == 4 and isinstance(parent, list):
        parent[key:key] = [parent[key]] * random.randint(1, 5)
    else:
        parent[key] = _odd(random, raw)
    return tree


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key or index) of every value below the root."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(items):
        yield tree, key
        yield from _places(value)


def _odd(random: Random, raw: list[bytes]) -> Any:
    kind = random.randrange(4)
    if kind == 0:
        return random.choice(ODD_TEXT)
    if kind == 1:
        return random.choice(ODD_NUMBERS)
    if kind == 2:
        return copy.deepcopy(random.choice(ODD_TREES))
    raw.append(random.choice(RAW))
    return _placeholder(len(raw) - 1).strip('"')


def lines_damaged(content: bytes, random: Random) -> bytes:
    """JSON lines: some line changed as JSON, lines dropped, repeated or swapped, one that is very long."""
    lines = content.split(b"\n")
    for _ in range(random.randint(1, 3)):
        at = random.randrange(len(lines))
        kind = random.randrange(6)
        if kind == 0:
            del lines[at : at + random.randint(1, 2)]
            lines = lines or [b""]
        elif kind == 1:
            lines[at:at] = [lines[at]] * random.randint(1, 3)
        elif kind == 2:
            lines[at] = b'{"step": 1, "loss": 1, "x": "' + b"y" * 300_000 + b'"}'
        elif kind == 3:
            lines[at] = bytes_damaged(lines[at], random)
        else:
            try:
                lines[at] = json_damaged(lines[at], random)
            except (ValueError, RecursionError):  # a line that was damaged before, or is empty
                lines[at] = random.choice(RAW)
    return b"\n".join(lines)


# --- YAML


def _bomb(line: str) -> bytes:
    """Aliases of aliases: 2 kB that a reader may take for more than there is memory."""
    lines = ["a0: &a0 {k: 1, l: 2}"]
    lines += [f"a{i}: &a{i} " + line.format(f"*a{i - 1}") for i in range(1, 40)]
    return "\n".join(lines).encode() + b"\n"


YAML = (
    b"x: !!python/object/apply:os.system ['touch executed']\n",
    b"x: !!python/name:os.system\n",
    b"x: !!python/module:os\n",
    b"x: !<tag:yaml.org,2002:python/object/new:os.system> ['touch executed']\n",
    _bomb("[{0}, {0}, {0}, {0}, {0}, {0}, {0}, {0}]"),
    _bomb("{{<<: [{0}, {0}, {0}, {0}, {0}, {0}, {0}, {0}]}}"),
    _bomb("{{x: {0}, y: {0}, <<: {0}}}"),
    b"x: &x [*x]\n",
    b"x: &x {<<: *x}\n",
    b"x: 0x" + b"f" * 9000 + b"\n",
    b"x: 0b" + b"1" * 30_000 + b"\n",
    b"x: " + b"9" * 9000 + b"\n",
    b"x: " + b"1:" * 9000 + b"1\n",
    b"x: 2001-02-30\n",
    b"x: 2001-01-01T00:00:00+99:99\n",
    b"x: !!timestamp a\n",
    b"x: !!binary '!'\n",
    b"x: !!set {a, b}\n",
    b"x: !!float a\n",
    b"x: .nan\n",
    b"? [a, {b: c}]\n: 1\n",
    b"? 0x" + b"f" * 9000 + b"\n: 1\n",
    b"x: " + b"[" * 5000 + b"\n",
    b"- " * 3000 + b"\n",
    b"x: " + b"{a: " * 300 + b"}" * 300 + b"\n",
    b"x: !foo bar\n",
    b"--- a\n--- b\n",
    b"%YAML 9.9\n---\n",
    b"\t x: 1\n",
)


def yaml_damaged(content: bytes, random: Random) -> bytes:
    """Tags that would run code, aliases that would fill memory, values of types that no config has, and bytes."""
    if random.random() < 0.3:
        return bytes_damaged(content, random)
    lines = content.splitlines(keepends=True)
    for _ in range(random.randint(1, 2)):
        at = random.randrange(len(lines) + 1)
        snippet = random.choice(YAML)
        if random.random() < 0.5 and at < len(lines) and snippet.startswith(b"x: "):
            lines[at] = lines[at].partition(b":")[0] + snippet[1:]
        else:
            lines.insert(at, snippet)
    return b"".join(lines)


# --- safetensors


def tensors_damaged(content: bytes, random: Random) -> bytes:
    """The header's length, its JSON, or what it says of some tensor: dtype, shape, offsets, name."""
    if random.random() < 0.2:
        return bytes_damaged(content, random)
    header, data = split_tensors(content)
    if random.random() < 0.3:
        return with_header(json_damaged(json.dumps(header).encode(), random), data, random)
    for _ in range(random.randint(1, 2)):
        _change_tensor(header, len(data), random)
    if random.random() < 0.2:
        data = bytes_damaged(data, random)
    return with_header(json.dumps(header).encode(), data, random)


def split_tensors(content: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and data of a file that is whole."""
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_header(header: bytes, data: bytes, random: Random) -> bytes:
    """A file of these, with the length that the header has, or now and then another."""
    length = len(header)
    if random.random() < 0.15:
        length = random.choice(
            [0, 1, length - 1, length + 1, length + len(data), 2**24, 2**31, 2**40, 2**63, 2**64 - 1]
        )
    return struct.pack("<Q", length % 2**64) + header + data


def _change_tensor(header: dict[str, Any], num_bytes: int, random: Random) -> None:
    names = [name for name, entry in header.items() if isinstance(entry, dict) and "data_offsets" in entry]
    if not names:
        return
    name = random.choice(names)
    entry = header[name]
    kind = random.randrange(7)
    if kind == 0:
        entry["dtype"] = random.choice(DTYPES)
    elif kind == 1:
        shape = entry["shape"] = list(entry["shape"] or [1]) if isinstance(entry["shape"], list) else [1]
        shape[random.randrange(len(shape))] = random.choice([0, -1, 2**31, 2**62, 2**64, 1.0, "1", None, True, 10**12])
    elif kind == 2:
        entry["shape"] = random.choice([[], [0], [2**32, 2**32], [1] * 2000, [0, 2**63], None, 3, [[1]], [2**63, 2, 0]])
    elif kind == 3:
        edges = [0, 1, -1, num_bytes, num_bytes + 1, num_bytes // 2, 2**63, 2**64, 0.5, None]
        entry["data_offsets"] = random.choice(
            [[random.choice(edges), random.choice(edges)], [], [0], 5, None, [0, 1, 2]]
        )
    elif kind == 4:
        entry["data_offsets"] = copy.copy(header[random.choice(names)]["data_offsets"])  # two tensors in one place
    elif kind == 5:
        header[random.choice(ODD_TEXT)] = header.pop(name)
    else:
        del header[name]


# --- tables


def csv_damaged(content: bytes, random: Random) -> bytes:
    """Cells changed, quotes left open, a cell beyond any reader's limit, and bytes."""
    if random.random() < 0.3:
        return bytes_damaged(content, random)
    rows = [line.split(b",") for line in content.splitlines()]
    for _ in range(random.randint(1, 3)):
        row = random.choice(rows)
        at = random.randrange(len(row))
        odd = random.choice([*map(str, ODD_NUMBERS), *ODD_TEXT]).encode(errors="surrogatepass")
        row[at] = random.choice([odd, b'"' + odd, b'"' + odd + b'"', b"x" * 200_000, b"1;2;", b";" * 1000, row[at] * 3])
        if random.random() < 0.1:
            row.append(b"more")
    return random.choice([b"\n", b"\r\n", b"\r"]).join(b",".join(row) for row in rows)
