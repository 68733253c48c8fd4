"""Reading files that grow: nothing twice, nothing lost, whatever the pieces."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from labkit.core import events
from labkit.driver.telemetry import Logs, Printed, Tail, Telemetry, visible


def log(step: int, **values: float) -> bytes:
    return events.encode({"kind": events.LOG, "rank": 0, "step": step, **values})


def append(path: Path, data: bytes) -> None:
    with open(path, "ab") as file:
        file.write(data)


@given(st.lists(st.binary(max_size=20)), st.data())
def test_lines_are_read_once_however_the_file_grows(lines, data):
    lines = [line.replace(b"\n", b"").replace(b"\0", b"") for line in lines]
    whole = b"".join(line + b"\n" for line in lines)
    cuts = data.draw(st.lists(st.integers(0, len(whole)), max_size=5).map(sorted))
    with tempfile.TemporaryDirectory() as folder:
        tail = Tail(Path(folder) / "file")
        read = list(tail.read_lines())
        for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
            append(tail.path, whole[start:end])
            read += tail.read_lines()
        assert read == lines
        assert list(tail.finish()) == []


def test_an_endless_line_is_given_up():
    with tempfile.TemporaryDirectory() as folder:
        tail = Tail(Path(folder) / "file")
        append(tail.path, b"x" * (3 << 20))
        assert sum(len(line) for line in tail.read_lines()) <= 3 << 20
        assert len(tail.rest) <= 1 << 20
        assert len(list(tail.finish())) <= 1


def test_a_truncated_line_is_left_out_and_the_rest_is_read(tmp_path):
    append(tmp_path / "rank-0.jsonl", log(0, loss=1.0) + b'{"kind": "log", "st\n')
    append(tmp_path / "rank-0.jsonl", log(1, loss=2.0) + b'{"kind":"log","step":2')
    telemetry = Telemetry(tmp_path, 1)
    telemetry.finish()
    assert telemetry.tables()[0]["loss"].tolist() == [1.0, 2.0]
    assert telemetry.damaged_lines() == 2


def test_a_half_written_line_is_read_when_it_is_whole(tmp_path):
    telemetry = Telemetry(tmp_path, 1)
    line = log(0, loss=1.0)
    append(tmp_path / "rank-0.jsonl", line[:10])
    telemetry.poll()
    assert telemetry.num_rows() == 0
    append(tmp_path / "rank-0.jsonl", line[10:])
    telemetry.poll()
    assert telemetry.num_rows() == 1
    assert telemetry.last_step(0) == 0
    telemetry.finish()
    assert telemetry.damaged_lines() == 0


def test_reserved_room_is_the_end_until_it_is_filled(tmp_path):
    """A writer reserves zeros, which turn into lines one after the other."""
    path = tmp_path / "rank-0.jsonl"
    first, second = log(0, loss=1.0), log(1, loss=2.0)
    path.write_bytes(first + second[:7] + bytes(100_000))
    telemetry = Telemetry(tmp_path, 1)
    telemetry.poll()
    assert telemetry.num_rows() == 1
    with open(path, "r+b") as file:
        file.seek(len(first) + 7)
        file.write(second[7:])
    telemetry.poll()
    assert telemetry.tables()[0]["loss"].tolist() == [1.0, 2.0]
    telemetry.finish()
    assert telemetry.damaged_lines() == 0


rows = st.lists(
    st.dictionaries(
        st.sampled_from("abc"), st.floats(allow_nan=False), min_size=0, max_size=3
    ),
    max_size=40,
)


@given(rows, st.integers(1, 7))
def test_columns_hold_what_was_logged_whenever_they_are_asked_for(rows, often):
    logs = Logs()
    for index, row in enumerate(rows):
        logs.add(events.encode({"kind": events.LOG, **row}))
        if index % often == 0:
            logs.table()
    table = logs.table()
    assert logs.num_rows == len(rows)
    for name in {name for row in rows for name in row}:
        expected = [row.get(name, math.nan) for row in rows]
        assert np.array_equal(table[name], expected, equal_nan=True)


def test_columns_grow_and_old_tables_stay():
    logs = Logs()
    logs.add(log(0, early=1.0))
    old = logs.table()
    for index in range(5000):
        logs.add(log(index, late=float(index)))
        if index % 700 == 0:
            logs.table()
    logs.add(log(1, early=2.0))
    table = logs.table()
    assert old["early"].tolist() == [1.0]
    assert len(table["early"]) == len(table["late"]) == 5002
    assert table["early"][-1] == 2.0
    assert np.isnan(table["early"][1:-1]).all()
    assert table["late"][1:-1].tolist() == list(range(5000))


def test_memory_holds_until_it_is_read_anew():
    logs = Logs()
    for step, size in enumerate([None, 5.0, None, None, 7.0, None]):
        logs.add(log(step) if size is None else log(step, memory_bytes=size))
        if step % 2:
            logs.table()
    memory = logs.table()["memory_bytes"].tolist()
    assert math.isnan(memory[0])
    assert memory[1:] == [5.0, 5.0, 5.0, 7.0, 7.0]


def test_throughput_is_what_was_done_by_its_seconds_and_none_for_warm_up():
    logs = Logs()
    logs.add(log(0, samples=8, step_s=0.5, warmup=1))
    logs.add(log(1, samples=8, step_s=0.5))
    logs.table()
    logs.add(log(2, step_s=0.5))
    logs.add(log(3, samples=8, step_s=0.0))
    rates = logs.table()["samples_per_s"].tolist()
    assert math.isnan(rates[0])
    assert rates[1] == 16
    assert math.isnan(rates[2])
    assert rates[3] == math.inf
    assert "tokens_per_s" not in logs.table()


def test_words_and_endless_numbers_are_no_values():
    logs = Logs()
    logs.add(log(0, note="text", nothing=None, huge=10**400))
    table = logs.table()
    assert all(math.isnan(table[name][0]) for name in ("note", "nothing", "huge"))


def test_lines_with_nan_are_read_like_the_others():
    logs = Logs()
    for loss in (1.0, float("nan"), float("inf"), 2.0):
        logs.add(log(0, loss=loss))
    losses = logs.table()["loss"]
    assert losses[[0, 3]].tolist() == [1.0, 2.0]
    assert math.isnan(losses[1])
    assert losses[2] == math.inf
    assert logs.num_damaged == 0


def test_printed_lines_are_labelled(tmp_path):
    append(tmp_path / "rank-1.log", b"one\ntwo")
    printed = Printed(tmp_path, 2)
    assert printed.poll() == ["[rank 1] one"]
    assert printed.finish() == ["[rank 1] two"]


def test_carriage_returns_show_the_last_state():
    assert visible(b"10%\r50%\r100%") == "100%"
    assert visible(b"windows\r") == "windows"
    assert visible("grün \xff".encode("latin-1")) == "gr\ufffdn \ufffd"
