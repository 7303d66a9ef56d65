"""Where Hydra ends: its search path, its resolvers, and its errors in one clear line."""

from __future__ import annotations

import difflib
import hashlib
import re
import secrets
import sysconfig
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from distbench import config as schema
from distbench.errors import ConfigError

MAX_NAME = 120
"""Characters of a sweep cell's folder name; file systems allow 255 bytes, and people read fewer."""


def conf_dir() -> Path:
    """`conf/`, inside the installed package or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


@cache
def group_options() -> dict[str, list[str]]:
    """Every group of `conf/` and its options, sorted."""
    return {
        group.name: sorted(option.stem for option in group.glob("*.yaml"))
        for group in sorted(conf_dir().iterdir())
        if group.is_dir() and any(group.glob("*.yaml"))
    }


@cache
def stamp() -> str:
    """This process's own name: local time and a random tail, so two started in one second do not collide."""
    return f"{datetime.now():%Y-%m-%d_%H-%M-%S}-{secrets.token_hex(2)}"


def label(*parts: Any) -> str:
    """The given parts that are set, joined by underscores, safe as a folder name."""
    return _slug("_".join(str(part) for part in parts if part is not None))


def quoted(value: Any) -> str:
    """As an override takes it whatever is in it."""
    text = str(value).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"


def pin(config: Any, fixed: list[str]) -> None:
    """Give every cell of a sweep the same folder, named by what the sweep varies: whoever composes it, and in whichever
    process, where `stamp` would be another one. `config`: the sweep's, composed; `fixed`: the keys that it does not vary."""
    from omegaconf import flag_override

    keys = ",".join(map(quoted, fixed))
    with flag_override(config.hydra, ["readonly", "struct"], [False, False]):
        config.hydra.overrides.hydra += [
            f"hydra.sweep.dir={quoted(Path(config.hydra.sweep.dir))}",
            f"hydra.job.config.override_dirname.exclude_keys=[{keys}]",
        ]


def cell(num: int, overrides: str, *fallback: Any) -> str:
    """Folder name of one cell of a sweep: its number, then what distinguishes it, which repeat it is last."""
    words = [word for word in overrides.split(",") if word]
    repeat = [word.removeprefix("sweep.") for word in words if word.startswith(REPEAT)]
    words = [word for word in words if not word.startswith(REPEAT)] + repeat
    return f"{int(num):03d}_{_slug(','.join(words)) or label(*fallback)}"


REPEAT = "sweep.repeat="


def _slug(text: str) -> str:
    clean = re.sub(r"[^A-Za-z0-9=,._+-]+", "-", text).strip("-.")
    if len(clean) <= MAX_NAME:
        return clean
    tail = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{clean[: MAX_NAME - 9]}-{tail}"


def register_resolvers() -> None:
    """Register the `distbench.*` OmegaConf resolvers that `conf/` uses."""
    from omegaconf import OmegaConf

    resolvers: dict[str, Callable[..., Any]] = {
        "stamp": stamp,
        "label": label,
        "cell": cell,
        "stdlib": lambda: sysconfig.get_paths()["stdlib"],
    }
    for name, function in resolvers.items():
        OmegaConf.register_new_resolver(f"distbench.{name}", function, replace=True)


def skip_mode_lookup(argv: list[str]) -> None:
    """Spare Hydra the composition that only looks for `hydra.mode`, 0.2 s, where nothing in `argv` can have set it.

    Our own config does not; an added group (a recipe), Hydra's own keys and its flags for other configs may.
    """
    from hydra._internal.hydra import Hydra

    plain = ("-m", "--multirun")
    if not any(word.startswith(("+", "hydra", "-")) and word not in plain for word in argv):
        Hydra.get_mode = lambda *_, **__: None


def explain(error: Exception) -> str:
    """One message for an error of Hydra's or OmegaConf's: what, which value, what instead."""
    cause = error.__cause__ or error.__context__
    text = str(error).strip()
    if cause is not None and str(cause).strip() and str(cause).splitlines()[0] not in text:
        text = f"{text}\n{str(cause).strip()}"
    text = text.split("\nConfig search path:")[0]
    text = re.sub(r"\n\t(\S+)", r" \1", text)  # options one a line, after a tab
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    kept = [line for line in lines if not line.lstrip().startswith(("full_key:", "object_type=", "reference_type="))]
    message = _wrong_value("\n".join(kept))
    if hint := _hint(message):
        # Hydra proposes to append the unknown key, which the typed schema would refuse as well.
        kept = [line for line in kept if not line.startswith(("To append to your", "See https://"))]
        message = "\n".join([*kept, hint])
    return message


KINDS = {
    "Integer": "a whole number",
    "int": "a whole number",
    "Float": "a number",
    "float": "a number",
    "bool": "true or false",
    "str": "a word",
}
"""OmegaConf's names of types, as one would say them."""


def _kinds(names: str) -> str:
    """A list of types, in words: `bool, int` is "true, false or a whole number"."""
    words = [KINDS.get(name, name) for name in names.split(", ")]
    if len(words) > 1:
        words = [word.replace(" or ", ", ") for word in words]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _own_keys(found: re.Match[str], key: str, _: str) -> str:
    """A value given to a whole section, such as `seed=1`."""
    names = [f.name for f in fields(getattr(schema, found[1]))]
    return f"is a value for several; set {' or '.join(f'{key}.{name}' for name in names)}"


WRONG_VALUES: tuple[tuple[str, Callable[[re.Match[str], str, str], str]], ...] = (
    (r"could not be converted to (Integer|Float)", lambda found, *_: f"is not {KINDS[found[1]]}"),
    (r"is not a valid (bool)", lambda found, *_: f"is not {KINDS[found[1]]}"),
    (r"expected one of \[(.*)\]", lambda found, *_: f"is not one of {found[1]}"),
    (r"incompatible with type hint '(?:Union|Optional)\[(.*)\]'", lambda found, *_: f"is not {_kinds(found[1])}"),
    (r"is not Optional", lambda *_: "is not a value it can have"),
    (r"is not a ListConfig", lambda _, key, value: f"is not a list; write {key}=[{value}]"),
    (r"is not a subclass of (Seeds|Logging)\b", _own_keys),
)


def _wrong_value(message: str) -> str:
    """Say what a value should have been, where OmegaConf names its own types."""
    if override := re.match(r"Error merging override (\S.*)\n", message):
        key, _, value = override[1].partition("=")
        for pattern, say in WRONG_VALUES:
            if found := re.search(pattern, message):
                return f"{override[1]} {say(found, key.lstrip('+'), value)}"
    return message


def _hint(message: str) -> str | None:
    """What to set instead of the group, option or key that a Hydra message complains about."""
    if match := re.search(r"Could not find '([^'/]+)/([^']+)'", message):
        group, option = match.groups()
        near = difflib.get_close_matches(option, group_options().get(group, []), n=1, cutoff=0.4)
        plus = "" if hasattr(schema.Config, group) or group in schema.MONOMORPHIC else "+"  # a recipe is added
        return f"Did you mean {plus}{group}={near[0]}?" if near else None
    if match := re.match(r"LexerNoViableAltException: ([^=\s]+)=(.*)", message):
        return f"""Quote such a value for Hydra inside the shell's quotes: "{match[1]}='{match[2]}'\""""
    if match := re.search(r"To append to your default list use (\S+)", message):
        return f"Did you mean {match[1]}?"
    if match := re.search(r"Could not override '([^']+)'", message) or re.search(
        r"Key '([^']+)' (?:is )?not in", message
    ):
        wanted = match.group(1).split("@")[0]
        group, _, key = wanted.partition(".")
        if key.split(".")[0] == "kwargs" and group == "model":
            return f"Arguments of your own are added with a plus: +{wanted}=... (with model=custom)"
        if owners := [name for name, option in schema.GROUPS.get(group, {}).items() if hasattr(option(), key)]:
            return f"{wanted} is for {group}={' or '.join(owners)}"
        if known := known_as(wanted):
            return f"Did you mean {known}?"
        keys = [name for name in valid_keys() if not wanted.startswith(f"{name}.")]
        near = difflib.get_close_matches(wanted, keys, n=1, cutoff=0.6)
        if not near and key:
            near = difflib.get_close_matches(wanted.rsplit(".", 1)[1], keys, n=1, cutoff=0.6)
        return f"Did you mean {near[0]}?" if near else None
    return None


FOREIGN = {
    "learning_rate": "optimizer.lr",
    "batch_size": "global_batch",
    "epochs": "steps",
    "num_epochs": "steps",
    "max_epochs": "steps",
    "max_steps": "steps",
    "num_steps": "steps",
    "world_size": "launch.nproc",
    "nproc_per_node": "launch.nproc",
    "num_processes": "launch.nproc",
    "gradient_accumulation_steps": "accumulation",
    "max_grad_norm": "clip_norm",
    "gradient_clip_val": "clip_norm",
    "dtype": "precision",
    "mixed_precision": "precision",
    "dataset": "data",
    "random_seed": "seed.model or seed.data",
}
"""What other tools call our keys."""


def known_as(key: str) -> str | None:
    """The full names of a key that was named without its group, or as other tools do."""
    if key in FOREIGN:
        return FOREIGN[key]
    return " or ".join(name for name in valid_keys() if name.endswith(f".{key}") and name.count(".") == 1) or None


def refuse_flags(argv: list[str]) -> None:
    """Refuse an override that is written as a flag. Raises ConfigError with what to write."""
    for word in argv:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            if name and "experimental-rerun".startswith(name):  # argparse takes any beginning of it
                raise ConfigError(
                    f"{word}: Hydra would unpickle a file, which can hold code; resume=RUN goes on with a run"
                )
            key = name.replace("-", "_")
            if target := key if key in valid_keys() else known_as(key):
                raise ConfigError(f"{word} is not a flag; overrides have no dashes: {target}={value or '...'}")


UNNAMED = re.compile(r"[-+]?[\d._]+(e[-+]?\d+)?|null|true|false|[\[{].*", re.IGNORECASE)
"""What Hydra reads as something else than a word."""


def refuse_unnamed_options(argv: list[str]) -> None:
    """Refuse a group that is given a number or a list, which Hydra meets with a traceback. Raises ConfigError."""
    for word in argv:
        group, _, value = word.partition("=")
        options = group_options().get(group.lstrip("+"), [])
        if options and any(UNNAMED.fullmatch(part) for part in value.split(",")):
            raise ConfigError(f"{word}: {group.lstrip('+')} is chosen by name, one of {', '.join(options)}")


def valid_keys() -> list[str]:
    """Every dotted key an override may name, over all options of all groups."""

    def walk(node: Any, prefix: str) -> list[str]:
        keys: list[str] = []
        for f in fields(node):
            name = f"{prefix}{f.name}"
            keys.append(name)
            for option in schema.GROUPS.get(name, {}).values():
                keys += walk(option(), f"{name}.")
            value = getattr(node, f.name)
            if name not in schema.GROUPS and is_dataclass(value):
                keys += walk(value, f"{name}.")
        return keys

    return list(dict.fromkeys(walk(schema.Config(), "")))
