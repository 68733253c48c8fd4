"""Starts ranks on this machine, by asking the nursery to fork them.

One nursery serves all; what it says is handed to the job that it speaks of.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO

from labkit.core.errors import StartFailed
from labkit.driver.engines.nursery import Nursery

LOOK_S = 5.0  # for the nursery's answer, which comes at once
POLL_S = 0.1
INTERRUPT_S = 1.0  # after which kept ranks that are still at work are ended
START_S = 120.0  # importing torch takes seconds, on a cold network disk many more


class RankProcesses:
    """The processes of a job: how they ended, and the means to end them.

    Ranks that are kept do one job after another; each is over when all are done.
    """

    def __init__(self, nursery: Nursery, job: int, keep: bool) -> None:
        self.nursery = nursery
        self.job = job  # its number, counted by the nursery's life
        self.keep = keep
        self.asked_at = time.monotonic()
        self.pids: list[int] | None = None  # None until the nursery has answered
        self.error: str | None = None  # why the nursery could not fork
        self.done: set[int] = set()  # process ids of kept ranks that wait for more
        self.statuses: dict[int, int] = {}  # by rank, as os.waitstatus_to_exitcode
        self.peak_bytes: dict[int, int] = {}  # of those that have ended
        self.looked = False  # whether the nursery has answered `look`
        self.interrupted_at: float | None = None
        self.kill_asked = False
        nursery.jobs[job] = self

    @property
    def ended(self) -> bool:
        """Whether nothing of it works, nor will.

        A nursery that still imports has forked nothing, and a kill that waits there
        ends ranks before they begin; so nobody needs to wait for its imports.
        """
        if self.pids is None:
            return self.kill_asked
        return len(self.statuses) + len(self.done) == len(self.pids)

    @property
    def stopping(self) -> bool:
        """Whether it was told to end."""
        return self.kill_asked or self.interrupted_at is not None

    @property
    def usable(self) -> bool:
        """Whether every rank waits for a further job."""
        return bool(
            self.keep
            and self.nursery.alive
            and not self.kill_asked
            and self.pids
            and len(self.done) == len(self.pids)
        )

    def take(self, message: dict[str, Any]) -> None:
        """Note what the nursery says of this job."""
        if "pids" in message:
            self.pids, self.error = message["pids"], message["error"]
        elif "looked" in message:
            self.looked = True
        elif "done" in message:
            self.done.add(message["done"])
        else:
            pid = message["exit"]
            rank = self.pids.index(pid)
            self.done.discard(pid)
            self.statuses[rank] = message["status"]
            self.peak_bytes[rank] = message["peak_bytes"]

    def poll(self, timeout: float) -> None:
        """Take in what the nursery reports, waiting at most `timeout` seconds.

        Raises:
            StartFailed: the nursery ended, could not fork, or does not answer.
        """
        try:
            self.nursery.receive(timeout)
        except StartFailed:
            self.end_sessions()
            raise
        if self.error is not None:
            self.kill()
            raise StartFailed(f"{self.error}. Ask for fewer ranks, or raise the limit")
        if self.pids is None and time.monotonic() - self.asked_at > START_S:
            self.kill()
            raise StartFailed(
                f"the nursery has not imported torch within {START_S:.0f} s; "
                "see whether `import torch` works in this kernel"
            )
        if self.interrupted_at is not None and not (self.ended or self.kill_asked):
            if time.monotonic() - self.interrupted_at > INTERRUPT_S:
                self.kill()

    def cpu_s(self, rank: int) -> float | None:
        """Processor seconds that a rank has used; None where that cannot be read."""
        if not self.pids:
            return None
        try:
            stat = Path(f"/proc/{self.pids[rank]}/stat").read_text()
        except OSError:
            return None
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def look(self) -> None:
        """Learn what has happened to the ranks until now.

        Raises:
            StartFailed: the nursery has ended.
        """
        self.looked = False
        self.nursery.send({"look": self.job})
        deadline = time.monotonic() + LOOK_S
        while not self.looked and time.monotonic() < deadline:
            self.nursery.receive(POLL_S)

    def end_sessions(self) -> None:
        """End what the ranks have started; they themselves ended with the nursery."""
        for rank, pid in enumerate(self.pids or ()):
            if rank not in self.statuses:
                try:
                    os.killpg(pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    pass  # nothing of it is left

    def again(self, job: BinaryIO) -> None:
        """Give kept ranks, which must be usable, another job."""
        self.done.clear()
        self.interrupted_at = None
        self.nursery.send({"again": self.job}, (job.fileno(),))

    def stop(self) -> None:
        """End the job: ranks that are kept are interrupted first, and so may stay."""
        if self.keep and self.pids and not self.statuses:
            self.interrupted_at = time.monotonic()
            self.nursery.send({"interrupt": self.job})
        else:
            self.kill()

    def kill(self) -> None:
        """End every rank that has not ended, and all that it started."""
        self.kill_asked = True
        self.nursery.send({"kill": self.job})


class LocalEngine:
    """Keeps one nursery and starts ranks from it."""

    def __init__(self) -> None:
        self.nursery: Nursery | None = None
        self.lock = threading.Lock()
        atexit.register(self.close)

    def warm(self) -> Nursery:
        """The running nursery, started if there is none; does not wait for it."""
        with self.lock:
            if self.nursery is not None and not self.nursery.alive:
                self.nursery.close()
                self.nursery = None
            if self.nursery is None:
                self.nursery = Nursery()
            return self.nursery

    def start(self, num_ranks: int, job: BinaryIO, keep: bool = False) -> RankProcesses:
        """Fork `num_ranks` ranks that read `job`; `keep` them for further jobs.

        Raises:
            StartFailed: the nursery or a rank did not come up.
        """
        nursery = self.warm()
        nursery.num_jobs += 1
        request = {"fork": num_ranks, "job": nursery.num_jobs, "keep": keep}
        nursery.send(request, (job.fileno(),))
        return RankProcesses(nursery, nursery.num_jobs, keep)

    def close(self) -> None:
        with self.lock:
            if self.nursery is not None:
                self.nursery.close()
                self.nursery = None
