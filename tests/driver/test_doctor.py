"""`labkit doctor`: its report on this machine, and on machines that lack things."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

import labkit
from labkit.core.errors import RankFailed
from labkit.core.hardware import GPU, GiB, Hardware
from labkit.driver import cli, directory, doctor, installed, machine, trial

NO_RANKS = {
    name: lambda hardware: ("ok", "left out of this test", "")
    for name in ("gloo all-reduce", "NCCL all-reduce")
}


def hardware(**values) -> Hardware:
    return Hardware(**({"cores": 2, "memory_bytes": 8 * GiB} | values))


def gpus(count: int) -> Hardware:
    found = tuple(GPU(index=i, name="H100", memory_bytes=GiB) for i in range(count))
    return hardware(gpus=found, torch_version="2.13.0", torch_cuda="13.0")


@pytest.fixture
def checked(monkeypatch):
    """Makes one check on a pretended machine."""

    def check(name: str, on: Hardware | None = None) -> doctor.Check:
        monkeypatch.setattr(doctor, "CHECKS", {name: doctor.CHECKS[name]})
        (found,) = doctor.examine(on or hardware())
        assert found.name == name
        assert found.remedy or found.status in ("ok", "skipped")
        return found

    return check


@pytest.fixture
def limits(monkeypatch):
    """Sets what the process's limits look like; others have no end."""

    def pretend(**low: float) -> None:
        monkeypatch.setattr(doctor, "soft_limit", lambda name: low.get(name, 1e18))

    return pretend


def run_labkit(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "labkit", *arguments],
        text=True,
        capture_output=True,
        check=False,
        env=os.environ | environment,
    )


def test_this_machine_can_run_labkit(tmp_path):
    done = run_labkit("doctor", XDG_STATE_HOME=str(tmp_path), WORLD_SIZE="9")
    assert done.returncode == 0, done.stdout
    assert done.stderr == ""
    assert "labkit: what this machine offers\n  cores " in done.stdout
    assert re.search(
        r"^ok +gloo all-reduce: sum right; [\d.]+ ms", done.stdout, re.MULTILINE
    )
    assert re.search(r"^(ok|skipped) +NCCL all-reduce: ", done.stdout, re.MULTILINE)
    assert "WORLD_SIZE: left over and harmless" in done.stdout
    assert list((tmp_path / "labkit" / "runs").iterdir()) == []


def test_the_report_loads_no_torch_and_no_matplotlib():
    code = (
        "import sys; from labkit.driver import cli; print(cli.main(['doctor']), "
        "'torch' in sys.modules, 'matplotlib' in sys.modules)"
    )
    printed = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert printed.splitlines()[-1] == "0 False False"


def test_help_tells_the_exit_statuses():
    for arguments in (["--help"], ["doctor", "--help"]):
        done = run_labkit(*arguments)
        assert done.returncode == 0
        for line in cli.STATUSES.splitlines():
            assert line in done.stdout
        assert re.findall(r"^  (\d)  ", done.stdout, re.MULTILINE) == ["0", "1", "2"]


@pytest.mark.parametrize("arguments", [[], ["docter"], ["doctor", "--hard"]])
def test_wrong_usage_is_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "usage: labkit" in capsys.readouterr().err


def test_the_version_is_told():
    assert run_labkit("--version").stdout == f"labkit {labkit.__version__}\n"


def test_the_command_is_installed_by_pyproject():
    text = (Path(labkit.__file__).parent.parent / "pyproject.toml").read_text()
    assert '[project.scripts]\nlabkit = "labkit.driver.cli:main"\n' in text


def test_a_missing_dependency_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    for name in ("labkit.driver.doctor", "labkit.driver.machine"):
        monkeypatch.delitem(sys.modules, name)
    for name in ("doctor", "machine"):
        monkeypatch.delattr(f"labkit.driver.{name}")
    assert cli.main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("failed   packages: import of pynvml halted")
    assert "Do: install" in printed


def test_a_failed_check_is_status_1_with_its_remedy(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "CHECKS", doctor.CHECKS | NO_RANKS)
    monkeypatch.setattr(doctor, "soft_limit", lambda name: 20)
    assert cli.main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "failed   open files: 20\n         Do: run `ulimit -n 1024`" in printed
    assert printed.endswith("\n2 failed\n")  # open files and processes


def test_warnings_alone_are_status_0(monkeypatch, capsys):
    small = hardware(shm_bytes=64 * 2**20)
    monkeypatch.setattr(machine, "detect", lambda: small)
    monkeypatch.setattr(doctor, "CHECKS", {"/dev/shm": doctor.check_shm})
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "warning  /dev/shm: 64 MiB\n         Do: NCCL and data-loader" in printed


def test_a_check_that_raises_is_a_failed_check(monkeypatch, capsys):
    def explode(hardware):
        raise OSError("the disk is on fire")

    after = {"explosion": explode, "environment": doctor.check_environment}
    monkeypatch.setattr(doctor, "CHECKS", after)
    assert doctor.run() == 1
    printed = capsys.readouterr().out
    assert "failed   explosion: OSError: the disk is on fire\n" in printed
    assert "Do: repair what is named here" in printed
    assert "ok       environment" in printed
    assert "Traceback" not in printed


def test_a_machine_that_cannot_be_read_is_a_failed_check(monkeypatch, capsys):
    def no_sysconf():
        raise AttributeError("module 'os' has no attribute 'sysconf'")

    monkeypatch.setattr(machine, "detect", no_sysconf)
    assert doctor.run() == 1
    assert "failed   machine: AttributeError: module 'os'" in capsys.readouterr().out


def test_a_failed_check_must_have_a_remedy():
    with pytest.raises(AssertionError, match="disk has no remedy"):
        doctor.Check(name="disk", status="failed", found="full")
    with pytest.raises(ValueError, match="status must be one of 'ok', 'warning'"):
        doctor.Check(name="disk", status="bad", found="full")


@pytest.mark.parametrize(
    ("size", "status"), [(GiB - 1, "warning"), (GiB, "ok"), (None, "ok")]
)
def test_shared_memory_below_1_gib_is_a_warning(checked, size, status):
    assert checked("/dev/shm", hardware(shm_bytes=size)).status == status


@pytest.mark.parametrize(
    ("ranks_fit", "status"), [(1, "failed"), (3, "warning"), (4, "ok")]
)
def test_memory_is_checked_for_2_and_4_ranks(checked, ranks_fit, status):
    found = checked("memory", hardware(memory_bytes=ranks_fit * 64 * 10**6))
    assert found.status == status
    if status != "ok":
        assert f"at most {ranks_fit} rank" in found.found


@pytest.mark.parametrize(
    ("name", "limit"), [("open files", "NOFILE"), ("processes", "NPROC")]
)
@pytest.mark.parametrize(
    ("value", "status"), [(63, "failed"), (255, "warning"), (256, "ok")]
)
def test_low_limits_are_found(checked, limits, name, limit, value, status):
    limits(**{f"RLIMIT_{limit}": value})
    found = checked(name)
    assert (found.status, found.found) == (status, str(value))


def test_a_containers_limit_of_processes_is_found(
    checked, limits, tmp_path, monkeypatch
):
    (tmp_path / "pids.max").write_text("50\n")
    monkeypatch.setattr(machine, "own_cgroups", lambda root, controller: [tmp_path])
    limits()
    found = checked("processes")
    assert (found.status, found.found) == ("failed", "50")
    assert "--pids-limit" in found.remedy


def test_real_limits_are_read():
    code = (
        "import resource; from labkit.driver import doctor\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))\n"
        "print(doctor.check_open_files(None)[:2])"
    )
    printed = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert printed == "('failed', '40')\n"


def test_no_limit_is_well(checked, limits):
    limits(RLIMIT_NOFILE=float("inf"))
    assert checked("open files").found == "no limit"


@pytest.mark.parametrize(
    ("count", "limit", "status"),
    [(1, 0, "skipped"), (2, 2**16, "warning"), (2, float("inf"), "ok")],
)
def test_locked_memory_matters_with_nccl_only(checked, limits, count, limit, status):
    limits(RLIMIT_MEMLOCK=limit)
    assert checked("locked memory", gpus(count)).status == status


def test_a_folder_of_somebody_else_fails_and_is_left_alone(
    checked, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = directory.state_dir()
    folder.chmod(0o755)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    found = doctor.check_folder(hardware())
    assert found[0] == "failed"
    assert found[1].endswith(f"belongs to user {me}, and you are user {me + 1}")
    assert "XDG_STATE_HOME" in found[2]
    assert checked("gloo all-reduce").status == "skipped"
    assert list(folder.iterdir()) == []
    assert folder.stat().st_mode & 0o777 == 0o755


def test_a_folder_that_stays_open_to_others_fails(checked, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    directory.state_dir().chmod(0o755)
    monkeypatch.setattr(Path, "chmod", lambda path, mode: None)  # as on some disks
    found = checked("folder of runs")
    assert found.status == "failed"
    assert found.found.endswith("stays open to others (mode 0755)")


def test_a_folder_that_was_open_is_closed(checked, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    directory.state_dir().chmod(0o755)
    assert checked("folder of runs").status == "ok"
    assert directory.state_path().stat().st_mode & 0o777 == 0o700


def test_a_folder_that_cannot_be_made_fails(checked, tmp_path, monkeypatch):
    (tmp_path / "labkit").write_text("a file")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    found = checked("folder of runs")
    assert found.status == "failed"
    assert "cannot be made" in found.found


@pytest.mark.parametrize(
    ("free", "status"), [(10**7, "failed"), (10**8, "warning"), (10**9, "ok")]
)
def test_a_full_disk_is_found(checked, tmp_path, monkeypatch, free, status):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "not" / "yet"))
    usage = SimpleNamespace(free=free)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    found = checked("disk space")
    assert found.status == status
    assert found.found == f"{free / 1e9:.1f} GB free in {tmp_path}"
    assert list(tmp_path.iterdir()) == []


REQUIRES = [
    "torch>=2.11",
    "numpy>=1.26",
    'ipykernel>=6.29; extra == "notebooks"',
    'tomli>=2; python_version < "3" and extra == "dev"',
    'ruff>=0.11; extra == "dev"',
]


@pytest.fixture
def packages(monkeypatch):
    """Pretends that exactly these versions are installed."""

    def pretend(**versions: str) -> None:
        def version(name: str) -> str:
            if name not in versions:
                raise metadata.PackageNotFoundError(name)
            return versions[name]

        pretended = SimpleNamespace(
            requires=lambda name: REQUIRES,
            metadata=lambda name: {"Requires-Python": "<3.14,>=3.10"},
            version=version,
            PackageNotFoundError=metadata.PackageNotFoundError,
        )
        monkeypatch.setattr(installed, "metadata", pretended)

    return pretend


def test_a_wrong_or_missing_package_fails(checked, packages):
    packages(torch="2.9.1+cpu", ipykernel="7.0")
    found = checked("packages")
    assert found.status == "failed"
    assert found.found == (
        "torch 2.9.1+cpu (>=2.11 needed), numpy missing (>=1.26 needed)"
    )
    assert found.remedy.endswith("-m pip install 'torch>=2.11' 'numpy>=1.26'")


def test_a_missing_notebook_package_is_a_warning(checked, packages):
    packages(torch="2.13.0+cu130", numpy="2.0")
    found = checked("notebook packages")
    assert found.status == "warning"
    assert found.found == "ipykernel missing (>=6.29 needed)"


def test_local_and_early_versions_are_taken(checked, packages):
    packages(torch="2.12.0.dev20260101+cpu", numpy="2.0rc1")
    assert checked("packages").found == "torch 2.12.0.dev20260101+cpu, numpy 2.0rc1"


@pytest.mark.parametrize(("version", "status"), [("3.9.1", "failed"), ("3.13.0", "ok")])
def test_the_python_is_compared(checked, packages, monkeypatch, version, status):
    packages()
    monkeypatch.setattr(installed.platform, "python_version", lambda: version)
    assert checked("Python").status == status


def test_the_real_metadata_names_what_is_used():
    needed = {need.name for need in installed.requirements("")}
    added = {need.name for need in installed.requirements("notebooks")}
    assert {"torch", "numpy", "pandas", "matplotlib", "cloudpickle"} <= needed
    assert {"ipykernel", "ipywidgets"} <= added
    assert needed & added == set()


@pytest.mark.parametrize(
    ("on", "why"),
    [
        (hardware(), "no GPU is visible"),
        (gpus(1), "two ranks need two GPUs, and there is one"),
    ],
)
def test_nccl_is_skipped_with_the_reason(checked, on, why):
    found = checked("NCCL all-reduce", on)
    assert (found.status, found.found) == ("skipped", f"not tried: {why}")


def test_nccl_is_tried_with_two_gpus(checked, monkeypatch):
    tried = []
    monkeypatch.setattr(
        trial, "try_all_reduce", lambda *names: tried.append(names) or ("ok", "", "")
    )
    assert checked("NCCL all-reduce", gpus(2)).status == "ok"
    assert tried == [("nccl", "cuda")]


def test_a_wrong_sum_fails_and_keeps_the_run(checked, monkeypatch, tmp_path):
    run = SimpleNamespace(results={0: (3.0, 3.0, 1.0), 1: (3.0, 2.5, 1.0)})
    monkeypatch.setattr(trial, "launch", lambda *args, **options: run)
    found = checked("gloo all-reduce")
    assert (found.status, found.found) == ("failed", "1 + 2 became [2.5, 3.0]")


def test_a_rank_that_fails_is_a_failed_check_without_its_traceback(
    checked, monkeypatch
):
    def broken(num_values):
        def add(worker):
            raise RuntimeError(f"no route for {num_values} values")

        return add

    monkeypatch.setattr(trial, "adder", broken)
    found = checked("gloo all-reduce")
    assert found.status == "failed"
    assert re.search(r"^rank \d failed first", found.found)
    assert found.found.endswith("RuntimeError: no route for 250000 values")
    assert "Traceback" not in str(found)
    assert "loopback" in found.remedy


def test_a_torch_that_cannot_be_imported_is_a_failed_check(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart is missing')")
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    done = run_labkit("doctor", PYTHONPATH=paths)
    assert done.returncode == 1
    words = " ".join(done.stdout.split())
    assert "failed gloo all-reduce: StartFailed: the nursery" in words
    assert "ImportError: libcudart is missing Do: see whether `import torch`" in words
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RankFailed("rank 1 failed first", 1, None, ""), "rank 1 failed first"),
        (OSError(), "OSError: "),
        (ValueError("one\ntwo\nthree"), "ValueError: one three"),
    ],
)
def test_errors_are_one_line(error, words):
    assert doctor.shorten(error) == words
