"""pyproject.toml, uv.lock and the requirements name the same versions; files of services call what exists."""

import re
import runpy
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement

from src.config.paths import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
RANGES = {  # file of pins -> ranges in pyproject.toml
    "requirements.txt": PROJECT["project"]["dependencies"] + PROJECT["dependency-groups"]["dev"],
    "requirements-extra.txt": [requirement for extra in EXTRAS.values() for requirement in extra],
}

LOCK = runpy.run_path(str(REPOSITORY / ".ci" / "lock.py"))
normalized = LOCK["normalized"]
SERVICE_FILES = ("Dockerfile", ".devcontainer/devcontainer.json", ".github/dependabot.yml")


def pins(file: str) -> dict[str, str]:
    return {normalized(name): version for name, version in LOCK["PIN"].findall((REPOSITORY / file).read_text())}


@pytest.mark.parametrize("file", RANGES)
def test_pins_are_the_locked_versions_within_their_ranges(file):
    packages = tomllib.loads((REPOSITORY / "uv.lock").read_text())["package"]
    locked = {package["name"]: package.get("version") for package in packages}
    ranges = {normalized(each.name): each.specifier for each in map(Requirement, RANGES[file])}
    pinned = pins(file)
    assert pinned.keys() == ranges.keys()
    for name, version in pinned.items():
        assert version == locked[name], f"{name}: run `make lock`"
        assert ranges[name].contains(version), name


def test_lock_belongs_to_the_ranges():
    packages = tomllib.loads((REPOSITORY / "uv.lock").read_text())["package"]
    (ours,) = (package for package in packages if package["name"] == PROJECT["project"]["name"])
    wanted = ours["metadata"]["requires-dist"] + ours["metadata"]["requires-dev"]["dev"]
    in_lock = {(each["name"], str(Requirement(f"x{each['specifier']}").specifier)) for each in wanted}
    requirements = [Requirement(text) for file in RANGES for text in RANGES[file]]
    assert in_lock == {(normalized(each.name), str(each.specifier)) for each in requirements}


def test_files_of_services_call_targets_that_exist_and_tools_of_these_versions():
    makefile = (REPOSITORY / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    files = [*REPOSITORY.glob(".github/workflows/*.yml"), *map(REPOSITORY.joinpath, SERVICE_FILES)]
    called = {file.name: re.findall(r"\bmake ([a-z-]+)", file.read_text()) for file in files}
    assert all(called.values()), called
    assert {target for names in called.values() for target in names} <= targets
    hooks = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())["repos"]
    revisions = {hook["repo"].rpartition("/")[2]: hook["rev"] for hook in hooks}
    assert revisions["ruff-pre-commit"] == f"v{pins('requirements.txt')['ruff']}"
