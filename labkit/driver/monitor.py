"""Follows a run from its first process to its last, on a thread of its own.

It reads telemetry and printed lines, notices the first failure and ends the others,
keeps the time limit, and writes down how the run ended.
"""

from __future__ import annotations

import json
import math
import queue
import threading
import time
from pathlib import Path

from labkit.core.errors import LabkitError, RunDirectoryError, RunTimedOut
from labkit.core.spec import LaunchSpec
from labkit.driver.death import Coroner, End
from labkit.driver.directory import write_file
from labkit.driver.engines.local import RankProcesses
from labkit.driver.outcome import find_failure
from labkit.driver.stall import StallWatch
from labkit.driver.telemetry import Printed, Telemetry

POLL_S = 0.05
RUNNING, FINISHED, FAILED, STOPPED = "running", "finished", "failed", "stopped"


class Monitor:
    """Follows one run.

    Attributes:
        status: "running", then "finished", "failed" or "stopped".
        error: why it failed, None otherwise.
        warning: what was wrong although it finished, None otherwise.
        lines: what ranks printed, labelled, for the cell to take out; None at the end.
        ended: set when nothing of the run is left and everything is written down.
    """

    def __init__(
        self,
        path: Path,
        spec: LaunchSpec,
        processes: RankProcesses,
        telemetry: Telemetry,
    ) -> None:
        self.path = path
        self.spec = spec
        self.processes = processes
        self.telemetry = telemetry
        self.printed = Printed(path, spec.ranks)
        self.lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.stall = StallWatch(
            path, spec.ranks, spec.stall_s, spec.started_at, processes.cpu_s
        )
        self.coroner = Coroner(path)
        self.warning: str | None = None
        self.own_ends: dict[int, End] = {}  # those that we did not cause
        self.status = RUNNING
        self.error: LabkitError | None = None
        self.ended = threading.Event()
        self.stop_asked = False  # no Event: a signal handler may set it at any moment
        self.started = time.monotonic()
        name = f"labkit monitor of {spec.name}"
        self.thread = threading.Thread(target=self.follow, name=name, daemon=True)

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        """Ask for the end of the run; returns at once, from any thread."""
        self.stop_asked = True

    def follow(self) -> None:
        """The thread: poll until every rank has ended, then write down the outcome."""
        status = FAILED
        try:
            while not self.processes.ended:
                self.processes.poll(POLL_S)
                self.read()
                self.intervene()
            status = self.conclude()
        except LabkitError as error:
            self.error = error
        except BaseException as error:  # the thread's edge: it becomes the run's error
            self.error = LabkitError(
                f"labkit itself failed while it followed the run: {error!r}"
            )
            self.error.__cause__ = error
            self.processes.kill()
        finally:
            self.close(status)

    def close(self, status: str) -> None:
        """Write down how it ended; whoever waits goes on, whatever happens here."""
        try:
            self.telemetry.finish()
            self.put(self.printed.finish())
            self.write_end(status)
        except OSError as error:  # its directory is gone, or the disk is full
            status = FAILED
            self.error = self.error or RunDirectoryError(
                f"the end of the run could not be written to {self.path}: {error}"
            )
        finally:
            self.status = status
            self.ended.set()
            self.lines.put(None)

    def read(self) -> None:
        """Take in what ranks wrote; what an ended rank wrote is all there by now."""
        before = self.telemetry.num_rows(), self.printed.num_bytes()
        self.telemetry.poll()
        self.put(self.printed.poll())
        if (self.telemetry.num_rows(), self.printed.num_bytes()) != before:
            self.stall.note_activity()

    def put(self, lines: list[str]) -> None:
        for line in lines:
            self.lines.put(line)

    def intervene(self) -> None:
        """End the run when it was stopped, has failed or has taken too long."""
        if self.processes.stopping:
            return
        limit = self.spec.timeout_s
        if self.stop_asked:
            self.processes.stop()
        elif failure := self.find_failure():
            self.error = failure
            self.processes.stop()
        elif limit is not None and time.monotonic() - self.started > limit:
            self.error = RunTimedOut(
                f"the run was ended after timeout_s={limit:g} seconds; "
                f"{self.steps_reached()}. Raise timeout_s, or ask for fewer steps"
            )
            self.processes.stop()
        elif stalled := self.stall.find():
            self.error = stalled
            self.processes.stop()

    def find_failure(self) -> LabkitError | None:
        now_s = time.time() - self.spec.started_at
        if not self.processes.stopping:
            for rank, status in self.processes.statuses.items():
                if rank not in self.own_ends:
                    peak_bytes = self.processes.peak_bytes[rank]
                    end = self.coroner.examine(rank, status, now_s, peak_bytes)
                    self.own_ends[rank] = end
        if self.processes.ended:
            now_s = math.inf  # nothing more can come
        return find_failure(self.telemetry, self.own_ends, now_s, self.stall)

    def where(self) -> str:
        """`at step 12`, the last that any rank logged."""
        steps = [self.telemetry.last_step(rank) for rank in range(self.spec.ranks)]
        logged = [step for step in steps if step is not None]
        return f"at step {max(logged)}" if logged else "before the first step"

    def steps_reached(self) -> str:
        steps = (self.telemetry.last_step(rank) for rank in range(self.spec.ranks))
        return ", ".join(
            f"rank {rank} had logged " + ("no step" if step is None else f"step {step}")
            for rank, step in enumerate(steps)
        )

    def conclude(self) -> str:
        """Every rank has ended: how did the run end?"""
        self.telemetry.finish()
        if len(self.telemetry.results) == self.spec.ranks:
            self.error = None  # what was about to be done about it came too late
            self.stall.read()
            self.warning = self.stall.disagreement
            return FINISHED
        if self.error is None and not self.stop_asked:
            self.error = self.find_failure() or LabkitError(
                "a rank ended its part without a result or an error; see run.logs(rank)"
            )
        return STOPPED if self.error is None else FAILED

    def write_end(self, status: str) -> None:
        end = {"status": status, "ended_at": time.time()}
        if self.error is not None:
            end["error"] = str(self.error)
        write_file(self.path / "end.json", json.dumps(end, indent=1))
