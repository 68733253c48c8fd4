"""The Stop button of a run that its cell does not wait for.

It is replaced by nothing when the run has ended: a saved notebook then holds no widget
whose state is lost, and its text is the same before and after.
"""

from __future__ import annotations

from collections.abc import Callable

from labkit.view.bundle import show

NOTHING = {"text/plain": ""}


class StopButton:
    """A button in the cell that runs now, where ipywidgets are installed."""

    def __init__(self, stop: Callable[[], None]) -> None:
        """Show it; `stop` is called at a click and must return at once."""
        self.stop = stop
        try:
            import ipywidgets
        except ModuleNotFoundError:  # run.stop() remains
            self.widget = self.handle = None
            return
        self.widget = ipywidgets.Button(
            description="Stop", icon="stop", tooltip="End this run and keep its metrics"
        )
        self.widget.on_click(self.click)
        self.handle = show(self.widget._repr_mimebundle_() | NOTHING, {})

    def click(self, _: object) -> None:
        self.widget.disabled = True
        self.widget.description = "Stopping"
        self.stop()

    def remove(self) -> None:
        """Take it off the page, and free what the kernel keeps of it."""
        if self.handle is not None:
            self.handle.update(NOTHING, raw=True)
            self.widget.close()
