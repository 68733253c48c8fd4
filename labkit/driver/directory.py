"""A run is a directory. Where they lie, how one is made, what its files are called.

    spec.json          what was launched
    environment.json   versions and the few variables that matter, by an allow list
    rank-N.jsonl       telemetry of rank N
    rank-N.log         what rank N printed
    rank-N.pulse       what rank N did last, compared when ranks wait for each other
    rank-N.crash       its lines of Python when C code crashed; empty otherwise
    rank-N.result      its pickled return value
    end.json           how it ended; absent while it runs, and if the kernel died

Everything is readable by this user alone.
"""

from __future__ import annotations

import json
import os
import platform
import re
import secrets
import sys
import time
from pathlib import Path
from typing import Any

from labkit.core.errors import RunDirectoryError
from labkit.core.hardware import Hardware
from labkit.core.spec import LaunchSpec

# Environment variables are recorded by this list alone; anything else may be a secret.
RECORDED_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "NCCL_DEBUG",
    "NCCL_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
    "TORCH_DISTRIBUTED_DEBUG",
)
KEY_BYTES = 32


def state_path() -> Path:
    """Where this user's own folder for labkit is, or will be."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "labkit"


def state_dir() -> Path:
    """This user's own folder for labkit, made on first use (mode 0700)."""
    folder = state_path()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        raise RunDirectoryError(
            f"runs are kept in {folder}, which cannot be made: {error}. "
            "Set XDG_STATE_HOME to a folder that you may write to"
        ) from error
    return folder


def create_run_dir(name: str, started_at: float) -> Path:
    """A new, empty run directory whose name sorts by time."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(started_at))
    stamp += f".{int(started_at % 1 * 1000):03d}"
    safe = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[:40] or "run"
    path = state_dir() / "runs" / f"{stamp}-{safe}-{secrets.token_hex(3)}"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.mkdir(mode=0o700)
    return path


def run_dirs() -> list[Path]:
    """This user's run directories, newest first."""
    specs = sorted((state_dir() / "runs").glob("*/spec.json"), reverse=True)
    return [spec.parent for spec in specs]


def user_key() -> bytes:
    """The secret that marks results as made by this user's own launches."""
    path = state_dir() / "key"
    if not path.exists():
        fresh = path.with_name(f"key-{secrets.token_hex(4)}")
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(fd, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        try:
            os.link(fresh, path)  # whole, and only if no other kernel was faster
        except FileExistsError:
            pass
        finally:
            fresh.unlink()
    key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise RunDirectoryError(
            f"{path} should hold {KEY_BYTES} bytes but holds {len(key)}; delete it and "
            "launch again (results of earlier runs then stay unread)"
        )
    return key


def write_file(path: Path, text: str) -> None:
    """Write a file that appears whole or not at all, for this user alone."""
    partial = path.with_name(path.name + ".partial")
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(fd, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(partial, path)


def describe_environment(hardware: Hardware, variables: dict[str, str]) -> str:
    """`environment.json`: enough to read a run elsewhere, and no secrets."""
    return json.dumps(
        {
            "python": platform.python_version(),
            "torch": hardware.torch_version,
            "torch_cuda": hardware.torch_cuda,
            "platform": sys.platform,
            "cores": hardware.cores,
            "memory_bytes": hardware.memory_bytes,
            "gpus": [gpu.name for gpu in hardware.gpus],
            "variables": {
                name: variables[name]
                for name in RECORDED_VARIABLES
                if name in variables
            },
        },
        indent=1,
    )


def read_spec(path: Path) -> LaunchSpec:
    """The spec of a run directory.

    Raises:
        RunDirectoryError: there is none, or it cannot be read; says which.
    """
    file = path / "spec.json"
    if not path.is_dir():
        raise RunDirectoryError(f"{path} is not a directory; lk.runs() lists your runs")
    try:
        return LaunchSpec.from_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunDirectoryError(
            f"{path} is not a run: it has no spec.json; lk.runs() lists your runs"
        ) from None
    except OSError as error:
        raise RunDirectoryError(f"{file} cannot be read: {error}") from error
    except (ValueError, TypeError) as error:
        raise RunDirectoryError(f"{file} is not a launch spec: {error}") from error


def read_end(path: Path) -> dict[str, Any] | None:
    """How a run ended, None when nobody wrote it down."""
    file = path / "end.json"
    try:
        end = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{file} cannot be read: {error}") from error
    if not isinstance(end, dict):
        raise RunDirectoryError(f"{file} should hold one JSON object")
    return end
