"""Launches on GPUs: NCCL with a GPU for each rank, gloo with several ranks on one."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import labkit as lk


def describe(worker):
    """Where this rank is, and the sum over ranks of a tensor on its GPU."""
    number = torch.full((1000,), worker.rank + 1.0, device=worker.device)
    dist.all_reduce(number)
    return {
        "device": str(worker.device),
        "current": torch.cuda.current_device(),
        "backend": dist.get_backend(),
        "bound": str(dist.distributed_c10d._get_default_group().bound_device_id),
        "sum": number[0].item(),
    }


def train(worker, steps=8):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(256, 256).to(worker.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(32, 256, generator=torch.Generator().manual_seed(1))
    mine = inputs[worker.rank :: worker.world_size].to(worker.device)
    for _ in range(steps):
        loss = model(mine).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        worker.log(loss=loss, samples=len(mine))
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.gpu(1)
def test_one_rank_runs_on_nccl():
    found = lk.launch(describe, ranks=1).results[0]
    assert found == {
        "device": "cuda:0", "current": 0, "backend": "nccl", "bound": "cuda:0",
        "sum": 1.0,
    }  # fmt: skip


@pytest.mark.gpu(2)
def test_each_rank_has_a_gpu_of_its_own():
    run = lk.launch(describe, ranks=2)
    assert [run.results[rank]["device"] for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert [run.results[rank]["current"] for rank in range(2)] == [0, 1]
    assert [run.results[rank]["bound"] for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert {run.results[rank]["backend"] for rank in range(2)} == {"nccl"}
    assert {run.results[rank]["sum"] for rank in range(2)} == {3.0}


@pytest.mark.gpu(2)
def test_visible_devices_are_respected(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    run = lk.launch(lambda worker: torch.cuda.device_count(), ranks=1)
    assert run.results[0] == 1
    with pytest.raises(ValueError, match="2 ranks but 1 GPU is visible"):
        lk.launch(describe, ranks=2, backend="nccl")


@pytest.mark.gpu(2)
def test_ddp_on_two_gpus_equals_one_process():
    single = lk.launch(train, ranks=1, device="cpu").results[0]
    for weights in lk.launch(train, ranks=2, backend="nccl").results.values():
        assert not weights.is_cuda, "results travel on the CPU"
        assert (weights - single).abs().max() < 1e-5


@pytest.mark.gpu(1)
def test_several_ranks_share_one_gpu_over_gloo(monkeypatch):
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    run = lk.launch(describe, ranks=3, device="cuda", backend="gloo")
    assert {run.results[rank]["device"] for rank in range(3)} == {"cuda:0"}
    assert {run.results[rank]["sum"] for rank in range(3)} == {6.0}
    single = lk.launch(train, ranks=1, device="cpu").results[0]
    shared = lk.launch(train, ranks=2, device="cuda", backend="gloo").results[1]
    assert (shared - single).abs().max() < 1e-5


@pytest.mark.gpu(1)
def test_memory_is_the_allocators_own():
    def grow(worker):
        kept = torch.ones(25_000_000, device=worker.device)  # 100 MB
        worker.log(loss=kept[0])

    row = lk.launch(grow, ranks=1, backend="nccl").metrics.iloc[0]
    assert 100e6 <= row["allocated_bytes"] < 110e6
    assert row["reserved_bytes"] >= row["allocated_bytes"]
    assert row["peak_allocated_bytes"] >= row["allocated_bytes"]
    assert row["memory_bytes"] == row["reserved_bytes"]


@pytest.mark.gpu(1)
def test_a_step_ends_with_the_work_on_the_gpu():
    """Queued kernels take far longer than it takes to queue them."""

    def work(worker):
        a = torch.randn(8192, 8192, device=worker.device)
        torch.cuda.synchronize()
        event = (
            torch.cuda.Event(enable_timing=True),
            torch.cuda.Event(enable_timing=True),
        )
        worker.log(loss=0.0)
        event[0].record()
        for _ in range(20):
            a = (a @ a).clamp(-1, 1)
        event[1].record()
        worker.log(loss=0.0)
        return event[0].elapsed_time(event[1]) / 1000

    run = lk.launch(work, ranks=1, backend="nccl")
    assert run.metrics["step_s"].iloc[1] >= 0.99 * run.results[0]


@pytest.mark.gpu(1)
def test_cuda_in_the_kernel_does_not_disturb_the_ranks():
    torch.ones(1, device="cuda")
    assert lk.launch(describe, ranks=1, backend="nccl").results[0]["sum"] == 1.0


@pytest.mark.gpu(1)
def test_a_tensor_on_a_gpu_is_refused_before_anything_starts():
    tensor = torch.ones(1, device="cuda")
    with pytest.raises(lk.CannotSend, match=r"cannot send tensor \(a Tensor\)"):
        lk.launch(lambda worker: tensor, ranks=1)
