"""The base model that the checkpoints of a run leave out: its identity, its place, and what an add-on has trained of it.

Checkpoints of an adapter hold what was trained, and BASE_FILE, which says on which weights: a Hub model at a commit, a
folder by the hash of its weights, or random weights by their seed. Tests: tests/engine/models/test_base_model.py,
tests/addons/adapters/test_adapter_checkpoints.py.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import xxhash

from engine.config.addon import Addon, overrides
from engine.config.errors import UsageError
from engine.config.paths import locate
from engine.config.run_config import RunConfig
from engine.distributed.running_statistics import persistent_buffers
from engine.models.config_and_tokenizer import BASE_FILE, CONFIG_OF_ADAPTER, pretrained_source, refuse_adapter
from engine.models.new_tokens import with_new_ids
from engine.storage.atomic_folder import rewrite
from engine.storage.cache_folder import cache_root, exclusive
from engine.storage.jsonl import read_json
from engine.storage.verify_hashes import hash_file

CHUNK = 1 << 24  # bytes read at a time for a hash


@dataclasses.dataclass(frozen=True)
class BaseModel:
    """Which weights a base model has. `name` is a Hub id, or a folder as the run file gives it; None: random weights."""

    name: str | None = None
    commit: str | None = None  # of a Hub model
    weights: str | None = None  # hash of the weights in a folder, or of random ones
    seed: int | None = None  # of random weights
    dtype: str | None = None  # in which random weights were drawn
    new_ids: list[int] | None = dataclasses.field(default=None, compare=False)  # of add_tokens, which the weights lack

    @property
    def is_random(self) -> bool:
        return self.name is None

    def __str__(self) -> str:
        if self.is_random:
            return f"random weights of seed {self.seed} in {self.dtype} ({self.weights})"
        return f"{self.name} at commit {self.commit}" if self.commit else f"{self.name} ({self.weights})"

    def is_same(self, other: "BaseModel") -> bool:
        """Return whether both are the same weights. The place of a folder does not count."""
        if self.commit or other.commit:
            return (self.name, self.commit) == (other.name, other.commit)
        return (self.weights, self.seed, self.dtype) == (other.weights, other.seed, other.dtype)

    def write(self, folder: Path) -> None:
        """Write BASE_FILE to a checkpoint or final/."""
        values = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        (folder / BASE_FILE).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def read_base(folder: str | Path) -> BaseModel | None:
    """Return the base model of a checkpoint or final/ that leaves it out, None of any other folder."""
    values = read_json(Path(folder) / BASE_FILE)
    if not values:
        return None
    names = [field.name for field in dataclasses.fields(BaseModel)]
    return BaseModel(**{name: values.get(name) for name in names})


# ---- which tensors are of the base -----------------------------------------------------------------------------------


def leaves_out_base(cfg: RunConfig) -> bool:
    """Return whether an add-on of the run file trains something beside a base model."""
    return any(overrides(addon, Addon.names_of_base) for addon in cfg.addons)


def tensors_of_base(task: Any, model: torch.nn.Module, tensors: dict[str, Any]) -> set[str]:
    """Return the names in `tensors`, the state dict of the saved part of the model, that checkpoints leave out.

    These are the frozen parameters of the base model. Buffers are saved, because training may change them."""
    if getattr(task, "base_model", None) is None:
        return set()
    names = {name for addon in task.cfg.addons for name in addon.names_of_base(model)}
    kept = persistent_buffers(model).keys()
    return {name for name in names & tensors.keys() - kept if not getattr(tensors[name], "requires_grad", False)}


# ---- the base of a run, and where it is ------------------------------------------------------------------------------


def find_base(cfg: RunConfig, weights: str | Path | None, read: bool = True) -> BaseModel | None:
    """Return the base model of a run that begins with the folder `weights`, or with the model that the run file names.

    None: the folder holds the base model beside what was trained on it, as older checkpoints do; so will those of this
    run. Unless `read`, hashes are left open."""
    if weights is None:
        return _named_base(cfg, read)
    folder = Path(locate(str(weights)))
    if weight_files(folder):
        refuse_adapter(str(folder), folder)
    base = read_base(folder)
    if base is not None:
        return base
    if any(addon.has_trained(folder) for addon in cfg.addons):
        return None if weight_files(folder) else _named_base(cfg, read)  # of an adapter that another program wrote
    return BaseModel(_as_given(cfg, folder), weights=hash_of_weights(cfg, folder) if read else None)


def _named_base(cfg: RunConfig, read: bool) -> BaseModel:
    """Return the model of `model_name_or_path`, or the random weights of the run."""
    name = cfg.model_name_or_path
    if not name:
        return BaseModel(seed=cfg.seed, dtype=cfg.dtype)
    folder, commit = pretrained_source(cfg)
    if commit:
        return BaseModel(name, commit)
    refuse_adapter(f"model_name_or_path: {name}", folder)
    trained_on = read_base(folder)
    if trained_on is not None and not weight_files(folder):
        raise UsageError(
            f"model_name_or_path: {name} holds only what a run trained on {trained_on}: {model_with_base(folder)}; or to train "
            f"it further, give --init_from {name}"
        )
    return BaseModel(name, weights=hash_of_weights(cfg, folder) if read else None)


def model_with_base(folder: Path) -> str:
    """Return what to do for a model with its base, where `folder` of a run leaves that out."""
    if (folder / CONFIG_OF_ADAPTER).exists():  # final/ of a run with merge: false
        return "start that run again with --merge true, which merges without training, and give its final/"
    return "give the run's final/ (with merge: true), where both are one model"


def _as_given(cfg: RunConfig, folder: Path) -> str:
    """Return the path of `folder` as the run file gives it: that of a run may have named only the run."""
    for name in (cfg.init_from, cfg.model_name_or_path):
        located = Path(locate(name)) if name else None
        if located and (located == folder or located in folder.parents):
            return str(Path(str(name)) / folder.relative_to(located))
    return str(folder)


def holds_base(weights: str | Path | None) -> bool:
    """Return whether `Task.build` may read the base model of a run from the folder `weights`, or from what the run file
    names if that is None."""
    if weights is None:
        return True
    return read_base(weights) is None and bool(weight_files(Path(locate(str(weights)))))


def fields_of_base(cfg: RunConfig, base: BaseModel, weights: str | Path | None) -> RunConfig:
    """Return the run file with whose model_name_or_path `Task.build` reads the base model of the folder `weights`.

    Raise UsageError if the base model is gone, or has other weights now."""
    if base.is_random:
        values: dict[str, Any] = {"model_name_or_path": None, "seed": base.seed, "dtype": base.dtype}
        return dataclasses.replace(cfg, **values)
    if base.commit:
        if cfg.model_name_or_path == base.name and pretrained_source(cfg)[1] == base.commit:
            return with_new_ids(cfg, base.new_ids)
        cfg = dataclasses.replace(cfg, model_name_or_path=base.name, model_revision=base.commit, model_config=None)
        return with_new_ids(cfg, base.new_ids)
    folder = _folder_of_base(cfg, base, weights)
    return with_new_ids(dataclasses.replace(cfg, model_name_or_path=str(folder), model_config=None), base.new_ids)


def _folder_of_base(cfg: RunConfig, base: BaseModel, weights: str | Path | None) -> Path:
    """Return the folder with the weights of `base`: that of the run file, or where they were."""
    found = []
    for name in (cfg.model_name_or_path, base.name):
        folder = Path(locate(str(name)))
        is_other = weights is None or folder != Path(locate(str(weights)))  # under eval.py it is the checkpoint itself
        if name and is_other and folder.is_dir() and weight_files(folder):
            actual = hash_of_weights(cfg, folder)
            if actual == base.weights:
                return folder
            found.append(f"{name} has {actual}")
    fix = f"put that model back to {base.name}, or give train.py its folder as --model_name_or_path"
    if weights is not None and weight_files(Path(locate(str(weights)))):
        fix += f"; the merged weights are evaluated by eval.py with --model_name_or_path {weights} and its data"
    raise UsageError(
        f"{weights} was trained on {base}, which is not there now ({', '.join(found) or 'no such folder'}): {fix}"
    )


@contextmanager
def built_with(task: Any, cfg: RunConfig) -> Iterator[None]:
    """Let a task build its model by the fields `cfg` within."""
    own = task.cfg
    task.cfg = cfg
    try:
        yield
    finally:
        task.cfg = own


def check_random(base: BaseModel, model: torch.nn.Module, weights: str | Path | None) -> BaseModel:
    """Return `base`, which are random weights, with their hash; raise UsageError if it has another one.

    Another version of torch or transformers may draw other numbers from the same seed."""
    actual = hash_of_tensors(model.state_dict())
    if base.weights not in (None, actual):
        raise UsageError(
            f"{weights} was trained on {base}, but the same seed gives others here ({actual}): install the versions of torch "
            "and transformers that environment.json of its run names"
        )
    return dataclasses.replace(base, weights=actual)


@torch.no_grad()
def cast_(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters and saved buffers in place, as loading a model in this dtype does."""
    for value in (*model.parameters(), *persistent_buffers(model).values()):
        if value.is_floating_point():
            value.data = value.data.to(dtype)


# ---- hashes of weights -----------------------------------------------------------------------------------------------


def weight_files(folder: Path) -> list[Path]:
    """Return the files with weights of a model folder, as `from_pretrained` chooses them."""
    return sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))


def hash_of_weights(cfg: RunConfig, folder: Path) -> str:
    """Return a hash of the names, dtypes, shapes and values in a model folder, however many files hold them.

    It is read once: the cache keeps the hash until size or time of a file changes. One process of a machine reads."""
    files = weight_files(folder)
    if not files:
        raise UsageError(f"{folder} holds no weights of a model (model*.safetensors)")
    stats = [(str(path.resolve()), path.stat()) for path in files]
    key = repr([(name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino) for name, stat in stats])
    target = cache_root(cfg) / "model_hashes" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    known = read_json(target).get("weights")
    if known:
        return known
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError:  # a cache that is read-only
        return _read_hash(files)
    with exclusive(target, f"reading the weights in {folder}"):
        value = read_json(target).get("weights") or _read_hash(files)
        with suppress(OSError):
            rewrite(target, json.dumps({"weights": value, "folder": str(folder)}))
    return value


def _read_hash(files: list[Path]) -> str:
    if files[0].suffix == ".bin":
        return _combined((path.name, hash_file(path)["xxh3_128"]) for path in files)
    return _combined(each for path in files for each in _hashes_of_file(path))


def _hashes_of_file(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, hash) of each tensor of a safetensors file, in its order."""
    with open(path, "rb", buffering=0) as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            first, end = entry["data_offsets"]
            digest = xxhash.xxh3_128(f"{entry['dtype']} {entry['shape']}".encode())
            file.seek(8 + size + first)
            while first < end:
                data = file.read(min(CHUNK, end - first))
                if not data:
                    raise UsageError(f"{path} is damaged: it ends before {name} does")
                digest.update(data)
                first += len(data)
            yield name, digest.hexdigest()


def hash_of_tensors(tensors: dict[str, torch.Tensor]) -> str:
    """Return a hash of names, dtypes, shapes and values of tensors in host memory."""
    hashes = []
    for name, value in tensors.items():
        digest = xxhash.xxh3_128(f"{value.dtype} {list(value.shape)}".encode())
        digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
        hashes.append((name, digest.hexdigest()))
    return _combined(hashes)


def _combined(hashes: Iterable[tuple[str, str]]) -> str:
    return "xxh3:" + xxhash.xxh3_128_hexdigest(json.dumps(sorted(hashes)).encode())
