"""What the machine offers, as the container limits it."""

from __future__ import annotations

from pathlib import Path

import pytest
from pynvml import NVML_TOPOLOGY_SINGLE, NVML_TOPOLOGY_SYSTEM

from labkit.core.hardware import GPU, GiB, GPULink, Hardware
from labkit.driver import machine, setup


def write(root: Path, **files: str) -> None:
    """Files of the cgroup that this process is in, and of its root."""
    for folder in {root, *machine.own_cgroups(root, "cpu")}:
        folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (root / name.replace("__", ".")).write_text(text)


@pytest.mark.parametrize(
    ("text", "cores"),
    [("150000 100000", 1.5), ("50000 100000", 0.5), ("max 100000", None), ("", None)],
)
def test_a_cpu_quota_limits_the_cores(tmp_path, text, cores):
    write(tmp_path, cpu__max=text)
    without = machine.usable_cores(tmp_path / "none")
    expected = without if cores is None else min(cores, without)
    assert machine.usable_cores(tmp_path) == expected


def test_a_memory_limit_is_read(tmp_path):
    write(tmp_path, memory__max=str(2 * GiB))
    assert machine.usable_memory(tmp_path) == 2 * GiB


@pytest.mark.parametrize("text", ["max", str(2**63 - 4096), "garbage"])
def test_no_memory_limit_leaves_the_physical_memory(tmp_path, text):
    write(tmp_path, memory__max=text)
    assert machine.usable_memory(tmp_path) == machine.usable_memory(tmp_path / "none")


def test_version_1_cgroups_are_read(tmp_path, monkeypatch):
    proc = "5:memory:/pod\n4:cpu,cpuacct:/pod\n0::/\n"
    real = Path.read_text
    monkeypatch.setattr(
        Path,
        "read_text",
        lambda path, *args, **options: (
            proc if str(path) == "/proc/self/cgroup" else real(path, *args, **options)
        ),
    )
    memory, cpu = tmp_path / "memory" / "pod", tmp_path / "cpu" / "pod"
    memory.mkdir(parents=True)
    cpu.mkdir(parents=True)
    (memory / "memory.limit_in_bytes").write_text(str(GiB))
    (cpu / "cpu.cfs_quota_us").write_text("50000")
    (cpu / "cpu.cfs_period_us").write_text("100000")
    assert machine.usable_memory(tmp_path) == GiB
    assert machine.usable_cores(tmp_path) == 0.5


def test_an_outer_cgroup_limits_too(tmp_path, monkeypatch):
    real = Path.read_text
    monkeypatch.setattr(
        Path,
        "read_text",
        lambda path, *args, **options: (
            "0::/outer/inner\n"
            if str(path) == "/proc/self/cgroup"
            else real(path, *args, **options)
        ),
    )
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    (tmp_path / "outer" / "memory.max").write_text(str(GiB))
    (tmp_path / "outer" / "inner" / "memory.max").write_text("max")
    assert machine.usable_memory(tmp_path) == GiB


UUIDS = ["GPU-aaaa1111", "GPU-aabb2222", "GPU-cccc3333"]


@pytest.mark.parametrize(
    ("visible", "chosen"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("0", [0]),
        ("2,0", [2, 0]),
        (" 1 , 2", [1, 2]),
        ("-1", []),
        ("0,-1,1", [0]),
        ("0,7,1", [0]),
        ("1,1", []),
        ("GPU-cccc", [2]),
        ("GPU-aa", []),
        ("GPU-aab,0", [1, 0]),
        ("MIG-1234", []),
    ],
)
def test_visible_devices_are_chosen_as_cuda_does(visible, chosen):
    assert machine.select_devices(UUIDS, visible) == chosen


def test_no_driver_means_no_gpus(monkeypatch):
    def no_library():
        raise machine.pynvml.NVMLError_LibraryNotFound

    monkeypatch.setattr(machine.pynvml, "nvmlInit", no_library)
    assert machine.visible_gpus(None) == ((), ())


class PretendedDriver:
    """The part of NVML that is asked, for two linked GPUs and one beside them."""

    NVMLError = machine.pynvml.NVMLError
    NVML_P2P_CAPS_INDEX_NVLINK = machine.pynvml.NVML_P2P_CAPS_INDEX_NVLINK
    NVML_P2P_STATUS_OK = machine.pynvml.NVML_P2P_STATUS_OK
    NVML_TOPOLOGY_NODE = machine.pynvml.NVML_TOPOLOGY_NODE

    class Memory:
        total = 80 * GiB

    def nvmlInit(self): ...
    def nvmlShutdown(self): ...
    def nvmlDeviceGetCount(self):
        return 3

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetUUID(self, handle):
        return UUIDS[handle].encode()

    def nvmlDeviceGetName(self, handle):
        return b"NVIDIA H100"

    def nvmlDeviceGetMemoryInfo(self, handle):
        return self.Memory

    def nvmlDeviceGetP2PStatus(self, first, second, kind):
        return 0 if {first, second} == {0, 1} else 1

    def nvmlDeviceGetTopologyCommonAncestor(self, first, second):
        if 2 in (first, second) and 0 in (first, second):
            return NVML_TOPOLOGY_SYSTEM
        return NVML_TOPOLOGY_SINGLE


def test_gpus_and_links_are_described(monkeypatch):
    monkeypatch.setattr(machine, "pynvml", PretendedDriver())
    gpus, links = machine.visible_gpus("0,1,2")
    assert [(gpu.index, gpu.name) for gpu in gpus] == [
        (0, "NVIDIA H100"),
        (1, "NVIDIA H100"),
        (2, "NVIDIA H100"),
    ]
    assert [(link.first, link.second, link.kind) for link in links] == [
        (0, 1, "NVLink"),
        (0, 2, "PCIe across sockets"),
        (1, 2, "PCIe"),
    ]


def test_the_installed_torch_is_found_unimported():
    import torch

    version, cuda = machine.installed_torch()
    assert version == torch.__version__
    assert cuda == torch.version.cuda


def hardware(**values):
    return Hardware(**({"cores": 2, "memory_bytes": 8 * GiB} | values))


def test_the_table_names_everything():
    gpus = tuple(GPU(index=i, name="H100", memory_bytes=80 * GiB) for i in range(2))
    rows = setup.describe(
        hardware(
            cores=1.5,
            shm_bytes=64 * 2**20,
            gpus=gpus,
            links=(GPULink(first=0, second=1, kind="NVLink"),),
            torch_version="2.13.0",
            torch_cuda="13.0",
        )
    )
    table = dict(rows)
    assert table["cores"] == "1.5"
    assert table["memory"] == "8.0 GiB"
    assert table["/dev/shm"].startswith("64 MiB; NCCL and data-loader workers usually")
    assert table["GPUs"] == "0: H100, 80 GiB; 1: H100, 80 GiB"
    assert table["GPU links"] == "0-1 NVLink"
    assert table["PyTorch"] == "2.13.0, built for CUDA 13.0"
    assert table["backend"] == "NCCL: 2 GPUs for 2 ranks."


def test_a_plain_machine_has_a_plain_table():
    table = dict(setup.describe(hardware(shm_bytes=2 * GiB)))
    assert table["/dev/shm"] == "2.0 GiB"
    assert table["GPUs"] == "none"
    assert table["PyTorch"] == "not installed: pip install torch"
    assert table["backend"] == "gloo on the CPU: no GPU is visible."


def test_setup_prints_and_returns_the_machine(capsys):
    import labkit as lk

    found = lk.setup()
    assert isinstance(found, Hardware)
    printed = capsys.readouterr().out
    assert f"memory    {found.memory_bytes / GiB:.1f} GiB" in printed
    assert "backend" in printed
