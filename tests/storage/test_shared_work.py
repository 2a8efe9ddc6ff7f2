"""Tasks run once per disk; a dead process releases its lock, and the next one does its work."""

import functools
import hashlib
import os
import resource
import socket
import time
from pathlib import Path

import numpy as np

from src.config import validation
from src.storage import atomic_folder, cache_folder
from src.storage.cache_folder import SharedWork
from tests.helpers import kit

PIECES = 12
CONTENT = [f"piece {i}" for i in range(PIECES)]


def note(folder: Path, *words) -> None:
    """Add a line to the log that all processes share."""
    with open(folder / "log", "a") as file:
        file.write(" ".join(map(str, words)) + "\n")


def log(folder: Path) -> list[list[str]]:
    return [line.split() for line in (folder / "log").read_text().splitlines()] if (folder / "log").exists() else []


def made(folder: Path) -> list[int]:
    return sorted(int(words[1]) for words in log(folder) if words[0] == "made")


def share_pieces(folder: Path, before=lambda i: None, seconds: float = 0.03, pieces: int = PIECES) -> list[str]:
    """Make what no other process makes; return the content of all pieces."""
    targets = [folder / "pieces" / f"{i}.txt" for i in range(pieces)]
    work = SharedWork(folder / "cache")

    def make(i: int) -> None:
        before(i)
        time.sleep(seconds)
        atomic_folder.rewrite(targets[i], f"piece {i}")
        note(folder, "made", i, os.getpid())

    for i, target in enumerate(targets):
        work.run_once(target, functools.partial(make, i), "pieces")
    return [target.read_text() for target in targets]


def wait_for(folder: Path, count: int, i: int) -> None:
    """Return when `count` ranks are making a piece, so that none comes too late to make one."""
    (folder / "begun").mkdir(exist_ok=True)
    (folder / "begun" / os.environ["RANK"]).touch()
    kit.until(lambda: len(list((folder / "begun").iterdir())) == count)


class NoLock:
    """The lock of a file system without locks: every process gets it."""

    def __init__(self, path, timeout=-1):
        Path(path).touch()

    def acquire(self, timeout=None):
        return self

    def release(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


# ---- each task once --------------------------------------------------------------------------------------------------


def test_each_piece_is_made_once(tmp_path):
    assert kit.spawn(3, share_pieces, tmp_path, out=tmp_path / "out") == [CONTENT] * 3
    assert made(tmp_path) == list(range(PIECES))
    assert list(tmp_path.rglob("*.tmp")) == []


def test_mutant_without_a_lock_makes_a_piece_three_times(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_folder, "FileLock", NoLock)
    all_begun = functools.partial(wait_for, tmp_path, 3)
    results = kit.spawn(3, share_pieces, tmp_path, all_begun, 0.0, 1, out=tmp_path / "out")
    assert results == [CONTENT[:1]] * 3  # no data is lost
    assert made(tmp_path) == [0, 0, 0]


def test_piece_of_a_killed_launch_is_taken_over(tmp_path):
    def stuck(i):
        note(tmp_path, "stuck", i, os.getpid())
        time.sleep(600)

    (dying,) = kit.fork(1, share_pieces, tmp_path, stuck, out=tmp_path / "dying")
    kit.until(lambda: log(tmp_path))
    others = kit.fork(2, share_pieces, tmp_path, out=tmp_path / "others")
    dying.kill()
    for process in others:
        process.join(300)
        assert process.exitcode == 0
    assert made(tmp_path) == list(range(PIECES))


# ---- results of one launch -------------------------------------------------------------------------------------------


def compute_in_two_processes(folder: Path) -> dict:
    def compute():
        note(folder, "made", len(log(folder)))
        return {"commit": os.environ["RANK"]}

    return SharedWork(folder / "cache").compute_once("main", compute, "a look-up")


def test_one_process_of_a_launch_looks_up(tmp_path):
    """The next launch looks up again, and the result of an earlier launch with the same name is not used."""
    for launch in range(2):
        one, other = kit.spawn(2, compute_in_two_processes, tmp_path, out=tmp_path / "out")
        assert one == other
        assert len(made(tmp_path)) == launch + 1


def test_result_of_an_earlier_launch_with_the_same_name(tmp_path, monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "MASTER_PORT": "29500", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    results = [SharedWork(tmp_path).compute_once("main", lambda i=i: {"commit": i}, "a look-up") for i in range(2)]
    assert results == [{"commit": 0}] * 2
    (file,) = (tmp_path / "launches").glob("*/*.json")
    os.utime(file, (cache_folder.STARTED - 100, cache_folder.STARTED - 100))
    assert SharedWork(tmp_path).compute_once("main", lambda: {"commit": 2}, "a look-up") == {"commit": 2}


def test_launches_on_different_hosts_are_different(tmp_path, monkeypatch):
    """accelerate launch gives all of them the same address and port; containers have the same process numbers, too."""

    def names() -> int:
        found = set()
        for host in ("one", "other"):
            monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
            found.add(cache_folder._launch_name())
        return len(found)

    monkeypatch.setenv("WORLD_SIZE", "2")
    assert names() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert names() == 2


# ---- the cache folder ------------------------------------------------------------------------------------------------


def digest(cache: Path) -> dict[str, str]:
    """Return the hash of each file in the complete prepared folders, by name."""
    hashes = {}
    for stats in sorted(cache.glob("**/prepared/[!.]*/facts.json")):
        for path in sorted(p for p in stats.parent.iterdir() if p.is_file()):
            hashes[f"{stats.parent.name}/{path.name}"] = hashlib.sha256(path.read_bytes()).hexdigest()
    return hashes


def test_full_disk_names_the_cache(tmp_path, monkeypatch):
    rows = [{"input_ids": np.arange(i, i + 40).tolist()} for i in range(2000)]
    kit.write_yaml(tmp_path / "llama.yaml", kit.LLAMA | {"vocab_size": 3000})
    fields = {"model_config": tmp_path / "llama.yaml", "train_file": kit.write_jsonl(tmp_path / "rows.jsonl", rows)}
    fields |= {"output_dir": "run", "max_steps": 2, "global_batch_size": 8, "cache_dir": tmp_path / "cache"}
    original = validation.check

    def check(*args):
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # files of 4 KB
        original(*args)

    monkeypatch.setattr(validation, "check", check)
    codes, texts = kit.run_command("train.py", *kit.flags(**fields), folder=tmp_path, world=1)
    assert codes == [2], texts
    assert digest(tmp_path / "cache") == {}  # nothing partial counts
    assert str(tmp_path / "cache") in texts[0].rstrip().splitlines()[-1]


def _open_on_two_hosts(fields: dict) -> int:
    socket.gethostname = lambda: f"node{os.environ['RANK']}.cluster"
    _, splits = kit.open_data(**fields)
    return len(splits["train"])


def test_cache_per_node_prepares_the_same_bytes_on_each_node(tiny, tmp_path):
    fields = tiny | {"cache_dir": tmp_path / "cache", "cache_per_node": True}
    assert kit.spawn(2, _open_on_two_hosts, fields, out=tmp_path / "out") == [83, 83]
    one, other = (digest(tmp_path / "cache" / f"node_node{i}.cluster") for i in (0, 1))
    assert one == other != {}
