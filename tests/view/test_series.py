"""Lines of a figure are made of what was logged, thinned without losing extremes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.view import series
from labkit.view.series import MEAN, OF_RANK, Line, thinned


def line(values) -> Line:
    y = np.asarray(values, dtype=float)
    return Line(kind=OF_RANK, rank=0, x=np.arange(len(y), dtype=float), y=y)


def table(**columns) -> dict[str, np.ndarray]:
    return {name: np.asarray(values, dtype=float) for name, values in columns.items()}


finite = st.floats(-1e6, 1e6)


@given(st.lists(finite, min_size=1, max_size=500), st.integers(4, 50))
def test_thinning_keeps_smallest_and_largest_and_the_order(values, limit):
    whole = line(values)
    thin = thinned(whole, limit)
    assert len(thin.x) <= max(limit, 1)
    assert thin.y.min() == whole.y.min()
    assert thin.y.max() == whole.y.max()
    assert (np.diff(thin.x) > 0).all()
    assert np.array_equal(thin.y, whole.y[thin.x.astype(int)])


def test_short_lines_stay_whole():
    whole = line(range(100))
    assert thinned(whole) is whole


def test_a_hundred_thousand_points_become_few():
    values = np.random.default_rng(0).normal(size=100_000)
    values[77_777] = 99
    thin = thinned(line(values))
    assert len(thin.x) <= series.MAX_POINTS
    assert thin.y.max() == 99


def test_the_mean_is_over_ranks_at_equal_steps():
    tables = {
        0: table(step=[0, 1, 2], loss=[1.0, 2.0, 3.0]),
        1: table(step=[0, 1], loss=[3.0, 4.0]),
    }
    mean = series.mean_line(tables)
    assert mean.x.tolist() == [0, 1]
    assert mean.y.tolist() == [2.0, 3.0]


def test_the_mean_leaves_out_steps_that_a_rank_did_not_log():
    tables = {
        0: table(step=[0, 5, 10], loss=[1.0, 1.0, 1.0]),
        1: table(step=[10, 5, 5], loss=[9.0, 2.0, 3.0]),
    }
    mean = series.mean_line(tables)
    assert mean.x.tolist() == [5, 10]
    assert mean.y.tolist() == [2.0, 5.0]


def test_one_rank_needs_no_mean():
    panel = series.loss({0: table(step=[0, 1], loss=[1.0, 2.0])})
    assert [line.kind for line in panel.lines] == [OF_RANK]


def test_ranks_without_a_loss_are_named():
    tables = {
        0: table(step=[0, 1]),
        1: table(step=[0, 1], loss=[1.0, 2.0]),
    }
    assert series.loss(tables).label == "loss (none on rank 0)"


def test_losses_that_are_not_numbers_are_left_out():
    tables = {0: table(step=[0, 1, 2], loss=[1.0, np.nan, np.inf])}
    assert series.loss(tables).lines[0].y.tolist() == [1.0]


def test_throughput_prefers_tokens():
    rates = {"samples_per_s": [1.0], "tokens_per_s": [64.0]}
    assert "tokens / s" in series.throughput({0: table(step=[0], **rates)}).label
    del rates["tokens_per_s"]
    assert "samples / s" in series.throughput({0: table(step=[0], **rates)}).label


@pytest.mark.parametrize(
    ("rate", "unit", "shown"),
    [(5.0, "(tokens", 5.0), (5e4, "(k tokens", 50.0), (2e8, "(M tokens", 200.0)],
)
def test_throughput_has_short_numbers(rate, unit, shown):
    panel = series.throughput({0: table(step=[0], tokens_per_s=[rate])})
    assert unit in panel.label
    assert panel.lines[0].y.tolist() == [shown]


def test_throughput_is_a_mean_of_the_latest():
    values = np.arange(30.0)
    smooth = series.smoothed(line(values)).y
    assert smooth[0] == 0
    assert smooth[-1] == values[-series.SMOOTHED_LOGS :].mean()


def test_memory_names_its_two_lines():
    cpu = table(step=[0], memory_bytes=[3e8], tensor_bytes=[5e6])
    panel = series.memory({0: cpu})
    assert panel.label == "memory (MB, dashed: tensors)"
    assert [line.y.tolist() for line in panel.lines] == [[300.0], [5.0]]
    cuda = {"memory_bytes": [2e9], "reserved_bytes": [2e9], "allocated_bytes": [1e9]}
    cuda = table(step=[0], **cuda)
    assert series.memory({0: cuda}).label == "reserved (GB, dashed: allocated)"


def test_nothing_logged_gives_three_empty_panels():
    panels = series.panels({0: {}, 1: {}})
    assert [len(panel.lines) for panel in panels] == [0, 0, 0]
    assert all(series.span(panel) == (0.0, 1.0, 0.0, 1.0) for panel in panels)


def test_mean_is_drawn_last_and_only_once():
    tables = {rank: table(step=[0, 1], loss=[1.0, 2.0]) for rank in range(3)}
    kinds = [line.kind for line in series.loss(tables).lines]
    assert kinds == [OF_RANK] * 3 + [MEAN]
