"""The handle, its telemetry and its probes, on real ranks."""

from __future__ import annotations

import gc
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import labkit as lk
from labkit.core import events
from labkit.worker.emit import Emitter
from labkit.worker.probe import tensor_bytes
from labkit.worker.worker import WARMUP_LOGS, Worker


@pytest.fixture
def worker(tmp_path):
    return Worker(
        0,
        1,
        torch.device("cpu"),
        Emitter(tmp_path, 0, started_at=0.0),
        SimpleNamespace(),
    )


@pytest.fixture
def logged(tmp_path):
    """What the worker has logged so far."""
    return lambda: [
        events.decode(line)
        for line in (tmp_path / "rank-0.jsonl").read_bytes().rstrip(b"\0").splitlines()
    ]


def test_one_line_for_each_call(worker, logged):
    for step in range(3):
        worker.log(loss=step)
        assert len(logged()) == step + 1


def test_steps_count_from_zero_unless_they_are_given(worker, logged):
    worker.log(loss=1)
    worker.log(loss=1)
    worker.log(loss=1, step=10)
    worker.log(loss=1)
    assert [event["step"] for event in logged()] == [0, 1, 10, 11]


def test_the_first_logs_are_marked_as_warm_up(worker, logged):
    for _ in range(WARMUP_LOGS + 2):
        worker.log(samples=8, tokens=512)
    assert ["warmup" in event for event in logged()] == [True] * WARMUP_LOGS + [
        False
    ] * 2
    assert all(event["step_s"] > 0 for event in logged())
    assert all(event["samples"] == 8 for event in logged())


def test_many_logs_outgrow_the_reserved_room(worker, logged, tmp_path):
    for step in range(5000):
        worker.log(loss=step)
    assert [event["loss"] for event in logged()] == list(range(5000))
    worker._emitter.close()
    data = (tmp_path / "rank-0.jsonl").read_bytes()
    assert data.endswith(b"}\n")


def test_losses_may_be_tensors_numbers_and_not_finite(worker, logged):
    numbers = (torch.tensor(2.5), torch.tensor([2.5]), np.float64(2.5), np.float32(2.5))
    for loss in (*numbers, 2.5, float("nan")):
        worker.log(loss=loss)
    losses = [event["loss"] for event in logged()]
    assert losses[:5] == [2.5] * 5
    assert math.isnan(losses[5])


def test_further_numbers_become_columns(worker, logged):
    worker.log(lr=torch.tensor(0.5), grad_norm=2)
    assert (logged()[0]["lr"], logged()[0]["grad_norm"]) == (0.5, 2)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"loss": torch.ones(2, 3)}, r"log\(loss=...\) takes one number, .* \(2, 3\)"),
        ({"loss": "low"}, r"log\(loss=...\) takes a number, not a str"),
        ({"samples": [1]}, r"log\(samples=...\) takes a number, not a list"),
        ({"lr": torch.tensor(1j)}, r"log\(lr=...\) takes a number, not a complex one"),
        ({"lr": None}, r"log\(lr=...\) takes a number, not a NoneType"),
    ],
)
def test_what_is_no_number_is_refused(worker, values, message):
    with pytest.raises(TypeError, match=message):
        worker.log(**values)


@pytest.mark.parametrize("name", ["rank", "kind", "step_s", "memory_bytes"])
def test_labkits_own_columns_cannot_be_overwritten(worker, name):
    with pytest.raises(
        ValueError, match=rf"log\({name}=...\) would overwrite labkit's own"
    ):
        worker.log(**{name: 1})


def test_a_column_has_a_python_name(worker, logged):
    with pytest.raises(ValueError, match="a column needs a Python name"):
        worker.log(**{'quo"te': 1})
    worker.log(größe=1)
    assert logged()[-1]["größe"] == 1


def test_memory_of_process_and_tensors_is_added(worker, logged):
    worker.log(loss=0.0)
    event = logged()[0]
    assert event["memory_bytes"] == event["process_bytes"] > 50e6
    assert event["peak_process_bytes"] >= event["process_bytes"] * 0.9
    assert event["tensor_bytes"] >= 0


def test_bytes_of_tensors_are_exact():
    """Parameters, gradients and Adam's two states, each counted once."""

    def count(worker):
        gc.collect()
        before = tensor_bytes()
        model = torch.nn.Linear(1000, 500)  # 500,500 parameters of 4 bytes
        parameters = tensor_bytes() - before
        model(torch.ones(1, 1000)).sum().backward()
        gradients = tensor_bytes() - before - parameters
        optimizer = torch.optim.Adam(model.parameters())
        optimizer.step()
        steps = 2 * 4  # Adam's step counters
        states = tensor_bytes() - before - parameters - gradients - steps
        view = model.weight[:10]
        views = tensor_bytes() - before - parameters - gradients - steps - states
        del view
        return parameters, gradients, states, views

    run = lk.launch(count, ranks=1)
    size = 500_500 * 4
    assert run.results[0] == (size, size, 2 * size, 0)


def test_tensors_of_other_ranks_and_of_the_kernel_are_not_counted():
    kept = torch.ones(10_000_000)
    run = lk.launch(lambda worker: tensor_bytes(), ranks=2)
    assert kept.nbytes == 40_000_000
    assert max(run.results.values()) < 1_000_000


def test_a_large_tensor_shows_in_both_memories():
    def grow(worker):
        worker.log(loss=0.0)
        kept = torch.ones(50_000_000)  # 200 MB, written so that it is resident
        worker._memory.due_at = 0.0
        worker.log(loss=kept[0])

    metrics = lk.launch(grow, ranks=1).metrics
    process, tensors = metrics["process_bytes"], metrics["tensor_bytes"]
    assert process[1] - process[0] > 190e6
    assert 200e6 <= tensors[1] - tensors[0] < 201e6


def test_a_mesh_has_named_axes_and_the_last_varies_fastest():
    def coordinates(worker):
        mesh = worker.mesh(dp=2, pp=2)
        return mesh.mesh_dim_names, list(mesh.get_coordinate())

    run = lk.launch(coordinates, ranks=4)
    assert run.results[0][0] == ("dp", "pp")
    assert [run.results[rank][1] for rank in range(4)] == [
        [0, 0], [0, 1], [1, 0], [1, 1],
    ]  # fmt: skip


def test_a_mesh_of_the_wrong_size_says_the_right_one(worker):
    with pytest.raises(ValueError, match=r"mesh dp=2 x pp=3 has 6 places, .* 1 ranks"):
        worker.mesh(dp=2, pp=3)


def test_the_handle_says_which_rank_it_is(worker):
    assert repr(worker) == "<Worker rank 0 of 1 on cpu>"
