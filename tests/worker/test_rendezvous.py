"""The store in the run's directory through which ranks find each other."""

from __future__ import annotations

import datetime
import threading

import pytest
import torch.distributed as dist

from labkit.worker.rendezvous import RunStore


def make(path, limit_s: float = 20) -> RunStore:
    return RunStore(str(path / "store"), 2, datetime.timedelta(seconds=limit_s))


def test_what_one_rank_sets_another_gets_also_when_it_asks_first(tmp_path):
    ours, theirs = make(tmp_path), make(tmp_path)
    found = []
    asker = threading.Thread(target=lambda: found.append(theirs.get("address")))
    asker.start()
    ours.set("address", "here")
    asker.join(20)
    assert found == [b"here"]
    assert ours.add("count", 1) == 1
    assert theirs.add("count", 2) == 3


def test_a_missing_key_is_named_after_the_limit(tmp_path):
    with pytest.raises(dist.DistStoreError, match=r"waited 0.01 s for a, b from"):
        make(tmp_path).wait(["a", "b"], datetime.timedelta(seconds=0.01))
    with pytest.raises(dist.DistStoreError, match=r"waited 0.02 s for c from"):
        make(tmp_path, limit_s=0.02).get("c")


def test_pytorch_puts_its_prefixes_before_it(tmp_path):
    store = make(tmp_path)
    dist.PrefixStore("group", store).set("key", "value")
    assert dist.PrefixStore("group", store).get("key") == b"value"
    assert not store.check(["key"])
