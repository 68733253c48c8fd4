"""Writes a rank's telemetry, one line a call.

The file is opened for appending and every event is one `write`, so a rank that is
killed loses nothing that it had logged, and a reader never waits for a buffer.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from labkit.core import events


class Emitter:
    """The rank's end of `rank-N.jsonl`.

    Event times are seconds since the run was started. They follow this process's
    monotonic clock, set once by the wall clock, so that they never run backwards.
    """

    def __init__(self, run_dir: Path, rank: int, started_at: float, attempt: int = 0):
        self.rank = rank
        self.attempt = attempt
        self.fd = os.open(
            run_dir / f"rank-{rank}.jsonl",
            os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC,
            0o600,
        )
        self.origin = time.perf_counter() - (time.time() - started_at)

    def now(self) -> float:
        """Seconds since the run was started."""
        return time.perf_counter() - self.origin

    def emit(self, kind: str, values: dict[str, Any], time_s: float | None = None):
        """Append one event; `time_s` when it happened, by default now."""
        event = {
            "kind": kind,
            "rank": self.rank,
            "attempt": self.attempt,
            "time_s": round(self.now() if time_s is None else time_s, 6),
            **values,
        }
        os.write(self.fd, events.encode(event))
