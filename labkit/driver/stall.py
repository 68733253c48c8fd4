"""Notices that a run makes no progress, from the pulses of its ranks.

A run is stalled when a collective has waited for `stall_s`, or when for so long no rank
has logged, printed, called a collective or used its processor. What is certain is said
earlier: a rank that has finished will never come to the collective in which others
wait. Times are this process's own, so that no clock of another needs to agree, and a
laptop may sleep.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from labkit.core.errors import RunStalled
from labkit.core.pulse import PULSE_S, RUNNING, Pulse
from labkit.driver import diagnosis

FROZEN_S = 5 * PULSE_S  # without a look: this process itself did not run
CERTAIN_S = 1.0  # how long a wait lasts before what is certain about it is said
IDLE_SHARE = 0.02  # of a core; a rank that uses less does nothing


class StallWatch:
    """Reads pulses and compares them.

    Attributes:
        pulses: the last of each rank.
        disagreement: the first that was seen, whether or not it has stopped anybody.
    """

    def __init__(
        self,
        path: Path,
        num_ranks: int,
        stall_s: float,
        started_at: float,
        cpu_s: Callable[[int], float | None] = lambda rank: None,
    ) -> None:
        """Watch the run in a directory.

        Args:
            path: the run's directory.
            num_ranks: how many ranks it has.
            stall_s: for how long they may wait.
            started_at: when it was started, seconds since the epoch.
            cpu_s: processor seconds that a rank has used; None when unknown.
        """
        self.cpu_s = cpu_s
        self.silent_cpu_s: dict[int, float] = {}
        self.paths = {rank: path / f"rank-{rank}.pulse" for rank in range(num_ranks)}
        self.stall_s = stall_s
        self.started_at = started_at
        self.pulses: dict[int, Pulse] = {}
        self.disagreement: str | None = None
        self.read_at = time.monotonic()
        self.came_at: dict[int, float] = {}  # when each rank's pulse was last a new one
        self.waits: dict[tuple[int, str, int], float] = {}  # by rank, group and number
        self.done: dict[int, tuple] = {}  # what counted as progress the last time
        self.active_at = time.monotonic()  # when any rank last made progress

    def note_activity(self) -> None:
        """A rank has logged or printed."""
        self.active_at = time.monotonic()

    def read(self) -> None:
        """Take in the ranks' pulses as they are."""
        before, self.read_at = self.read_at, time.monotonic()
        if self.read_at - before > FROZEN_S:  # everything may have been suspended
            self.waits.clear()
            self.active_at = self.read_at
        waits = {}
        for rank, path in self.paths.items():
            try:
                line, _, _ = path.read_bytes().partition(b"\n")
            except OSError:
                continue  # not there yet, or deleted
            pulse = Pulse.from_line(line) or self.pulses.get(rank)
            if pulse is None:
                continue
            if pulse != self.pulses.get(rank):
                self.came_at[rank] = self.read_at
                self.pulses[rank] = pulse
            self.note_progress(rank, pulse)
            for call in pulse.calls:
                if call.waiting and pulse.state == RUNNING:
                    key = rank, call.group, call.number
                    waits[key] = self.waits.get(key, self.read_at)
        self.waits = waits
        self.note_silent_ranks()
        self.disagreement = diagnosis.disagreement(self.pulses) or self.disagreement

    def note_progress(self, rank: int, pulse: Pulse) -> None:
        """Calls and computing are progress; waking up to write a pulse is not."""
        state, number, cpu_s = self.done.get(rank, ("", 0, 0.0))
        calls = sum(call.number for call in pulse.calls)
        threshold = IDLE_SHARE * max(1.0, self.stall_s)
        if (state, number) != (pulse.state, calls) or pulse.cpu_s - cpu_s > threshold:
            self.done[rank] = pulse.state, calls, pulse.cpu_s
            self.active_at = self.read_at

    def note_silent_ranks(self) -> None:
        """A rank that writes no pulse holds the interpreter: does it compute?"""
        for rank in self.paths:
            if self.is_fresh(rank):
                continue
            cpu_s = self.cpu_s(rank)
            if cpu_s is None or cpu_s > self.silent_cpu_s.get(rank, -1.0):
                self.silent_cpu_s[rank] = cpu_s or 0.0
                self.active_at = self.read_at

    def is_fresh(self, rank: int) -> bool:
        """Whether a rank has written a pulse lately, or needs to write no more."""
        pulse = self.pulses.get(rank)
        return pulse is not None and (
            pulse.state != RUNNING or self.read_at - self.came_at[rank] < 5 * PULSE_S
        )

    def find(self) -> RunStalled | None:
        """Why the run cannot go on; None while it can, or may."""
        if time.monotonic() - self.read_at < PULSE_S / 2:
            return None
        self.read()
        waited_s = self.read_at - min(self.waits.values(), default=self.read_at)
        if waited_s > min(CERTAIN_S, self.stall_s):
            certain = diagnosis.disagreement(
                self.pulses, harmful=True
            ) or diagnosis.left_early(self.pulses)
            if certain:
                return RunStalled(certain, self.table())
        if waited_s > self.stall_s:
            return self.too_long(
                diagnosis.absent_peer(self.pulses)
                or self.disagreement
                or "a collective does not end, although all its ranks have called it"
            )
        if self.read_at - self.active_at > self.stall_s:
            return self.too_long(
                "no rank logs, prints, communicates or computes"
                + "".join(
                    f"; rank {rank} has not begun"
                    for rank in self.paths
                    if rank not in self.pulses
                )
                + "".join(
                    f"; rank {rank} is in {pulse.purpose}"
                    for rank, pulse in self.pulses.items()
                    if pulse.purpose
                )
            )
        return None

    def too_long(self, sentence: str) -> RunStalled:
        return RunStalled(
            f"{sentence}. The run was ended after stall_s={self.stall_s:g} seconds of "
            "this; raise stall_s if it should take so long",
            self.table(),
        )

    def cause(self) -> str | None:
        """What pulses show behind a failure of which ranks felt only the echo."""
        self.read()
        return (
            self.disagreement
            or diagnosis.not_joined(self.pulses, len(self.paths))
            or diagnosis.explain(self.pulses)
        )

    def table(self) -> str:
        now_s = time.time() - self.started_at
        return diagnosis.table(self.pulses, len(self.paths), now_s)
