"""What the ranks of a `%%ranks` cell print and give, rank by rank."""

from __future__ import annotations

import threading

from labkit.view.bundle import show
from labkit.view.live import in_notebook

SHOWN_LINES = 500  # of each rank


class RankOutputs:
    """A place per rank in the cell that runs now."""

    def __init__(self, ranks: list[int]) -> None:
        self.ranks = ranks
        self.thread: threading.Thread | None = None
        self.shown = dict.fromkeys(ranks, "")
        self.places = {
            rank: show({"text/plain": ""}, {}) for rank in ranks if in_notebook()
        }

    def update(self, rank: int, printed: str, value: str | None) -> None:
        """Show what a rank has printed so far, and its value when there is one."""
        lines = printed.rstrip("\n").split("\n") if printed.strip() else []
        if len(lines) > SHOWN_LINES:
            lines = ["(earlier lines are left out)", *lines[-SHOWN_LINES:]]
        if value is not None:
            lines += f"Out: {value}".split("\n")
        text = "\n".join([f"rank {rank}", *(f"  {line}" for line in lines)])
        if lines and text != self.shown[rank]:
            self.shown[rank] = text
            if rank in self.places:
                self.places[rank].update({"text/plain": text}, raw=True)

    def finish(self) -> None:
        """Wait until everything is shown; print it where nothing could be shown."""
        if self.thread is not None:
            self.thread.join()
        if not self.places:
            for text in filter(None, self.shown.values()):
                print(text)
