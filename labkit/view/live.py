"""A figure below the cell that grows while a run works, and stays when it has ended.

One display handle is updated with a PNG; its text never changes, so that a notebook
under test compares equal. The background (axes, ticks, words) is kept as pixels and
drawn anew only when limits change; lines are drawn on top. The view gives itself a
small share of one core and draws less often when drawing is slow.
"""

from __future__ import annotations

import importlib
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from labkit.view import HEIGHT_PX, WIDTH_PX
from labkit.view.bundle import show
from labkit.view.button import StopButton
from labkit.view.series import Table, panels

REDRAWS_PER_S = 5
CORE_SHARE = 0.015  # of one core, spent on drawing in the long run
HEAD_START_S = 0.1  # of drawing that a run may spend at its beginning
SHOWN_LINES = 200  # of what ranks print, when the cell does not print it itself
TEXT = "labkit: loss, throughput and memory of each rank"
SIZE = {"image/png": {"width": WIDTH_PX, "height": HEIGHT_PX}}


def in_notebook() -> bool:
    """Whether this is a kernel with a front end that shows pictures."""
    ipython = sys.modules.get("IPython")
    shell = ipython and ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


def show_figures() -> None:
    """Let a notebook show a figure that is a cell's last value, without pyplot."""
    if in_notebook():
        from IPython import get_ipython
        from IPython.core.pylabtools import select_figure_formats

        select_figure_formats(get_ipython(), {"png"})


class LiveView:
    """Draws tables until `ended` is set, then once more in full resolution."""

    def __init__(
        self,
        tables: Callable[[], dict[int, Table]],
        num_rows: Callable[[], int],
        title: str,
        ended: threading.Event,
        lines: queue.SimpleQueue[str | None] | None,
        stop: Callable[[], None] | None,
        closing: Callable[[], str] | None = None,
    ) -> None:
        """Show an empty figure in the cell that runs now.

        Args:
            tables: gives the columns of each rank as they are.
            num_rows: how many rows they have together; costs less.
            title: what stands above the panels.
            ended: set when no more will come.
            lines: what ranks print, to be shown below the figure; None if the cell
                prints it.
            stop: what a Stop button does, from a thread; None for no button.
            closing: what to say below the lines at the end; None if the cell says it.
        """
        self.tables = tables
        self.num_rows = num_rows
        self.title = title
        self.ended = ended
        self.lines = lines
        self.closing = closing
        self.recent: deque[str] = deque(maxlen=SHOWN_LINES)
        self.num_lines = 0
        self.redraws = 0
        self.cpu_s = 0.0
        self.began = 0.0
        self.button = StopButton(stop) if stop else None
        self.picture = show({"image/png": BLANK_PNG, "text/plain": TEXT}, SIZE)
        self.printed = lines and show({"text/plain": ""}, {})
        self.thread = threading.Thread(
            target=self.follow, name="labkit live view", daemon=True
        )

    def start(self) -> None:
        self.thread.start()

    def finish(self) -> None:
        """Wait until the last state is shown; call after `ended` was set."""
        self.thread.join()

    def follow(self) -> None:
        """The thread: draw until the end, then take the button away."""
        try:
            self.draw()
        finally:
            if self.button:
                self.button.remove()

    def draw(self) -> None:
        """Draw what is new, within the share of a core."""
        # Half a second of matplotlib, while the ranks start.
        canvas = importlib.import_module("labkit.view.canvas")
        live = canvas.LiveCanvas(self.title, sorted(self.tables()))
        self.began = time.monotonic()
        drawn_rows = 0
        while not self.ended.wait(1 / REDRAWS_PER_S):
            self.show_lines()
            rows = self.num_rows()
            if rows == drawn_rows or not self.may_draw():
                continue
            drawn_rows = rows
            began_cpu = time.thread_time()
            self.update(live.render(panels(self.tables())))
            self.redraws += 1
            self.cpu_s += time.thread_time() - began_cpu
        if self.closing and (words := self.closing()):
            for line in words.splitlines():
                self.lines.put(line)
        self.show_lines()
        self.update(canvas.static_png(self.tables(), self.title))

    def may_draw(self) -> bool:
        """Whether the share of a core allows another picture now."""
        allowed = HEAD_START_S + CORE_SHARE * (time.monotonic() - self.began)
        return self.cpu_s <= allowed

    def update(self, png: bytes) -> None:
        self.picture.update(
            {"image/png": png, "text/plain": TEXT}, raw=True, metadata=SIZE
        )

    def show_lines(self) -> None:
        """Add what ranks have printed since last time to the text below the figure."""
        if self.lines is None:
            return
        before = self.num_lines
        while not self.lines.empty():
            line = self.lines.get()
            if line is not None:  # which marks the end
                self.recent.append(line)
                self.num_lines += 1
        if self.num_lines > before:
            text = "\n".join(self.recent)
            hidden = self.num_lines - len(self.recent)
            if hidden:
                text = f"({hidden} earlier lines: run.logs(rank))\n{text}"
            self.printed.update({"text/plain": text}, raw=True)


# One transparent pixel, which the size above stretches to the figure's place.
BLANK_PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c489"
    "0000000b49444154789c6360000200000500017a5eab3f0000000049454e44ae426082"
)
