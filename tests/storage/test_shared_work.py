"""Work on one disk is done once, whoever does it; who fails is heard, who dies is noticed, and nobody waits for ever."""

import ctypes
import functools
import hashlib
import json
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import time
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from src.config import validation
from src.config.errors import Failure, UsageError
from src.data import preprocessing
from src.download import cache_folder
from src.storage import shared_work
from src.storage.shared_work import SharedWork
from src.tasks import causal_lm
from tests.helpers import kit

PIECES = 12


def note(folder: Path, *words) -> None:
    """Add a line to the log that all processes share."""
    with open(folder / "log", "a") as file:
        file.write(" ".join(map(str, words)) + "\n")


def log(folder: Path) -> list[list[str]]:
    return [line.split() for line in (folder / "log").read_text().splitlines()] if (folder / "log").exists() else []


def made(folder: Path) -> list[int]:
    return sorted(int(words[1]) for words in log(folder) if words[0] == "made")


def share_pieces(folder: Path, before=lambda i: None, seconds: float = 0.03, pieces: int = PIECES) -> list[str]:
    """Share pieces with whoever else does the same; return what is in all of them."""
    targets = [folder / "pieces" / f"{i}.txt" for i in range(pieces)]
    work = SharedWork(folder / "cache")

    def make(i: int) -> None:
        before(i)
        time.sleep(seconds)
        shared_work.write_atomic(targets[i], f"piece {i}")
        note(folder, "made", i, os.getpid())

    with work.joined():
        work.run_all(targets, make, "pieces")
    return [target.read_text() for target in targets]


WHOLE = [f"piece {i}" for i in range(PIECES)]


class NoLock:
    """The lock of a file system that keeps none: everybody gets it."""

    def __init__(self, path):
        Path(path).touch()

    def acquire(self, timeout=None):
        return self

    def release(self):
        pass


# ---- each piece once ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_piece_is_made_once_and_seen_by_all(tmp_path, world):
    assert kit.spawn(world, share_pieces, tmp_path, out=tmp_path / "out") == [WHOLE] * world
    assert made(tmp_path) == list(range(PIECES))
    if world > 1:  # and nobody does it all
        assert len({words[2] for words in log(tmp_path)}) == world
    left = [path.name for path in (tmp_path / "cache").rglob("*") if path.suffix in (".here", ".failed", ".tmp")]
    assert left == []


def test_mutant_without_a_lock_makes_pieces_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_work, "FileLock", NoLock)
    monkeypatch.setattr(SharedWork, "raise_if_failed", lambda self: None)
    assert (
        kit.spawn(3, share_pieces, tmp_path, lambda i: None, 0.2, 3, out=tmp_path / "out") == [WHOLE[:3]] * 3
    )  # no data is lost
    assert len(made(tmp_path)) > 3


def test_two_launches_at_once_share_the_work(tmp_path):
    launches = [kit.fork(2, share_pieces, tmp_path, out=tmp_path / name) for name in ("a", "b")]
    for process in chain(*launches):
        process.join(30)
        assert process.exitcode == 0
    assert made(tmp_path) == list(range(PIECES))
    assert len({words[2] for words in log(tmp_path)}) > 2  # processes of both


def test_a_piece_of_a_dead_process_of_another_launch_is_taken_over(tmp_path):
    def stuck(i):
        note(tmp_path, "stuck", i, os.getpid())
        time.sleep(60)

    (dying,) = kit.fork(1, share_pieces, tmp_path, stuck, out=tmp_path / "dying")
    [_, piece, _] = kit.until(lambda: log(tmp_path))[0]
    others = kit.fork(2, share_pieces, tmp_path, out=tmp_path / "others")
    kit.until(lambda: len(made(tmp_path)) == PIECES - 1)
    time.sleep(0.3)
    assert int(piece) not in made(tmp_path)  # it is waited for
    assert all(process.is_alive() for process in others)
    dying.kill()
    for process in others:
        process.join(10)
        assert process.exitcode == 0
    assert made(tmp_path) == list(range(PIECES))


# ---- who fails, who dies ------------------------------------------------------------------------------------------------


def outcome(folder: Path, before, world: int = 3) -> tuple[list, list[str], float]:
    """Return (what each rank raised, what it held, seconds) of a launch in which something happens to a rank."""
    began = time.monotonic()

    def guarded():
        try:
            share_pieces(folder, before, 0.2, 30)
        except (UsageError, Failure, RuntimeError) as error:
            return type(error).__name__, str(error), getattr(error, "reported_elsewhere", False)
        return "nothing", "", False

    try:
        results = kit.spawn(world, guarded, out=folder / "out", timeout=25)
    except kit.RankFailed as failed:
        results = [
            kit.torch.load(path, weights_only=False) if path.exists() else None
            for path in (folder / "out" / f"rank{rank}.pt" for rank in range(world))
        ]
        if None in failed.codes:
            raise
    return results, log(folder), time.monotonic() - began


@pytest.mark.parametrize("kind", [UsageError, RuntimeError])
def test_a_rank_that_fails_stops_the_others_with_its_reason(tmp_path, kind):
    def before(i):
        if os.environ["RANK"] == "1":
            raise kind("a cosmic ray")

    results, lines, seconds = outcome(tmp_path, before)
    assert results[1] == (kind.__name__, "a cosmic ray", False)
    expected = ("UsageError", "a cosmic ray", True) if kind is UsageError else None
    expected = expected or ("Failure", "rank 1: RuntimeError: a cosmic ray", True)
    assert results[0] == results[2] == expected
    assert seconds < 10
    assert len(lines) < 30  # they did not go on to the end


def test_a_rank_that_is_killed_stops_the_others(tmp_path):
    def before(i):
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    results, lines, seconds = outcome(tmp_path, before)
    assert results[1] is None
    for rank in (0, 2):
        kind, text, _ = results[rank]
        assert (kind, "rank 1 ended without a word" in text) == ("Failure", True)
    assert seconds < 10
    assert len(lines) < 30


@pytest.mark.parametrize("how", ["fails", "is killed"])
def test_mutant_that_does_not_listen_is_caught(tmp_path, monkeypatch, how):
    def before(i):
        if os.environ["RANK"] == "1":
            if how == "fails":
                raise RuntimeError("a cosmic ray")
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(SharedWork, "raise_if_failed", lambda self: None)
    results, _, _ = outcome(tmp_path, before)
    assert results[0] == results[2] == ("nothing", "", False)


def test_hosts_with_dots_in_their_names(tmp_path, monkeypatch):
    """Ranks 0 and 1 on one machine, 2 on another: a word is heard from both, a death on the same one."""
    name = lambda: ("node.a.example.org", "node.a.example.org", "node.b_1.example.org")[int(os.environ["RANK"])]  # noqa: E731
    monkeypatch.setattr(socket, "gethostname", name)

    def fails(i):
        if os.environ["RANK"] == "2":
            raise UsageError("a cosmic ray")

    def dies(i):
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    for number, (before, words) in enumerate(((fails, "a cosmic ray"), (dies, "rank 1 ended without a word"))):
        (folder := tmp_path / f"{number}").mkdir()
        results, _, seconds = outcome(folder, before)
        assert words in results[0][1]
        assert seconds < 15
    assert "rank 1 ended without a word" in results[2][1]  # said by rank 0, for the machine is another
    assert results[2][2]


def _word(work: SharedWork, host: str, parent: int, rank: int, moment: float) -> None:
    work.folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"kind": "UsageError", "text": "of another time", "time": moment})
    (work.folder / f"{host}_{parent}_{rank}.failed").write_text(text)


def _heard(folder: Path, host: str | None, parent: int, ago: float) -> bool:
    shared_work.STARTED = time.time()  # kit's children share the imports of pytest
    work = SharedWork(folder)
    _word(work, host or work.host, parent or work.parent, 1, time.time() - ago)
    try:
        work.raise_if_failed()
    except UsageError as error:
        return str(error) == "of another time"
    return False


WORDS = {  # (host, parent, age): whether it is of this launch
    (None, 0, 0): True,
    (None, 0, 100): False,
    (None, 1, 0): False,
    ("elsewhere", 1, 5): False,
    ("elsewhere", 1, -1): True,
}


@pytest.mark.parametrize("word", WORDS)
def test_a_word_of_an_earlier_launch_of_the_same_name_is_not_heard(tmp_path, word):
    env = {"MASTER_PORT": "29500", "WORLD_SIZE": "2"}
    assert kit.spawn(1, _heard, tmp_path / "cache", *word, out=tmp_path / "out", env=env) == [WORDS[word]]


def test_mutant_that_hears_every_word_is_caught(tmp_path, monkeypatch):
    monkeypatch.setattr(SharedWork, "recent", lambda *_: True)
    env = {"MASTER_PORT": "29500", "WORLD_SIZE": "2"}
    word = (None, 0, 100)
    assert kit.spawn(1, _heard, tmp_path / "cache", *word, out=tmp_path / "out", env=env) != [WORDS[word]]


def _after_a_failure(folder: Path) -> list[int]:
    """Share one piece whose lock becomes free because who had it failed; return what was made here all the same."""
    shared_work.STARTED, work, made, locked = time.time(), SharedWork(folder), [], shared_work._try_lock

    @contextmanager
    def late(target):
        with locked(target) as mine:
            _word(work, work.host, work.parent, 1, time.time())  # between the look at words and the lock
            yield mine

    shared_work._try_lock = late
    with suppress(UsageError):
        work.run_all([folder / "piece"], made.append, "a piece")
    return made


def test_a_lock_that_a_failure_has_freed_is_no_leave_to_try_again(tmp_path):
    env = {"MASTER_PORT": "29500", "WORLD_SIZE": "2"}
    assert kit.spawn(1, _after_a_failure, tmp_path / "cache", out=tmp_path / "out", env=env) == [[]]


# ---- whole commands ----------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    """Pieces of a few rows."""
    monkeypatch.setattr(preprocessing, "PIECE", 2000)
    monkeypatch.setattr(preprocessing, "BLOCK", 1000)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> dict:
    return kit.tiny_files(tmp_path_factory.mktemp("tiny"))


def command(tiny, folder: Path, world: int = 3, **fields) -> tuple[list, list[str], float]:
    folder.mkdir(exist_ok=True)
    values = {"output_dir": "run", "max_steps": 2, "global_batch_size": 8, "cache_dir": folder / "cache"}
    began = time.monotonic()
    argv = kit.flags(**tiny | values | fields)
    codes, texts = kit.run_command("train.py", *argv, folder=folder, world=world, timeout=40)
    return codes, texts, time.monotonic() - began


def struck(monkeypatch, blow) -> None:
    """Let `blow` happen in the preparation of each block."""
    original = causal_lm.Task.encode

    @functools.wraps(original)
    def encode(self, batch, places):
        blow()
        time.sleep(0.05)
        return original(self, batch, places)

    monkeypatch.setattr(causal_lm.Task, "encode", encode)


def raising(error, mark: Path, rank="1"):
    """Return a blow that raises on one rank; the others wait for it, or they might be done before that rank has a piece."""

    def blow():
        if os.environ["RANK"] == rank:
            mark.touch()
            raise error
        end = time.monotonic() + 20
        while not mark.exists() and time.monotonic() < end:
            time.sleep(0.01)

    return blow


@pytest.mark.parametrize("kind, code", [(UsageError, 2), (RuntimeError, 1)])
def test_one_rank_speaks_for_all(tiny, tmp_path, monkeypatch, small, kind, code):
    struck(monkeypatch, raising(kind("a cosmic ray"), tmp_path / "raised"))
    codes, texts, seconds = command(tiny, tmp_path / "here")
    assert codes == [code] * 3, texts
    assert [("cosmic ray" in text) for text in texts] == [False, True, False]
    assert texts[1].rstrip().endswith("a cosmic ray")
    assert "failed" not in texts[0] + texts[2]
    assert seconds < 15


def test_a_killed_rank_ends_the_command(tiny, tmp_path, monkeypatch, small):
    struck(monkeypatch, lambda: os.environ["RANK"] == "1" and os.kill(os.getpid(), signal.SIGKILL))
    codes, texts, seconds = command(tiny, tmp_path / "here")
    assert codes == [1, -9, 1], texts
    said = "failed: rank 1 ended without a word while data was made ready (killed?)"
    assert sum(said in text for text in texts) == 1
    assert "Traceback" not in "".join(texts)
    assert seconds < 15


@pytest.mark.parametrize("world", [1, 2])
def test_a_killed_helper_ends_with_a_reason(tiny, tmp_path, monkeypatch, small, world):
    def blow():
        if multiprocessing.current_process().daemon and os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1)  # or the other rank might have done all of it before

    struck(monkeypatch, blow)
    codes, texts, seconds = command(tiny, tmp_path / "here", world, preprocessing_num_workers=3)
    assert codes == [1] * world, texts
    assert "a helper process of preparing train data ended with -9 (killed?)" in texts[0]
    assert seconds < 20
    monkeypatch.undo()
    codes, texts, _ = command(tiny, tmp_path / "here", world)  # the same command goes on
    assert codes == [0] * world, texts


def test_a_fault_of_a_helper_is_said_once(tiny, tmp_path, monkeypatch, small):
    def blow():
        if multiprocessing.current_process().daemon:
            raise UsageError("a cosmic ray")

    struck(monkeypatch, blow)
    codes, texts, _ = command(tiny, tmp_path / "here", 1, preprocessing_num_workers=3)
    assert codes == [2]
    assert texts[0].count("a cosmic ray") == 1


# ---- disks that are full, or not to be written -----------------------------------------------------------------------------


def digest(cache: Path) -> dict[str, str]:
    """Return hashes of all that is prepared, by name, for each folder that counts as complete."""
    found = {}
    for stats in sorted(cache.glob("**/prepared/*/facts.json")):
        for path in sorted(p for p in stats.parent.iterdir() if p.suffix in (".arrow", ".npy", ".json")):
            found[f"{stats.parent.name}/{path.name}"] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def _without_powers() -> None:
    """Make root one for whom permissions hold."""
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None)
    assert libc.capget(header, data) == 0
    for i in (0, 1, 2):  # effective, permitted, inheritable; bits 1 and 2 are DAC_OVERRIDE and DAC_READ_SEARCH
        data[i] &= ~0b111
    assert libc.capset(header, data) == 0


@contextmanager
def no_room(folder: Path, how: str):
    """Make `folder` one that cannot be written (any more)."""
    folder.mkdir()
    if how == "read-only":
        folder.chmod(0o555)
        yield _without_powers
        folder.chmod(0o755)
    elif how == "files of 4 KB":
        yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    else:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", folder], check=False)
        if mounted.returncode:
            pytest.skip("only root can mount a small disk")
        try:
            yield lambda: None
        finally:
            subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("how", ["read-only", "full", "files of 4 KB"])
def test_a_cache_without_room_is_named_and_nothing_half_made_counts(tmp_path, monkeypatch, how):
    rows = [{"input_ids": np.arange(i, i + 40).tolist()} for i in range(2000)]
    kit.write_yaml(tmp_path / "llama.yaml", kit.LLAMA | {"vocab_size": 3000})
    tiny = {"model_config": tmp_path / "llama.yaml", "train_file": kit.write_jsonl(tmp_path / "rows.jsonl", rows)}
    (tmp_path / "here").mkdir()
    original = validation.check
    with no_room(tmp_path / "here" / "cache", how) as strike:
        monkeypatch.setattr(validation, "check", lambda *args: (strike(), original(*args))[1])
        codes, texts, seconds = command(tiny, tmp_path / "here", 2)
        monkeypatch.undo()
        assert 0 not in codes
        assert None not in codes
        assert seconds < 20
        assert digest(tmp_path / "here" / "cache") == {}
        said = [text for text in texts if text.strip()]
        assert len(said) == 1, said
        assert str(tmp_path / "here" / "cache") in said[0].rstrip().splitlines()[-1]
        assert "Traceback" not in said[0]
        assert codes == [2, 2]
        if how == "files of 4 KB":
            codes, texts, _ = command(tiny, tmp_path / "here", 2)
            assert codes == [0, 0], texts
            command(tiny, tmp_path / "fresh", 1)
            # the key holds no path of the cache
            assert digest(tmp_path / "here" / "cache") == digest(tmp_path / "fresh" / "cache") != {}


# ---- disks without locks, nodes with disks ---------------------------------------------------------------------------------


def counting(monkeypatch, folder: Path) -> None:
    original = causal_lm.Task.encode

    @functools.wraps(original)
    def encode(self, batch, places):
        note(folder, "made", places.start + 1000 * (places.split == "validation"), os.getpid())
        time.sleep(0.02)
        return original(self, batch, places)

    monkeypatch.setattr(causal_lm.Task, "encode", encode)


def opened(tiny, cache, fields: dict | None = None) -> int:
    cache = cache[int(os.environ["RANK"])] if isinstance(cache, list) else cache
    _, splits = kit.open_data(**tiny, cache_dir=cache, **fields or {})
    return len(splits["train"])


def test_a_lock_that_does_not_lock_costs_work_but_no_data(tiny, tmp_path, monkeypatch, small):
    assert kit.spawn(1, opened, tiny, tmp_path / "one", out=tmp_path / "out1") == [83]
    counting(monkeypatch, tmp_path)
    monkeypatch.setattr(shared_work, "FileLock", NoLock)
    original = np.lib.format.open_memmap

    def slowly(*args, **kwargs):  # so that ranks put the pieces together at the same time
        found = original(*args, **kwargs)
        time.sleep(0.1 + 0.1 * int(os.environ["RANK"]))
        return found

    monkeypatch.setattr(np.lib.format, "open_memmap", slowly)
    assert kit.spawn(3, opened, tiny, tmp_path / "three", out=tmp_path / "out3") == [83] * 3
    assert digest(tmp_path / "one") == digest(tmp_path / "three") != {}
    assert len(made(tmp_path)) > len(set(made(tmp_path)))  # it cost work


NODES = {  # name: (cache folders of the two ranks, fields, how often each piece is made)
    "one disk": (["a", "a"], {}, 1),
    "a disk each": (["a", "b"], {}, 2),
    "one disk, a folder each": (["a", "a"], {"cache_per_node": True}, 2),
}


@pytest.mark.parametrize("name", NODES)
def test_nodes_share_what_is_on_their_disk(tiny, tmp_path, monkeypatch, small, name):
    folders, fields, times = NODES[name]
    counting(monkeypatch, tmp_path)
    monkeypatch.setattr(socket, "gethostname", lambda: f"node{os.environ['RANK']}.cluster")
    caches = [tmp_path / folder for folder in folders]
    assert kit.spawn(2, opened, tiny, caches, fields, out=tmp_path / "out") == [83, 83]
    done = made(tmp_path)
    assert len(set(done)) > 4
    assert done == sorted(list(set(done)) * times)
    if name == "one disk, a folder each":
        assert sorted(path.name for path in (tmp_path / "a").glob("node_*")) == [
            "node_node0.cluster",
            "node_node1.cluster",
        ]
        one, other = (digest(tmp_path / "a" / f"node_node{i}.cluster") for i in (0, 1))
        assert one == other != {}


def test_cache_per_node_is_a_folder_of_the_host(tmp_path, monkeypatch):
    from src.config.schema import RunConfig

    monkeypatch.setattr(socket, "gethostname", lambda: "node7.cluster")
    run = RunConfig(cache_dir=str(tmp_path))
    assert cache_folder.cache_root(run) == tmp_path
    run.cache_per_node = True
    assert cache_folder.cache_root(run) == tmp_path / "node_node7.cluster"
