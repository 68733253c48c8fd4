"""Random faults, a few of each kind: the bench `faults` in short, without its times."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.bench.faults import choose, failure, names_culprit, outlive, play, play_one
from tests.faults import KINDS, Answer, Fault, LaunchProcess
from tests.processes import MARK

SEED = 7
ROUNDS = len(KINDS) + 1


@pytest.fixture
def folder():
    """A folder with a short name, as data loaders have sockets below it."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def process(folder):
    with LaunchProcess(folder / "launches") as process:
        yield process


def fault(**changes):
    made = Fault(kind="raise", ranks=2, rank=1, step=0, exit_status=1, stall_s=30.0)
    return dataclasses.replace(made, **changes)


def test_every_fault_is_named_and_leaves_nothing_behind(folder):
    faults = choose(ROUNDS, SEED)
    assert {one.kind for one in faults} == set(KINDS)
    wrong = [failure(one) for one in play(faults, folder) if not one.right]
    assert not wrong, "\n".join(wrong)


def test_a_seed_repeats_its_faults():
    assert choose(30, 1) == choose(30, 1)
    assert choose(30, 1) != choose(30, 2)


# The checks can fail


def test_another_culprit_is_not_right():
    text = "Traceback ...\nRuntimeError: the fault of rank 1\n\nrank 1 failed first"
    answer = Answer(
        error="RankFailed", rank=1, text=text, printed="", status="failed", pids=[],
        descriptors=0, ended_at=0.0,
    )  # fmt: skip
    assert names_culprit(fault(), answer)
    assert not names_culprit(fault(rank=0), answer)
    assert not names_culprit(fault(), dataclasses.replace(answer, rank=0))


def test_a_launch_that_hangs_is_ended_and_shown(process, folder):
    hang = fault(kind="hang", stall_s=600.0)
    played = play_one(process, hang, folder, limit_s=10)
    assert not played.named
    assert played.detection_s is None
    assert "Timeout (0:00:10)!" in played.words
    assert 'run.py", line' in played.words
    assert played.orphans == []


def test_an_orphan_is_seen(process, folder):
    environment = {MARK: process.mark}
    with subprocess.Popen([sys.executable, "-c", "input()"], env=environment,
                          stdin=subprocess.PIPE) as orphan:  # fmt: skip
        process.end()
        assert outlive(lambda: process.left_over([])) == {orphan.pid}


def test_a_file_that_is_left_is_seen(process):
    (process.temporary / "left").touch()
    assert process.files_left() == {process.temporary / "left"}
