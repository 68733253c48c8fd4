"""Who ends whom: kernel, nursery and ranks, each killed without a warning."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile

import psutil
import pytest

import labkit as lk
from labkit.driver.launcher import LAUNCHER
from tests.processes import wait_until_gone

# A kernel that starts ranks, each with a data-loader child, and tells all process ids.
KERNEL = """
import json, os, subprocess, sys, threading
import labkit as lk

def work(worker):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(json.dumps([os.getpid(), child.pid]), flush=True)
    threading.Event().wait()

run = lk.start(work, ranks=3)
pids = [pid for _ in range(3)
        for pid in json.loads(run.monitor.lines.get(timeout=60).split("] ")[1])]
print(json.dumps(pids + [lk.driver.launcher.LAUNCHER.engine.nursery.process.pid]),
      flush=True)
if sys.argv[1:]:
    os.fork() or threading.Event().wait()  # a child that holds all our descriptors
sys.stdin.read()
"""


@pytest.fixture
def kernel():
    """A kernel process with running ranks; its process and all the others' ids."""
    process = subprocess.Popen(
        [sys.executable, "-c", KERNEL],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield process, json.loads(process.stdout.readline())
        process.kill()


def test_nothing_outlives_a_kernel_that_is_killed(kernel):
    process, pids = kernel
    assert len(pids) == 7
    process.send_signal(signal.SIGKILL)
    assert wait_until_gone(pids) == []


def test_nothing_outlives_a_kernel_that_ends(kernel):
    process, pids = kernel
    process.stdin.close()
    process.wait()
    assert wait_until_gone(pids) == []


def test_no_rank_outlives_a_nursery_that_is_killed(kernel):
    _, pids = kernel
    *ranks_and_children, nursery = pids
    os.kill(nursery, signal.SIGKILL)
    assert wait_until_gone([nursery, *ranks_and_children]) == []


def test_no_rank_outlives_kernel_and_nursery_killed_at_once(kernel):
    process, pids = kernel
    os.kill(pids[-1], signal.SIGKILL)
    process.send_signal(signal.SIGKILL)
    assert wait_until_gone(pids[::2]) == []


def test_a_forked_copy_of_the_kernel_keeps_nothing_alive():
    """A process that the kernel forked holds the socket, so end of file never comes."""
    process = subprocess.Popen(
        [sys.executable, "-c", KERNEL, "fork"], stdout=subprocess.PIPE, text=True
    )
    pids = json.loads(process.stdout.readline())
    copies = []
    while not copies:
        own = psutil.Process(process.pid).children()
        copies = [child.pid for child in own if child.pid not in pids]
    try:
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert wait_until_gone(pids) == []
    finally:
        for pid in copies:
            os.kill(pid, signal.SIGKILL)
        process.stdout.close()


def test_a_nursery_that_is_killed_fails_the_run_and_the_next_launch_works():
    def wait(worker):
        worker.log(loss=0.0)
        import threading

        threading.Event().wait()

    run = lk.start(wait, ranks=2)
    while run.telemetry.last_step(1) is None:
        run.monitor.ended.wait(0.01)
    os.kill(LAUNCHER.engine.nursery.process.pid, signal.SIGKILL)
    with pytest.raises(lk.StartFailed, match=r"the nursery.*ended \(exit status -9\)"):
        run.wait()
    assert run.status == "failed"
    assert lk.launch(lambda worker: worker.rank, ranks=2).results[1] == 1


def test_a_broken_torch_is_reported_with_its_own_words(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch is broken')\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import labkit as lk; lk.launch(lambda worker: 1, ranks=1)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "StartFailed" in done.stderr
    assert "libtorch is broken" in done.stderr


LOADER = """
import glob, sys, torch
import labkit as lk

def work(worker):
    batches = iter(torch.utils.data.DataLoader(range(100), num_workers=1))
    next(batches)
    return len(glob.glob(f"{sys.argv[1]}/labkit-*/*/listener-*"))

assert max(lk.launch(work, ranks=2).results.values()) > 0
"""


def test_data_loaders_leave_nothing_in_the_temporary_folder():
    """Their processes have sockets there, and a rank's end does not let them tidy."""
    with tempfile.TemporaryDirectory() as folder:  # a short name, as sockets need
        environment = os.environ | {"TMPDIR": folder}
        subprocess.run(
            [sys.executable, "-c", LOADER, folder], env=environment, check=True
        )
        left = {name.partition("_")[0] for name in os.listdir(folder)}
    assert left <= {"torchinductor"}  # torch's own, one for all processes of a user


def test_ranks_can_be_stopped_before_they_are_forked():
    """The nursery is still importing when the stop comes."""
    code = (
        "import labkit as lk\n"
        "run = lk.start(lambda worker: __import__('time').sleep(600), ranks=4)\n"
        "run.stop()\n"
        "print(run.wait().status)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "stopped by you before the first step",
        "stopped",
    ]


def test_a_copy_of_the_kernel_starts_a_nursery_of_its_own():
    lk.launch(lambda worker: None, ranks=1)
    ours = LAUNCHER.engine.nursery
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        run = lk.launch(lambda worker: worker.rank, ranks=2, live=False)
        os.write(write, b"%d" % (run.results[1] + (LAUNCHER.engine.nursery is ours)))
        LAUNCHER.engine.close()
        os._exit(0)
    os.close(write)
    assert os.waitpid(pid, 0)[1] == 0
    assert os.read(read, 10) == b"1"
    os.close(read)
    assert ours.alive
    assert lk.launch(lambda worker: worker.rank, ranks=2).results[1] == 1


def spares(number: int) -> list[int]:
    """Process ids of the ranks that wait for a job, once there are so many."""
    nursery = psutil.Process(LAUNCHER.engine.warm().process.pid)
    while len(found := nursery.children()) != number:
        LAUNCHER.engine.nursery.receive(0.05)
        assert nursery.is_running()
    return sorted(child.pid for child in found)


def launch_pids(ranks: int) -> list[int]:
    run = lk.launch(lambda worker: os.getpid(), ranks)
    return sorted(run.results.values())


def test_ranks_are_forked_before_they_are_asked_for():
    launch_pids(3)
    waiting = spares(3)
    assert launch_pids(3) == waiting


def test_more_ranks_than_wait_are_forked():
    launch_pids(1)
    (waiting,) = spares(1)
    pids = launch_pids(3)
    assert len(pids) == 3
    assert waiting in pids


def test_a_waiting_rank_that_was_killed_is_replaced():
    launch_pids(2)
    first, _ = spares(2)
    os.kill(first, signal.SIGKILL)
    while psutil.pid_exists(first):
        pass  # until the nursery has heard of it; before, it may still get the job
    pids = launch_pids(2)
    assert len(pids) == 2
    assert first not in pids
    assert spares(2)


def test_waiting_ranks_end_with_the_kernel():
    code = (
        "import labkit as lk, os, psutil, sys\n"
        "lk.launch(lambda worker: None, ranks=2)\n"
        "nursery = psutil.Process().children()[0]\n"
        "while len(nursery.children()) < 2: pass\n"
        "print(nursery.pid, *(child.pid for child in nursery.children()), flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 3
    assert wait_until_gone(pids) == []


STUCK = """
import ctypes, json, os, sys
import labkit as lk

def hold(worker):
    print(os.getpid(), flush=True)
    ctypes.PyDLL(None).sleep(600)  # C code that never lets go of the interpreter

{begin}
pids = [int(run.monitor.lines.get(timeout=60).split()[-1]) for _ in range(2)]
print(json.dumps(pids), flush=True)
sys.stdin.read()
"""
START = "run = lk.start(hold, ranks=2)"
KEEP = """
import threading, time
ranks = lk.Ranks(2)
threading.Thread(target=ranks.run, args=[hold], daemon=True).start()
while ranks.last is None or not ranks.last.monitor.processes.pids: time.sleep(0.01)
pids = ranks.last.monitor.processes.pids
print(json.dumps(pids), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("begin", [START, KEEP], ids=["start", "kept"])
def test_ranks_that_are_stuck_in_c_end_with_a_killed_kernel(begin):
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK.format(begin=begin)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        pids = json.loads(process.stdout.readline())
        assert len(pids) == 2
        process.kill()
    assert wait_until_gone(pids) == []


def test_a_rank_that_is_stuck_in_c_is_stopped():
    import ctypes

    def hold(worker):
        print("there", flush=True)
        ctypes.PyDLL(None).sleep(600)

    run = lk.start(hold, ranks=2)
    for _ in range(2):
        assert "there" in run.monitor.lines.get(timeout=60)
    run.stop()
    assert run.wait().status == "stopped"
    assert wait_until_gone(run.monitor.processes.pids) == []


def test_children_of_a_rank_end_with_a_failure():
    def work(worker):
        sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
        print(subprocess.Popen(sleep).pid, flush=True)
        if worker.rank == 1:
            raise ValueError("boom")
        import torch.distributed as dist

        dist.barrier()

    with pytest.raises(lk.RankFailed, match="boom"):
        lk.launch(work, ranks=2)
    run = lk.runs()[0]
    children = [int(run.logs(rank)) for rank in range(2)]
    assert wait_until_gone(children) == []


# What ranks leave open to others


def test_ranks_listen_on_loopback_alone():
    def look(worker):
        import torch.distributed as dist

        dist.barrier()
        found = psutil.Process().net_connections("inet")
        dist.barrier()
        return [one.laddr.ip for one in found]

    addresses = lk.launch(look, ranks=2).results
    assert set(addresses[0] + addresses[1]) <= {"127.0.0.1", "::1"}


NO_NAME = (
    "hostname no-such-host.invalid && exec {python} -c 'import labkit as lk; "
    "print(lk.launch(lambda worker: worker.rank, ranks=2).results[1])'"
)


def test_a_host_name_that_does_not_resolve_does_not_matter():
    command = ["unshare", "--uts", "sh", "-c", NO_NAME.format(python=sys.executable)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unshare" in done.stderr:
        pytest.skip("no namespace for another host name may be made here")
    assert done.stdout == "1\n", done.stderr
