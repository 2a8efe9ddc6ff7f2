"""pyproject.toml, uv.lock and the requirements name the same versions."""

import runpy
import tomllib

import pytest
from packaging.requirements import Requirement

from engine.config.paths import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
RANGES = {  # file of pins -> ranges in pyproject.toml
    "requirements.txt": PROJECT["project"]["dependencies"] + PROJECT["dependency-groups"]["dev"],
    "requirements-extra.txt": [requirement for extra in EXTRAS.values() for requirement in extra],
}
LOCK = runpy.run_path(str(REPOSITORY / ".ci" / "lock.py"))


@pytest.mark.parametrize("file", RANGES)
def test_pins_are_the_locked_versions_within_their_ranges(file):
    normalized, text = LOCK["normalized"], (REPOSITORY / file).read_text()
    packages = tomllib.loads((REPOSITORY / "uv.lock").read_text())["package"]
    locked = {package["name"]: package.get("version") for package in packages}
    ranges = {normalized(each.name): each.specifier for each in map(Requirement, RANGES[file])}
    pinned = {normalized(name): version for name, version in LOCK["PIN"].findall(text)}
    assert pinned.keys() == ranges.keys()
    for name, version in pinned.items():
        assert version == locked[name], f"{name}: run `make lock`"
        assert ranges[name].contains(version), name
