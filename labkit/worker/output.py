"""Where a rank's prints go: to its log file, line by line, those of C code too."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import TextIO

LINE_BUFFERED = 1  # _IOLBF of stdio.h
STREAMS: list[TextIO] = []  # Python's stdout and stderr, made at the first job


def redirect_output(path: Path) -> None:
    """Point descriptors 0 at nothing, 1 and 2 at the log, written line by line."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    if STREAMS:  # of an earlier job; they write to the same descriptors
        sys.stdout, sys.stderr = STREAMS
        return
    text = {"buffering": 1, "encoding": "utf-8", "errors": "backslashreplace"}
    STREAMS[:] = (
        open(1, "w", closefd=False, **text),
        open(2, "w", closefd=False, **text),
    )
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__ = STREAMS


def buffer_lines_of_c() -> None:
    """C's own stdout would keep what it prints to a file until there is much of it."""
    libc = ctypes.CDLL(None)
    stdout = "__stdoutp" if sys.platform == "darwin" else "stdout"
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, stdout), None, LINE_BUFFERED, 0)


def flush_output() -> None:
    """Write out whatever Python and C still hold in their buffers."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass  # the function closed or replaced it; its own flush was its own
    ctypes.CDLL(None).fflush(None)
