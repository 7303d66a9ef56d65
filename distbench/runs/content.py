"""What a configuration names and does not hold: the code of the user's model, the text that it is trained on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import xxhash
from torch import nn

from distbench.config import Config, TextData
from distbench.numerics.cache import model_sources, text_files

PACKAGE = Path(__file__).resolve().parents[1]
BLOCK, BLOCKS = 1 << 16, 64
"""Of a large file, so many blocks of so many bytes count, and its size: who appends, cuts or rewrites it is seen."""


def content(config: Config, model: nn.Module | None) -> dict[str, Any]:
    """Digests for the record's `content`. `model_code`: of the files that define the user's modules and their factory, null
    for distbench's own. `data`: of the text's files, null without any."""
    sources = sorted(file for file in model_sources(config, model) if not file.is_relative_to(PACKAGE))
    texts = text_files(config.data) if isinstance(config.data, TextData) else []
    return {
        "model_code": _digest(sources) if sources else None,
        "data": _digest(texts) if texts else None,
    }


def _digest(files: list[Path]) -> str:
    """Of their contents in this order, wherever they lie."""
    total = xxhash.xxh3_128()
    for file in files:
        size = file.stat().st_size
        total.update(size.to_bytes(8, "little"))
        with file.open("rb") as opened:
            if size <= BLOCK * BLOCKS:
                total.update(opened.read())
                continue
            for number in range(BLOCKS):
                opened.seek(number * (size - BLOCK) // (BLOCKS - 1), os.SEEK_SET)
                total.update(opened.read(BLOCK))
    return str(total.hexdigest())
