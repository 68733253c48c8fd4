"""Draws the three panels of a run: loss, throughput and memory over the steps.

The live figure and the static one are built here, so that they look the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from labkit.view import HEIGHT_PX, WIDTH_PX
from labkit.view.series import (
    MAX_POINTS,
    MEAN,
    SECOND_OF_RANK,
    Panel,
    Table,
    panels,
    span,
)

DPI = 100
# Okabe and Ito's palette, which colour-blind readers can tell apart; its black is the
# mean's and its yellow is too pale for a line. Beyond six ranks the dashes change.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
DASHES = ("-", (0, (5, 1)), (0, (3, 1, 1, 1)))
MAX_LEGEND = 8  # ranks named in the legend


def draw(tables: Mapping[int, Table], title: str) -> Figure:
    """The figure of a run whose numbers are all there.

    Returns:
        A figure of 900 x 270 pixels at 100 dpi that belongs to no window.
    """
    found = panels(tables, 2 * MAX_POINTS)  # it may be shown twice as large
    frame = Frame(title, ranks=sorted(tables))
    for axes, panel in zip(frame.axes, found, strict=True):
        frame.label(axes, panel)
        for line in panel.lines:
            axes.add_line(frame.artist(line.kind, line.rank, line.x, line.y))
        x0, x1, y0, y1 = span(panel)
        axes.set_xlim(x0, x1)
        room = 0.05 * (y1 - y0)
        axes.set_ylim(y0 if panel.from_zero else y0 - room, y1 + room)
    return frame.figure


class Frame:
    """An empty figure with three axes, a title and a legend of ranks."""

    def __init__(self, title: str, ranks: list[int], dpi: int = DPI) -> None:
        self.figure = Figure(figsize=(WIDTH_PX / DPI, HEIGHT_PX / DPI), dpi=dpi)
        FigureCanvasAgg(self.figure)
        self.ranks = ranks
        self.axes: list[Axes] = list(self.figure.subplots(1, 3))
        self.figure.subplots_adjust(
            left=0.06, right=0.99, bottom=0.27, top=0.82, wspace=0.24
        )
        self.figure.suptitle(
            title, fontsize=9, x=0.06, ha="left", y=0.985, parse_math=False
        )
        for axes in self.axes:
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="y", color="#dddddd", linewidth=0.6)
            axes.set_axisbelow(True)
            axes.tick_params(labelsize=8)
            axes.set_xlabel("step", fontsize=8)
            # Places that are told need not be searched for at every drawing.
            axes.xaxis.set_label_coords(0.5, -0.16)
            axes.xaxis.set_major_locator(MaxNLocator(3, integer=True, min_n_ticks=1))
            axes.yaxis.set_major_locator(MaxNLocator(4))
        self.add_legend()

    def label(self, axes: Axes, panel: Panel) -> None:
        axes.set_title(panel.label, fontsize=9, loc="left", y=1.03)

    def artist(self, kind: str, rank: int | None, x=(), y=(), **options) -> Line2D:
        """The line of a rank, or the mean over ranks in bold."""
        if kind == MEAN:
            return Line2D(x, y, color="black", linewidth=2.2, zorder=3, **options)
        index = self.ranks.index(rank)
        dashes = DASHES[index // len(COLOURS) % len(DASHES)]
        if kind == SECOND_OF_RANK:
            dashes = (0, (2, 2))
        colour = COLOURS[index % len(COLOURS)]
        return Line2D(
            x, y, color=colour, linestyle=dashes, linewidth=1.1, alpha=0.9, **options
        )

    def add_legend(self) -> None:
        named = self.ranks[:MAX_LEGEND]
        handles = [self.artist("rank", rank) for rank in named]
        labels = [f"rank {rank}" for rank in named]
        if len(self.ranks) > MAX_LEGEND:
            labels[-1] += f" (and {len(self.ranks) - MAX_LEGEND} more)"
        if len(self.ranks) > 1:
            handles.append(self.artist(MEAN, None))
            labels.append("mean loss over ranks")
        self.figure.legend(
            handles, labels, loc="lower left", bbox_to_anchor=(0.055, -0.01),
            ncols=len(labels), fontsize=8, frameon=False, handlelength=1.8,
            columnspacing=1.4,
        )  # fmt: skip
