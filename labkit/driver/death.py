"""Says why a rank's process ended, as far as there is evidence."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import labkit.core
from labkit.driver import machine
from labkit.driver.telemetry import visible

SHOWN_LINES = 20  # of the end of a log
TAIL_BYTES = 1 << 16
PACKAGE = str(Path(labkit.core.__file__).parents[1])
# The end of these is described on stderr: by C++, by gloo and NCCL, by faulthandler.
SPOKEN = frozenset(
    (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
)


@dataclass(frozen=True, kw_only=True)
class End:
    """How a rank's process ended.

    Attributes:
        status: as os.waitstatus_to_exitcode: negative for a signal.
        time_s: when, in seconds since the run was started.
        what: what happened to the rank, as the end of a sentence that begins with it.
        evidence: a sentence on why, empty when there is nothing to say.
        words: the last lines that it wrote, for signals that are described there.
    """

    status: int
    time_s: float
    what: str = ""
    evidence: str = ""
    words: str = ""


class Coroner:
    """Keeps what has to be known before the ranks start to explain a death later."""

    def __init__(
        self, run_dir: Path, count_kills: Callable[[], Counter[str]] = machine.oom_kills
    ) -> None:
        self.run_dir = run_dir
        self.count_kills = count_kills
        self.kills_before = count_kills()

    def examine(self, rank: int, status: int, time_s: float, peak_bytes: int) -> End:
        """How the rank came to its end; its process is gone.

        Args:
            rank: which.
            status: as os.waitstatus_to_exitcode.
            time_s: when, in seconds since the run was started.
            peak_bytes: the most memory that its process has used.
        """
        evidence = words = ""
        what = f"ended without a result (exit status {status})"
        if status > 0:
            words = last_words(self.run_dir, rank)
        if status == -signal.SIGKILL:
            what, evidence = self.explain_kill(peak_bytes)
        elif status < 0:
            what = f"was ended by {signal_name(-status)}"
            if -status in SPOKEN:
                words = last_words(self.run_dir, rank)
        return End(
            status=status, time_s=time_s, what=what, evidence=evidence, words=words
        )

    def explain_kill(self, peak_bytes: int) -> tuple[str, str]:
        """Signal 9 comes without a word, from the system or from anybody."""
        name = signal_name(signal.SIGKILL)
        used = f"The rank had used up to {peak_bytes / 1e9:.1f} GB"
        limit = f"{machine.usable_memory() / 1e9:.1f} GB"
        kills = self.count_kills()
        if not kills:
            return (
                f"was killed from outside, by {name}",
                f"{used} of {limit}; whether memory was short cannot be read here",
            )
        risen = kills - self.kills_before
        if not risen:
            return (
                f"was killed from outside, by {name}",
                f"The system has ended no process for lack of memory meanwhile. {used} "
                f"of {limit}",
            )
        return (
            f"was killed by the operating system ({name}): out of memory",
            f"{used}, and all ranks together may use {limit}; meanwhile the system "
            f"ended {max(risen.values())} for lack of memory. Ask for fewer ranks, or "
            "for a smaller batch or model",
        )


def last_words(run_dir: Path, rank: int) -> str:
    """The last lines that a rank wrote, and the lines of Python that it was in."""
    words = read_tail(run_dir / f"rank-{rank}.log")[-SHOWN_LINES:]
    frames = [
        line
        for line in main_thread(read_tail(run_dir / f"rank-{rank}.crash"))
        if f'File "{PACKAGE}' not in line and 'File "<string>"' not in line
    ]
    if frames:
        words += [f"Python lines of rank {rank}, innermost first:", *frames]
    return "\n".join(words)


def read_tail(path: Path) -> list[str]:
    """The lines at the end of a file, none when it is not there."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            lines = [visible(line) for line in file.read().split(b"\n")]
    except OSError:
        return []
    return [line for line in lines if line.strip()]


def main_thread(lines: list[str]) -> list[str]:
    """Frames of the thread that faulthandler writes last, which is the main one."""
    frames: list[str] = []
    for line in lines:
        if re.match(r"(Current thread|Thread) 0x", line):
            frames = []
        elif line.startswith("  File "):
            frames.append(line)
    return frames


def signal_name(number: int) -> str:
    """`signal 9 (SIGKILL)`."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"
