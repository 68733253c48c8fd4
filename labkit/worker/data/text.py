"""Real text that every machine has: the sources of Python's standard library.

They are read as bytes, so a token is a number from 0 to 255. The order of the files is
that of their names, so that every rank of a run sees the same text; another Python
version has other text.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from labkit.core.checks import positive_int

MAX_BYTES = 4_000_000


class Text(Dataset):
    """Windows of `context` bytes and the bytes that follow them.

    `text[i]` is (tokens, targets), both int64 of shape (context,); targets are tokens
    shifted by one. Windows do not overlap, so what one rank is dealt no other sees.

    Args:
        context: length of a window, in bytes.
        max_bytes: how much text to read.
    """

    vocab = 256

    def __init__(self, context: int = 64, max_bytes: int = MAX_BYTES) -> None:
        self.context = positive_int("context", context)
        data = read_sources(positive_int("max_bytes", max_bytes))
        self.data = torch.frombuffer(data, dtype=torch.uint8)
        if len(self) < 1:
            raise ValueError(
                f"{len(data)} bytes of text hold no window of {context} + 1 bytes"
            )

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index % len(self) * self.context
        window = self.data[start : start + self.context + 1].long()
        return window[:-1], window[1:]


def read_sources(max_bytes: int) -> bytearray:
    """The standard library's modules, one after the other, cut at `max_bytes`."""
    folder = Path(sysconfig.get_path("stdlib"))
    data = bytearray()
    for path in sorted(folder.glob("*.py")) + sorted(folder.glob("[a-z]*/*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        data += path.read_bytes()
        if len(data) >= max_bytes:
            break
    return data[:max_bytes]
