"""What is promised outside the code: installation files, README, CONTRIBUTING."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins(marker_python: str) -> dict[str, str]:
    """Pinned versions by name, as that Python version sees them."""
    found = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)
            environment = {"python_version": marker_python}
            if pin.marker is None or pin.marker.evaluate(environment):
                assert pin.name not in found, f"{pin.name} is pinned twice"
                found[pin.name.lower()] = str(pin.specifier).removeprefix("==")
    return found


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_the_tested_set_satisfies_every_dependency(project, python):
    extras = project["optional-dependencies"]
    tested = pins(python)
    for text in [*project["dependencies"], *extras["notebooks"], *extras["dev"]]:
        need = Requirement(text)
        if need.marker and not need.marker.evaluate({"python_version": python}):
            continue
        assert need.specifier.contains(tested[need.name.lower()]), need


def test_torch_is_pinned_as_tested():
    assert pins("3.11")["torch"] == "2.13.0"


def pip_lines(name: str) -> list[str]:
    """What pip is told by conda's file or by Binder's."""
    text = (ROOT / name).read_text()
    if name.endswith(".yml"):
        dependencies = yaml.safe_load(text)["dependencies"]
        return next(item["pip"] for item in dependencies if isinstance(item, dict))
    return [line for line in text.splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("name", ["environment.yml", "binder/requirements.txt"])
def test_conda_and_binder_install_what_pyproject_says(project, name):
    lines = pip_lines(name)
    editable = next(line for line in lines if line.startswith("-e"))
    extras = re.fullmatch(r"-e \.\[([a-z,]+)\]", editable)[1].split(",")
    assert extras == ["notebooks"]
    assert set(extras) <= set(project["optional-dependencies"])
    constraints = next(line for line in lines if line.startswith("-c")).split()[1]
    assert ((ROOT / name).parent / constraints).resolve() == ROOT / "constraints.txt"


def test_conda_and_binder_have_a_supported_python(project):
    allowed = SpecifierSet(project["requires-python"])
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    python = next(str(item) for item in conda if str(item).startswith("python="))
    binder = (ROOT / "binder/runtime.txt").read_text().strip()
    assert allowed.contains(python.removeprefix("python="))
    assert binder == python.replace("=", "-")


def test_a_second_make_does_not_reinstall():
    done = subprocess.run(
        ["make", "--no-print-directory", "-C", ROOT, "--question", "setup"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_make_target_in_the_readme_exists():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for name in ("README.md", "CONTRIBUTING.md"):
        named = re.findall(r"\bmake ([a-z-]+)", (ROOT / name).read_text())
        assert set(named) <= targets, name


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "labkit/README.md"])
def test_links_and_file_names_in_documents_exist(name):
    text = (ROOT / name).read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert ((ROOT / name).parent / target).exists(), target
    if name == "labkit/README.md":
        for file in re.findall(r"`((?:driver|worker|view|core)/[\w/]+\.py)`", text):
            assert (ROOT / "labkit" / file).exists(), file


def test_contributing_is_short():
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 40


def test_the_readmes_example_runs(tmp_path):
    text = (ROOT / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    assert len([line for line in code.splitlines() if line]) <= 12
    check = "\nimport json; print(json.dumps([run.status, len(run.metrics)]))"
    done = subprocess.run(
        [sys.executable, "-c", code + check],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == ["finished", 800]
