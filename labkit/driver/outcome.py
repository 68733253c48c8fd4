"""Reads from events and exit statuses how a run ended and which rank was first."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from labkit.core.errors import RankFailed
from labkit.driver.telemetry import Telemetry

NOTICE_S = 0.05  # within this a rank's end and the echo of it cannot be told apart


@dataclass(frozen=True, kw_only=True)
class End:
    """How a rank's process ended and when, in seconds since the run was started."""

    status: int  # as os.waitstatus_to_exitcode: negative for a signal
    time_s: float


def find_failure(telemetry: Telemetry, ends: dict[int, End]) -> RankFailed | None:
    """The failure that came first, or None while every rank is well.

    A rank that raises writes an `error` event before its peers can notice. A rank that
    was killed, or that left on its own, writes nothing; its peers may write what they
    noticed ("connection closed") before we hear of its end. So an end without a word
    leads, unless an error was written well before it.

    Args:
        telemetry: the events that have been read so far.
        ends: how ranks ended before labkit ended any.
    """
    silent = {
        rank: end
        for rank, end in ends.items()
        if rank not in telemetry.results and rank not in telemetry.errors
    }
    errors = telemetry.errors
    first_error = min(errors, key=lambda rank: errors[rank]["time_s"], default=None)
    first_silent = min(silent, key=lambda rank: silent[rank].time_s, default=None)
    if first_silent is not None:
        end = silent[first_silent]
        if first_error is None or end.time_s < errors[first_error]["time_s"] + NOTICE_S:
            return fail(telemetry, first_silent, describe(end.status))
    if first_error is not None:
        text = errors[first_error].get("traceback", "")
        return fail(telemetry, first_error, "failed first", text)
    return None


def describe(status: int) -> str:
    if status < 0:
        return f"was ended by {signal_name(-status)}"
    return f"ended without a result (exit status {status})"


def fail(telemetry: Telemetry, rank: int, what: str, text: str = "") -> RankFailed:
    step = telemetry.last_step(rank)
    where = "before its first log" if step is None else f"after step {step}"
    others = [other for other in telemetry.tails if other != rank]
    verdict = f"rank {rank} {what} ({where})"
    stopped = [other for other in others if other not in telemetry.results]
    if stopped:
        plural, were = ("rank", "was") if len(stopped) == 1 else ("ranks", "were")
        listed = ", ".join(map(str, stopped))
        verdict += f"; {plural} {listed} {were} stopped because of it"
    return RankFailed(verdict, rank, step, text)


def signal_name(number: int) -> str:
    """`signal 9 (SIGKILL)`."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"
