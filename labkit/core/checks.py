"""Checks of single arguments. Each error says what was given and what is valid."""

from __future__ import annotations

import math
import operator
from typing import Any


def positive_int(name: str, value: Any) -> int:
    """`value` as an int of at least 1, or an error that says what it was."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {value!r}") from None
    if isinstance(value, bool) or number < 1:
        raise ValueError(f"{name} must be 1 or more, not {value!r}")
    return number


def positive_seconds(name: str, value: Any) -> float:
    """`value` as a positive, finite number of seconds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number of seconds, not {value!r}")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be more than 0 seconds, not {value!r}")
    return float(value)


def one_of(name: str, value: Any, valid: tuple[str, ...]) -> str:
    """`value` if it is among `valid`, else an error that lists them."""
    if value not in valid:
        listed = ", ".join(repr(word) for word in valid)
        raise ValueError(f"{name} must be one of {listed}, not {value!r}")
    return value
