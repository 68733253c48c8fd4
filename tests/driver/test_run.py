"""Runs that are read back: the same object, and harmless whoever made them."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import stat

import pytest

import labkit as lk
from labkit.core.errors import ResultUnavailable


def train(worker, steps=6):
    print("hello from", worker.rank)
    for step in range(steps):
        worker.log(loss=1.0 / (1 + step) + worker.rank, samples=8, tokens=64, lr=0.1)
    return {"rank": worker.rank}


@pytest.fixture(scope="module")
def run():
    return lk.launch(train, ranks=2, name="told apart")


@pytest.fixture
def copy(run, tmp_path):
    """The run's directory somewhere else, as if it had been unpacked there."""
    return shutil.copytree(run.path, tmp_path / "copy")


def test_metrics_have_the_promised_columns(run):
    metrics = run.metrics
    assert list(metrics.columns[:7]) == [
        "rank", "step", "time_s", "loss", "samples_per_s", "tokens_per_s",
        "memory_bytes",
    ]  # fmt: skip
    assert len(metrics) == 12
    assert metrics["step"].tolist() == sorted(list(range(6)) * 2)
    assert metrics["rank"].tolist() == [0, 1] * 6
    assert metrics["loss"].iloc[0] == 1.0
    assert (metrics["lr"] == 0.1).all()
    assert (metrics["memory_bytes"] > 1e6).all()


def test_warm_up_has_no_throughput_and_the_rest_has(run):
    metrics = run.metrics
    warm = metrics["warmup"] == 1
    assert metrics.loc[warm, "step"].max() == 2
    assert metrics.loc[warm, "samples_per_s"].isna().all()
    assert (metrics.loc[~warm, "samples_per_s"] > 0).all()
    ratio = metrics["tokens_per_s"] / metrics["samples_per_s"]
    assert ratio.dropna().round(6).eq(8).all()


def test_time_counts_from_the_start_and_never_runs_back(run):
    for _, mine in run.metrics.groupby("rank"):
        assert mine["time_s"].is_monotonic_increasing
        assert mine["time_s"].iloc[0] > 0


def test_the_summary_has_a_row_for_each_rank(run):
    summary = run.summary
    assert summary.index.tolist() == [0, 1]
    assert summary["steps"].tolist() == [6, 6]
    assert summary["loss"].tolist() == pytest.approx([1 / 6, 1 + 1 / 6])


def test_a_run_that_logged_nothing_has_empty_metrics():
    run = lk.launch(lambda worker: None, ranks=2)
    assert len(run.metrics) == 0
    assert list(run.metrics.columns[:2]) == ["rank", "step"]
    assert len(run.summary) == 2
    assert run.plot() is not None


def test_reprs_hold_no_path_time_or_id(run):
    assert repr(run) == "<Run told apart: 2 ranks, gloo on CPU, finished>"
    assert repr(run.results) == "<results of ranks [0, 1]>"


def test_a_run_read_back_is_the_same(run):
    again = lk.open_run(run.path)
    assert type(again) is type(run)
    assert again.metrics.equals(run.metrics)
    assert (again.status, again.spec, repr(again)) == ("finished", run.spec, repr(run))
    assert dict(again.results) == {0: {"rank": 0}, 1: {"rank": 1}}
    assert again.logs(1) == run.logs(1) == "hello from 1\n"
    assert again.wait() is again


def test_a_run_read_back_has_the_same_figure(run, tmp_path):
    for name, of in (("live.png", run), ("again.png", lk.open_run(run.path))):
        of.plot().savefig(tmp_path / name)
    assert (tmp_path / "live.png").read_bytes() == (tmp_path / "again.png").read_bytes()


def test_runs_are_listed_newest_first(run):
    newer = lk.launch(lambda worker: None, ranks=1, name="newer")
    paths = [found.path for found in lk.runs()]
    assert paths.index(newer.path) < paths.index(run.path)


def test_everything_in_a_run_is_the_users_alone(run):
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(run.path.parent.stat().st_mode) == 0o700
    for file in run.path.iterdir():
        if file.name != "rendezvous":  # torch's, inside a 0700 folder
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file.name


def test_no_secret_of_the_environment_is_written(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "hunter2-in-the-environment")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run = lk.launch(lambda worker: None, ranks=1)
    for file in run.path.iterdir():
        assert b"hunter2" not in file.read_bytes(), file.name
    recorded = json.loads((run.path / "environment.json").read_text())
    assert recorded["variables"]["OMP_NUM_THREADS"] == "1"


def test_the_users_key_is_made_once_and_is_the_users_alone(monkeypatch, tmp_path):
    from labkit.driver.directory import user_key

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    key = user_key()
    assert (len(key), user_key()) == (32, key)
    path = tmp_path / "labkit" / "key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["key"]
    path.write_bytes(b"short")
    with pytest.raises(lk.RunDirectoryError, match="should hold 32 bytes but holds 5"):
        user_key()


def test_no_such_rank_is_an_error(run):
    with pytest.raises(ValueError, match="has ranks 0 to 1, there is no rank 2"):
        run.logs(2)
    with pytest.raises(
        ResultUnavailable, match=r"rank 5 delivered no result; .*: 0, 1"
    ):
        run.results[5]


def test_a_run_whose_kernel_died_is_unfinished(copy):
    (copy / "end.json").unlink()
    assert lk.open_run(copy).status == "unfinished"


def test_a_truncated_line_is_left_out_with_a_warning(run, copy):
    file = copy / "rank-0.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    last_log = max(i for i, line in enumerate(lines) if b'"log"' in line)
    lines[last_log] = lines[last_log][:20] + b"\n"
    file.write_bytes(b"".join(lines))
    with pytest.warns(UserWarning, match=r"1 line of telemetry in .* not be read"):
        again = lk.open_run(copy)
    assert len(again.metrics) == len(run.metrics) - 1


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda path: shutil.rmtree(path), "is not a directory; lk.runs"),
        (lambda path: (path / "spec.json").unlink(), "has no spec.json"),
        (lambda path: (path / "spec.json").write_text("{"), "is not a launch spec"),
        (lambda path: (path / "spec.json").write_text('{"a": 1}'), "is not a launch"),
        (lambda path: (path / "spec.json").write_bytes(b"\xff"), "is not a launch"),
    ],
)
def test_what_is_no_run_says_so(copy, break_it, message):
    break_it(copy)
    with pytest.raises(lk.RunDirectoryError, match=message):
        lk.open_run(copy)


def test_an_unreadable_directory_says_so(copy, monkeypatch):
    """Root may read everything, so that the refusal is pretended."""
    real = os.open

    def refuse(path, *args, **options):
        if str(path).endswith("spec.json"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **options)

    import io

    monkeypatch.setattr(io, "open", lambda path, *a, **k: refuse(path))
    with pytest.raises(lk.RunDirectoryError, match="cannot be read"):
        lk.open_run(copy)


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_hostile_run_executes_nothing(copy, tmp_path):
    """Somebody hands over a run whose result would create a file when unpickled."""
    proof = tmp_path / "executed"
    (copy / "rank-0.result").write_bytes(pickle.dumps(Bomb(proof)))
    run = lk.open_run(copy)
    assert len(run.metrics) == 12
    run.plot()
    run.logs(0)
    with pytest.raises(ResultUnavailable, match="was not written by a launch of yours"):
        run.results[0]
    assert not proof.exists()
    pickle.loads(pickle.dumps(Bomb(proof))).close()
    assert proof.exists(), "the bomb itself works, or this test proves nothing"


def test_a_forged_digest_without_the_key_does_not_help(copy, tmp_path):
    import hashlib

    proof = tmp_path / "executed"
    data = pickle.dumps(Bomb(proof))
    (copy / "rank-0.result").write_bytes(data)
    digest = hashlib.blake2b(data).hexdigest()
    lines = (copy / "rank-0.jsonl").read_text().splitlines()
    result = json.loads(lines[-1])
    assert result["kind"] == "result"
    lines[-1] = json.dumps(result | {"digest": digest})
    (copy / "rank-0.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(ResultUnavailable):
        lk.open_run(copy).results[0]
    assert not proof.exists()


@pytest.mark.parametrize(
    "event",
    [
        {"kind": "error", "rank": 0},
        {"kind": "result"},
        {"kind": "log", "step": 1e308, "loss": -1e308},
        {"kind": "log", "step": float("nan"), "loss": float("inf")},
        {"kind": "log"},
        {"kind": "unknown", "x": 1},
    ],
)
def test_odd_events_do_not_break_reading(copy, event):
    with open(copy / "rank-0.jsonl", "a") as file:
        file.write(json.dumps(event) + "\n")
    run = lk.open_run(copy)
    assert len(run.metrics) >= 12
    assert len(run.summary) == 2
    run.plot().canvas.draw()


def test_a_state_folder_that_cannot_be_made_says_what_to_do(monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(blocked))
    with pytest.raises(lk.RunDirectoryError, match="Set XDG_STATE_HOME"):
        lk.launch(lambda worker: None, ranks=1)
