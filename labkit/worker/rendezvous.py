"""Where the ranks of a run find each other: a file in the run's directory.

It needs no port and no host name, and only this user can read it. PyTorch's own
`FileStore` keeps it. But that store looks for a missing key every 10 ms, which is half
the time of a warm launch, so here it is asked more often at first.
"""

from __future__ import annotations

import datetime
import time

import torch.distributed as dist

FIRST_PAUSE_S = 0.0002
LONGEST_PAUSE_S = 0.01  # FileStore's own


class RunStore(dist.Store):
    """A `FileStore` whose waits begin with short pauses."""

    def __init__(self, path: str, ranks: int, timeout: datetime.timedelta) -> None:
        super().__init__()
        self.store = dist.FileStore(path, ranks)
        self.limit = timeout

    @property
    def timeout(self) -> datetime.timedelta:
        return self.limit

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self.limit = timeout

    def set(self, key: str, value: str | bytes) -> None:
        self.store.set(key, value)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self.store.compare_set(key, expected, desired)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.store.get(key)

    def add(self, key: str, amount: int) -> int:
        return self.store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self.store.check(keys)

    def delete_key(self, key: str) -> bool:
        return self.store.delete_key(key)

    def num_keys(self) -> int:
        return self.store.num_keys()

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """Wait until all keys are there.

        Raises:
            dist.DistStoreError: they were not, within `timeout`.
        """
        limit = self.limit if timeout is None else timeout
        deadline = time.monotonic() + limit.total_seconds()
        pause_s = FIRST_PAUSE_S
        while not self.store.check(keys):
            if time.monotonic() > deadline:
                raise dist.DistStoreError(
                    f"waited {limit.total_seconds():g} s for {', '.join(keys)} "
                    "from the other ranks"
                )
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)
