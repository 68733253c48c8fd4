"""The ranks' return values, read when asked for.

A pickle runs code when it is read. So a result is unpickled only when its digest,
keyed with a secret that never leaves this user's own folder, matches: then this user's
own launch wrote it. A directory that somebody else made stays data.
"""

from __future__ import annotations

import hashlib
import hmac
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from labkit.core.errors import ResultUnavailable


class Results(Mapping):
    """`results[rank]` is what the function returned on that rank.

    Each value is read from disk at its first use and kept.

    Raises:
        ResultUnavailable: this rank returned nothing, or not to this user.
    """

    def __init__(self, path: Path, events: Mapping[int, dict], key: bytes) -> None:
        self._path = path
        self._events = events  # `result` events by rank
        self._key = key
        self._values: dict[int, Any] = {}

    def __getitem__(self, rank: int) -> Any:
        if rank not in self._values:
            self._values[rank] = self._read(rank)
        return self._values[rank]

    def __contains__(self, rank: object) -> bool:
        return rank in self._events

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._events))

    def __len__(self) -> int:
        return len(self._events)

    def __repr__(self) -> str:
        return f"<results of ranks {list(self)}>"

    def _read(self, rank: int) -> Any:
        event = self._events.get(rank)
        if event is None:
            ranks = ", ".join(map(str, self)) or "none"
            raise ResultUnavailable(
                f"rank {rank!r} delivered no result; ranks that did: {ranks}"
            )
        path = self._path / f"rank-{rank}.result"
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ResultUnavailable(f"{path} cannot be read: {error}") from error
        digest = hashlib.blake2b(data, key=self._key).hexdigest()
        if not hmac.compare_digest(digest, str(event.get("digest"))):
            raise ResultUnavailable(
                f"the result of rank {rank} was not written by a launch of yours, or "
                "was changed since. Reading it could run somebody else's code, so it "
                "is left alone; metrics, logs and figures of this run can be used"
            )
        return pickle.loads(data)
