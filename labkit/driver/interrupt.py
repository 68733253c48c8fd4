"""What the kernel's stop button does while ranks start and while a cell waits for them.

Python's own answer, an exception wherever the main thread is, could come between the
start of the ranks and the first look at them, or, at a second press, before the first
has been acted upon. So SIGINT calls a function here.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import TracebackType


class Interrupts:
    """As a context: the first SIGINT stops a run, a second raises KeyboardInterrupt.

    Attributes:
        presses: how many came.
        stop: ends the run; None before there is one.
    """

    def __init__(
        self, stop: Callable[[], None] | None = None, presses: int = 0
    ) -> None:
        self.stop = stop
        self.presses = presses

    def stop_with(self, stop: Callable[[], None]) -> None:
        """There is a run now; end it at once if the button was pressed already."""
        self.stop = stop
        if self.presses:
            stop()

    def press(self, *_: object) -> None:
        self.presses += 1
        if self.stop is not None:
            self.stop()
            if self.presses > 1:
                raise KeyboardInterrupt

    def __enter__(self) -> Interrupts:
        # no other thread is ever interrupted, nor may it say what shall happen
        self.in_main = threading.current_thread() is threading.main_thread()
        if self.in_main:
            self.before = signal.signal(signal.SIGINT, self.press)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.in_main:
            # None: it was set by C code, and cannot be set again from here
            signal.signal(signal.SIGINT, self.before or signal.default_int_handler)
