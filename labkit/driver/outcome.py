"""Reads from events and ends of processes how a run failed and which rank was first."""

from __future__ import annotations

import signal

from labkit.core.errors import LabkitError, RankFailed, RunStalled
from labkit.core.pulse import PULSE_S
from labkit.driver.death import End
from labkit.driver.stall import StallWatch
from labkit.driver.telemetry import Telemetry

ECHO_WAIT_S = 0.5  # how long an echo waits for the failure behind it to be reported


def find_failure(
    telemetry: Telemetry, ends: dict[int, End], now_s: float, stall: StallWatch
) -> LabkitError | None:
    """The failure that came first; None while every rank is well, or it is too early.

    A rank that raises writes an `error` event. One that was killed, or left on its own,
    writes nothing, and what its peers notice ("connection closed") may be read before
    we hear of its end. So such an echo, as the rank itself marks it, is named only when
    nothing stands behind it.

    Args:
        telemetry: the events that have been read so far.
        ends: how ranks ended before labkit ended any.
        now_s: seconds since the run was started.
        stall: knows what ranks called last.
    """
    errors, echoes = {}, {}
    for rank, event in telemetry.errors.items():
        found = echoes if event.get("lost_peer") else errors
        found[rank] = float(event.get("time_s", 0.0))
    for rank, end in ends.items():
        if rank not in telemetry.results and rank not in telemetry.errors:
            errors[rank] = end.time_s
    if not errors:
        if not echoes or now_s <= min(echoes.values()) + ECHO_WAIT_S:
            return None
        if cause := stall.cause():
            return RunStalled(cause, stall.table())
        errors = echoes
    rank = min(errors, key=errors.__getitem__)
    if rank in telemetry.errors:
        text = telemetry.errors[rank].get("traceback", "")
        return fail(telemetry, rank, "failed first", text)
    end = ends[rank]
    evidence, text = end.evidence, end.words
    if end.status == -signal.SIGABRT:  # as gloo does when sizes differ
        if now_s <= end.time_s + PULSE_S:
            return None  # its peers have not yet written what they called
        stall.read()
        if cause := stall.disagreement:
            evidence = cause[0].upper() + cause[1:]
            text = f"{text}\n\n{stall.table()}"
    return fail(telemetry, rank, end.what, text, evidence)


def fail(
    telemetry: Telemetry, rank: int, what: str, text: str, evidence: str = ""
) -> RankFailed:
    step = telemetry.last_step(rank)
    where = "before its first log" if step is None else f"after step {step}"
    others = [other for other in telemetry.tails if other != rank]
    verdict = f"rank {rank} {what} ({where})"
    failed = [
        other
        for other in others
        if other in telemetry.errors and not telemetry.errors[other].get("lost_peer")
    ]
    if failed:
        plural = "rank" if len(failed) == 1 else "ranks"
        verdict += f"; {plural} {', '.join(map(str, failed))} raised as well"
    stopped = [
        other
        for other in others
        if other not in telemetry.results and other not in failed
    ]
    if stopped:
        plural, were = ("rank", "was") if len(stopped) == 1 else ("ranks", "were")
        listed = ", ".join(map(str, stopped))
        verdict += f"; {plural} {listed} {were} stopped because of it"
    if evidence:
        verdict += f". {evidence}"
    return RankFailed(verdict, rank, step, text)
