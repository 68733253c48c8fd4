"""Holds back the kernel's stop button for the moment in which ranks are started.

An interrupt between the start of the ranks and the first look at them would leave a
run that nobody follows.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Held:
    """Whether an interrupt came meanwhile."""

    pressed = False

    def press(self, *_: object) -> None:
        self.pressed = True


@contextmanager
def held_back() -> Iterator[Held]:
    """Keep SIGINT from raising inside; it is noted instead, for the caller to act on.

    Threads other than the main one are never interrupted.
    """
    held = Held()
    if threading.current_thread() is not threading.main_thread():
        yield held
        return
    before = signal.signal(signal.SIGINT, held.press)
    try:
        yield held
    finally:
        # None: it was not set from Python, and cannot be set again from here
        signal.signal(signal.SIGINT, before or signal.default_int_handler)
