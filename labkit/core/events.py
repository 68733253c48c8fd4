"""The telemetry that a rank writes: one JSON object a line, append-only.

The kinds, in the order in which a rank writes them:

    start   the rank is up: process id, device, versions
    log     one `worker.log` call: step, loss, throughput, memory
    result  the function returned: size and keyed digest of the pickled value
    error   the function raised: type, message, traceback, last step

Every event carries `kind`, `rank`, `attempt` (0 unless the run was restarted) and
`time_s`, seconds since the run was started.
"""

from __future__ import annotations

import json
from typing import Any

Event = dict[str, Any]  # a parsed line; keys differ by kind and are listed above

START = "start"
LOG = "log"
RESULT = "result"
ERROR = "error"

# Columns that `log` events fill, in the order in which `Run.metrics` shows them.
LOG_COLUMNS = (
    "rank",
    "step",
    "time_s",
    "loss",
    "samples_per_s",
    "tokens_per_s",
    "memory_bytes",
)
# Memory on CUDA is the allocator's view, on the CPU the process's and its tensors'.
CUDA_MEMORY_COLUMNS = (
    "allocated_bytes",
    "reserved_bytes",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
)
CPU_MEMORY_COLUMNS = ("process_bytes", "peak_process_bytes", "tensor_bytes")


def encode(event: Event) -> bytes:
    """One event as a line that a single write appends whole."""
    return json.dumps(event, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Event | None:
    """The event in a line, or None when the line is damaged."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or not isinstance(event.get("kind"), str):
        return None
    return event
