"""Starts a run: `start` returns at once, `launch` waits in the cell."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable
from typing import Any, BinaryIO

from labkit.core.errors import RunInProgress
from labkit.driver import directory
from labkit.driver.engines.environment import rank_environment
from labkit.driver.engines.local import LocalEngine, RankProcesses
from labkit.driver.interrupt import Interrupts
from labkit.driver.monitor import Monitor
from labkit.driver.request import Request, job_file, prepare
from labkit.driver.run import Run
from labkit.driver.telemetry import Telemetry

STOP_S = 3.0  # within which a run that was told to stop has ended
HandOver = Callable[[BinaryIO], RankProcesses]


class Launcher:
    """Starts runs, one at a time. A kernel has one of these, `LAUNCHER`."""

    def __init__(self) -> None:
        self.engine = LocalEngine()
        self.current: Run | None = None
        self.lock = threading.Lock()

    def begin(self, request: Request, hand_over: HandOver | None = None) -> Run:
        """Start the ranks of a request and the monitor that follows them.

        Args:
            request: what to run.
            hand_over: gives the job to ranks; by default to fresh ones.
        """
        with self.lock:
            self.refuse_second()
            ranks = request.spec.ranks
            self.current = self.start_ranks(
                request, hand_over or (lambda job: self.engine.start(ranks, job))
            )
            return self.current

    def refuse_second(self) -> None:
        run = self.current
        if run is not None and not run.done and run.monitor.stop_asked:
            run.monitor.ended.wait(STOP_S)  # it is about to end
        if run is not None and not run.done:
            steps = [run.telemetry.last_step(rank) for rank in range(run.ranks)]
            logged = [step for step in steps if step is not None]
            where = f"step {max(logged)}" if logged else "no step logged yet"
            raise RunInProgress(
                f"{run.name} is still running ({run.ranks} ranks, {where}); wait for "
                "it with its wait(), or end it with its stop()"
            )

    def start_ranks(self, request: Request, hand_over: HandOver) -> Run:
        """Write the run's directory, then start its ranks and its monitor."""
        spec, parcel = request.spec, request.parcel
        environment = rank_environment()
        path = directory.create_run_dir(spec.name, spec.started_at)
        header = {
            "run_dir": str(path),
            "spec": dataclasses.asdict(spec),
            "environment": environment,
            "directory": request.directory,
            "module_path": [entry for entry in sys.path if isinstance(entry, str)],
            "argv": list(map(str, sys.argv)),
            "sources": parcel.sources,
            "cell": request.cell,
            "key": directory.user_key().hex(),
        }
        directory.write_file(path / "spec.json", spec.to_json())
        directory.write_file(
            path / "environment.json",
            directory.describe_environment(request.hardware, environment),
        )
        telemetry = Telemetry(path, spec.ranks)
        with job_file(header, parcel.payload) as job:
            processes = hand_over(job)
        monitor = Monitor(path, spec, processes, telemetry)
        run = Run(path, spec, telemetry, monitor)
        monitor.start()
        return run


def watch(run: Run, *, in_background: bool) -> None:
    """Draw the run live where there is a notebook to draw in.

    Args:
        in_background: whether the cell goes on. Then the view shows what ranks print,
            as nobody else does, and a Stop button, as the kernel's is of no use.
    """
    from labkit.view import live

    if live.in_notebook():
        run.view = live.LiveView(
            tables=run.telemetry.tables,
            num_rows=run.telemetry.num_rows,
            title=run.title,
            ended=run.monitor.ended,
            lines=run.monitor.lines if in_background else None,
            stop=run.stop if in_background else None,
            closing=run.closing if in_background else None,
        )
        run.view.start()


LAUNCHER = Launcher()


def start(
    function: Callable,
    ranks: int,
    *,
    args: tuple = (),
    kwargs: dict[str, Any] | None = None,
    backend: str = "auto",
    device: str = "auto",
    live: bool = True,
    stall_s: float = 30,
    timeout_s: float | None = None,
    name: str | None = None,
) -> Run:
    """Run `function(worker, *args, **kwargs)` on `ranks` processes; return at once.

    Use `run.wait()`, `await run` and `run.stop()` on what is returned. The cell that
    started the run shows its live figure, a Stop button and the lines that ranks print.

    Args:
        function: what each rank runs; its first argument is the `Worker` handle. It
            may be defined in a cell, and may use what other cells define.
        ranks: number of processes.
        args: further positional arguments.
        kwargs: keyword arguments.
        backend: "nccl", "gloo", or "auto": NCCL when there is a GPU for every rank.
        device: "cuda", "cpu", or "auto". device="cuda" with backend="gloo" lets
            several ranks share a GPU.
        live: whether to draw the run while it works, in a notebook.
        stall_s: seconds that a collective may wait for its peers, or that all ranks may
            do nothing, before the run is ended.
        timeout_s: seconds after which the run is ended; None for no limit.
        name: what tables and figures call the run; by default the function's name.

    Raises:
        ValueError, TypeError: the arguments cannot work here; nothing was started.
        CannotSend: the function uses something that cannot travel to a process.
        RunInProgress: this notebook has a run that has not ended.
    """
    request = prepare(
        function, ranks, args, kwargs, backend, device, stall_s, timeout_s, name
    )
    with Interrupts() as interrupts:
        run = LAUNCHER.begin(request)
        interrupts.stop_with(run.stop)
        if live:
            watch(run, in_background=True)
    return run


def launch(
    function: Callable,
    ranks: int,
    *,
    args: tuple = (),
    kwargs: dict[str, Any] | None = None,
    backend: str = "auto",
    device: str = "auto",
    live: bool = True,
    stall_s: float = 30,
    timeout_s: float | None = None,
    name: str | None = None,
) -> Run:
    """Run `function(worker, *args, **kwargs)` on `ranks` processes; wait for the end.

    Takes what `start` takes. Below the cell, what ranks print appears as it comes, and
    loss, throughput and memory grow. The kernel's stop button ends the run, which is
    then returned with status "stopped" and what it had logged.

    Raises:
        RankFailed: a rank failed; leads with that rank's own traceback.
        RunStalled: ranks waited for each other; leads with a line per rank.
        RunTimedOut: the run took longer than `timeout_s`.
        ValueError, TypeError, CannotSend, RunInProgress: as for `start`.
    """
    request = prepare(
        function, ranks, args, kwargs, backend, device, stall_s, timeout_s, name
    )
    with Interrupts() as interrupts:
        run = LAUNCHER.begin(request)
        interrupts.stop_with(run.stop)
        if live:
            watch(run, in_background=False)
        return run.follow(print_lines=True)
