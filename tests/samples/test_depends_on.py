"""`depends_on()` of a sample: other input makes other data; without it the name of the folder is a hash of the code."""

import pytest

from engine.config.errors import UsageError
from engine.storage.cache_folder import sample_folder
from tests.helpers.sample_files import add_sample

PLAIN = """
import os


def make(folder):
    (folder / "train.txt").write_text(os.environ["LINES"])
"""
KEYED = (
    PLAIN
    + """

def depends_on():
    return {"lines": os.environ["LINES"]}
"""
)


def made(code: str, tmp_path, monkeypatch, lines: str) -> str:
    """Return the text that the sample made, with this value of the variable that it reads."""
    monkeypatch.setenv("LINES", lines)
    add_sample("lines", code, tmp_path, monkeypatch)
    folder = sample_folder("lines", tmp_path / "cache")
    return (tmp_path / folder / "train.txt").read_text()


def test_other_input_makes_other_data(tmp_path, monkeypatch):
    texts = [made(KEYED, tmp_path, monkeypatch, lines) for lines in ("one", "two", "one")]
    assert texts == ["one", "two", "one"]
    folders = [path for path in (tmp_path / "cache" / "samples").iterdir() if path.is_dir()]
    assert len(folders) == 2  # the first one is used again


def test_without_it_nothing_changes(tmp_path, monkeypatch):
    """The second value is not seen."""
    assert [made(PLAIN, tmp_path, monkeypatch, lines) for lines in ("one", "two")] == ["one", "one"]


@pytest.mark.parametrize(
    "code, words",
    [
        (PLAIN + "\n\ndef depends_on():\n    return open('/does/not/exist')\n", "/does/not/exist"),
        (PLAIN + "\n\ndef depends_on():\n    return os.environ['NOT_SET']\n", "KeyError: 'NOT_SET'"),
        (PLAIN + "\n\ndef depends_on():\n    return {1, 2}\n", "text, numbers"),
        (PLAIN + "\n\ndef depends_on():\n    os.environ['LINES'] += '.'\n    return os.environ['LINES']\n", "changed"),
    ],
)
def test_input_that_cannot_be_named_is_refused(tmp_path, monkeypatch, code, words):
    with pytest.raises(UsageError, match=rf"lines.py: .*depends_on\(\).*{words}"):
        made(code, tmp_path, monkeypatch, "one")
    assert not list((tmp_path / "cache").glob("samples/lines-*/train.txt"))
