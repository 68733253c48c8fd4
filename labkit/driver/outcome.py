"""Reads from events and exit statuses how a run ended and which rank was first."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from labkit.core.errors import RankFailed
from labkit.driver.telemetry import Telemetry

# What a rank says when it lost a peer. It is the echo of a failure, not the failure.
ECHO = re.compile(r"[Cc]onnection (closed|reset|refused)|[Bb]roken pipe|by peer")
ECHO_WAIT_S = 0.5  # how long an echo waits for the failure behind it to be reported


@dataclass(frozen=True, kw_only=True)
class End:
    """How a rank's process ended and when, in seconds since the run was started."""

    status: int  # as os.waitstatus_to_exitcode: negative for a signal
    time_s: float


def find_failure(
    telemetry: Telemetry, ends: dict[int, End], now_s: float
) -> RankFailed | None:
    """The failure that came first; None while every rank is well, or it is too early.

    A rank that raises writes an `error` event. One that was killed, or left on its own,
    writes nothing, and what its peers notice ("connection closed") may be read before
    we hear of its end. So such an echo is named only when nothing stands behind it.

    Args:
        telemetry: the events that have been read so far.
        ends: how ranks ended before labkit ended any.
        now_s: seconds since the run was started.
    """
    errors, echoes = {}, {}
    for rank, event in telemetry.errors.items():
        found = echoes if ECHO.search(str(event.get("message"))) else errors
        found[rank] = float(event.get("time_s", 0.0))
    for rank, end in ends.items():
        if rank not in telemetry.results and rank not in telemetry.errors:
            errors[rank] = end.time_s
    if not errors and echoes and now_s > min(echoes.values()) + ECHO_WAIT_S:
        errors = echoes
    if not errors:
        return None
    rank = min(errors, key=errors.__getitem__)
    if rank in telemetry.errors:
        text = telemetry.errors[rank].get("traceback", "")
        return fail(telemetry, rank, "failed first", text)
    return fail(telemetry, rank, describe(ends[rank].status))


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
