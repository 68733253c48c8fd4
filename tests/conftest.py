"""What every test gets: a state folder of its own, and GPUs or a reason to skip."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from labkit.driver import machine


@pytest.fixture(autouse=True, scope="session")
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs of tests must not land among the user's own."""
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
    yield
    patch.undo()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu(n)` where there are fewer than n GPUs."""
    usable = machine.detect().usable_gpus
    for item in items:
        if (mark := item.get_closest_marker("gpu")) and mark.args[0] > usable:
            reason = f"GPUs: {mark.args[0]} needed, {usable} can be used here"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
