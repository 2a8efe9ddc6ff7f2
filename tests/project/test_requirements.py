"""pyproject.toml, uv.lock and the requirements name the same versions."""

import ast
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


def test_lint_does_not_depend_on_extra_packages():
    """pyrefly treats as Any each extra package that the code imports; else `make lint` fails where it is not installed."""
    extras = {Requirement(requirement).name for requirement in RANGES["requirements-extra.txt"]}
    imported = set()
    for folder in PROJECT["tool"]["pyrefly"]["project-includes"]:
        files = [REPOSITORY / folder] if folder.endswith(".py") else (REPOSITORY / folder).rglob("*.py")
        for file in files:
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Import):
                    imported |= {name.name.split(".")[0] for name in node.names}
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    imported.add(node.module.split(".")[0])
    skipped = {name.removesuffix(".*") for name in PROJECT["tool"]["pyrefly"]["replace-imports-with-any"]}
    assert extras & imported <= skipped
    assert "torch" in imported  # the files were read
