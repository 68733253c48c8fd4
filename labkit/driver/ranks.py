"""Ranks that stay: the same processes run one function after another.

    with lk.Ranks(4) as ranks:
        ranks.run(build)       # worker.state keeps what it makes
        ranks.run(train)

In a notebook, cells that begin with `%%ranks` run on them too.
"""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections.abc import Callable
from typing import Any, BinaryIO

from labkit.core.errors import LabkitError
from labkit.driver import diagnosis, launcher, magic, ship
from labkit.driver.call import check_call, run_name
from labkit.driver.engines.local import RankProcesses
from labkit.driver.interrupt import Interrupts
from labkit.driver.launcher import LAUNCHER
from labkit.driver.request import Request, current_directory, prepare
from labkit.driver.run import Run

KEPT = "the ranks and their state were kept"


class Ranks:
    """Persistent ranks, forked at the first call and ended by `close`.

    A context manager; without one, `close` ends the ranks, or the end of the kernel.
    After an error or an interrupt the ranks stay if all of them came back from it and
    have called the same collectives. Else they are ended, a line says why, and the next
    call starts fresh ones.

    Attributes:
        ranks: number of processes.
        last: the Run of the last call, None before the first.
    """

    def __init__(
        self,
        ranks: int,
        *,
        backend: str = "auto",
        device: str = "auto",
        stall_s: float = 30,
    ) -> None:
        """Take what `lk.launch` takes; nothing is started yet.

        Raises:
            ValueError, TypeError: as for `lk.launch`.
        """
        self._request = prepare(
            magic.idle, ranks, (), None, backend, device, stall_s, None, "ranks"
        )
        self.ranks = self._request.spec.ranks
        self.last: Run | None = None
        self._processes: list[RankProcesses] = []  # one, or none
        self._closed = False
        self._finalize = weakref.finalize(self, end, self._processes)
        magic.offer(self)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        spec = self._request.spec
        return f"<{self.ranks} ranks, {spec.backend} on {spec.device}, {self.status}>"

    @property
    def status(self) -> str:
        """ "closed", "not started", "ready" or "busy"."""
        if self._closed:
            return "closed"
        if not self._processes:
            return "not started"
        return "ready" if self._processes[0].usable else "busy"

    def close(self) -> None:
        """End the ranks, and what they run."""
        self._closed = True
        if self.last is not None and not self.last.done:
            self.last.stop()
        self._finalize()

    def run(
        self,
        function: Callable,
        *,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
        live: bool = True,
        timeout_s: float | None = None,
        name: str | None = None,
    ) -> Run:
        """Run `function(worker, *args, **kwargs)` on every rank; wait for the end.

        What it puts into `worker.state` is there at the next call. Takes what
        `lk.launch` takes, and returns a Run as that does.

        Raises:
            RankFailed, RunStalled, RunTimedOut, CannotSend: as `lk.launch`.
            ValueError: the ranks were closed.
        """
        kwargs = {} if kwargs is None else kwargs
        check_call(function, args, kwargs)
        parcel = ship.pack(function, tuple(args), kwargs)
        request = self._ask(run_name(function, name), timeout_s, parcel=parcel)
        with Interrupts() as interrupts:
            run = self._begin(request)
            interrupts.stop_with(run.stop)
            if live:
                launcher.watch(run, in_background=False)
            return self._finish(run, print_lines=True)

    def run_cell(self, source: str, name: str, chosen: list[int]) -> Run:
        """Run the source of a cell on the chosen ranks; what `%%ranks` does.

        Args:
            source: the cell, without its first line.
            name: what tracebacks call it.
            chosen: ranks that run it; the others wait.
        """
        cell = {"source": source, "name": name, "ranks": chosen}
        request = self._ask("cell", None, cell=cell)
        with Interrupts() as interrupts:
            run = self._begin(request)
            interrupts.stop_with(run.stop)
            magic.show(run, chosen)
            return self._finish(run, print_lines=False)

    def _ask(self, name: str, timeout_s: float | None, **changes: Any) -> Request:
        if self._closed:
            raise ValueError(
                "these ranks were closed; make new ones with lk.Ranks(...)"
            )
        spec = dataclasses.replace(
            self._request.spec, name=name, timeout_s=timeout_s, started_at=time.time()
        )
        directory = current_directory()
        return dataclasses.replace(
            self._request, spec=spec, directory=directory, **changes
        )

    def _begin(self, request: Request) -> Run:
        self.last = LAUNCHER.begin(request, self._hand_over)
        return self.last

    def _hand_over(self, job: BinaryIO) -> RankProcesses:
        """Give a job to the ranks that were kept, or else to fresh ones."""
        if self._processes:
            (processes,) = self._processes
            if processes.nursery.alive:
                processes.look()
            if processes.usable:
                processes.again(job)
                return processes
            print("the ranks have ended since the last call; fresh ones have no state")
            self._drop()
        processes = LAUNCHER.engine.start(self.ranks, job, keep=True)
        self._processes.append(processes)
        return processes

    def _finish(self, run: Run, *, print_lines: bool) -> Run:
        """Wait for the run, and see whether its ranks can go on."""
        try:
            return run.follow(print_lines=print_lines)
        except KeyboardInterrupt:  # a second press: there is no time to ask
            self._drop()
            raise
        finally:
            if run.done and self._processes:
                if why := self._unusable(run):
                    self._drop()
                    print(
                        f"the ranks were ended and their state is lost: {why}. The "
                        "next call starts fresh ones"
                    )
                elif run.status != "finished":
                    print(KEPT)

    def _unusable(self, run: Run) -> str | None:
        """Why the ranks cannot take another call, None when they can."""
        (processes,) = self._processes
        if processes.statuses and not processes.kill_asked:
            gone = ", ".join(map(str, sorted(processes.statuses)))
            return f"the process of rank {gone} has ended"
        if not processes.usable:
            return "not all of them came back from what they did"
        stall = run.monitor.stall
        stall.read()
        if diagnosis.out_of_step(stall.pulses):
            return "some of them have called more collectives than others"
        return None

    def _drop(self) -> None:
        end(self._processes)


def end(held: list[RankProcesses]) -> None:
    """End the ranks that are held, if any."""
    while held:
        processes = held.pop()
        if processes.nursery.alive:
            try:
                processes.kill()
            except LabkitError:
                pass  # the nursery has just ended, and they with it
