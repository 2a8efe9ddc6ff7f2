"""make lock writes the versions of uv.lock into the requirements, and nothing else."""

import pytest

from addons.tools import lock
from src.config.paths import REPOSITORY


@pytest.mark.parametrize("file", lock.FILES)
def test_pins_follow_the_lock_and_all_else_stays(file):
    text, versions = (REPOSITORY / file).read_text(), lock.locked_versions()
    assert lock.with_pins(text, versions) == text
    newer = lock.with_pins(text, {name: f"{version}.1" for name, version in versions.items()})
    changed = [(old, new) for old, new in zip(text.splitlines(), newer.splitlines(), strict=True) if old != new]
    assert len(changed) == text.count("==")
    for old, new in changed:
        name, _, rest = old.partition("==")
        version, _, comment = rest.partition(" ")
        assert new == f"{name}=={version}.1" + (f" {comment}" if comment else "")
