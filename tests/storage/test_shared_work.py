"""Tasks run once per disk; errors and deaths stop all processes of a launch; no process waits for ever."""

import ctypes
import errno
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
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from src.config import validation
from src.config.errors import Failure, UsageError
from src.data import preprocessing
from src.storage import peer_failures, shared_work
from src.storage.peer_failures import LaunchPeers
from src.storage.shared_work import SharedWork
from src.tasks import causal_lm
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
    """Make pieces together with all processes that do the same; return the content of all pieces."""
    targets = [folder / "pieces" / f"{i}.txt" for i in range(pieces)]
    work = SharedWork(folder / "cache")

    def make(i: int) -> None:
        before(i)
        time.sleep(seconds)
        shared_work.write_atomic(targets[i], f"piece {i}")
        note(folder, "made", i, os.getpid())

    with work.peers.joined():
        work.run_all(targets, make, "pieces")
    return [target.read_text() for target in targets]


def wait_for(folder: Path, count: int, i: int) -> None:
    """Return when `count` processes are making a piece, so that none comes too late to make one."""
    (folder / "begun").mkdir(exist_ok=True)
    (folder / "begun" / str(os.getpid())).touch()
    kit.until(lambda: len(list((folder / "begun").iterdir())) == count)


class NoLock:
    """The lock of a file system without locks: every process gets it."""

    def __init__(self, path):
        Path(path).touch()

    def acquire(self, timeout=None):
        return self

    def release(self):
        pass


# ---- each task once --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 3])
def test_each_piece_is_made_once(tmp_path, world):
    all_begun = functools.partial(wait_for, tmp_path, world)
    assert kit.spawn(world, share_pieces, tmp_path, all_begun, out=tmp_path / "out") == [CONTENT] * world
    assert made(tmp_path) == list(range(PIECES))
    assert len({words[2] for words in log(tmp_path)}) == world  # every process takes part
    left = [path.name for path in (tmp_path / "cache").rglob("*") if path.suffix in (".here", ".failed", ".tmp")]
    assert left == []


def test_mutant_without_a_lock_makes_a_piece_three_times(tmp_path, monkeypatch):
    monkeypatch.setattr(peer_failures, "FileLock", NoLock)
    monkeypatch.setattr(LaunchPeers, "raise_if_failed", lambda self: None)
    all_begun = functools.partial(wait_for, tmp_path, 3)
    results = kit.spawn(3, share_pieces, tmp_path, all_begun, 0.0, 1, out=tmp_path / "out")
    assert results == [CONTENT[:1]] * 3  # no data is lost
    assert made(tmp_path) == [0, 0, 0]


def test_two_launches_share_the_pieces(tmp_path):
    all_begun = functools.partial(wait_for, tmp_path, 4)
    launches = [kit.fork(2, share_pieces, tmp_path, all_begun, out=tmp_path / name) for name in ("a", "b")]
    for process in chain(*launches):
        process.join(300)
        assert process.exitcode == 0
    assert made(tmp_path) == list(range(PIECES))
    assert len({words[2] for words in log(tmp_path)}) == 4  # processes of both


def test_piece_of_a_killed_launch_is_taken_over(tmp_path):
    def stuck(i):
        note(tmp_path, "stuck", i, os.getpid())
        time.sleep(600)

    (dying,) = kit.fork(1, share_pieces, tmp_path, stuck, out=tmp_path / "dying")
    [_, piece, _] = kit.until(lambda: log(tmp_path))[0]
    others = kit.fork(2, share_pieces, tmp_path, out=tmp_path / "others")
    kit.until(lambda: len(made(tmp_path)) == PIECES - 1)
    time.sleep(0.3)
    assert int(piece) not in made(tmp_path)  # the others wait for it
    assert all(process.is_alive() for process in others)
    dying.kill()
    for process in others:
        process.join(300)
        assert process.exitcode == 0
    assert made(tmp_path) == list(range(PIECES))


# ---- errors and deaths -----------------------------------------------------------------------------------------------


def stop_rank(folder: Path, rank: int, how):
    """Return a function that raises `how`, or kills the process, on one rank.

    The other ranks wait for that, or they could make all pieces before this rank has one."""

    def stop(*_):
        if os.environ["RANK"] == str(rank):
            (folder / "reached").touch()
            raise how("a cosmic ray") if how != "killed" else os.kill(os.getpid(), signal.SIGKILL)
        kit.until((folder / "reached").exists)

    return stop


def outcomes(folder: Path, rank: int, how, env=None) -> list:
    """Return (kind, text, reported_elsewhere) of the error on each of three ranks (None: killed) if `rank` ends by `how`."""
    folder.mkdir(exist_ok=True)

    def guarded():
        try:
            share_pieces(folder, stop_rank(folder, rank, how), 0.2, 30)
        except (UsageError, Failure, RuntimeError) as error:
            return type(error).__name__, str(error), getattr(error, "reported_elsewhere", False)
        return "nothing", "", False

    with suppress(kit.RankFailed):
        kit.spawn(3, guarded, out=folder / "out", env=env)
    files = [folder / "out" / f"rank{rank}.pt" for rank in range(3)]
    return [kit.torch.load(file, weights_only=False) if file.exists() else None for file in files]


STOPPED = {  # how rank 1 ends: (what it raises, what the others raise)
    UsageError: (("UsageError", "a cosmic ray", False), "UsageError", "a cosmic ray"),
    RuntimeError: (("RuntimeError", "a cosmic ray", False), "Failure", "rank 1: RuntimeError: a cosmic ray"),
    "killed": (None, "Failure", "rank 1 ended"),
}


@pytest.mark.parametrize("how", STOPPED)
def test_failed_rank_stops_the_others(tmp_path, monkeypatch, how):
    own, kind, text = STOPPED[how]
    results = outcomes(tmp_path / "right", 1, how)
    assert results[1] == own
    for rank in (0, 2):
        assert results[rank][0] == kind
        assert text in results[rank][1]
    assert all(results[rank][2] for rank in (0, 2)) or how == "killed"
    assert len(made(tmp_path / "right")) < 29  # they stop before the end

    monkeypatch.setattr(LaunchPeers, "raise_if_failed", lambda self: None)  # the mutant
    results = outcomes(tmp_path / "mutant", 1, how)
    assert results[0] == results[2] == ("nothing", "", False)


def test_host_names_with_dots(tmp_path, monkeypatch):
    """Ranks 0 and 1 on one host, 2 on another: errors arrive from both, a death is noticed on the same host."""
    names = ("node.a.example.org", "node.a.example.org", "node.b_1.example.org")
    monkeypatch.setattr(socket, "gethostname", lambda: names[int(os.environ["RANK"])])
    nodes = {"LOCAL_WORLD_SIZE": "2"}
    results = outcomes(tmp_path / "fails", 2, UsageError, nodes)
    assert results[0][1] == "a cosmic ray"
    results = outcomes(tmp_path / "dies", 1, "killed", nodes)
    assert all("rank 1 ended" in results[rank][1] for rank in (0, 2))
    assert results[2][2]  # rank 0 has reported it


@pytest.fixture
def peers(tmp_path, monkeypatch):
    """Rank 0 of two, in this process."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(peer_failures, "STARTED", time.time())
    (peers := LaunchPeers(tmp_path)).folder.mkdir(parents=True)
    return peers


def leave_report(peers: LaunchPeers, host: str | None = None, other_launcher=False, age: float = 0, **more) -> None:
    report = more | {"kind": "UsageError", "text": "a cosmic ray", "time": time.time() - age}
    name = f"{host or peers.host}_{peers.launcher + other_launcher}_1.failed"
    (peers.folder / name).write_text(json.dumps(report))


REPORTS = {  # (host, another launcher, age in seconds): whether it is of this launch
    (None, False, 0): True,
    (None, False, 100): False,
    (None, True, 0): False,
    ("elsewhere", True, 15): False,
    ("elsewhere", True, -1): True,
}


@pytest.mark.parametrize("report", REPORTS)
def test_reports_of_an_earlier_launch_are_ignored(peers, monkeypatch, report):
    leave_report(peers, *report)
    with pytest.raises(UsageError) if REPORTS[report] else nullcontext():
        peers.raise_if_failed()
    monkeypatch.setattr(LaunchPeers, "is_recent", lambda *_: True)  # the mutant
    if report != (None, True, 0):
        with pytest.raises(UsageError):
            peers.raise_if_failed()


def test_reports_of_training_do_not_stop_preparation(peers):
    """They are of an earlier launch with the same name: it crashed on a host with a clock ahead, and starts again."""
    leave_report(peers, "elsewhere", True, -1, prepared=True)
    peers.raise_if_failed()


def test_launches_on_different_hosts_are_different(peers, tmp_path, monkeypatch):
    """accelerate launch gives all of them the same address and port; containers have the same process numbers, too."""

    def folders() -> int:
        found = set()
        for host in ("one", "other"):
            monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
            found.add(LaunchPeers(tmp_path).folder)
        return len(found)

    assert folders() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert folders() == 2
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert folders() == 2


def test_launch_that_follows_at_once(peers, monkeypatch):
    """Its error is printed, though an earlier launch had the same; a launcher's number in a container may be the same."""
    monkeypatch.setattr(peers, "rank", "1")
    peers.report_failure(UsageError("a cosmic ray"))
    for name, value in {"launcher": peers.launcher + 1, "rank": "0"}.items():
        monkeypatch.setattr(peers, name, value)
    peers.report_failure(error := UsageError("a cosmic ray"))
    assert error.already_reported
    began = time.time()
    with subprocess.Popen(["sleep", "600"]) as launcher:
        assert peer_failures._earliest_report(launcher.pid) > began - 10
        launcher.kill()


def test_lock_freed_by_a_failure_is_not_taken(peers, tmp_path, monkeypatch):
    """The holder fails between a look at the reports and the lock."""
    tried, original = [], shared_work.try_lock

    @contextmanager
    def late(target):
        with original(target) as locked:
            leave_report(peers)
            yield locked

    monkeypatch.setattr(shared_work, "try_lock", late)
    with pytest.raises(UsageError):
        SharedWork(tmp_path).run_all([tmp_path / "piece"], tried.append, "a piece")
    assert tried == []


# ---- whole commands --------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    """Pieces of a few rows."""
    monkeypatch.setattr(preprocessing, "PIECE", 2000)
    monkeypatch.setattr(preprocessing, "BLOCK", 1000)


def command(tiny, folder: Path, world: int = 3, **fields) -> tuple[list, list[str]]:
    folder.mkdir(exist_ok=True)
    values = {"output_dir": "run", "max_steps": 2, "global_batch_size": 8, "cache_dir": folder / "cache"}
    argv = kit.flags(**tiny | values | fields)
    codes, texts = kit.run_command("train.py", *argv, folder=folder, world=world)
    assert "Traceback" not in "".join(texts) or 1 in codes or "a cosmic ray" in "".join(texts)
    return codes, texts


def before_each_block(monkeypatch, act) -> None:
    """Call `act(row locations)` before each block of rows is tokenized."""
    original = causal_lm.Task.encode

    @functools.wraps(original)
    def encode(self, batch, places):
        act(places)
        time.sleep(0.05)
        return original(self, batch, places)

    monkeypatch.setattr(causal_lm.Task, "encode", encode)


ENDS = {  # how rank 1 ends: exit codes, what is printed once, and by which ranks
    UsageError: ([2, 2, 2], "a cosmic ray", {1}),
    RuntimeError: ([2, 2, 2], "a cosmic ray", {1}),
    "killed": ([1, -9, 1], "rank 1 ended", {0, 2}),
}


@pytest.mark.parametrize("how", ENDS)
def test_one_rank_prints_the_error(tiny, tmp_path, monkeypatch, small, how):
    before_each_block(monkeypatch, stop_rank(tmp_path, 1, how))
    expected, words, ranks = ENDS[how]
    codes, texts = command(tiny, tmp_path / "here")
    assert codes == expected, texts
    (rank,) = [rank for rank, text in enumerate(texts) if words in text]
    assert rank in ranks
    assert "Traceback" not in "".join(texts) or how is RuntimeError


def test_killed_helper_ends_the_command(tiny, tmp_path, monkeypatch, small):
    def act(_):  # the other processes wait, or they could make all pieces before a helper of rank 0 has one
        if multiprocessing.current_process().daemon and os.environ["RANK"] == "0":
            (tmp_path / "reached").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        kit.until((tmp_path / "reached").exists)

    monkeypatch.setattr(preprocessing, "PIECE", 200)  # more pieces than processes
    with monkeypatch.context() as patch:
        before_each_block(patch, act)
        codes, texts = command(tiny, tmp_path / "here", 2, preprocessing_num_workers=3)
    assert codes == [1, 1], texts
    assert "(exit code -9;" in texts[0]
    codes, texts = command(tiny, tmp_path / "here", 2)  # the same command uses the pieces
    assert codes == [0, 0], texts


def test_error_of_a_helper_is_printed_once(tiny, tmp_path, monkeypatch, small):
    def act(_):
        if multiprocessing.current_process().daemon:
            (tmp_path / "reached").touch()
            raise UsageError("a cosmic ray")
        kit.until((tmp_path / "reached").exists)

    monkeypatch.setattr(preprocessing, "PIECE", 200)  # more pieces than processes
    before_each_block(monkeypatch, act)
    codes, texts = command(tiny, tmp_path / "here", 1, preprocessing_num_workers=3)
    assert codes == [2]
    assert texts[0].count("a cosmic ray") == 1


# ---- full and read-only disks ----------------------------------------------------------------------------------------


def digest(cache: Path) -> dict[str, str]:
    """Return the hash of each file in the complete prepared folders, by name."""
    found = {}
    for stats in sorted(cache.glob("**/prepared/*/facts.json")):
        for path in sorted(p for p in stats.parent.iterdir() if p.suffix in (".arrow", ".npy", ".json")):
            found[f"{stats.parent.name}/{path.name}"] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def obey_permissions() -> None:
    """Take from root the right to ignore the permissions of files."""
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None)
    assert libc.capget(header, data) == 0
    for i in (0, 1, 2):  # effective, permitted, inheritable; bits 1 and 2 are DAC_OVERRIDE and DAC_READ_SEARCH
        data[i] &= ~0b111
    assert libc.capset(header, data) == 0


@contextmanager
def unwritable(folder: Path, how: str):
    """Make a folder that cannot be written; yield what each process calls first."""
    folder.mkdir(parents=True)
    if how == "read-only":
        folder.chmod(0o555)
        yield obey_permissions
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
def test_unwritable_cache_is_named(tmp_path, monkeypatch, how):
    rows = [{"input_ids": np.arange(i, i + 40).tolist()} for i in range(2000)]
    kit.write_yaml(tmp_path / "llama.yaml", kit.LLAMA | {"vocab_size": 3000})
    fields = {"model_config": tmp_path / "llama.yaml", "train_file": kit.write_jsonl(tmp_path / "rows.jsonl", rows)}
    original, cache = validation.check, tmp_path / "here" / "cache"
    with unwritable(cache, how) as prepare:
        monkeypatch.setattr(validation, "check", lambda *args: (prepare(), original(*args))[1])
        codes, texts = command(fields, tmp_path / "here", 2)
        monkeypatch.undo()
        assert codes == [2, 2], texts
        assert digest(cache) == {}  # nothing partial counts
        (message,) = [text for text in texts if text.strip()]
        assert str(cache) in message.rstrip().splitlines()[-1]
        if how == "files of 4 KB":  # what is left does no harm
            codes, texts = command(fields, tmp_path / "here", 2)
            assert codes == [0, 0], texts
            command(fields, tmp_path / "fresh", 1)
            assert digest(cache) == digest(tmp_path / "fresh" / "cache") != {}


def test_full_disk_that_can_still_hold_the_report(tiny, tmp_path, monkeypatch):
    """The mutant reports the bare OSError, so other ranks exit with 1 and not with 2."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    def report_and_wait(self, error):  # the others read the first report before this rank writes a better one
        report(self, error)
        time.sleep(0.5)

    report = LaunchPeers.report_failure
    monkeypatch.setattr(LaunchPeers, "report_failure", report_and_wait)
    monkeypatch.setattr(preprocessing, "write_piece", full)
    codes, texts = command(tiny, tmp_path / "here", 3)
    assert codes == [2, 2, 2], texts
    assert [text.rstrip().splitlines()[-1].startswith("error: cache_dir: ") for text in texts if text.strip()] == [True]


# ---- disks without locks, nodes with one disk each -------------------------------------------------------------------


def note_blocks(monkeypatch, folder: Path) -> None:
    before_each_block(
        monkeypatch, lambda at: note(folder, "made", at.rows[0] + 1000 * (at.split == "validation"), os.getpid())
    )


def opened(tiny, caches: list, fields: dict) -> int:
    _, splits = kit.open_data(**tiny, cache_dir=caches[int(os.environ["RANK"])], **fields)
    return len(splits["train"])


def test_missing_locks_cost_work_but_no_data(tiny, tmp_path, monkeypatch, small):
    assert kit.spawn(1, opened, tiny, [tmp_path / "one"], {}, out=tmp_path / "out1") == [83]
    before_each_block(monkeypatch, lambda at: wait_for(tmp_path, 3, 0))
    note_blocks(monkeypatch, tmp_path)
    monkeypatch.setattr(peer_failures, "FileLock", NoLock)
    original = np.lib.format.open_memmap

    def slowly(*args, **kwargs):  # so that ranks assemble the pieces at the same time
        found = original(*args, **kwargs)
        time.sleep(0.1 + 0.1 * int(os.environ["RANK"]))
        return found

    monkeypatch.setattr(np.lib.format, "open_memmap", slowly)
    assert kit.spawn(3, opened, tiny, [tmp_path / "three"] * 3, {}, out=tmp_path / "out3") == [83] * 3
    assert digest(tmp_path / "one") == digest(tmp_path / "three") != {}
    assert len(made(tmp_path)) > len(set(made(tmp_path)))


NODES = {  # name: (cache folders of two ranks, fields, how often each block is prepared)
    "one disk": (["a", "a"], {}, 1),
    "one disk each": (["a", "b"], {}, 2),
    "cache_per_node": (["a", "a"], {"cache_per_node": True}, 2),
}


@pytest.mark.parametrize("name", NODES)
def test_nodes_share_their_disk(tiny, tmp_path, monkeypatch, small, name):
    folders, fields, times = NODES[name]
    note_blocks(monkeypatch, tmp_path)
    monkeypatch.setattr(socket, "gethostname", lambda: f"node{os.environ['RANK']}.cluster")
    caches = [tmp_path / folder for folder in folders]
    assert kit.spawn(2, opened, tiny, caches, fields, out=tmp_path / "out") == [83, 83]
    blocks = made(tmp_path)
    assert len(set(blocks)) > 4
    assert blocks == sorted(list(set(blocks)) * times)
    if name == "cache_per_node":
        one, other = (digest(tmp_path / "a" / f"node_node{i}.cluster") for i in (0, 1))
        assert one == other != {}
