"""Why a rank's process ended, and nothing beyond the evidence."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch.distributed as dist

import labkit as lk
from labkit.driver import machine
from labkit.driver.death import Coroner

GB = 10**9


def examine(path, before, after, status=-9):
    counts = iter([Counter(before), Counter(after)])
    coroner = Coroner(path, lambda: next(counts))
    return coroner.examine(1, status, 1.0, peak_bytes=int(3.8 * GB))


def test_a_kill_without_evidence_is_from_outside(tmp_path):
    end = examine(tmp_path, {"a": 3}, {"a": 3})
    assert end.what == "was killed from outside, by signal 9 (SIGKILL)"
    assert "ended no process for lack of memory" in end.evidence


def test_a_kill_that_the_system_has_counted_is_lack_of_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "usable_memory", lambda: 4 * GB)
    end = examine(tmp_path, {"a": 3, "b": 1}, {"a": 4, "b": 1})
    assert end.what == (
        "was killed by the operating system (signal 9 (SIGKILL)): out of memory"
    )
    assert "used up to 3.8 GB" in end.evidence
    assert "may use 4.0 GB" in end.evidence
    assert "Ask for fewer ranks" in end.evidence


def test_a_kill_where_nothing_counts_leaves_the_question_open(tmp_path):
    assert "cannot be read here" in examine(tmp_path, {}, {}).evidence


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("memory.events", "low 0\noom 2\noom_kill 2\noom_group_kill 0\n"),
        ("memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"),
    ],
)
def test_kills_are_counted_in_both_versions_of_cgroups(tmp_path, name, text):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("pgfault 7\noom_kill 5\n")
    if not Path("/proc/self/cgroup").exists():
        pytest.skip("this system has no cgroups")
    counts = machine.oom_kills(tmp_path, str(vmstat))
    assert counts == {str(file): 2, str(vmstat): 5}


def test_a_crash_shows_the_learners_line():
    def train(worker):
        if worker.rank == 1:
            ctypes.string_at(0)
        dist.barrier()

    with pytest.raises(lk.RankFailed, match=r"rank 1 was ended by signal 11") as caught:
        lk.launch(train, 2)
    assert "test_death.py" in caught.value.rank_traceback
    assert "in train" in caught.value.rank_traceback
    assert "/labkit/worker/" not in str(caught.value)


def test_an_abort_shows_what_c_wrote():
    def train(worker):
        os.write(2, b"the reason\n")
        os.abort()

    with pytest.raises(lk.RankFailed, match=r"signal 6 \(SIGABRT\)") as caught:
        lk.launch(train, 1)
    assert caught.value.rank_traceback.startswith("the reason\n")


def test_other_signals_are_named():
    def train(worker):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(lk.RankFailed, match=r"was ended by signal 15 \(SIGTERM\)"):
        lk.launch(train, 1)


HUNGRY = """
import os, sys
from pathlib import Path
Path(sys.argv[1], sys.argv[2]).write_text(str(os.getpid()))
import labkit as lk

def eat(worker):
    worker.log(loss=1.0)
    if worker.rank == 1:
        kept = []
        while True:
            kept.append(bytearray(os.urandom(1 << 20) * 16))
    import threading
    threading.Event().wait()

try:
    lk.launch(eat, ranks=2, live=False)
except lk.RankFailed as error:
    print(error)
"""


@pytest.fixture
def limited_cgroup():
    """A memory cgroup of 1 GB below this process's own, of either version."""
    for parent in machine.own_cgroups(machine.CGROUP_ROOT, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            folder = parent / f"labkit-test-{os.getpid()}"
            try:
                folder.mkdir()
                (folder / name).write_text(str(10**9))
            except OSError:
                if folder.exists():
                    folder.rmdir()
                continue
            yield folder
            folder.rmdir()
            return
    pytest.skip("no memory cgroup may be made here")


def test_a_real_lack_of_memory_is_named_with_its_numbers(limited_cgroup):
    done = subprocess.run(
        [sys.executable, "-c", HUNGRY, str(limited_cgroup), "cgroup.procs"],
        capture_output=True,
        text=True,
        check=False,
    )
    if "killed by the operating system" not in done.stdout and done.returncode == -9:
        pytest.skip("the system chose the kernel process itself")
    assert "rank 1 was killed by the operating system" in done.stdout, done.stderr
    assert "out of memory" in done.stdout
    assert "all ranks together may use 1.0 GB" in done.stdout
