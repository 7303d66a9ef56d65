"""Byte-level next-token windows over the user's own text, memory-mapped and sample-addressed."""

from __future__ import annotations

import bisect
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from distbench.data.synthetic import mix
from distbench.errors import ConfigError


class TextWindows:
    """Windows of `seq_len` bytes, each predicting the byte that follows every position.

    The files, in name order, form one stream cut to `max_bytes`. Window w covers bytes [w T, (w+1) T]. Sample i of
    epoch e = i // W is window p_e(i mod W): an affine permutation drawn from (seed, e), so that no table is kept and
    any sample can be asked for at once.
    """

    def __init__(self, path: str, glob: str, seq_len: int, max_bytes: int, seed: int | None) -> None:
        """`seed` None: windows in the order of the text. Raises ConfigError where there is too little text."""
        root = Path(path).expanduser()
        files = sorted(f for f in root.rglob(glob) if f.is_file()) if root.is_dir() else [root]
        self._maps: list[np.ndarray] = []
        self._ends: list[int] = []
        total = 0
        for file in files:
            size = min(file.stat().st_size, max_bytes - total)
            if size > 0:
                self._maps.append(np.memmap(file, dtype=np.uint8, mode="r", shape=(size,)))
                total += size
                self._ends.append(total)
        self.seq_len, self.seed = seq_len, seed
        self.num_windows = max(0, total - 1) // seq_len
        if self.num_windows == 0:
            raise ConfigError(
                f"data.path={path} holds {total} bytes in {len(files)} files matching {glob!r}: fewer than one window "
                f"of data.seq_len={seq_len} + 1; name more text or another data.glob"
            )

    def sample(self, index: int) -> tuple[Tensor, Tensor]:
        """int64 (seq_len,) input bytes and the (seq_len,) bytes that follow them."""
        epoch, within = divmod(index, self.num_windows)
        start = self._permute(within, epoch) * self.seq_len
        window = torch.from_numpy(self._read(start, self.seq_len + 1).astype(np.int64))
        return window[:-1], window[1:]

    def _permute(self, within: int, epoch: int) -> int:
        if self.seed is None or self.num_windows == 1:
            return within
        multiplier = mix(self.seed, 2 * epoch) % self.num_windows
        while np.gcd(multiplier, self.num_windows) != 1:
            multiplier += 1
        return (multiplier * within + mix(self.seed, 2 * epoch + 1)) % self.num_windows

    def _read(self, start: int, count: int) -> np.ndarray:
        pieces: list[np.ndarray] = []
        file = bisect.bisect_right(self._ends, start)
        while count:
            begin = start - (self._ends[file - 1] if file else 0)
            piece = self._maps[file][begin : begin + count]
            pieces.append(piece)
            start, count, file = start + len(piece), count - len(piece), file + 1
        return np.concatenate(pieces)
