"""What travels to ranks, and what is said of things that do not."""

from __future__ import annotations

import linecache
import pickle
import sys
import threading
import types

import pytest

from labkit.core.errors import CannotSend
from labkit.driver.ship import pack


def deliver(function, *args, **kwargs):
    """What a rank would unpickle."""
    return pickle.loads(pack(function, args, kwargs).payload)


def cell(source: str, filename: str = "cell-7") -> dict:
    """Names defined by a cell: in `__main__`, with a source that is on no disk."""
    lines = source.splitlines(keepends=True)
    linecache.cache[filename] = (len(source), None, lines, filename)
    names = {"__name__": "__main__"}
    exec(compile(source, filename, "exec"), names)
    return names


def test_a_call_travels_whole():
    function, args, kwargs = deliver(lambda a, b: a + b, 1, b=2)
    assert function(*args, **kwargs) == 3


def test_the_source_of_a_cell_travels_and_its_lines_stay():
    source = "def helper():\n    raise ValueError\n\ndef train(worker):\n    helper()\n"
    parcel = pack(cell(source)["train"], (), {})
    assert parcel.sources == {"cell-7": source}
    train, _, _ = pickle.loads(parcel.payload)
    assert train.__code__.co_filename == "cell-7"
    assert train.__code__.co_firstlineno == 4
    assert train.__globals__["helper"].__code__.co_filename == "cell-7"


def test_the_source_of_a_file_does_not_travel():
    assert pack(lambda worker: 1, (), {}).sources == {}


def test_functions_of_importable_modules_travel_by_name():
    assert len(pack(threading.Thread, (), {}).payload) < 200


LOCK = threading.Lock()


def uses_a_global(worker):
    return LOCK


def default_lock(worker, lock=LOCK):
    return lock


class Holder:
    def __init__(self):
        self.inner = types.SimpleNamespace(lock=threading.Lock())

    def method(self, worker):
        return self.inner


# As if they had been defined in a cell.
uses_a_global.__module__ = "__main__"
default_lock.__module__ = "__main__"


def nested(worker):
    def inside():
        return LOCK

    return inside


nested.__module__ = "__main__"


def a_closure():
    handle = threading.Lock()
    return lambda worker: handle


@pytest.mark.parametrize(
    ("function", "kwargs", "said"),
    [
        (uses_a_global, {}, "cannot send LOCK (a lock) to the ranks; it is reached "
         "from uses_a_global through uses_a_global -> LOCK"),
        (nested, {}, "cannot send LOCK (a lock) to the ranks; it is reached from "
         "nested through nested -> LOCK"),
        (default_lock, {}, "cannot send default 0 (a lock)"),
        (a_closure(), {}, "cannot send handle (a lock) to the ranks; it is reached "
         "from <lambda> through <lambda> -> handle"),
        (Holder().method, {}, "method.__self__.inner.lock"),
        (lambda worker, x: x, {"x": {"deep": [1, {"er": threading.Lock()}]}},
         "kwargs['x']['deep'][1]['er']"),
        (lambda worker, x: x, {"x": (i for i in range(3))},
         "cannot send kwargs['x'] (a generator)"),
        (lambda worker, x: x, {"x": Holder()}, "kwargs['x'].inner.lock"),
    ],
)  # fmt: skip
def test_what_cannot_travel_is_named_with_the_path_to_it(function, kwargs, said):
    with pytest.raises(CannotSend) as caught:
        pack(function, (), kwargs)
    assert said in str(caught.value)
    assert "Create it inside" in str(caught.value)


def test_an_open_file_is_refused_although_it_could_be_copied(tmp_path):
    with open(tmp_path / "data.txt", "w+") as file:
        with pytest.raises(CannotSend, match="an open file belongs to the process"):
            pack(lambda worker: file, (), {})


def test_standard_output_is_the_ranks_own(monkeypatch, tmp_path):
    with open(tmp_path / "terminal", "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        parcel = pack(lambda worker: out, (), {})
        with open(tmp_path / "log of a rank", "w") as log:
            monkeypatch.setattr(sys, "stdout", log)
            assert pickle.loads(parcel.payload)[0](None) is log


def test_an_object_whose_pickling_fails_in_its_own_way_is_named():
    class Odd:
        def __reduce__(self):
            raise ZeroDivisionError("odd")

    odd = Odd()
    with pytest.raises(CannotSend, match=r"cannot send odd \(a Odd\).*odd\. Create"):
        pack(lambda worker: odd, (), {})


def test_a_cycle_is_searched_once():
    ring: list = [threading.Lock()]
    ring.append(ring)
    with pytest.raises(CannotSend, match=r"ring\[0\]"):
        pack(lambda worker: ring, (), {})


def test_a_tensor_on_a_gpu_is_refused(monkeypatch):
    """No GPU is needed: a CPU tensor that says it is on one."""
    import torch

    tensor = torch.ones(1)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with pytest.raises(CannotSend, match=r"tensor \(a Tensor\).*CUDA context"):
        pack(lambda worker: tensor, (), {})
