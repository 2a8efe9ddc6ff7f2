"""engine/MANIFEST has the hashes of the files that it names; engine/VERSION is that of CHANGELOG.md."""

import re
import shutil

import pytest

from engine.tools import manifest
from tests.helpers import kit

STALE = (
    "engine/MANIFEST is stale: run `make manifest` if this is the template. A copy never does, since make update would "
    "then take its edits for the template's text: in a copy, rm -r tests/project, which is about the template"
)


def stale(folder) -> set[tuple[str, str]]:
    """Return (path, hash) of what differs between the MANIFEST and the files, but for add-ons that were removed."""
    listed, here = manifest.read_manifest(folder), manifest.hashes(manifest.engine_files(folder))
    removed = {name for name in listed.keys() - here.keys() if name.startswith(("addons/", "tests/addons/"))}
    return {each for each in listed.items() ^ here.items() if each[0] not in removed}


def test_hashes_are_those_of_the_files():
    assert stale(kit.REPOSITORY) == set(), STALE


@pytest.mark.parametrize("mutant", ["edited", "new", "deleted"])
def test_mutant_of_a_file_is_caught(tmp_path, mutant):
    shutil.copytree(kit.REPOSITORY / "engine" / "tools", tmp_path / "engine" / "tools")
    manifest.write_manifest(tmp_path)
    assert stale(tmp_path) == set()
    file = tmp_path / "engine" / "tools" / ("new.py" if mutant == "new" else "update.py")
    file.unlink() if mutant == "deleted" else file.write_text("# another text\n")
    assert {name for name, _ in stale(tmp_path)} == {f"engine/tools/{file.name}"}


def test_version_heads_the_changelog():
    version = (kit.REPOSITORY / manifest.VERSION).read_text().strip()
    sections = re.findall(r"^## (.+)$", (kit.REPOSITORY / "CHANGELOG.md").read_text(), re.M)
    assert sections[0] == version
    for section in (kit.REPOSITORY / "CHANGELOG.md").read_text().split("\n## ")[1:]:
        assert {"**New**", "**To do**", "**Numbers**", "**Data**"} <= set(re.findall(r"\*\*\w[\w ]*\*\*", section)), (
            section
        )
