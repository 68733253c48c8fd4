"""Turns ranks' columns into the lines of three panels. Pure functions, no drawing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

Table = Mapping[str, np.ndarray]  # one rank's columns, all of one length
SMOOTHED_LOGS = 10  # throughput of single steps is mostly noise
MAX_POINTS = 300  # of a line in a live figure, whose panels are 270 pixels wide
MEAN, OF_RANK, SECOND_OF_RANK = "mean", "rank", "second of rank"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a panel: x and y of equal length; `rank` is None for the mean."""

    kind: str
    rank: int | None
    x: np.ndarray
    y: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Panel:
    """What stands above the axes, and the lines in them."""

    label: str
    lines: list[Line] = field(default_factory=list)
    from_zero: bool = False


def panels(tables: Mapping[int, Table], max_points: int = MAX_POINTS) -> list[Panel]:
    """Loss, throughput and memory over the steps, thinned for drawing."""
    whole = (loss(tables), throughput(tables), memory(tables))
    return [
        replace(panel, lines=[thinned(line, max_points) for line in panel.lines])
        for panel in whole
    ]


def loss(tables: Mapping[int, Table]) -> Panel:
    lines = rank_lines(tables, "loss")
    mean = mean_line(tables)
    return Panel(
        label="loss" + missing_loss(tables, lines),
        lines=[*lines, mean] if mean else lines,
    )


def missing_loss(tables: Mapping[int, Table], lines: list[Line]) -> str:
    """Says which ranks have logged steps but no loss, as pipeline stages do."""
    have = {line.rank for line in lines}
    missing = [rank for rank, table in tables.items() if table and rank not in have]
    if not lines or not missing:
        return ""
    return " (none on rank " + ", ".join(map(str, missing)) + ")"


def throughput(tables: Mapping[int, Table]) -> Panel:
    """Tokens a second where ranks log tokens, else samples a second; per rank."""
    for name in ("tokens", "samples"):
        lines = rank_lines(tables, f"{name}_per_s")
        if lines:
            break
    else:
        name = "samples"
    scale, prefix = thousands(lines)
    return Panel(
        label=f"throughput ({prefix}{name} / s, mean of {SMOOTHED_LOGS})",
        lines=[scaled(smoothed(line), scale) for line in lines],
        from_zero=True,
    )


def memory(tables: Mapping[int, Table]) -> Panel:
    """What counts against the limit, solid; what tensors hold of it, dashed."""
    on_cuda = any("reserved_bytes" in table for table in tables.values())
    second = "allocated_bytes" if on_cuda else "tensor_bytes"
    lines = rank_lines(tables, "memory_bytes")
    lines += rank_lines(tables, second, SECOND_OF_RANK)
    largest = max((line.y.max() for line in lines), default=0)
    divisor, unit = (1e9, "GB") if largest >= 1e9 else (1e6, "MB")
    solid, dashed = ("reserved", "allocated") if on_cuda else ("memory", "tensors")
    return Panel(
        label=f"{solid} ({unit}, dashed: {dashed})",
        lines=[scaled(line, 1 / divisor) for line in lines],
        from_zero=True,
    )


def rank_lines(
    tables: Mapping[int, Table], column: str, kind: str = OF_RANK
) -> list[Line]:
    """A line for each rank that has finite numbers in the column."""
    lines = []
    for rank, table in sorted(tables.items()):
        if column in table and "step" in table:
            x, y = table["step"], table[column]
            good = np.isfinite(x) & np.isfinite(y)
            if good.any():
                lines.append(Line(kind=kind, rank=rank, x=x[good], y=y[good]))
    return lines


def mean_line(tables: Mapping[int, Table]) -> Line | None:
    """The mean over ranks at each step that every rank with a loss has reached."""
    lines = rank_lines(tables, "loss")
    if len(lines) < 2:
        return None
    steps = lines[0].x
    for line in lines[1:]:
        steps = np.intersect1d(steps, line.x)
    if not len(steps):
        return None
    total = np.zeros(len(steps))
    for line in lines:
        # the last value where a step was logged twice
        last = len(line.x) - 1 - np.unique(line.x[::-1], return_index=True)[1]
        total += line.y[last][np.isin(line.x[last], steps)]
    return Line(kind=MEAN, rank=None, x=steps, y=total / len(lines))


def thinned(line: Line, max_points: int = MAX_POINTS) -> Line:
    """At most `max_points` points: smallest and largest of each stretch, in order."""
    length = len(line.x)
    if length <= max_points:
        return line
    stretch = -(-length // (max_points // 2))  # points in each, rounded up
    whole = length // stretch * stretch
    rows = line.y[:whole].reshape(-1, stretch)
    first = np.arange(0, whole, stretch)
    low, high = first + rows.argmin(axis=1), first + rows.argmax(axis=1)
    rest = line.y[whole:]
    if len(rest):
        low = np.append(low, whole + rest.argmin())
        high = np.append(high, whole + rest.argmax())
    kept = np.unique(np.concatenate([low, high]))
    return Line(kind=line.kind, rank=line.rank, x=line.x[kept], y=line.y[kept])


def smoothed(line: Line) -> Line:
    """Each value as the mean of it and of those before it, SMOOTHED_LOGS in all."""
    total = np.concatenate([[0.0], np.cumsum(line.y)])
    end = np.arange(1, len(line.y) + 1)
    start = np.maximum(0, end - SMOOTHED_LOGS)
    mean = (total[end] - total[start]) / (end - start)
    return Line(kind=line.kind, rank=line.rank, x=line.x, y=mean)


def scaled(line: Line, scale: float) -> Line:
    return Line(kind=line.kind, rank=line.rank, x=line.x, y=line.y * scale)


def thousands(lines: list[Line]) -> tuple[float, str]:
    """A scale, and the word that goes before the unit, for short tick labels."""
    largest = max((float(line.y.max()) for line in lines), default=0.0)
    if largest >= 1e7:
        return 1e-6, "M "
    return (1e-3, "k ") if largest >= 1e4 else (1.0, "")


def span(panel: Panel) -> tuple[float, float, float, float]:
    """Smallest and largest x and y of a panel's lines, never empty."""
    if not panel.lines:
        return 0.0, 1.0, 0.0, 1.0
    x0 = min(float(line.x.min()) for line in panel.lines)
    x1 = max(float(line.x.max()) for line in panel.lines)
    y0 = min(float(line.y.min()) for line in panel.lines)
    y1 = max(float(line.y.max()) for line in panel.lines)
    if panel.from_zero:
        y0 = min(0.0, y0)
    if math.isclose(y0, y1):
        y1 = y0 + max(1.0, abs(y0) * 0.1)
    return x0, max(x1, x0 + 1), y0, y1
