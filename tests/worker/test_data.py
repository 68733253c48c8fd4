"""Data is the same everywhere, and dealt without overlap."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

import labkit as lk
from labkit.worker.data.batches import split


def rank(number: int, world_size: int) -> SimpleNamespace:
    """As much of a worker as `batches` needs."""
    return SimpleNamespace(
        rank=number, world_size=world_size, device=torch.device("cpu")
    )


def dealt(length: int, world_size: int, global_batch: int, steps: int) -> list[list]:
    """Sample numbers by step and rank."""
    data = TensorDataset(torch.arange(length))
    parts = [
        [
            batch[0].tolist()
            for batch in lk.batches(
                data, rank(r, world_size), global_batch=global_batch, steps=steps
            )
        ]
        for r in range(world_size)
    ]
    return [list(step) for step in zip(*parts, strict=True)]


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(12, 40), st.integers(1, 9))
def test_a_step_is_the_same_samples_for_any_number_of_ranks(
    world_size, share, length, steps
):
    batch = world_size * share
    alone = dealt(length, 1, batch, steps)
    together = dealt(length, world_size, batch, steps)
    assert len(together) == steps
    for (whole,), parts in zip(alone, together, strict=True):
        assert [len(part) for part in parts] == [share] * world_size
        assert sorted(sum(parts, [])) == sorted(whole)  # noqa: RUF017


def test_no_sample_comes_twice_in_an_epoch_and_epochs_differ():
    steps = dealt(length=24, world_size=2, global_batch=8, steps=6)
    epochs = [sum(sum(steps[i : i + 3], []), []) for i in (0, 3)]  # noqa: RUF017
    assert [sorted(epoch) for epoch in epochs] == [list(range(24))] * 2
    assert epochs[0] != epochs[1]


def test_another_seed_is_another_order():
    data = TensorDataset(torch.arange(100))
    orders = [
        next(lk.batches(data, rank(0, 1), global_batch=50, steps=1, seed=seed))[0]
        for seed in (0, 0, 1)
    ]
    assert torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])


@pytest.mark.parametrize(
    ("batch", "ranks", "message"),
    [
        (10, 4, "global_batch 10 cannot be split over 4 ranks; use 8 or 12"),
        (3, 4, "global_batch 3 cannot be split over 4 ranks; use 4"),
        (0, 4, "global_batch must be 1 or more, not 0"),
    ],
)
def test_uneven_splits_name_what_is_valid(batch, ranks, message):
    with pytest.raises(ValueError, match=message):
        split(batch, ranks)


def test_a_batch_larger_than_the_dataset_is_refused():
    data = TensorDataset(torch.arange(10))
    with pytest.raises(ValueError, match=r"global_batch 16 .* has: 10 samples"):
        lk.batches(data, rank(0, 2), global_batch=16, steps=1)


def test_text_is_real_and_targets_follow_tokens():
    text = lk.Text(context=32, max_bytes=100_000)
    tokens, targets = text[0]
    assert tokens.shape == targets.shape == (32,)
    assert tokens.dtype == torch.int64
    assert torch.equal(tokens[1:], targets[:-1])
    assert len(text) == 99_999 // 32
    words = bytes(torch.cat([text[i][0] for i in range(300)]).tolist())
    assert b"import" in words
    assert b"def " in words


def test_windows_do_not_overlap_and_leave_nothing_out():
    text = lk.Text(context=7, max_bytes=1000)
    joined = torch.cat([text[i][0] for i in range(len(text))])
    assert torch.equal(joined, text.data[: 7 * len(text)].long())
    assert torch.equal(text[-1][0], text[len(text) - 1][0])
    with pytest.raises(IndexError):
        text[len(text)]


def test_text_is_the_same_in_every_rank():
    run = lk.launch(lambda worker: lk.Text(context=64).data.sum().item(), ranks=2)
    assert run.results[0] == run.results[1] == lk.Text(context=64).data.sum().item()


def test_too_little_text_for_a_window_is_refused():
    with pytest.raises(ValueError, match=r"10 bytes of text hold no window of 64 \+ 1"):
        lk.Text(context=64, max_bytes=10)


def test_digits_are_pictures_of_digits():
    digits = lk.Digits()
    pixels, digit = digits[0]
    assert (len(digits), pixels.shape, pixels.dtype) == (1797, (64,), torch.float32)
    assert 0 <= digits.pixels.min() < digits.pixels.max() == 1
    assert sorted(set(digits.digits.tolist())) == list(range(10))
    assert digit.dtype == torch.int64
