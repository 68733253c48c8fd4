"""Looks at processes, and waits until they are gone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import psutil

MARK = "LABKIT_TEST_MARK"  # in the environment that a process is started with


def marked(mark: str) -> set[int]:
    """All processes that were started with a mark, or come from such a one."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                found.add(process.pid)
    return found


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(holds: Callable[[], bool], limit_s: float = 20) -> None:
    """Wait until the condition holds; an AssertionError at the limit."""
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, f"not so within {limit_s} s"
        time.sleep(0.01)  # polls a condition, with a limit; nothing is assumed


def wait_until_gone(pids: list[int], limit_s: float = 20) -> list[int]:
    """Wait until none of the processes runs; those that still do at the limit."""
    try:
        wait_until(lambda: not any(map(is_running, pids)), limit_s)
    except AssertionError:
        pass
    return [pid for pid in pids if is_running(pid)]
