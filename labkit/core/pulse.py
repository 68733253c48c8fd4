"""What a rank says of itself a few times a second, in `rank-N.pulse`.

The file holds one line of JSON, written over each time. Unlike telemetry it is written
by a thread of its own, so it goes on while the rank waits for its peers, and it is
compared across ranks when one of them waits too long.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import orjson

PULSE_S = 0.4  # between two pulses; one costs a millisecond at most
JOINING, RUNNING, FINISHED, FAILED = "joining", "running", "finished", "failed"


@dataclass(frozen=True, kw_only=True)
class Call:
    """One collective that a rank called.

    Attributes:
        group: the process group, by name and ranks; equal on all its ranks.
        number: counts the calls in this group, from 1.
        kind: "all_reduce" and so on.
        elements: of the input tensors, one number each; empty for a barrier.
        dtype: of the first input tensor, empty when there is none.
        waiting: whether it has not come to its end.
        time_s: when it was called, in seconds since the run was started.
    """

    group: str
    number: int
    kind: str
    elements: list[int]
    dtype: str
    waiting: bool
    time_s: float


@dataclass(frozen=True, kw_only=True)
class Pulse:
    """One rank at one moment.

    Attributes:
        time_s: seconds since the run was started.
        state: "joining", "running", "finished" or "failed".
        step: the last that it logged, None before its first log.
        num_logs: how many steps it has logged.
        cpu_s: processor seconds that it has used.
        line: where its main thread is in the learner's code, empty when it is not.
        purpose: what it is doing there if known: "gradients", "buffers", "state_dict".
        calls: its last collectives, oldest first.
        groups: the ranks of each process group.
        numbers: how many collectives it has called in each group, all in all.
    """

    time_s: float
    state: str
    step: int | None = None
    num_logs: int = 0
    cpu_s: float = 0.0
    line: str = ""
    purpose: str = ""
    calls: list[Call] = dataclasses.field(default_factory=list)
    groups: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    numbers: dict[str, int] = dataclasses.field(default_factory=dict)

    def to_line(self) -> bytes:
        return orjson.dumps(self) + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Pulse | None:
        """The pulse in a line; None when it was read while it was written."""
        try:
            values = orjson.loads(line)
            calls = [Call(**call) for call in values.pop("calls")]
            return cls(calls=calls, **values)
        except (ValueError, TypeError, AttributeError, KeyError):
            return None

    def last_number(self, group: str) -> int:
        """The number of its last call in a group, 0 when there was none."""
        if group in self.numbers:
            return self.numbers[group]
        return max(
            (call.number for call in self.calls if call.group == group), default=0
        )
