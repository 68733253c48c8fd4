"""Reads from events and exit statuses how a run ended and which rank was first."""

from __future__ import annotations

import signal

from labkit.core.errors import RankFailed
from labkit.driver.telemetry import Telemetry


def find_failure(
    telemetry: Telemetry, statuses: dict[int, int], killed: bool
) -> RankFailed | None:
    """The failure that came first, or None while every rank is well.

    Args:
        telemetry: the events that have been read so far.
        statuses: exit statuses by rank, negative for a signal.
        killed: whether labkit has already ended ranks, so that a signal proves nothing.

    A rank that ended by a signal that was not ours leads: what its peers raise is the
    echo of it. Otherwise the earliest `error` event does, and last a rank that left
    without a word.
    """
    for rank, status in sorted(statuses.items()):
        if status < 0 and not (killed and status == -signal.SIGKILL):
            if rank not in telemetry.results:
                return fail(telemetry, rank, f"was ended by {signal_name(-status)}")
    if telemetry.errors:
        rank = min(telemetry.errors, key=lambda rank: telemetry.errors[rank]["time_s"])
        text = telemetry.errors[rank].get("traceback", "")
        return fail(telemetry, rank, "failed first", text)
    for rank, status in sorted(statuses.items()):
        if rank not in telemetry.results and status >= 0:
            return fail(
                telemetry, rank, f"ended without a result (exit status {status})"
            )
    return None


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
