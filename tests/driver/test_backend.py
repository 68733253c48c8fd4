"""Which backend and device ranks get, for pretended numbers of GPUs."""

from __future__ import annotations

import pytest

from labkit.core.hardware import GPU, GiB, Hardware
from labkit.driver.backend import check_memory, choose, threads_per_rank


def machine(gpus: int, cuda: str | None = "13.0", cores: float = 8) -> Hardware:
    return Hardware(
        cores=cores,
        memory_bytes=2 * GiB,
        gpus=tuple(GPU(index=i, name="H100", memory_bytes=GiB) for i in range(gpus)),
        torch_version="2.13.0",
        torch_cuda=cuda,
    )


@pytest.mark.parametrize(
    ("ranks", "gpus", "options", "backend", "device"),
    [
        (1, 1, {}, "nccl", "cuda"),
        (4, 4, {}, "nccl", "cuda"),
        (4, 8, {}, "nccl", "cuda"),
        (4, 0, {}, "gloo", "cpu"),
        (4, 2, {}, "gloo", "cpu"),
        (2, 2, {"backend": "nccl"}, "nccl", "cuda"),
        (2, 2, {"device": "cuda"}, "nccl", "cuda"),
        (4, 2, {"device": "cuda"}, "gloo", "cuda"),
        (4, 1, {"device": "cuda", "backend": "gloo"}, "gloo", "cuda"),
        (2, 2, {"device": "cuda", "backend": "gloo"}, "gloo", "cuda"),
        (2, 2, {"backend": "gloo"}, "gloo", "cpu"),
        (2, 2, {"device": "cpu"}, "gloo", "cpu"),
    ],
)
def test_the_choice(ranks, gpus, options, backend, device):
    choice = choose(ranks, **options, hardware=machine(gpus))
    assert (choice.backend, choice.device) == (backend, device)
    assert choice.why.endswith(".")


def test_a_cpu_build_of_torch_uses_no_gpu():
    choice = choose(2, hardware=machine(2, cuda=None))
    assert (choice.backend, choice.device) == ("gloo", "cpu")
    assert "this PyTorch (2.13.0) is built for the CPU" in choice.why


def test_fewer_gpus_than_ranks_is_explained():
    why = choose(4, hardware=machine(1)).why
    assert "NCCL needs one GPU per rank, and there is 1 GPU for 4 ranks" in why
    assert "device='cuda' lets ranks share a GPU" in why


def test_more_ranks_than_gpus_is_refused_for_nccl(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(ValueError, match="you asked for 4 ranks") as caught:
        choose(4, "nccl", hardware=machine(1))
    assert str(caught.value) == (
        "you asked for 4 ranks but 1 GPU is visible (CUDA_VISIBLE_DEVICES=3). NCCL "
        "needs one GPU per rank. Use ranks=1, or backend='gloo' to keep 4 ranks"
    )


@pytest.mark.parametrize(
    ("gpus", "options", "message"),
    [
        (0, {"backend": "nccl"}, "no GPU is visible. Use backend='gloo'"),
        (0, {"device": "cuda"}, "no GPU is visible. Use device='cpu'"),
        (2, {"backend": "nccl", "device": "cpu"}, "works on GPUs only"),
    ],
)
def test_what_cannot_work_is_refused(gpus, options, message):
    with pytest.raises(ValueError, match=message):
        choose(2, **options, hardware=machine(gpus))


def test_more_processes_than_memory_is_refused():
    check_memory(8, machine(0))
    with pytest.raises(ValueError, match=r"100 ranks need about 6.4 GB .* at most 33"):
        check_memory(100, machine(0))


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"),
    [(8, 2, 4), (2, 4, 1), (1.5, 1, 1), (0.5, 1, 1), (8, 3, 2)],
)
def test_ranks_share_the_cores(cores, ranks, threads):
    assert threads_per_rank(ranks, machine(0, cores=cores)) == threads
