"""Reads what ranks write, while they write it: events and printed lines.

Both readers take a live run and a recorded one alike. They read what has been appended
since last time and keep numbers in columns, so that a figure of 100,000 steps costs no
parsing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np

from labkit.core import events

READ_BYTES = 1 << 16
LINE_LIMIT_BYTES = 1 << 20  # a longer line is no event of ours
LOG_PREFIX = events.LOG_PREFIX.encode()
NOT_COLUMNS = frozenset(("kind", "rank", "attempt"))

Table = Mapping[str, np.ndarray]  # one rank's columns, all of one length


class Tail:
    """Reads a growing file; a file that is not there yet is empty.

    In a `padded` file zeros are room that its writer has reserved.
    """

    def __init__(self, path: Path, *, padded: bool = False) -> None:
        self.path = path
        self.padded = padded
        self.file: BinaryIO | None = None
        self.offset = 0
        self.rest = b""

    def read_lines(self) -> Iterator[bytes]:
        """The complete lines appended since last time, without their ends."""
        if self.file is None:
            try:
                self.file = open(self.path, "rb", buffering=0)
            except FileNotFoundError:
                return
            self.file.seek(self.offset)
        while data := self.read_written():
            self.offset += len(data)
            *lines, self.rest = (self.rest + data).split(b"\n")
            yield from lines
            if len(self.rest) > LINE_LIMIT_BYTES:
                yield self.rest
                self.rest = b""

    def read_written(self) -> bytes:
        """The next bytes that were written."""
        data = self.file.read(READ_BYTES)
        written = data.find(b"\0") if self.padded else -1
        if written < 0:
            return data
        self.file.seek(self.offset + written)
        return data[:written]

    def finish(self) -> Iterator[bytes]:
        """The lines that remain, one without an end included; then close the file."""
        yield from self.read_lines()
        if self.rest:
            yield self.rest
            self.rest = b""
        if self.file is not None:
            self.file.close()
            self.file = None


class Logs:
    """One rank's `log` events as columns, parsed when somebody asks for them.

    Most runs log faster than anybody looks. Parsed together, lines cost a third of what
    they cost one by one.
    """

    def __init__(self) -> None:
        self.lines: list[bytes] = []  # not parsed yet
        self.length = 0
        self.arrays: dict[str, np.ndarray] = {}  # longer than `length`, to grow into
        self.num_damaged = 0

    def add(self, line: bytes) -> None:
        self.lines.append(line)

    @property
    def num_rows(self) -> int:
        return self.length + len(self.lines)

    def table(self) -> Table:
        """Columns of equal length; a value that was not given is NaN."""
        if self.lines:
            lines, self.lines = self.lines, []
            self.extend(self.parse(lines))
        return {name: array[: self.length] for name, array in self.arrays.items()}

    def parse(self, lines: list[bytes]) -> list[events.Event]:
        rows = events.decode_all(lines)
        self.num_damaged += len(lines) - len(rows)
        return rows

    def extend(self, rows: list[events.Event]) -> None:
        start, self.length = self.length, self.length + len(rows)
        names = dict.fromkeys(name for row in rows for name in row)
        for name in [
            *self.arrays,
            *(name for name in names if is_new(name, self.arrays)),
        ]:
            fresh = np.array([as_float(row.get(name)) for row in rows], dtype=float)
            array = self.with_room(name, start)
            array[start : self.length] = fresh
            if name in events.CARRIED_COLUMNS:
                carry(array[max(0, start - 1) : self.length])
        for name in ("samples", "tokens"):
            self.add_throughput(name, start)

    def add_throughput(self, name: str, start: int) -> None:
        """What was done in each step, by its seconds; none for warm-up."""
        if name not in self.arrays or "step_s" not in self.arrays:
            return
        fresh = slice(start, self.length)
        rate = self.with_room(f"{name}_per_s", start)
        step_s = self.arrays["step_s"][fresh]
        with np.errstate(divide="ignore", invalid="ignore"):
            rate[fresh] = self.arrays[name][fresh] / step_s
        if "warmup" in self.arrays:
            rate[fresh][self.arrays["warmup"][fresh] == 1] = np.nan

    def with_room(self, name: str, used: int) -> np.ndarray:
        """The column's array; arrays that were handed out before stay as they were."""
        array = self.arrays.get(name)
        if array is None or len(array) < self.length:
            wider = np.full(max(1024, 2 * self.length), np.nan)
            if array is not None:
                wider[:used] = array[:used]
            self.arrays[name] = array = wider
        return array


def is_new(name: str, arrays: dict[str, np.ndarray]) -> bool:
    return name not in arrays and name not in NOT_COLUMNS


def as_float(value: object) -> float:
    """A JSON value as a number; what is none, or too large for one, is NaN."""
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return np.nan
    return np.nan


def carry(values: np.ndarray) -> None:
    """Fill each NaN with the last number before it, in place."""
    known = np.where(np.isnan(values), 0, np.arange(len(values)))
    values[:] = values[np.maximum.accumulate(known)]


class Telemetry:
    """The events of a run's ranks. Safe to read from one thread while another polls."""

    def __init__(self, path: Path, num_ranks: int) -> None:
        self.tails = {
            rank: Tail(path / f"rank-{rank}.jsonl", padded=True)
            for rank in range(num_ranks)
        }
        self.logs = {rank: Logs() for rank in range(num_ranks)}
        self.starts: dict[int, events.Event] = {}
        self.results: dict[int, events.Event] = {}
        self.errors: dict[int, events.Event] = {}
        self.num_damaged = 0
        self.lock = threading.Lock()

    def poll(self) -> None:
        """Take in what was appended since last time."""
        with self.lock:
            for rank, tail in self.tails.items():
                for line in tail.read_lines():
                    self.take(rank, line)

    def finish(self) -> None:
        """Read to the end, a last line without an end included, and close the files."""
        with self.lock:
            for rank, tail in self.tails.items():
                for line in tail.finish():
                    self.take(rank, line)

    def take(self, rank: int, line: bytes) -> None:
        if line.startswith(LOG_PREFIX):
            self.logs[rank].add(line)
            return
        event = events.decode(line)
        if event is None:
            self.num_damaged += 1
        elif event["kind"] == events.LOG:  # written by hand, or by another program
            self.logs[rank].add(line)
        elif event["kind"] == events.START:
            self.starts[rank] = event
        elif event["kind"] == events.RESULT:
            self.results[rank] = event
        elif event["kind"] == events.ERROR:
            self.errors[rank] = event

    def tables(self) -> dict[int, Table]:
        """Columns by rank, as they are now."""
        with self.lock:
            return {rank: logs.table() for rank, logs in self.logs.items()}

    def num_rows(self) -> int:
        """How many `log` events there are, of all ranks."""
        with self.lock:
            return sum(logs.num_rows for logs in self.logs.values())

    def damaged_lines(self) -> int:
        """How many lines could not be read and were left out."""
        self.tables()
        logs = self.logs.values()
        return self.num_damaged + sum(log.num_damaged for log in logs)

    def last_step(self, rank: int) -> int | None:
        """The last step that a rank logged, None before its first log."""
        with self.lock:
            steps = self.logs[rank].table().get("step", ())
        return int(steps[-1]) if len(steps) and np.isfinite(steps[-1]) else None


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

    def num_bytes(self) -> int:
        """How much has been read so far, a line without an end included."""
        return sum(tail.offset for tail in self.tails.values())

    def finish(self) -> list[str]:
        """The remaining lines, those without an end included."""
        return [
            label(rank, line)
            for rank, tail in self.tails.items()
            for line in tail.finish()
        ]


def label(rank: int, line: bytes) -> str:
    return f"[rank {rank}] {visible(line)}"


def visible(line: bytes) -> str:
    """What a terminal shows of a line: what follows its last carriage return."""
    text = line.decode("utf-8", errors="replace").rstrip("\r")
    return text[text.rfind("\r") + 1 :]
