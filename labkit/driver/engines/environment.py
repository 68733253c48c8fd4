"""The environment that ranks get: the kernel's as it is now, fit for one machine."""

from __future__ import annotations

import os
import sys

# Left behind by another launcher, these would send ranks to the wrong place.
RENDEZVOUS_NAMES = frozenset(
    [
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "ROLE_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_WORLD_SIZE",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_MAX_RESTARTS",
        "TORCHELASTIC_USE_AGENT_STORE",
    ]
)


def stale_names() -> list[str]:
    """Variables of another launcher that this process has and ranks do not get."""
    return sorted(RENDEZVOUS_NAMES.intersection(os.environ))


def rank_environment() -> dict[str, str]:
    """A copy of this process's environment without what would mislead ranks."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in RENDEZVOUS_NAMES
    }
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    # Ranks of one machine need no host name and no other interface.
    environment["GLOO_SOCKET_IFNAME"] = loopback
    environment["NCCL_SOCKET_IFNAME"] = loopback
    return environment
