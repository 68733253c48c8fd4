"""Ranks that wait for each other: each kind is named for what it is."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import labkit as lk
from labkit.core.pulse import Call, Pulse
from labkit.driver import diagnosis
from labkit.driver.stall import StallWatch


def stalled(function, ranks=2, stall_s=30.0):
    """The error of a run that stalls."""
    with pytest.raises(lk.RunStalled) as caught:
        lk.launch(function, ranks, stall_s=stall_s)
    run = lk.runs()[0]
    assert run.status == "failed"
    assert caught.value.verdict in run.error
    return caught.value


def test_another_kind_of_collective():
    def train(worker):
        dist.all_reduce(torch.ones(4))
        if worker.rank == 0:
            dist.broadcast(torch.ones(2), 0)
        else:
            dist.all_reduce(torch.ones(4))

    error = stalled(train, ranks=3)
    assert error.verdict.startswith(
        "ranks called different collectives: rank 0 broadcast #2 of 2 float32; "
        "ranks 1, 2 all_reduce #2 of 4 float32. "
    )
    lines = error.table.splitlines()
    assert lines[0].split()[:2] == ["rank", "step"]
    assert "test_stall.py" in lines[1]
    assert ", in train: dist.broad" in lines[1]
    assert ", in train: dist.all_r" in lines[2]


@pytest.mark.parametrize("ranks", [2, 4])
def test_another_size(ranks):
    """Two ranks abort, more hang or go on to the next collective."""

    def train(worker):
        worker.log(loss=1.0)
        dist.all_reduce(torch.ones(8 if worker.rank == 0 else 4))
        dist.barrier()

    with pytest.raises((lk.RunStalled, lk.RankFailed)) as caught:
        lk.launch(train, ranks)
    text = str(caught.value)
    assert "ank 0 all_reduce #1 of 8 float32" in text
    assert "all_reduce #1 of 4 float32" in text
    assert "anks called different collectives" in text
    if isinstance(caught.value, lk.RankFailed):
        assert "terminate called" in text
        assert "signal 6 (SIGABRT)" in text


def test_a_rank_that_finished_early():
    def train(worker):
        for _ in range(9 if worker.rank == 1 else 10):
            dist.all_reduce(torch.ones(3))
            worker.log(loss=1.0)

    error = stalled(train)
    assert (
        "rank 1 finished after 9 collectives, rank 0 is waiting in its 10th (all_reduce"
        in error.verdict
    )
    assert "lengths must match (9 vs 10)" in error.verdict


def test_data_that_ends_earlier_on_one_rank():
    class Stream(torch.utils.data.IterableDataset):
        def __init__(self, length):
            self.length = length

        def __iter__(self):
            return (torch.ones(4) for _ in range(self.length))

    def train(worker):
        model = DistributedDataParallel(torch.nn.Linear(4, 1))
        data = Stream(100 if worker.rank == 0 else 90)
        for batch in torch.utils.data.DataLoader(data, batch_size=10):
            loss = model(batch).sum()
            loss.backward()
            worker.log(loss=loss)

    assert "if rank 1 ran out of data, lengths must match (9 vs 10)" in (
        stalled(train).verdict
    )


def test_a_sampler_that_pads_lets_every_rank_finish():
    def train(worker):
        from torch.utils.data import DataLoader, DistributedSampler

        data = torch.ones(101, 4)
        loader = DataLoader(data, batch_size=10, sampler=DistributedSampler(data))
        model = DistributedDataParallel(torch.nn.Linear(4, 1))
        for batch in loader:
            model(batch).sum().backward()
        return len(loader)

    assert dict(lk.launch(train, 2).results) == {0: 6, 1: 6}


def test_early_stop_on_rank_0_only():
    def train(worker):
        model = DistributedDataParallel(torch.nn.Linear(4, 1))
        for step in range(5):
            if worker.rank == 0 and step == 2:
                break
            model(torch.ones(2, 4)).sum().backward()
            worker.log(loss=1.0)

    error = stalled(train)
    assert "rank 0 finished after" in error.verdict
    assert "(gradients)" in error.verdict
    assert "(2 vs 3)" in error.verdict


def test_evaluation_on_rank_0_through_the_wrapper():
    def train(worker):
        layers = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)
        model = DistributedDataParallel(torch.nn.Sequential(*layers))
        for _ in range(3):
            model(torch.randn(2, 4)).sum().backward()
        if worker.rank == 0:
            model(torch.randn(2, 4))
        model(torch.randn(2, 4)).sum().backward()

    verdict = stalled(train).verdict
    assert "(buffers)" in verdict
    assert "(gradients)" in verdict
    assert "rank 0 broadcast #" in verdict


def test_a_batch_that_is_skipped_on_one_rank():
    def train(worker):
        model = DistributedDataParallel(torch.nn.Linear(4, 1))
        for step in range(4):
            loss = model(torch.ones(2, 4)).sum()
            if worker.rank == 1 and step == 2:
                continue
            loss.backward()
            worker.log(loss=loss)

    verdict = stalled(train).verdict
    assert "rank 1 finished after" in verdict


def test_state_dict_on_rank_0_only():
    def train(worker):
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_model_state_dict,
        )
        from torch.distributed.fsdp import fully_shard

        model = torch.nn.Linear(8, 8)
        fully_shard(model)
        model(torch.ones(2, 8)).sum().backward()
        if worker.rank == 0:
            options = StateDictOptions(full_state_dict=True)
            get_model_state_dict(model, options=options)
        else:
            threading.Event().wait()

    verdict = stalled(train, stall_s=2).verdict
    assert verdict.startswith("rank 0 waits in all_gather #")
    assert "(state_dict), but rank 1 has not come to it" in verdict
    assert "every rank must call it" in verdict
    assert "stall_s=2 seconds" in verdict


def test_a_state_dict_that_every_rank_gathers_loads_into_a_plain_model():
    def save(worker):
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_model_state_dict,
        )
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        fully_shard(model)
        output = model(torch.ones(1, 4))
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_model_state_dict(model, options=options), output.detach()

    weights, output = lk.launch(save, 2).results[0]
    plain = torch.nn.Linear(4, 2)
    plain.load_state_dict(weights)
    assert torch.equal(plain(torch.ones(1, 4)).detach(), output)


def test_a_receive_without_a_send():
    def train(worker):
        if worker.rank == 0:
            dist.recv(torch.ones(2), 1)
        else:
            threading.Event().wait()

    error = stalled(train, stall_s=2)
    assert "rank 0 is in recv from rank 1" in error.verdict
    assert ", in train: dist.recv(" in error.table


def test_a_subgroup_is_compared_with_its_own_ranks():
    def train(worker):
        mesh = worker.mesh(dp=2, tp=2)
        for _ in range(2 if worker.rank == 3 else 3):
            dist.all_reduce(torch.ones(2), group=mesh.get_group("tp"))

    verdict = stalled(train, ranks=4).verdict
    assert (
        "rank 3 finished after 2 collectives, rank 2 is waiting in its 3rd" in verdict
    )


def test_a_rank_that_is_suspended():
    def train(worker):
        if worker.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()

    error = stalled(train, stall_s=4)
    assert "rank 0 waits in barrier #1, but rank 1" in error.verdict
    assert "silent for" in error.table


def test_a_long_step_is_no_stall():
    """One rank computes for longer than stall_s, and nobody waits for it."""

    def train(worker):
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            sum(range(1000))
        dist.all_reduce(torch.ones(1))
        return True

    assert all(lk.launch(train, 2, stall_s=1).results.values())


def test_a_difference_that_hurts_nobody_is_a_warning():
    def train(worker):
        # the ranks' sizes are the same in bytes, so gloo does not notice
        kind = torch.float32 if worker.rank == 0 else torch.int32
        dist.broadcast(torch.ones(4, dtype=kind), 0)

    with pytest.warns(
        UserWarning, match=r"finished, but ranks called different.*int32"
    ):
        run = lk.launch(train, 2)
    assert run.status == "finished"


def test_a_good_run_warns_of_nothing():
    def train(worker):
        model = DistributedDataParallel(torch.nn.Linear(4, 1))
        for _ in range(100):
            model(torch.ones(2, 4)).sum().backward()
        everything = [None, None]
        dist.all_gather_object(everything, "x" * (1 + 5 * worker.rank))
        dist.gather(torch.ones(2), [torch.ones(2)] * 2 if worker.rank == 0 else None)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert lk.launch(train, 2).status == "finished"


# Correct programs that look like stalls


def test_more_collectives_than_the_recorder_holds_are_no_early_end():
    def train(worker):
        mine = dist.new_group([0])
        dist.barrier()
        parts = [torch.zeros(4) for _ in range(3)] if worker.rank == 2 else None
        if worker.rank == 1:
            time.sleep(3)  # its work; the others wait for it in the gather
        dist.gather(torch.ones(4), parts, dst=2)
        if worker.rank == 0:
            for _ in range(200):
                dist.all_reduce(torch.ones(1), group=mine)

    assert lk.launch(train, 3).status == "finished"


def test_a_group_that_was_formed_anew_is_not_compared_with_the_old(tmp_path):
    def train(worker):
        dist.all_reduce(torch.ones(4))
        dist.all_reduce(torch.ones(4))
        dist.destroy_process_group()
        dist.init_process_group(
            "gloo",
            init_method=f"file://{tmp_path}/again",
            rank=worker.rank,
            world_size=worker.world_size,
        )
        if worker.rank == 1:
            time.sleep(2)
        dist.broadcast(torch.ones(7), 0)

    assert lk.launch(train, 2).status == "finished"


def test_lines_that_are_written_over_are_progress():
    def train(worker):
        for number in range(12):
            print(f"\r{number}", end="", flush=True)
            time.sleep(0.25)

    assert lk.launch(train, 1, stall_s=1.5).status == "finished"


@pytest.mark.skipif(sys.platform != "linux", reason="children are seen in /proc")
def test_a_child_that_computes_is_progress():
    def train(worker):
        code = "import time; end = time.time() + 3\nwhile time.time() < end: pass"
        subprocess.run([sys.executable, "-c", code], check=True)

    assert lk.launch(train, 1, stall_s=1.5).status == "finished"


def test_a_receive_may_wait_for_a_rank_that_computes():
    def train(worker):
        if worker.rank == 0:
            end = time.monotonic() + 3
            while time.monotonic() < end:
                pass
            dist.send(torch.ones(1), 1)
        else:
            dist.recv(torch.ones(1), 0)

    assert lk.launch(train, 2, stall_s=1).status == "finished"


def test_a_monitor_that_was_frozen_counts_anew(tmp_path):
    watch = StallWatch(tmp_path, 2, stall_s=30.0, started_at=0.0)
    for rank in range(2):
        waiting = pulse(call(waiting=True))
        (tmp_path / f"rank-{rank}.pulse").write_bytes(waiting.to_line())
    watch.read()
    watch.read_at -= 100
    watch.waits = dict.fromkeys(watch.waits, watch.read_at - 1)
    watch.active_at = watch.read_at
    assert watch.find() is None


def test_all_ranks_suspended_are_ended():
    def train(worker):
        os.kill(os.getpid(), signal.SIGSTOP)

    assert "no rank logs" in stalled(train, stall_s=2).verdict


# The comparison alone


def call(number=1, **changes):
    made = Call(
        group="0",
        number=number,
        kind="all_reduce",
        elements=[4],
        dtype="float32",
        waiting=False,
        time_s=float(number),
    )
    return dataclasses.replace(made, **changes)


def pulse(*calls, **changes):
    made = Pulse(time_s=9.0, state="running", calls=list(calls), groups={"0": [0, 1]})
    return dataclasses.replace(made, **changes)


def test_a_pulse_survives_the_file():
    one = pulse(call(), line="a.py, line 1", step=3)
    assert Pulse.from_line(one.to_line()) == one


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b"{}", b'{"calls": 1}', b"null"])
def test_a_torn_pulse_is_none(line):
    assert Pulse.from_line(line) is None


def test_equal_calls_agree():
    assert diagnosis.explain({0: pulse(call()), 1: pulse(call())}) is None


def test_the_first_difference_is_named():
    other = call(2, kind="broadcast"), call(3, kind="reduce")
    text = diagnosis.disagreement({0: pulse(call(2), call(3)), 1: pulse(*other)})
    assert "rank 0 all_reduce #2" in text
    assert "rank 1 broadcast #2" in text


def test_groups_of_one_name_and_other_ranks_are_not_compared():
    other = pulse(call(kind="broadcast"), groups={"0": [2, 3]})
    assert diagnosis.disagreement({0: pulse(call()), 2: other}) is None


@pytest.mark.parametrize("kind", ["gather", "scatter", "all_to_all"])
def test_sizes_that_may_differ(kind):
    one, other = call(kind=kind), call(kind=kind, elements=[1, 1])
    assert diagnosis.disagreement({0: pulse(one), 1: pulse(other)}) is None


def test_ranks_that_did_not_join_are_named():
    pulses = {0: pulse(state="joining"), 2: pulse(state="joining")}
    assert diagnosis.not_joined(pulses, 3) == (
        "rank 1 did not join; ranks 0, 2 waited at the rendezvous"
    )


@pytest.mark.parametrize(
    ("number", "word"),
    [(1, "1st"), (2, "2nd"), (13, "13th"), (23, "23rd"), (111, "111th")],
)
def test_ordinals(number, word):
    assert diagnosis.ordinal(number) == word
