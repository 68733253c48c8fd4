"""Persistent ranks: state from call to call, and what an error leaves of it."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist

import labkit as lk
from tests.processes import wait_until, wait_until_gone


@pytest.fixture
def ranks():
    with lk.Ranks(3) as ranks:
        yield ranks


def pids(ranks):
    return list(ranks.run(lambda worker: os.getpid()).results.values())


def remember(worker):
    worker.state.kept = worker.rank


def recall(worker):
    total = torch.tensor([worker.state.kept])
    dist.all_reduce(total)
    return total.item()


def test_state_and_processes_last_from_call_to_call(ranks):
    before = pids(ranks)
    ranks.run(remember)
    assert list(ranks.run(recall).results.values()) == [3, 3, 3]
    assert pids(ranks) == before


def test_each_call_is_a_run_of_its_own(ranks, capsys):
    def talk(worker, word):
        print(word)
        worker.log(loss=1.0)
        return word

    first = ranks.run(talk, args=("one",))
    second = ranks.run(talk, kwargs={"word": "two"}, name="second")
    assert first.path != second.path
    assert (first.results[1], second.results[2]) == ("one", "two")
    assert (first.logs(0), second.logs(0)) == ("one\n", "two\n")
    assert len(second.metrics) == 3
    assert lk.open_run(second.path).name == "second"
    assert "[rank 1] one" in capsys.readouterr().out


def test_an_error_keeps_ranks_that_all_came_back(ranks, capsys):
    def fail(worker):
        if worker.rank == 1:
            raise ValueError("boom")

    ranks.run(remember)
    before = pids(ranks)
    with pytest.raises(lk.RankFailed, match="boom"):
        ranks.run(fail)
    assert "the ranks and their state were kept" in capsys.readouterr().out
    assert ranks.run(recall).results[0] == 3
    assert pids(ranks) == before


def test_an_error_while_peers_wait_ends_the_ranks_and_says_so(ranks, capsys):
    def fail(worker):
        if worker.rank == 1:
            raise ValueError("boom")
        dist.barrier()

    before = pids(ranks)
    with pytest.raises(lk.RankFailed, match="boom") as caught:
        ranks.run(fail)
    assert caught.value.rank == 1
    assert "the ranks were ended and their state is lost" in capsys.readouterr().out
    assert wait_until_gone(before) == []
    assert not set(pids(ranks)) & set(before)


def test_ranks_that_called_different_numbers_of_collectives_are_not_kept(capsys):
    """Their next collectives would not belong together."""

    def fail(worker):
        group = worker.mesh(dp=1, tp=2).get_group("dp")
        dist.all_reduce(torch.ones(1))
        if worker.rank == 0:
            dist.all_reduce(torch.ones(1), async_op=True)
        del group
        raise ValueError("boom")

    with lk.Ranks(2) as ranks, pytest.raises(lk.RankFailed, match="boom"):
        ranks.run(fail)
    assert "more collectives than others" in capsys.readouterr().out


def test_an_interrupt_keeps_the_ranks(ranks, capsys):
    def endless(worker):
        while True:
            worker.log(loss=1.0)
            time.sleep(0.005)

    ranks.run(remember)

    def press():
        wait_until(lambda: ranks.last.telemetry.last_step(2) is not None)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    run = ranks.run(endless)
    thread.join()
    assert run.status == "stopped"
    words = capsys.readouterr().out.splitlines()
    assert words[0].startswith("stopped by you at step")
    assert words[1] == "the ranks and their state were kept"
    assert ranks.run(recall).results[1] == 3


def test_ranks_that_were_killed_between_calls_are_replaced(ranks, capsys):
    before = pids(ranks)
    os.kill(before[1], signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(before[1]))  # the nursery knows by then
    after = pids(ranks)
    assert not set(before) & set(after)
    assert "ended since the last call" in capsys.readouterr().out
    assert wait_until_gone(before) == []


def test_a_rank_that_exits_ends_the_others(ranks):
    before = pids(ranks)
    with pytest.raises(lk.RankFailed, match="rank 2 ended without a result"):
        ranks.run(lambda worker: worker.rank == 2 and os._exit(0))
    assert wait_until_gone(before) == []


def test_closing_ends_the_processes():
    with lk.Ranks(2) as ranks:
        before = pids(ranks)
    assert wait_until_gone(before) == []
    assert "closed" in repr(ranks)
    with pytest.raises(ValueError, match="were closed; make new ones"):
        ranks.run(remember)


def test_ranks_that_nobody_holds_any_more_end():
    ranks = lk.Ranks(2)
    before = pids(ranks)
    del ranks
    gc.collect()
    assert wait_until_gone(before) == []


def test_a_launch_beside_waiting_ranks_works(ranks):
    ranks.run(remember)
    assert lk.launch(lambda worker: worker.rank, 2).results[1] == 1
    assert ranks.run(recall).results[0] == 3


def test_a_call_is_refused_while_a_run_works(ranks):
    run = lk.start(lambda worker: threading.Event().wait(), 1)
    with pytest.raises(lk.RunInProgress):
        ranks.run(remember)
    run.stop()
    run.wait()
    ranks.run(remember)


def test_a_stall_in_kept_ranks_is_named():
    def early(worker):
        if worker.rank == 0:
            dist.barrier()

    with lk.Ranks(2) as ranks:
        ranks.run(lambda worker: dist.barrier())
        with pytest.raises(lk.RunStalled, match="rank 1 finished"):
            ranks.run(early)
        assert ranks.run(lambda worker: worker.rank).results[1] == 1


def test_a_class_defined_beside_the_test_lives_on(ranks):
    def build(worker):
        worker.state.model = torch.nn.Linear(2, 1)

    ranks.run(build)
    shape = ranks.run(lambda worker: tuple(worker.state.model.weight.shape)).results[0]
    assert shape == (1, 2)


def test_cells_share_names_with_functions(ranks):
    ranks.run_cell("y = worker.rank + 5", "cell", [0, 1, 2])
    assert ranks.run(lambda worker: worker.state.y).results[2] == 7
    run = ranks.run_cell("y * 2", "cell", [1])
    assert dict(run.results) == {0: None, 1: "12", 2: None}


def test_wrong_arguments_are_refused_before_anything_starts():
    with pytest.raises(ValueError, match="ranks must be 1 or more"):
        lk.Ranks(0)
    ranks = lk.Ranks(2)
    with pytest.raises(TypeError, match="takes a function"):
        ranks.run(42)
    assert "not started" in repr(ranks)


def test_a_call_that_leaves_ranks_out_of_step_is_the_last_one(capsys):
    """Its stray collective would meet the next call's."""

    def stray(worker):
        if worker.rank == 0:
            worker.state.work = dist.all_reduce(torch.ones(2), async_op=True)

    def add(worker):
        total = torch.ones(2)
        dist.all_reduce(total)
        return total.tolist()

    with lk.Ranks(2) as ranks:
        try:
            ranks.run(stray)
        except lk.RunStalled:
            pass  # it was noticed even before the end
        assert "their state is lost" in capsys.readouterr().out
        assert dict(ranks.run(add).results) == {0: [2.0, 2.0], 1: [2.0, 2.0]}


def test_ranks_that_left_their_group_form_it_again(ranks):
    ranks.run(lambda worker: dist.destroy_process_group())
    ranks.run(remember)
    assert ranks.run(recall).results[0] == 3
