"""Compares what is installed with what labkit's own metadata asks for."""

from __future__ import annotations

import platform
import sys
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet


def compare_python() -> tuple[str, str, str]:
    """Status, what was found, and a remedy, as of all below."""
    asked = SpecifierSet(metadata.metadata("labkit")["Requires-Python"])
    version = platform.python_version()
    if asked.contains(version, prereleases=True):
        return "ok", version, ""
    remedy = "make an environment with such a Python, and install labkit there"
    return "failed", f"{version} ({asked} needed)", remedy


def compare_packages(extra: str = "") -> tuple[str, str, str]:
    """What labkit needs, or with `extra` what that adds; only the first can fail."""
    found, wrong = [], {}
    for need in requirements(extra):
        try:
            version = metadata.version(need.name)
        except metadata.PackageNotFoundError:
            version = None
        if version and need.specifier.contains(version, prereleases=True):
            found.append(f"{need.name} {version}")
        else:
            words = f"{need.name} {version or 'missing'} ({need.specifier} needed)"
            wrong[f"'{need.name}{need.specifier}'"] = words
    if not wrong:
        return "ok", ", ".join(found), ""
    remedy = f"{sys.executable} -m pip install {' '.join(wrong)}"
    return "warning" if extra else "failed", ", ".join(wrong.values()), remedy


def requirements(extra: str) -> list[Requirement]:
    """What installing labkit brings, or with `extra` what that adds to it."""
    needs = [Requirement(text) for text in metadata.requires("labkit") or []]
    if extra:
        needs = [need for need in needs if not applies(need, "")]
    return [need for need in needs if applies(need, extra)]


def applies(need: Requirement, extra: str) -> bool:
    return need.marker is None or need.marker.evaluate({"extra": extra})
