"""Tasks run once per disk; a dead process releases its lock, and the next one does its work."""

import functools
import time
from contextlib import nullcontext
from pathlib import Path

from engine.storage import atomic_folder, cache_folder
from engine.storage.cache_folder import run_once
from tests.helpers import kit

PIECES = 12
CONTENT = [f"piece {i}" for i in range(PIECES)]


def made(folder: Path) -> list[int]:
    """Return the pieces in the log that all processes share."""
    return sorted(map(int, (folder / "log").read_text().split()))


def share_pieces(folder: Path, wait=lambda: None) -> list[str]:
    """Make what no other process makes; return the content of all pieces."""
    targets = [folder / "pieces" / f"{i}.txt" for i in range(PIECES)]

    def make(i: int) -> None:
        with open(folder / "log", "a") as file:
            file.write(f"{i}\n")
        wait()
        time.sleep(0.03)
        atomic_folder.rewrite(targets[i], f"piece {i}")

    for i, target in enumerate(targets):
        run_once(target, functools.partial(make, i), "pieces")
    return [target.read_text() for target in targets]


# ---- each task once --------------------------------------------------------------------------------------------------


def test_each_piece_is_made_once(tmp_path):
    assert kit.spawn(3, share_pieces, tmp_path, out=tmp_path / "out") == [CONTENT] * 3
    assert made(tmp_path) == list(range(PIECES))
    assert list(tmp_path.rglob("*.tmp")) == []


def test_mutant_without_a_lock_makes_a_piece_three_times(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_folder, "exclusive", lambda target, what: nullcontext())
    all_begun = functools.partial(kit.until, lambda: len(made(tmp_path)) >= 3)
    results = kit.spawn(3, share_pieces, tmp_path, all_begun, out=tmp_path / "out")
    assert results == [CONTENT] * 3  # no data is lost
    assert made(tmp_path)[:3] == [0, 0, 0]


def test_piece_of_a_killed_launch_is_taken_over(tmp_path):
    (dying,) = kit.fork(1, share_pieces, tmp_path, lambda: time.sleep(600), out=tmp_path / "dying")
    kit.until((tmp_path / "log").exists)
    others = kit.fork(2, share_pieces, tmp_path, out=tmp_path / "others")
    dying.kill()
    for process in others:
        process.join(300)
        assert process.exitcode == 0
    assert made(tmp_path) == [0, *range(PIECES)]
