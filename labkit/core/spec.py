"""What a launch is told to do, in words that can be saved as `spec.json`.

A spec is checked where it is made, so that everything behind it may trust it.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from labkit.core.checks import one_of, positive_int, positive_seconds

BACKENDS = ("auto", "nccl", "gloo")
DEVICES = ("auto", "cuda", "cpu")
MAX_RANKS = 4096
MAX_STALL_S = 86400.0


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """One launch: how many ranks, on what, and how long they may take.

    Attributes:
        name: what the run is called in tables and in its directory's name.
        ranks: number of processes, the world size.
        backend: "nccl" or "gloo", already decided.
        device: "cuda" or "cpu", already decided.
        num_gpus: visible GPUs, over which ranks are dealt in turn; 0 on the CPU.
        threads: compute threads of each rank.
        stall_s: how long a collective may wait for its peers.
        timeout_s: how long the run may take as a whole; None for no limit.
        started_at: wall-clock seconds since the epoch; `time_s` counts from here.
        why: the sentence that says why this backend and device are used.
    """

    name: str
    ranks: int
    backend: str
    device: str
    num_gpus: int
    threads: int
    stall_s: float
    timeout_s: float | None
    started_at: float
    why: str

    def __post_init__(self) -> None:
        if positive_int("ranks", self.ranks) > MAX_RANKS:
            raise ValueError(f"ranks must be {MAX_RANKS} or fewer, not {self.ranks}")
        positive_int("threads", self.threads)
        if positive_seconds("stall_s", self.stall_s) > MAX_STALL_S:
            raise ValueError(
                f"stall_s must be {MAX_STALL_S:g} seconds (a day) or fewer, not "
                f"{self.stall_s!r}"
            )
        if not isinstance(self.name, str):
            raise TypeError(f"name must be a text, not {self.name!r}")
        positive_seconds("started_at", self.started_at)
        if self.timeout_s is not None:
            positive_seconds("timeout_s", self.timeout_s)
        one_of("backend", self.backend, BACKENDS[1:])
        one_of("device", self.device, DEVICES[1:])

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> LaunchSpec:
        """Read a spec back; ValueError or TypeError when it is not one."""
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError("a launch spec is a JSON object")
        return cls(**values)
