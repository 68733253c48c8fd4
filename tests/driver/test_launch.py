"""Launching functions on real gloo ranks."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import labkit as lk
from labkit.driver.launcher import LAUNCHER
from tests.processes import is_running, wait_until, wait_until_gone


def launch(function, ranks=2, **options):
    return lk.launch(function, ranks, **options)


def test_results_of_every_rank_come_back():
    run = launch(lambda worker: (worker.rank, worker.world_size), ranks=3)
    assert dict(run.results) == {0: (0, 3), 1: (1, 3), 2: (2, 3)}
    assert run.status == "finished"


def test_ranks_form_a_process_group():
    def add(worker):
        number = torch.tensor([worker.rank + 1.0])
        dist.all_reduce(number)
        return number.item()

    assert list(launch(add, ranks=4).results.values()) == [10.0] * 4


def test_one_rank_is_a_valid_run():
    assert launch(lambda worker: worker.world_size, ranks=1).results[0] == 1


def test_ranks_may_be_a_numpy_integer():
    assert len(launch(lambda worker: None, ranks=np.int64(2)).results) == 2


def test_none_and_fifty_megabytes_come_back_whole():
    def give(worker):
        return None if worker.rank == 0 else np.arange(6_250_000)

    results = launch(give).results
    assert results[0] is None
    assert np.array_equal(results[1], np.arange(6_250_000))


def test_arguments_are_passed():
    def give(worker, a, b=2, *, c):
        return a, b, c

    run = launch(give, args=(1,), kwargs={"c": [3]})
    assert run.results[1] == (1, 2, [3])


def test_closures_lambdas_and_classes_travel():
    config = {"size": 3}
    double = lambda x: 2 * x  # noqa: E731

    class Layer(torch.nn.Module):
        def forward(self, x):
            return double(x) + config["size"]

    run = launch(lambda worker: Layer()(torch.ones(2)))
    assert run.results[0].tolist() == [5, 5]


def test_helpers_beside_the_notebook_are_imported(in_folder, monkeypatch):
    (in_folder / "my_helpers.py").write_text("def twice(x):\n    return 2 * x\n")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    import my_helpers

    assert launch(lambda worker: my_helpers.twice(worker.rank)).results[1] == 2

    def imports_itself(worker):
        from my_helpers import twice

        return twice(21)

    assert launch(imports_itself).results[0] == 42


def test_the_result_of_a_class_is_of_that_class():
    class Point:
        def __init__(self, x):
            self.x = x

    result = launch(lambda worker: Point(worker.rank)).results[1]
    assert isinstance(result, Point)
    assert result.x == 1


def test_tensors_that_require_gradients_come_back():
    def give(worker):
        weight = torch.ones(2, requires_grad=True)
        return weight, weight.detach() * 2

    weight, double = launch(give).results[0]
    assert weight.requires_grad
    assert double.tolist() == [2, 2]


def test_everything_printed_arrives_labelled_and_in_order(capsys):
    def talk(worker):
        for index in range(3):
            print("line", index)
        print("to stderr", file=sys.stderr)
        ctypes.CDLL(None).printf(b"from C\n")
        os.write(1, b"to the descriptor\n")
        warnings.warn("careful", stacklevel=1)
        print("no end of line", end="")

    for _ in range(2):  # the second run shows its lines as well
        run = launch(talk)
        lines = capsys.readouterr().out.splitlines()
        for rank in range(2):
            mine = [line for line in lines if line.startswith(f"[rank {rank}] ")]
            words = [line.removeprefix(f"[rank {rank}] ") for line in mine]
            assert words[:6] == [
                "line 0",
                "line 1",
                "line 2",
                "to stderr",
                "from C",
                "to the descriptor",
            ]
            assert any("careful" in word for word in words)
            assert words[-1] == "no end of line"
        assert "line 2\nto stderr" in run.logs(0)


def test_printed_lines_arrive_while_the_run_works(capsys):
    def print_then_wait(worker):
        print("first")
        threading.Event().wait()

    run = lk.start(print_then_wait, ranks=1)
    assert run.monitor.lines.get(timeout=60) == "[rank 0] first"
    assert not run.done
    run.stop()
    run.wait()


def test_a_line_printed_just_before_death_is_kept(capsys):
    def die(worker):
        print("last words")
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(lk.RankFailed):
        launch(die, ranks=1)
    assert "[rank 0] last words" in capsys.readouterr().out


def test_progress_bars_show_their_last_state(capsys):
    def bar(worker):
        sys.stderr.write("10 %\r50 %\r100 %\n")

    launch(bar, ranks=1)
    assert "[rank 0] 100 %\n" in capsys.readouterr().out


def test_the_environment_is_the_kernels_of_now(monkeypatch):
    monkeypatch.setenv("LABKIT_TEST", "set after the nursery started")
    run = launch(lambda worker: os.environ.get("LABKIT_TEST"))
    assert run.results[0] == "set after the nursery started"
    monkeypatch.delenv("LABKIT_TEST")
    assert launch(lambda worker: os.environ.get("LABKIT_TEST")).results[0] is None


def test_stale_rendezvous_variables_do_no_harm(monkeypatch):
    stale = {
        "WORLD_SIZE": "8",
        "RANK": "7",
        "MASTER_ADDR": "no.such.host.invalid",
        "MASTER_PORT": "1",
        "GLOO_SOCKET_IFNAME": "no-such-interface",
    }
    for name, value in stale.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    names = "MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE are set here"
    with pytest.warns(UserWarning, match=names):
        run = launch(lambda worker: (os.environ["RANK"], os.environ["WORLD_SIZE"]))
    assert dict(run.results) == {0: ("0", "2"), 1: ("1", "2")}
    assert dict(os.environ) == before


def test_taken_ports_do_not_matter():
    with socket.socket() as first, socket.socket() as second:
        for sock, port in ((first, 29500), (second, 12355)):
            try:
                sock.bind(("127.0.0.1", port))
                sock.listen()
            except OSError:
                pass  # taken already, which serves as well
        assert launch(lambda worker: worker.rank).results[1] == 1


def test_works_after_torch_was_used_with_threads_in_the_kernel():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        torch.randn(500, 500) @ torch.randn(500, 500)
        run = launch(lambda worker: (torch.randn(200, 200) @ torch.ones(200)).shape)
        assert run.results[1] == (200,)
    finally:
        torch.set_num_threads(before)


def test_compute_threads_are_shared_among_ranks():
    from labkit.driver import machine

    threads = launch(lambda worker: torch.get_num_threads(), ranks=2).results[0]
    assert threads == max(1, int(machine.usable_cores()) // 2)


def test_data_loader_workers_work_and_end_with_their_rank():
    def load(worker):
        loader = DataLoader(
            TensorDataset(torch.arange(8)), num_workers=2, persistent_workers=True
        )
        batches = iter(loader)
        next(batches)
        return [process.pid for process in batches._workers]

    run = launch(load)
    pids = [pid for rank in run.results for pid in run.results[rank]]
    assert len(pids) == 4
    assert wait_until_gone(pids) == []


def test_ddp_equals_one_process():
    def train(worker):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        if worker.world_size > 1:
            model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
        mine = inputs[worker.rank :: worker.world_size]
        for _ in range(5):
            loss = model(mine).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    single = launch(train, ranks=1).results[0]
    for weights in launch(train, ranks=4).results.values():
        assert (weights - single).abs().max() < 1e-6


def test_a_function_may_destroy_the_process_group():
    def train(worker):
        dist.all_reduce(torch.ones(1))
        if worker.rank == 0:
            dist.destroy_process_group()
        return worker.rank

    assert dict(launch(train, ranks=3).results) == {0: 0, 1: 1, 2: 2}


def test_a_path_object_in_the_module_path_does_no_harm(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    assert launch(lambda worker: worker.rank).results[1] == 1


def test_zeros_in_what_is_printed_end_nothing(capsys):
    launch(lambda worker: print("a\0b\nafter"), ranks=1)
    assert "[rank 0] after" in capsys.readouterr().out


def test_numpy_draws_other_numbers_in_each_rank():
    draws = launch(lambda worker: np.random.rand(), ranks=3).results.values()
    again = launch(lambda worker: np.random.rand(), ranks=3).results.values()
    assert len({*draws, *again}) == 6


@pytest.mark.parametrize("ending", ["exit", "return", "raise"])
def test_a_process_that_a_rank_forked_is_not_the_rank(ending):
    def fork(worker):
        pid = os.fork()
        if pid == 0:
            if ending == "exit":
                sys.exit(0)
            if ending == "raise":
                raise ValueError("in the child")
            return "child"
        os.waitpid(pid, 0)
        return "rank"

    assert dict(launch(fork).results) == {0: "rank", 1: "rank"}


def test_threads_of_a_rank_finish_before_it_leaves(tmp_path):
    def work(worker):
        def write():
            time.sleep(0.5)
            (tmp_path / f"{worker.rank}").write_text("done")

        threading.Thread(target=write).start()

    launch(work)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_classes_of_the_notebook_travel_between_ranks():
    code = (
        "import labkit as lk, torch.distributed as dist\n"
        "class A: pass\n"
        "def gather(worker):\n"
        "    found = [None, None]\n"
        "    dist.all_gather_object(found, A())\n"
        "    return [type(one).__name__ for one in found]\n"
        "print(lk.launch(gather, 2).results[1])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.stdout == "['A', 'A']\n", done.stderr


def test_more_than_a_thousand_open_files_do_no_harm():
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2000:
        pytest.skip(f"no more than {hard} files may be opened here")
    code = (
        "import resource, os, labkit as lk\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (2000, 2000))\n"
        "held = [open(os.devnull) for _ in range(1100)]\n"
        "print(lk.launch(lambda worker: worker.rank, 2).results[1])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.stdout == "1\n", done.stderr


def test_a_blocked_child_signal_does_not_keep_a_run_from_ending():
    code = (
        "import signal, labkit as lk\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})\n"
        "print(lk.launch(lambda worker: worker.rank, 2, timeout_s=30).results[1])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.stdout == "1\n", done.stderr


def test_characters_that_a_terminal_does_not_know_are_printed_somehow():
    code = "import labkit as lk\nlk.launch(lambda worker: print('\\u00e9'), 1)\n"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        check=False,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert done.stdout == b"[rank 0] \\xe9\n", done.stderr


def test_a_launch_right_after_two_interrupts_works():
    def endless(worker):
        while True:
            worker.log(loss=1.0)
            time.sleep(0.01)

    def press():
        wait_until(lambda: LAUNCHER.current.name == "pressed")
        wait_until(lambda: LAUNCHER.current.telemetry.last_step(0) is not None)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.02)  # as fast as a person presses twice, or faster
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with contextlib.suppress(KeyboardInterrupt):
        launch(endless, name="pressed")
    thread.join()
    assert launch(lambda worker: worker.rank).results[1] == 1


def test_a_script_that_ends_while_a_run_works_ends_quietly():
    code = (
        "import labkit as lk, threading\n"
        "run = lk.start(lambda worker: threading.Event().wait(), 2)\n"
        "while not run.monitor.processes.pids: pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_full_disk_is_named(tmp_path):
    """A file system of 2 MB, in which telemetry finds no room."""
    script = tmp_path / "full.py"
    script.write_text(
        "import labkit as lk\n"
        "try:\n"
        "    lk.launch(lambda worker: worker.rank, 8, live=False)\n"
        "except lk.LabkitError as error:\n"
        "    print(error)\n"
    )
    folder = tmp_path / "small"
    folder.mkdir()
    mount = (
        f"mount -t tmpfs -o size=1m tmpfs {folder} && exec {sys.executable} {script}"
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"XDG_STATE_HOME": str(folder)},
    )
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip("no file system may be mounted here")
    assert "cannot write to" in done.stdout, done.stderr
    assert "No space left on device" in done.stdout


def test_start_returns_at_once_and_wait_gives_the_run():
    run = lk.start(lambda worker: worker.rank, ranks=2)
    assert run.wait() is run
    assert run.results[1] == 1


def test_a_run_can_be_awaited():
    import asyncio

    async def cell():
        return await lk.start(lambda worker: worker.rank, ranks=2)

    assert asyncio.run(cell()).status == "finished"


def test_launch_works_inside_a_running_event_loop():
    import asyncio

    async def cell():
        return launch(lambda worker: worker.rank)

    assert asyncio.run(cell()).results[1] == 1


def test_stop_ends_the_run_and_keeps_what_was_logged():
    def forever(worker):
        for step in range(10**9):
            worker.log(loss=step)

    run = lk.start(forever, ranks=2)
    while run.telemetry.last_step(0) is None or run.telemetry.last_step(1) is None:
        run.monitor.ended.wait(0.01)
    pids = list(run.monitor.processes.pids)
    run.stop()
    assert run.wait().status == "stopped"
    assert len(run.metrics) >= 2
    assert not any(is_running(pid) for pid in pids)


def test_a_second_launch_is_refused_while_one_runs():
    def wait(worker):
        worker.log(loss=1.0)
        threading.Event().wait()

    run = lk.start(wait, ranks=2)
    try:
        with pytest.raises(lk.RunInProgress, match=r"wait is still running \(2 ranks"):
            launch(lambda worker: 1)
    finally:
        run.stop()
        run.wait()
    assert launch(lambda worker: 1).results[0] == 1


def test_a_run_that_takes_too_long_is_ended():
    with pytest.raises(lk.RunTimedOut, match=r"timeout_s=0.5 .*rank 0 had logged no"):
        launch(lambda worker: threading.Event().wait(), timeout_s=0.5)


def test_a_rank_that_has_finished_stays_until_its_peers_have(tmp_path):
    gate = tmp_path / "gate"

    def leave(worker):
        while worker.rank == 1 and not gate.exists():
            time.sleep(0.01)
        return os.getpid()

    run = lk.start(leave, ranks=2)
    try:
        wait_until(lambda: 0 in run.results)
        assert is_running(run.results[0])
        assert 0 not in run.monitor.processes.statuses
    finally:
        gate.touch()
    assert run.wait().status == "finished"


def test_a_mutual_wait_ends_after_stall_s():
    def leaves_rank_0_alone(worker):
        if worker.rank == 0:
            dist.all_reduce(torch.ones(1))
        else:
            threading.Event().wait()

    with pytest.raises(lk.RunStalled, match="rank 0 waits in all_reduce #1 of 1 float"):
        launch(leaves_rank_0_alone, stall_s=1)


# What a rank does wrong


def test_the_failing_ranks_own_traceback_leads():
    def train(worker):
        for _ in range(4):
            worker.log(loss=1.0)
        if worker.rank == 1:
            raise ValueError("boom")
        dist.all_reduce(torch.ones(1))

    with pytest.raises(lk.RankFailed) as caught:
        launch(train, ranks=3)
    error = caught.value
    assert (error.rank, error.step) == (1, 3)
    lines = str(error).splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "test_launch.py" in lines[1]
    assert 'raise ValueError("boom")' in str(error)
    assert "ValueError: boom" in lines
    assert "/labkit/worker/" not in str(error)
    assert lines[-1] == (
        "rank 1 failed first (after step 3); ranks 0, 2 were stopped because of it"
    )


def test_a_failed_run_keeps_metrics_and_logs():
    def train(worker):
        print("before")
        worker.log(loss=1.0)
        raise RuntimeError("after")

    with pytest.raises(lk.RankFailed):
        launch(train, name="kept")
    run = lk.runs()[0]
    assert (run.name, run.status) == ("kept", "failed")
    assert len(run.metrics) >= 1
    assert any("before" in run.logs(rank) for rank in range(2))
    assert "RuntimeError: after" in run.error


def test_chained_errors_are_shown_without_labkits_frames():
    def train(worker):
        try:
            worker.log(loss="not a number")
        except TypeError as error:
            raise RuntimeError("outer") from error

    with pytest.raises(lk.RankFailed) as caught:
        launch(train, ranks=1)
    text = str(caught.value)
    assert "The above exception was the direct cause" in text
    assert "takes a number, not a str" in text
    assert "/labkit/worker/" not in text


def test_a_killed_rank_is_named_with_its_signal():
    def train(worker):
        if worker.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))

    with pytest.raises(
        lk.RankFailed, match=r"rank 1 was killed from outside.*9 \(SIGK"
    ):
        launch(train)


@pytest.mark.parametrize("status", [0, 3])
def test_a_rank_that_exits_by_itself_is_named(status):
    def train(worker, status):
        if worker.rank == 1:
            os._exit(status)
        dist.all_reduce(torch.ones(1))

    message = rf"rank 1 ended without a result \(exit status {status}\)"
    with pytest.raises(lk.RankFailed, match=message):
        launch(train, kwargs={"status": status})


def test_sys_exit_in_a_rank_is_an_error():
    def train(worker):
        sys.exit(3)

    with pytest.raises(lk.RankFailed, match="SystemExit: 3"):
        launch(train, ranks=1)


def test_a_result_that_cannot_be_pickled_is_named():
    with pytest.raises(
        lk.RankFailed, match=r"the result of rank 0 \(a lock\) cannot be sent back"
    ):
        launch(lambda worker: threading.Lock(), ranks=1)


def test_an_exception_that_cannot_be_shown_is_named_all_the_same():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError

    def fail(worker):
        raise Mute

    with pytest.raises(lk.RankFailed, match="Mute: <exception str"):
        launch(fail, ranks=1)


def test_a_run_whose_directory_was_deleted_ends():
    import shutil

    def delete(worker):
        shutil.rmtree(os.path.dirname(os.readlink("/proc/self/fd/1")))
        threading.Event().wait()

    run = lk.start(delete, ranks=1)
    while run.path.exists():
        run.monitor.ended.wait(0.01)
    run.stop()
    with pytest.raises(lk.RunDirectoryError, match="the end of the run could not be"):
        run.wait()
    assert launch(lambda worker: worker.rank).results[1] == 1


def test_a_flood_of_lines_is_cut_off_in_the_cell_and_kept_in_the_log(capsys):
    def flood(worker):
        for index in range(12_000):
            print(index)

    run = launch(flood, ranks=1)
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 10_001
    assert "all: run.logs(rank)" in shown[-1]
    assert len(run.logs(0).splitlines()) == 12_000


def test_the_next_launch_works_after_a_failure():
    def fail(worker):
        raise ValueError

    with pytest.raises(lk.RankFailed):
        launch(fail)
    assert launch(lambda worker: worker.rank).results[1] == 1


# What is refused before anything starts


@pytest.mark.parametrize(
    ("ranks", "error"),
    [(0, ValueError), (-1, ValueError), (True, ValueError), (2.0, TypeError),
     ("2", TypeError), (None, TypeError), (10**9, ValueError)],
)  # fmt: skip
def test_impossible_numbers_of_ranks_are_refused(ranks, error):
    with pytest.raises(error, match="ranks"):
        launch(lambda worker: 1, ranks=ranks)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "mpi"}, "backend must be one of 'auto', 'nccl', 'gloo'"),
        ({"device": "tpu"}, "device must be one of 'auto', 'cuda', 'cpu'"),
        ({"stall_s": 0}, "stall_s must be more than 0"),
        ({"timeout_s": float("nan")}, "timeout_s must be more than 0"),
    ],
)
def test_invalid_options_say_what_is_valid(options, message):
    with pytest.raises(ValueError, match=message):
        launch(lambda worker: 1, **options)


def test_a_function_without_a_worker_argument_is_refused():
    with pytest.raises(TypeError, match="the first one is always the worker"):
        launch(lambda: 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": 5}, "name must be a text, not 5"),
        ({"kwargs": [1]}, "args is a tuple and kwargs a dict"),
        ({"args": 1}, "args is a tuple and kwargs a dict"),
    ],
)
def test_options_of_the_wrong_type_are_refused(options, message):
    with pytest.raises(TypeError, match=message):
        launch(lambda worker: 1, **options)


def test_functions_that_would_not_run_are_refused():
    async def later(worker):
        return 1

    def piecewise(worker):
        yield 1

    with pytest.raises(TypeError, match="later is an async function"):
        launch(later)
    with pytest.raises(TypeError, match="piecewise is a generator function"):
        launch(piecewise)


def test_a_deleted_folder_is_named(tmp_path, monkeypatch):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(FileNotFoundError, match="current folder was deleted"):
        launch(lambda worker: 1)


def test_missing_and_unknown_arguments_are_refused():
    def train(worker, lr):
        return lr

    with pytest.raises(TypeError, match="missing a required argument: 'lr'"):
        launch(train)
    with pytest.raises(TypeError, match="unexpected keyword argument 'lrate'"):
        launch(train, kwargs={"lr": 1, "lrate": 1})


def test_what_is_not_callable_is_refused():
    with pytest.raises(TypeError, match="takes a function"):
        launch(42)


def test_refusals_leave_no_run_behind():
    before = len(lk.runs())
    with pytest.raises(lk.CannotSend):
        launch(lambda worker, lock: 1, kwargs={"lock": threading.Lock()})
    with pytest.raises(ValueError, match=r"NCCL needs one GPU|no GPU is visible"):
        launch(lambda worker: 1, ranks=64, backend="nccl")
    assert len(lk.runs()) == before
