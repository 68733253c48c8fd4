"""Specs are checked where they are made, and survive being saved."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.core import events
from labkit.core.models import GPT, MLP
from labkit.core.spec import LaunchSpec

VALID = {
    "name": "train",
    "ranks": 4,
    "backend": "gloo",
    "device": "cpu",
    "num_gpus": 0,
    "threads": 1,
    "stall_s": 30.0,
    "timeout_s": None,
    "started_at": 1.5,
    "why": "because",
}


def test_a_launch_spec_survives_being_saved():
    spec = LaunchSpec(**VALID)
    assert LaunchSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": 0}, "ranks must be 1 or more, not 0"),
        ({"ranks": 5000}, "ranks must be 4096 or fewer, not 5000"),
        ({"threads": 0}, "threads must be 1 or more"),
        ({"backend": "auto"}, "backend must be one of 'nccl', 'gloo', not 'auto'"),
        ({"device": "auto"}, "device must be one of 'cuda', 'cpu'"),
        ({"stall_s": float("inf")}, "stall_s must be more than 0 seconds"),
        ({"timeout_s": -1}, "timeout_s must be more than 0 seconds"),
    ],
)
def test_an_impossible_launch_says_what_is_valid(change, message):
    with pytest.raises(ValueError, match=message):
        LaunchSpec(**(VALID | change))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"ranks": 4}', "not json"])
def test_what_is_not_a_spec_is_refused(text):
    with pytest.raises((ValueError, TypeError)):
        LaunchSpec.from_json(text)


def test_heads_must_divide_the_width():
    message = r"width 64 cannot be shared by 6 heads; .*: 1, 2, 4, 8, 16, 32, 64"
    with pytest.raises(ValueError, match=message):
        GPT(width=64, heads=6)


@pytest.mark.parametrize("field", ["layers", "width", "heads", "context", "vocab"])
def test_sizes_of_a_gpt_are_positive(field):
    with pytest.raises(ValueError, match=f"{field} must be 1 or more, not 0"):
        GPT(**{field: 0})


def test_sizes_of_an_mlp_are_whole_numbers():
    with pytest.raises(TypeError, match="width must be a whole number, not "):
        MLP(width=1.5)


numbers = st.floats() | st.integers(-(2**53), 2**53) | st.booleans() | st.text()


@given(st.dictionaries(st.text(min_size=1), numbers))
def test_an_event_survives_being_written(values):
    event = {**values, "kind": events.LOG}
    line = events.encode(event)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert repr(events.decode(line)) == repr(event)  # nan is not equal to itself


@given(st.binary())
def test_any_bytes_are_an_event_or_nothing(data):
    event = events.decode(data)
    assert event is None or isinstance(event["kind"], str)
