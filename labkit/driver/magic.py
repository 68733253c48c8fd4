"""The `%%ranks` cell magic: a cell runs on persistent ranks instead of in the kernel.

    %%ranks             on all of them
    %%ranks 0,2         on ranks 0 and 2

Each rank has its own place below the cell, with what it prints and the value of the
cell's last expression. `worker`, `torch` and `dist` are there, and what earlier
`%%ranks` cells defined.
"""

from __future__ import annotations

import sys
import threading
import weakref
from types import FrameType
from typing import TYPE_CHECKING, Any

from labkit.driver.run import Run
from labkit.driver.ship import cell_name

if TYPE_CHECKING:
    from labkit.driver.ranks import Ranks

REFRESH_S = 0.2
latest: weakref.ref[Ranks] | None = None  # on which cells run


def idle(worker: Any) -> None:
    """The function of a Ranks that was not given one yet."""


def shell() -> Any:
    """IPython's shell, None where there is none."""
    ipython = sys.modules.get("IPython")
    return ipython and ipython.get_ipython()


def offer(ranks: Ranks) -> None:
    """Let `%%ranks` cells run on these from now on."""
    global latest
    latest = weakref.ref(ranks)
    if shell() is not None:
        register(shell())


def register(ipython: Any) -> None:
    """Make the magic known; `%load_ext labkit` does it too."""
    ipython.register_magic_function(run_cell, "cell", "ranks")


def run_cell(line: str, source: str) -> None:
    """Run this cell on the ranks of the last `lk.Ranks`, or on those named: `0,2`."""
    ranks = latest and latest()
    if ranks is None or ranks.status == "closed":
        raise ValueError("%%ranks needs ranks: run `ranks = lk.Ranks(4)` first")
    chosen = parse(line, ranks.ranks)
    name = calling_cell(sys._getframe())
    source = "\n" + source  # so that lines count from the cell's first, the magic
    compile(source, name, "exec")  # a mistake is shown before ranks see it
    ranks.run_cell(source, name, chosen)


def calling_cell(frame: FrameType | None) -> str:
    """What tracebacks call the cell that runs now."""
    while frame is not None:
        filename = frame.f_code.co_filename
        shown = cell_name(filename)
        if shown != filename:
            return shown
        frame = frame.f_back
    return "%%ranks"


def parse(line: str, num_ranks: int) -> list[int]:
    """The ranks that a magic's line names; all when it names none.

    Raises:
        ValueError: it names no ranks that there are.
    """
    words = line.replace(",", " ").split()
    if not words:
        return list(range(num_ranks))
    if not all(word.isdigit() and int(word) < num_ranks for word in words):
        raise ValueError(
            f"%%ranks {line.strip()}: give ranks from 0 to {num_ranks - 1}, as in "
            "%%ranks 0,2, or none for all"
        )
    return sorted({int(word) for word in words})


def show(run: Run, chosen: list[int]) -> None:
    """Show each rank's output in a place of its own while the run works."""
    from labkit.view.ranks import RankOutputs

    outputs = RankOutputs(chosen)
    thread = threading.Thread(
        target=follow, args=[run, outputs], name="labkit outputs", daemon=True
    )
    run.view = outputs
    outputs.thread = thread
    thread.start()


def follow(run: Run, outputs: Any) -> None:
    """The thread: refresh until the end, then add the last values."""
    ended = False
    while not ended:
        ended = run.monitor.ended.wait(REFRESH_S)
        for rank in outputs.ranks:
            value = run.results[rank] if ended and rank in run.results else None
            outputs.update(rank, run.logs(rank), value)
