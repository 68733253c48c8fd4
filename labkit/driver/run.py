"""A run: live while its ranks work, the same object when it is read back from disk."""

from __future__ import annotations

import asyncio
import queue
import warnings
from collections.abc import Generator, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.core.errors import RunDirectoryError
from labkit.core.events import LOG_COLUMNS
from labkit.driver import directory
from labkit.driver.interrupt import Interrupts
from labkit.driver.monitor import STOPPED, Monitor
from labkit.driver.results import Results
from labkit.driver.telemetry import Telemetry, visible
from labkit.view.live import in_notebook, show_figures

if TYPE_CHECKING:
    import matplotlib.figure
    import pandas as pd

    from labkit.core.spec import LaunchSpec
    from labkit.view.live import LiveView

UNFINISHED = "unfinished"  # read back, and nobody wrote down how it ended
AWAIT_POLL_S = 0.1
PRINTED_LINES = 10_000  # of a run in one cell; more would stall the page


class Run:
    """What a launch made: status, results, metrics, printed lines and figures.

    Attributes:
        path: the run's directory.
        spec: what was launched.
        telemetry: the events that ranks have written so far.
        monitor: follows the ranks; None for a run that was read back.
        view: the live figure, when there is one.
    """

    def __init__(
        self,
        path: Path,
        spec: LaunchSpec,
        telemetry: Telemetry,
        monitor: Monitor | None,
    ) -> None:
        self.path = path
        self.spec = spec
        self._results = Results(path, telemetry.results, directory.user_key())
        self.telemetry = telemetry
        self.monitor = monitor
        self.view: LiveView | None = None

    @property
    def results(self) -> Results:
        """What the function returned on each rank, `results[rank]`."""
        self._refresh()
        return self._results

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def ranks(self) -> int:
        """Number of ranks, the world size."""
        return self.spec.ranks

    @property
    def status(self) -> str:
        """ "running", "finished", "failed", "stopped", or "unfinished".

        A run is unfinished when its directory does not say how it ended: another
        kernel runs it still, or died while it did.
        """
        if self.monitor is not None:
            return self.monitor.status
        end = directory.read_end(self.path)
        return UNFINISHED if end is None else str(end.get("status", UNFINISHED))

    @property
    def error(self) -> Any:
        """Why the run failed: the exception, or its text for a run read back."""
        if self.monitor is not None:
            return self.monitor.error
        return (directory.read_end(self.path) or {}).get("error")

    @property
    def done(self) -> bool:
        """Whether nothing of the run is working any more, as far as is known."""
        return self.monitor is None or self.monitor.ended.is_set()

    def wait(self) -> Run:
        """Wait for the end; the run itself.

        An interrupt (the kernel's stop button) ends the run, which is then returned
        with status "stopped"; a second interrupt raises.

        Raises:
            RankFailed: a rank failed; leads with that rank's own traceback.
            RunStalled: ranks waited for each other; leads with a line per rank.
            RunTimedOut: the run took longer than `timeout_s`.
        """
        with Interrupts(self.stop):
            return self.follow(print_lines=False)

    def __await__(self) -> Generator[Any, None, Run]:
        return self._wait_async().__await__()

    def stop(self) -> None:
        """End the run now; returns at once. What was logged is kept."""
        if self.monitor is not None:
            self.monitor.stop()

    def closing(self) -> str:
        """How it ended, for the cell that started it and went on; empty if well."""
        if self.monitor.error is not None:
            return str(self.monitor.error)
        if self.monitor.status == STOPPED:
            return f"stopped by you {self.monitor.where()}"
        return ""

    @property
    def metrics(self) -> pd.DataFrame:
        """One row per `worker.log` call, ordered by step and rank.

        Columns: rank, step, time_s (since the run was started), loss, samples_per_s
        and tokens_per_s (of this rank), memory_bytes; then whatever else was logged.
        Warm-up rows have no throughput. `memory_bytes` is reserved memory on a GPU,
        resident memory of the process on the CPU.
        """
        import pandas as pd  # half a second, paid by those who ask for a table

        self._refresh()
        frames = []
        for rank, table in self.telemetry.tables().items():
            frame = pd.DataFrame(dict(table))
            frame.insert(0, "rank", rank)
            frames.append(frame)
        frames = [frame for frame in frames if len(frame)] or frames[:1]
        joined = pd.concat(frames, ignore_index=True)
        leading = list(LOG_COLUMNS)
        others = sorted(set(joined.columns) - set(leading))
        joined = joined.reindex(columns=leading + others)
        if np.isfinite(joined["step"]).all():
            joined["step"] = joined["step"].astype(int)
        joined["rank"] = joined["rank"].astype(int)
        return joined.sort_values(["step", "rank"], kind="stable", ignore_index=True)

    @property
    def summary(self) -> pd.DataFrame:
        """One row per rank: steps, last loss, median throughput, largest memory."""
        metrics = self.metrics
        rows = metrics.groupby("rank").agg(
            steps=("step", "nunique"),
            loss=("loss", "last"),
            samples_per_s=("samples_per_s", "median"),
            tokens_per_s=("tokens_per_s", "median"),
            memory_bytes=("memory_bytes", "max"),
        )
        rows = rows.reindex(range(self.ranks)).rename_axis("rank")
        whole = {"steps": "Int64", "memory_bytes": "Int64"}
        return rows.round({"samples_per_s": 1, "tokens_per_s": 1}).astype(whole)

    def plot(self) -> matplotlib.figure.Figure:
        """Loss, throughput and memory per step: a line per rank, mean loss bold."""
        from labkit.view import figure  # matplotlib is loaded by those who draw

        self._refresh()
        show_figures()
        return figure.draw(self.telemetry.tables(), self.title)

    def logs(self, rank: int) -> str:
        """Everything that a rank has printed so far, standard error included.

        Raises:
            ValueError: there is no such rank.
        """
        if rank not in range(self.ranks):
            raise ValueError(
                f"this run has ranks 0 to {self.ranks - 1}, there is no rank {rank!r}"
            )
        try:
            data = (self.path / f"rank-{rank}.log").read_bytes()
        except FileNotFoundError:  # it ended before it could open its log
            return ""
        return "\n".join(visible(line) for line in data.split(b"\n"))

    @cached_property
    def title(self) -> str:
        """What figures say of this run."""
        device = {"cuda": "GPU", "cpu": "CPU"}[self.spec.device]
        plural = "rank" if self.ranks == 1 else "ranks"
        return f"{self.name}: {self.ranks} {plural}, {self.spec.backend} on {device}"

    def __repr__(self) -> str:
        return f"<Run {self.title}, {self.status}>"

    def _refresh(self) -> None:
        """Read on where no monitor does; a live run is read by its own."""
        if self.monitor is None:
            self.telemetry.finish()

    def follow(self, *, print_lines: bool) -> Run:
        """Wait for the end, and print the ranks' lines meanwhile if asked to."""
        monitor = self.monitor
        if monitor is None:
            return self
        try:
            if print_lines:
                print_lines_of(monitor)
        except BaseException:  # the cell's output is closed, or a second interrupt
            monitor.stop()
            raise
        while not monitor.ended.wait(1.0):
            pass
        if self.view is not None:
            self.view.finish()
        if monitor.error is not None:
            raise monitor.error
        if monitor.warning is not None:
            warnings.warn(f"the run finished, but {monitor.warning}", stacklevel=3)
        if monitor.status == STOPPED:
            print(self.closing())
        return self

    async def _wait_async(self) -> Run:
        presses = 0
        try:
            while not self.done:
                await asyncio.sleep(AWAIT_POLL_S)
        except asyncio.CancelledError:
            self.stop()
            if not in_notebook():
                raise
            presses = 1  # it is how a kernel interrupts a cell that awaits
        with Interrupts(self.stop, presses):
            return self.follow(print_lines=False)


def print_lines_of(monitor: Monitor) -> None:
    """Print what ranks print, as it comes, until nothing more can come."""
    for count, line in enumerate(lines_until_end(monitor)):
        if count < PRINTED_LINES:
            print_any(line)
        elif count == PRINTED_LINES:
            print(f"(no more than {PRINTED_LINES} lines here; all: run.logs(rank))")


def print_any(line: str) -> None:
    """Print a line, also where the terminal does not know its characters."""
    try:
        print(line)
    except UnicodeEncodeError:
        print(line.encode("ascii", "backslashreplace").decode())


def lines_until_end(monitor: Monitor) -> Iterator[str]:
    """What ranks print, as it comes, until nothing more can come."""
    while not monitor.ended.is_set() or not monitor.lines.empty():
        try:
            line = monitor.lines.get(timeout=0.2)
        except queue.Empty:
            continue
        if line is not None:
            yield line


def open_run(path: str | Path) -> Run:
    """A run from its directory: the object that the launch returned, and its figure.

    Nothing in the directory is executed. A line of telemetry that cannot be read is
    left out, with a warning.

    Raises:
        RunDirectoryError: there is no readable run.
    """
    folder = Path(path).expanduser()
    spec = directory.read_spec(folder)
    telemetry = Telemetry(folder, spec.ranks)
    try:
        telemetry.finish()
    except OSError as error:
        raise RunDirectoryError(f"{folder} cannot be read: {error}") from error
    if number := telemetry.damaged_lines():
        warnings.warn(
            f"{number} line{'s' if number > 1 else ''} of telemetry in {folder} could "
            f"not be read and {'were' if number > 1 else 'was'} left out",
            stacklevel=2,
        )
    return Run(folder, spec, telemetry, None)


def runs() -> list[Run]:
    """This user's runs, newest first; one that cannot be read is left out."""
    found = []
    for path in directory.run_dirs():
        try:
            spec = directory.read_spec(path)
        except RunDirectoryError as error:
            warnings.warn(str(error), stacklevel=2)
        else:
            found.append(Run(path, spec, Telemetry(path, spec.ranks), None))
    return found
