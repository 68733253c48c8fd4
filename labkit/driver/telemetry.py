"""Reads what ranks write, while they write it: events and printed lines.

Both readers take a live run and a recorded one alike. They read what has been appended
since last time and keep numbers in columns, so that a figure of 100,000 steps costs no
parsing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from labkit.core import events

READ_BYTES = 1 << 20
LINE_LIMIT_BYTES = 1 << 20  # a longer line is no event of ours
NOT_COLUMNS = frozenset(("kind", "rank", "attempt"))

Table = Mapping[str, np.ndarray]  # one rank's columns, all of one length


class Tail:
    """Reads a growing file; a file that is not there yet is empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.rest = b""

    def read_lines(self) -> Iterator[bytes]:
        """The complete lines that were appended since last time, without their ends."""
        try:
            file = open(self.path, "rb", buffering=0)
        except FileNotFoundError:
            return
        with file:
            file.seek(self.offset)
            while data := file.read(READ_BYTES):
                self.offset += len(data)
                *lines, self.rest = (self.rest + data).split(b"\n")
                yield from lines
                if len(self.rest) > LINE_LIMIT_BYTES:
                    yield self.rest
                    self.rest = b""

    def read_rest(self) -> bytes:
        """What stands after the last line's end; call once, at the end."""
        rest, self.rest = self.rest, b""
        return rest


class Columns:
    """Numbers by name, in arrays that grow; a value that was not given is NaN."""

    def __init__(self) -> None:
        self.length = 0
        self.arrays: dict[str, np.ndarray] = {}

    def append(self, event: events.Event) -> None:
        for name, value in event.items():
            if name in NOT_COLUMNS or not isinstance(value, int | float):
                continue
            array = self.arrays.get(name)
            if array is None or self.length >= len(array):
                array = self.grow(name)
            array[self.length] = value
        self.length += 1

    def grow(self, name: str) -> np.ndarray:
        """Room for more; arrays that were handed out before stay as they were."""
        wider = np.full(max(1024, 2 * self.length), np.nan)
        if name in self.arrays:
            old = self.arrays[name][: self.length]
            wider[: len(old)] = old
        self.arrays[name] = wider
        return wider

    def table(self) -> Table:
        names = list(self.arrays)
        short = [name for name in names if len(self.arrays[name]) < self.length]
        for name in short:  # a column that ended before the others grew
            self.grow(name)
        return {name: self.arrays[name][: self.length] for name in names}


class Telemetry:
    """The events of a run's ranks. Safe to read from one thread while another polls."""

    def __init__(self, path: Path, num_ranks: int) -> None:
        self.tails = {
            rank: Tail(path / f"rank-{rank}.jsonl") for rank in range(num_ranks)
        }
        self.columns = {rank: Columns() for rank in range(num_ranks)}
        self.starts: dict[int, events.Event] = {}
        self.results: dict[int, events.Event] = {}
        self.errors: dict[int, events.Event] = {}
        self.damaged: list[str] = []  # where a line could not be read
        self.lock = threading.Lock()

    def poll(self) -> int:
        """Read what was appended; the number of events that were new."""
        with self.lock:
            return sum(self.poll_rank(rank) for rank in self.tails)

    def poll_rank(self, rank: int) -> int:
        fresh = 0
        for line in self.tails[rank].read_lines():
            fresh += self.take(rank, line)
        return fresh

    def finish(self) -> None:
        """Read to the end, a last line without an end included."""
        self.poll()
        with self.lock:
            for rank, tail in self.tails.items():
                if rest := tail.read_rest():
                    self.take(rank, rest)

    def take(self, rank: int, line: bytes) -> int:
        event = events.decode(line)
        if event is None:
            self.damaged.append(
                f"rank-{rank}.jsonl before byte {self.tails[rank].offset}"
            )
            return 0
        kind = event["kind"]
        if kind == events.LOG:
            self.columns[rank].append(event)
        elif kind in (events.START, events.RESULT, events.ERROR):
            by_rank = {
                events.START: self.starts,
                events.RESULT: self.results,
                events.ERROR: self.errors,
            }[kind]
            by_rank[rank] = event
        return 1

    def tables(self) -> dict[int, Table]:
        """Columns by rank, as they are now."""
        with self.lock:
            return {rank: columns.table() for rank, columns in self.columns.items()}

    def last_step(self, rank: int) -> int | None:
        """The last step that a rank logged, None before its first log."""
        with self.lock:
            columns = self.columns[rank]
            steps = columns.arrays.get("step")
            if not columns.length or steps is None or len(steps) < columns.length:
                return None
            step = steps[columns.length - 1]
            return None if np.isnan(step) else int(step)


class Printed:
    """The lines that ranks print, labelled, in each rank's own order."""

    def __init__(self, path: Path, num_ranks: int) -> None:
        self.tails = {
            rank: Tail(path / f"rank-{rank}.log") for rank in range(num_ranks)
        }

    def poll(self) -> list[str]:
        """Complete lines since last time."""
        return [
            label(rank, line)
            for rank, tail in self.tails.items()
            for line in tail.read_lines()
        ]

    def finish(self) -> list[str]:
        """The remaining lines, those without an end included."""
        lines = self.poll()
        for rank, tail in self.tails.items():
            if rest := tail.read_rest():
                lines.append(label(rank, rest))
        return lines


def label(rank: int, line: bytes) -> str:
    return f"[rank {rank}] {visible(line)}"


def visible(line: bytes) -> str:
    """What a terminal shows of a line: what follows its last carriage return."""
    text = line.decode("utf-8", errors="replace").rstrip("\r")
    return text[text.rfind("\r") + 1 :]
