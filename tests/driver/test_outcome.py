"""Which rank is named when several fail."""

from __future__ import annotations

import math
import os
import signal
import sys

import pytest
import torch.distributed as dist

import labkit as lk
from labkit.core import events
from labkit.core.pulse import Call, Pulse
from labkit.driver.death import End
from labkit.driver.outcome import ECHO_WAIT_S, find_failure
from labkit.driver.stall import StallWatch
from labkit.driver.telemetry import Telemetry

LOST = "RuntimeError: [../pair.cc:553] Connection closed by peer [127.0.0.1]:4711"
BUG = "ValueError: boom"


@pytest.fixture
def telemetry(tmp_path):
    return Telemetry(tmp_path, 3)


def failure(telemetry, ends, now_s):
    folder = telemetry.tails[0].path.parent
    return find_failure(telemetry, ends, now_s, StallWatch(folder, 3, 30.0, 0.0))


def raised(telemetry, rank, time_s, message):
    event = {"kind": events.ERROR, "time_s": time_s, "lost_peer": message is LOST}
    telemetry.take(rank, events.encode(event | {"traceback": message}))


def test_nothing_has_failed(telemetry):
    assert failure(telemetry, {}, 1.0) is None


def test_the_earliest_error_leads(telemetry):
    raised(telemetry, 0, 2.0, BUG)
    raised(telemetry, 2, 1.0, BUG)
    assert failure(telemetry, {}, 2.0).rank == 2


def test_an_error_leads_before_its_echo_whatever_the_clocks_say(telemetry):
    raised(telemetry, 0, 0.9, LOST)
    raised(telemetry, 1, 1.0, BUG)
    assert failure(telemetry, {}, 1.0).rank == 1


def test_ranks_that_raise_too_are_not_said_to_be_stopped(telemetry):
    raised(telemetry, 0, 2.0, BUG)
    raised(telemetry, 2, 1.0, BUG)
    assert failure(telemetry, {}, 2.0).verdict == (
        "rank 2 failed first (before its first log); rank 0 raised as well; "
        "rank 1 was stopped because of it"
    )


def test_an_echo_waits_for_the_end_of_the_rank_behind_it(telemetry):
    raised(telemetry, 0, 1.0, LOST)
    assert failure(telemetry, {}, 1.1) is None
    ends = {1: End(status=-9, time_s=1.3, what="was killed by signal 9 (SIGKILL)")}
    found = failure(telemetry, ends, 1.3)
    assert found.rank == 1
    assert "signal 9 (SIGKILL)" in found.verdict


@pytest.mark.parametrize("now_s", [1.0 + ECHO_WAIT_S + 0.1, math.inf])
def test_an_echo_with_nothing_behind_it_is_named_in_the_end(telemetry, now_s):
    raised(telemetry, 0, 1.0, LOST)
    assert failure(telemetry, {}, now_s).rank == 0


def test_a_rank_that_ended_after_its_own_error_is_no_silent_end(telemetry):
    raised(telemetry, 1, 1.0, BUG)
    ends = {1: End(status=1, time_s=0.5)}
    assert failure(telemetry, ends, 1.0).rank_traceback == BUG


def test_a_rank_that_has_delivered_is_well(telemetry):
    telemetry.take(0, events.encode({"kind": events.RESULT}))
    assert failure(telemetry, {0: End(status=0, time_s=1.0)}, 2.0) is None


@pytest.mark.parametrize(("number", "told"), [(1, True), (2, False)])
def test_an_abort_is_explained_by_calls_that_differ_only(telemetry, number, told):
    """Peers that wait for the rank that aborted do so because of it."""
    for rank in range(2):
        call = Call(
            group="0", number=1 if rank else number, kind="all_reduce",
            elements=[4 + rank], dtype="float32", waiting=True, time_s=1.0,
        )  # fmt: skip
        pulse = Pulse(time_s=1.0, state="running", calls=[call], groups={"0": [0, 1]})
        path = telemetry.tails[rank].path.with_name(f"rank-{rank}.pulse")
        path.write_bytes(pulse.to_line())
    ends = {1: End(status=-signal.SIGABRT, time_s=1.3, what="aborted")}
    verdict = failure(telemetry, ends, math.inf).verdict
    assert ("anks called different collectives" in verdict) == told
    assert "has not come to it" not in verdict


# On real ranks


def test_a_killed_rank_leads_when_its_peers_wrap_what_they_heard():
    def train(worker):
        dist.barrier()
        if worker.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            dist.barrier()
        except Exception as error:
            raise RuntimeError("could not sync") from error

    with pytest.raises(lk.RankFailed) as caught:
        lk.launch(train, 4)
    assert caught.value.rank == 3


def test_a_rank_that_exits_leads_when_its_peers_exit_too():
    def train(worker):
        dist.barrier()
        if worker.rank == 2:
            os._exit(3)
        try:
            dist.barrier()
        except Exception:
            sys.exit(1)

    with pytest.raises(
        lk.RankFailed, match=r"rank 2 ended without .*status 3"
    ) as caught:
        lk.launch(train, 4)
    assert caught.value.rank == 2


def test_a_connection_error_of_the_learners_own_is_no_echo():
    def train(worker):
        dist.barrier()
        if worker.rank == 1:
            raise ConnectionResetError(104, "Connection reset by peer")
        dist.barrier()

    with pytest.raises(lk.RankFailed, match="ConnectionResetError") as caught:
        lk.launch(train, 4)
    assert caught.value.rank == 1


def test_a_very_long_message_is_shortened_and_arrives():
    def train(worker):
        raise ValueError("x" * 2_000_000)

    with pytest.raises(lk.RankFailed, match="ValueError: xxx") as caught:
        lk.launch(train, 1)
    assert len(str(caught.value)) < 300_000
