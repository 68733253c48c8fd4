"""The telemetry that a rank writes: one JSON object a line, append-only.

The kinds, in the order in which a rank writes them:

    start   the rank is up: process id, device, versions
    log     one `worker.log` call: step, its seconds, loss, samples, tokens, and memory
            where it was read anew
    result  the function returned: size and keyed digest of the pickled value
    error   the function raised: type, message, traceback, last step

Every event carries `kind`, `rank`, `attempt` (0 unless the run was restarted) and
`time_s`, seconds since the run was started.
"""

from __future__ import annotations

import json
from typing import Any

import orjson

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
# In the file these stand only where they were read anew; they hold until then.
CARRIED_COLUMNS = ("memory_bytes", *CUDA_MEMORY_COLUMNS, *CPU_MEMORY_COLUMNS)

LOG_PREFIX = '{"kind":"log",'  # how every log event begins
ENCODER = json.JSONEncoder(separators=(",", ":"), check_circular=False)


def encode(event: Event) -> bytes:
    """One event as a line."""
    return ENCODER.encode(event).encode() + b"\n"


def decode_all(lines: list[bytes]) -> list[Event]:
    """The events in many lines; damaged lines are left out."""
    try:
        found = orjson.loads(b"[" + b",".join(lines) + b"]")
        if len(found) == len(lines) and all(isinstance(one, dict) for one in found):
            return found
    except ValueError:
        pass  # a line among them is damaged, or holds NaN; each tells for itself
    return [event for event in map(decode, lines) if event is not None]


def decode(line: bytes) -> Event | None:
    """The event in a line, or None when the line is damaged."""
    try:
        event = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not isinstance(event.get("kind"), str):
        return None
    return event
