"""Writes a rank's return value where the kernel can find it."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from typing import Any

import cloudpickle
import torch


class ResultPickler(cloudpickle.Pickler):
    """Pickles a value for a kernel that may have no GPU: tensors travel on the CPU."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_cuda:
            return value.cpu().__reduce_ex__(self.proto)
        return super().reducer_override(value)

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.proto = 5


def write(value: Any, run_dir: Path, rank: int, key: bytes) -> dict[str, Any]:
    """Pickle `value` to `rank-N.result`; return what the `result` event says of it.

    The digest is keyed with a secret of this user, so that a directory which came from
    somebody else is never unpickled (see `labkit.driver.results`).

    Raises:
        TypeError: the value cannot be pickled.
    """
    buffer = io.BytesIO()
    try:
        ResultPickler(buffer).dump(value)
    except Exception as error:
        kind = type(value).__name__
        raise TypeError(
            f"the result of rank {rank} (a {kind}) cannot be sent back: {error}; "
            "return numbers, tensors, arrays or containers of them"
        ) from None
    data = buffer.getbuffer()
    path = run_dir / f"rank-{rank}.result"
    partial = path.with_suffix(".partial")
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(fd, "wb") as file:
        file.write(data)
    os.replace(partial, path)
    digest = hashlib.blake2b(data, key=key).hexdigest()
    return {"size_bytes": len(data), "digest": digest}
