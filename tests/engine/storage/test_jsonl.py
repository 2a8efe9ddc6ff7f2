"""JSON lines: whole lines only, nothing lost on a full disk, truncated after a step."""

import json
import resource
from pathlib import Path

import pytest

from engine.storage import jsonl


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_wait_for_the_flush_and_are_strict_json(tmp_path):
    lines = jsonl.JsonlWriter(tmp_path / "a.jsonl")
    lines.add({"step": 1})
    assert not (tmp_path / "a.jsonl").exists()
    lines.flush()
    with pytest.raises(ValueError):
        lines.add({"loss": float("nan")})
    lines.flush()
    assert read(tmp_path / "a.jsonl") == [{"step": 1}]
    values = {"a": float("nan"), "b": [float("inf"), 1.5], "c": {"d": -float("inf")}, "e": 3}
    assert jsonl.strict_json(values) == {"a": None, "b": [None, 1.5], "c": {"d": None}, "e": 3}


def test_full_disk_gets_whole_lines_and_the_rest_later(tmp_path, capsys):
    """The write that does not fit is taken in part, as write(2) has it."""
    path, limits = tmp_path / "metrics.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    lines = jsonl.JsonlWriter(path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # of any file
    try:
        for step in range(1, 8):
            lines.add({"step": step, "rest": "x" * 700})
            lines.try_flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [line["step"] for line in read(path)] == [1, 2, 3, 4, 5]
    assert f"{path} cannot be written (No space left on device)" in capsys.readouterr().err
    lines.add({"step": 8})
    lines.flush()
    assert [line["step"] for line in read(path)] == [1, 2, 3, 4, 5, 6, 7, 8]


FIVE = "".join(f'{{"step": {n}}}\n' for n in range(1, 6))


@pytest.mark.parametrize(
    "text, kept",
    [
        (FIVE[:-5], FIVE[: 3 * 12]),  # half a line, as a kill leaves it
        (FIVE[: 3 * 12], FIVE[: 3 * 12]),  # nothing to drop
        (FIVE[: 3 * 12 - 1], FIVE[: 2 * 12]),  # the line to keep is not whole
        (FIVE[4 * 12 :], ""),  # all of it
        (FIVE + '[1]\n"x"\n\n\0\0\0\0\n', FIVE[: 3 * 12]),  # what is no object
    ],
)
def test_truncate_keeps_the_lines_up_to_a_step(tmp_path, text, kept):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    inode = path.stat().st_ino
    jsonl.truncate_after(path, lambda line: line["step"] <= 3)
    assert path.read_text() == kept
    assert path.stat().st_ino == inode  # in place


def test_last_step_is_read_from_the_end(tmp_path, monkeypatch):
    """A run that ends looks up its last step: with all lines parsed, a million steps would take seconds and gigabytes."""
    path, parsed = tmp_path / "a.jsonl", []
    assert jsonl.last_step(path) == 0
    path.write_text("".join(f'{{"step": {n}}}\n' for n in range(1, 1001)) + '[1]\n{"kind": "x"}\n{"step": 10')
    loads = json.loads
    monkeypatch.setattr(jsonl.json, "loads", lambda text: parsed.append(text) or loads(text))
    assert jsonl.last_step(path) == 1000
    assert len(parsed) == 3
