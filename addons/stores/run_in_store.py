"""A run whose `output_dir` is an address (s3://…): it trains in a local folder, and each save goes to the store.

The local folder is a mirror: the store decides what a resume finds. A checkpoint exists there if it has a manifest, which
is written last and deleted first. Tests: tests/addons/stores/.
"""

import hashlib
import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from addons.stores._lease import FOLDER, Lease
from addons.stores._options import LEASE
from addons.stores._store import Store
from engine.checkpointing.async_writer import finish_writing
from engine.checkpointing.checkpoint_folder import list_checkpoints
from engine.config.addresses import address_of, on_this_node
from engine.config.errors import Failure, UsageError, warn
from engine.config.run_config import RunConfig, field_values
from engine.process.exit_codes import on_exit
from engine.storage import atomic_folder, jsonl, verify_hashes
from engine.storage.cache_folder import cache_root, exclusive, run_once
from engine.storage.run_store import RunStore
from engine.storage.verify_hashes import MANIFEST

WITH_MANIFEST = re.compile(r"((checkpoints/)?[^/]+)/manifest\.json")
STEP = re.compile(r"checkpoints/step_\d+")
PARTS = ".parts"  # what ranks of other nodes tell the main process about their shards
ARCHIVED = re.compile(r"\.old\d+$")  # what a run has renamed
MODEL = ("config.json", MANIFEST)
REPORT = ("RUN", "OTHER")  # what a flag names to read its record
SLOW_STORE = 300.0  # seconds that a run that ends waits for its last lines; a launcher may kill it sooner
SYNCED = "synced-"  # with the token of a launch: what it reads is here
REQUESTS = ("stop", "save")  # files of the local folder for this start
RECORD = "copy.json"  # beside a local copy: sizes and versions of the files that it was made from


def open_run(cfg: Any) -> "RunInStore":
    """Return the store of a run, whose lease this launch holds, with a local folder that has what a resume needs."""
    run = RunInStore(cfg)
    try:
        run.store.list(FOLDER)
    except FileNotFoundError as error:
        raise UsageError(f"output_dir: {run.address}: there is no such bucket: {error}") from error
    except OSError as error:
        raise Failure(f"output_dir: {error}") from error
    try:
        run.begin()
    except OSError as error:
        raise Failure(f"output_dir: {error}") from error
    return run


class RunInStore(RunStore):
    """The store of a run and its local folder. Every process has one; the main process writes."""

    def __init__(self, cfg: Any):
        self.cfg = cfg
        self.store = Store(cfg.output_dir, "output_dir")
        self.address = self.store.address
        # A folder for each node, also if nodes share a disk. A plan may be printed while the run trains.
        name = f"{self.address} {socket.gethostname()} {cfg.dry_run}"
        self.folder = _scratch(cfg, name, self.address)
        self.folder.mkdir(parents=True, exist_ok=True)
        address_of[str(self.folder)] = self.address
        self.rank = int(os.environ.get("RANK", "0"))
        self.is_main = self.rank == 0
        self.lease = Lease(self.store, field_values(cfg).get("store_lease", LEASE), _launch())
        self.sent: dict[str, tuple[int, int]] = {}  # files of the record -> size and time when they were the store's
        self.ending = threading.Lock()
        self.has_begun = False
        self.has_ended = False

    def begin(self) -> None:
        """Take the lease, on the main process, and make the local folder what the store has: once on each node."""
        if self.cfg.dry_run:
            self.token = "plan"
            self._sync()
        else:
            if self.is_main or self._is_far(self.rank):
                on_exit(self._close)
            if self.is_main:
                self.lease.take()
                self.token = self.lease.holder["token"]
            else:
                self.token = self.lease.wait_for(2 * self.lease.seconds + 60)
            self._sync_once()
        self.has_begun = True

    def agree(self, token: str) -> None:
        """Take the start of the main process for this one's, which may have read the lease of a launch that was killed."""
        if token != self.token:
            self.token = token
            try:
                self._sync_once()
            except OSError as error:
                raise Failure(f"output_dir: {error}") from error

    # ---- from the store ----------------------------------------------------------------------------------------------

    def _sync_once(self) -> None:
        """One process of each disk and launch does it, for all."""
        done = self.folder.with_name(f"{SYNCED}{self.token}")
        run_once(done, lambda: self._sync_for(done), f"fetching the newest checkpoint of {self.address}")
        self.sent = {name: _stamp(path) for name, path in self._record()}

    def _sync_for(self, done: Path) -> None:
        self._sync()
        for earlier in done.parent.glob(f"{SYNCED}*"):
            if not earlier.name.endswith(".lock"):
                earlier.unlink()
        done.touch()

    def _sync(self) -> None:
        """Make the local folder what the store has. Of each checkpoint but the newest and the best, and of final/, fetch
        only the small files that tell what it is: `fetch` brings the others."""
        with exclusive(self.folder.parent / "sync", f"fetching {self.address}"):
            names = self.store.list()
            manifests = {}
            for name in names:
                match = WITH_MANIFEST.fullmatch(name)
                if match and (STEP.fullmatch(match[1]) or match[1] == "final" or "checkpoints/" in name):
                    manifests[match[1]] = self.store.read(name)
            self._remove_others(manifests)
            for name in names:
                folder = "/".join(name.split("/")[: 2 if name.startswith("checkpoints/") else 1])
                if ARCHIVED.search(folder):  # only its name: the next one has another number
                    (self.folder / folder).mkdir(parents=True, exist_ok=True)
                elif ("/" not in name and name not in REQUESTS) or name.startswith("logs/"):
                    self.store.get(name, self.folder / name)
            for name, manifest in manifests.items():
                path = self.folder / name
                if not (path / MANIFEST).exists():
                    path.mkdir(parents=True, exist_ok=True)
                    if f"{name}/state.json" in names:
                        self.store.get(f"{name}/state.json", path / "state.json")
                    (path / MANIFEST).write_bytes(manifest or b"")
            checkpoints = list_checkpoints(self.folder)
            # Now, when no other process waits in a collective
            if checkpoints and not self.cfg.dry_run and self.cfg.resume != "never":
                # On its node, the main process verifies it later
                self._fetch(checkpoints[-1], verify=self._is_far(self.rank))
                state = jsonl.read_json(checkpoints[-1] / "state.json")  # {} if it is damaged: that is found later
                best = state.get("progress", {}).get("best_step", 0) if self.cfg.metric_for_best_model else 0
                self._fetch(self.folder / "checkpoints" / f"step_{best:08d}")

    def _remove_others(self, manifests: dict[str, bytes | None]) -> None:
        """Remove what is here only from an earlier start, or other than in the store."""
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        for path in [*self.folder.iterdir(), *self.folder.glob("checkpoints/*"), *self.folder.glob("logs/*")]:
            name = str(path.relative_to(self.folder))
            file = path / MANIFEST
            is_same = name in manifests and file.exists() and file.read_bytes() == manifests[name]
            if is_same or name in ("checkpoints", "logs", "logs/run.lock"):
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def fetch(self, folder: Path) -> None:
        """Download the files of a checkpoint or final/ of this run that are not here; those that lack are found later."""
        try:
            with exclusive(self.folder.parent / "sync", f"fetching {folder}"):
                self._fetch(folder)
        except OSError as error:
            raise Failure(f"{folder} could not be fetched: {error}") from error

    def fetch_again(self, folder: Path) -> bool:
        """Replace the local files of a damaged checkpoint by those of the store; return False if it is not of this run."""
        if not folder.is_relative_to(self.folder):
            return False
        for name in verify_hashes.read_manifest(folder).get("files", {}):
            if ".." not in Path(name).parts:
                (folder / name).unlink(missing_ok=True)
        self.fetch(folder)
        return True

    def here(self, path: Path | None) -> Path | None:
        """Return a checkpoint of the main process as it is on this node, with its files."""
        path = on_this_node(path)
        if path is not None:
            self.fetch(path)
        return path

    def _fetch(self, folder: Path, verify: bool = False) -> None:
        """Download the files that are not here; with `verify`, also those that are damaged."""
        if not folder.is_relative_to(self.folder):
            return
        for name, entry in verify_hashes.read_manifest(folder).get("files", {}).items():
            file = folder / name
            is_here = file.exists() and file.stat().st_size == entry["size"]
            if ".." in file.parts or (is_here and not (verify and verify_hashes.hash_file(file) != entry)):
                continue
            with suppress(FileNotFoundError):
                self.store.get(str(file.relative_to(self.folder)), file)

    # ---- to the store ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise Failure if another run has taken over."""
        self.lease.check()

    def publish(self, folder: Path) -> str:
        """Upload a checkpoint or final/ and the lines before it, the manifest last. Return its address.

        Ranks of other nodes have uploaded their shards. After an error remove it here, too: what the store lacks does not
        exist."""
        name = str(folder.relative_to(self.folder))
        try:
            self.lease.renew()  # asks the store: this process may have slept while another run took over
            self._send_record()
            self.store.delete(f"{name}/{MANIFEST}")  # of a save that was not known when this run began
            files = {
                f"{name}/{each}": entry["size"] for each, entry in verify_hashes.read_manifest(folder)["files"].items()
            }
            for each in files:
                if (self.folder / each).exists():
                    self.store.put(self.folder / each, each)
            there = self.store.list(name)
            for each, size in files.items():
                if there.get(each, [None])[0] != size:
                    raise OSError(f"{self.address}/{each} has not the {size:,} bytes that were sent")
            others = [each for each in there if each.startswith(f"{name}/") and each not in files]
            self.store.delete(*others)  # of an earlier save with more files
            self.lease.renew()
            self.store.put(folder / MANIFEST, f"{name}/{MANIFEST}")
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return f"{self.address}/{name}"

    # ---- shards of ranks on other nodes ------------------------------------------------------------------------------

    def _is_far(self, rank: int) -> bool:
        return rank >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # the first node has the first ranks

    def _outcome(self, outcome: Path) -> str:
        return f"{PARTS}/{self.token}/{outcome.parent.name}/{outcome.name}"

    def send_shard(self, shard: Path) -> None:
        """Upload the files of this rank to their place in the checkpoint, which has no manifest yet."""
        if not self._is_far(self.rank):
            return
        self.lease.check_holder(self.token)
        name = re.sub(r"^\.(.*)\.\d+\.parts$", r"\1", shard.parent.name)
        folder = str((shard.parent.parent / name).relative_to(self.folder))
        self.store.delete(f"{folder}/{MANIFEST}")
        for path in sorted(shard.iterdir()):
            self.store.put(path, f"{folder}/{path.name}")
        shutil.rmtree(shard)

    def send_outcome(self, outcome: Path) -> None:
        """Upload what this rank has written, or its error; without it, the main process does not wait forever."""
        if self._is_far(self.rank):
            with suppress(OSError):
                self.store.put(outcome, self._outcome(outcome))
            outcome.unlink(missing_ok=True)

    def read_outcome(self, outcome: Path) -> dict[str, Any] | None:
        """Return what a rank has written, of this node or another one; None if it is not there yet."""
        if not self._is_far(int(outcome.stem)):
            return super().read_outcome(outcome)
        text = self.store.read(self._outcome(outcome))
        if text is None:
            time.sleep(0.5)  # between two requests
            return None
        self.store.delete(self._outcome(outcome))
        return json.loads(text)

    def prune(self) -> None:
        """Delete the checkpoints that were deleted here, and what is left of uploads that did not end."""
        try:
            self.lease.renew()
            names = self.store.list("checkpoints")
            for folder in {"/".join(name.split("/")[:2]) for name in names}:
                inside = [name for name in names if name.startswith(f"{folder}/")]
                if STEP.fullmatch(folder) and not (self.folder / folder).exists():
                    self.store.delete(f"{folder}/{MANIFEST}", *inside)
            self.store.delete(*[name for name in self.store.list(PARTS) if self.token not in name])
        except OSError as error:
            warn(f"old checkpoints cannot be removed ({error}); the next save tries again")

    def rename(self, path: Path, target: Path) -> None:
        """Rename a file or folder here and in the store, which copies it; manifests go last and are deleted first."""
        name, new = (str(each.relative_to(self.folder)) for each in (path, target))
        try:
            self.lease.renew()
            names = sorted(self.store.list(name), key=lambda each: each.endswith(MANIFEST))
            for each in names:
                self.store.copy(each, new + each.removeprefix(name))
            self.store.delete(*reversed(names))
        except OSError as error:
            raise Failure(f"{self.address}/{name} could not be renamed: {error}") from error
        path.rename(target)

    def _record(self) -> Iterator[tuple[str, Path]]:
        """Yield the files that tell what the run did: metrics.jsonl, ledger.jsonl, status.json, logs/, trackers/, …

        On another node than that of the main process, only the log of this rank."""
        for path in sorted(self.folder.rglob("*" if self.is_main else f"logs/rank_{self.rank}.*")):
            first, *inside = path.relative_to(self.folder).parts
            is_left_out = first in ("checkpoints", "final", *REQUESTS) or path.name == "run.lock"
            if not is_left_out and path.is_file() and not first.startswith(".") and not ARCHIVED.search(first):
                yield "/".join((first, *inside)), path

    def _send_record(self) -> None:
        """Upload the files of the record that have changed since they were the store's."""
        for name, path in self._record():
            with suppress(FileNotFoundError):  # rewritten just now
                stamp = _stamp(path)
                if self.sent.get(name) != stamp:
                    self.store.put(path, name)
                    self.sent[name] = stamp

    def _close(self, seconds: float | None) -> bool:
        """Upload the last lines and give the lease back, when the last checkpoint is written."""
        is_written = finish_writing(seconds)
        closing = threading.Thread(target=self._end, daemon=True)
        closing.start()
        closing.join(SLOW_STORE if seconds is None else seconds)
        return is_written and not closing.is_alive()

    def _end(self) -> None:
        with self.ending:
            if self.has_ended or self.lease.lost:
                return
            try:
                if self.has_begun:  # else another run trains here
                    if self.is_main:
                        self.lease.renew()
                    self._send_record()
                self.lease.release()
                self.has_ended = True
            except (OSError, Failure) as error:
                warn(f"the last lines are not in the store ({error}), but in {self.folder}")


def _stamp(path: Path) -> tuple[int, int]:
    return path.stat().st_size, path.stat().st_mtime_ns


def _scratch(cfg: Any, key: str, address: str) -> Path:
    """Return the local folder of an address: its last part, so that the run keeps its name."""
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    return (
        cache_root(cfg).absolute()
        / "stores"
        / digest
        / (re.sub(r"[^\w.-]", "_", address.split("/")[-1]).strip(".") or "run")
    )


def _launch() -> str:
    """Return what the processes of a launch share on all nodes, which count its restarts each in their own way."""
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
    return " ".join(os.environ.get(name, "") for name in names)


# ---- a copy of a run, checkpoint, model or file, to read it ----------------------------------------------------------


def local_copy(address: str, field: str, cfg: Any = None) -> str:
    """Return the local copy of a file or folder, up to date; of a run final/ or else the newest checkpoint, and its
    record; for a report (`field` RUN) the record alone."""
    store = Store(address, field)
    kind = "report" if field in REPORT else "resume" if field == "resume" else ""
    target = _scratch(cfg or RunConfig(), f"{store.address} {kind}", store.address)
    record = target.parent / RECORD
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with exclusive(target, f"fetching {address}"):
            names = {name: about for name, about in store.list().items() if not name.startswith(FOLDER)}
            if not names:
                raise UsageError(f"{field}: {address}: there is no such file or folder in the store")
            wanted_names = _to_read(names, kind)
            wanted = {name: about for name, about in names.items() if name in wanted_names}
            had = json.loads(record.read_text()) if record.exists() else {}
            for name in had.keys() - wanted.keys():
                (target / name).unlink(missing_ok=True)
            had = {name: about for name, about in had.items() if name in wanted and (target / name).exists()}
            for name, about in wanted.items():
                if had.get(name) != about:
                    if not had:
                        print(f"{field}: fetching {address}", flush=True)
                    store.get(name, target / name)
                    had[name] = about
                    atomic_folder.rewrite(record, json.dumps(had))
    except OSError as error:
        raise UsageError(f"{field}: {address}: {error}") from error
    address_of[str(target)] = address
    return str(target)


def _to_read(names: dict[str, Any], kind: str) -> set[str]:
    """Return the names of what is read of a folder in a store."""
    whole = [name.rpartition("/")[0] for name in names if WITH_MANIFEST.fullmatch(name)]
    checkpoints = [name for name in whole if name.startswith("checkpoints/") and not ARCHIVED.search(name)]
    steps = [name for name in checkpoints if STEP.fullmatch(name)]
    has_final = "final" in whole and (kind != "resume" or not checkpoints)
    if any(name in names for name in MODEL) or not (checkpoints or has_final):  # a model or checkpoint, or any folder
        return set(names)
    chosen = "final" if has_final else max(steps or checkpoints)
    folders = ("logs/",) if kind == "report" else ("logs/", f"{chosen}/")
    return {name for name in names if "/" not in name or name.startswith(folders)}
