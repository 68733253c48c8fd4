"""Reading files that grow: nothing twice, nothing lost, whatever the pieces."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from labkit.core import events
from labkit.driver.telemetry import Columns, Printed, Tail, Telemetry, visible


def log(step: int, **values: float) -> bytes:
    return events.encode({"kind": events.LOG, "rank": 0, "step": step, **values})


def append(path: Path, data: bytes) -> None:
    with open(path, "ab") as file:
        file.write(data)


@given(st.lists(st.binary(max_size=20)), st.data())
def test_lines_are_read_once_however_the_file_grows(lines, data):
    lines = [line.replace(b"\n", b"") for line in lines]
    whole = b"".join(line + b"\n" for line in lines)
    cuts = data.draw(st.lists(st.integers(0, len(whole)), max_size=5).map(sorted))
    with tempfile.TemporaryDirectory() as folder:
        tail = Tail(Path(folder) / "file")
        read = list(tail.read_lines())
        for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
            append(tail.path, whole[start:end])
            read += tail.read_lines()
        assert read == lines
        assert tail.read_rest() == b""


def test_an_endless_line_is_given_up():
    with tempfile.TemporaryDirectory() as folder:
        tail = Tail(Path(folder) / "file")
        append(tail.path, b"x" * (3 << 20))
        assert sum(len(line) for line in tail.read_lines()) <= 3 << 20
        assert len(tail.rest) <= 1 << 20


def test_a_truncated_line_is_left_out_and_the_rest_is_read(tmp_path):
    append(tmp_path / "rank-0.jsonl", log(0, loss=1.0) + b'{"kind": "log", "st\n')
    append(tmp_path / "rank-0.jsonl", log(1, loss=2.0) + b'{"kind":"log","step":2')
    telemetry = Telemetry(tmp_path, 1)
    telemetry.finish()
    assert telemetry.tables()[0]["loss"].tolist() == [1.0, 2.0]
    assert len(telemetry.damaged) == 2
    assert telemetry.damaged[0].startswith("rank-0.jsonl before byte ")


def test_a_half_written_line_is_read_when_it_is_whole(tmp_path):
    telemetry = Telemetry(tmp_path, 1)
    line = log(0, loss=1.0)
    append(tmp_path / "rank-0.jsonl", line[:10])
    assert telemetry.poll() == 0
    append(tmp_path / "rank-0.jsonl", line[10:])
    assert telemetry.poll() == 1
    assert telemetry.damaged == []
    assert telemetry.last_step(0) == 0


rows = st.lists(
    st.dictionaries(
        st.sampled_from("abc"), st.floats(allow_nan=False), min_size=0, max_size=3
    ),
    max_size=40,
)


@given(rows, st.integers(1, 4))
def test_columns_hold_what_was_appended(rows, spread):
    columns = Columns()
    rows = [row for row in rows for _ in range(spread)]
    for row in rows:
        columns.append(row)
    table = columns.table()
    for name in {name for row in rows for name in row}:
        expected = [row.get(name, math.nan) for row in rows]
        assert np.array_equal(table[name], expected, equal_nan=True)


def test_columns_grow_and_old_tables_stay():
    columns = Columns()
    columns.append({"early": 1.0})
    old = columns.table()
    for index in range(5000):
        columns.append({"late": float(index)})
    columns.append({"early": 2.0})
    table = columns.table()
    assert old["early"].tolist() == [1.0]
    assert len(table["early"]) == len(table["late"]) == 5002
    assert table["early"][-1] == 2.0
    assert np.isnan(table["early"][1:-1]).all()
    assert table["late"][1:-1].tolist() == list(range(5000))


def test_words_in_an_event_are_no_column():
    columns = Columns()
    columns.append({"step": 0, "note": "text", "rank": 3, "nothing": None})
    assert set(columns.table()) == {"step"}


def test_printed_lines_are_labelled(tmp_path):
    append(tmp_path / "rank-1.log", b"one\ntwo")
    printed = Printed(tmp_path, 2)
    assert printed.poll() == ["[rank 1] one"]
    assert printed.finish() == ["[rank 1] two"]


def test_carriage_returns_show_the_last_state():
    assert visible(b"10%\r50%\r100%") == "100%"
    assert visible(b"windows\r") == "windows"
    assert visible("grün \xff".encode("latin-1")) == "gr\ufffdn \ufffd"
