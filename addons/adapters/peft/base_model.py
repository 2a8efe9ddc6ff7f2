"""The base model that the checkpoints of a run leave out: its identity, its place, and how it is built.

Checkpoints of an adapter hold what was trained, and BASE_FILE, which says on which weights: a Hub model at a commit, a
folder by the hash of its weights, or random weights by their seed. Tests: tests/addons/adapters/test_base_model.py,
tests/addons/adapters/test_adapter_checkpoints.py.
"""

import dataclasses
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from addons.adapters.peft.files import adapter_files
from addons.adapters.peft.weight_hashes import hash_of_tensors, hash_of_weights, weight_files
from engine.checkpointing.model_folder import RUN_CONFIG
from engine.config.errors import UsageError, warn
from engine.config.paths import locate, read_yaml
from engine.config.run_config import RunConfig
from engine.distributed.running_statistics import persistent_buffers
from engine.models.build_model import weights_folder
from engine.models.config_and_tokenizer import BASE_FILE, named_base, pretrained_source, refuse_adapter
from engine.models.new_tokens import rows_missing
from engine.storage.jsonl import read_json

ROUNDED = re.compile(r"(-unsloth)?-bnb-[48]bit$", re.IGNORECASE)  # in names of models that are published in few bits


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


# ---- the base of a run, and where it is ------------------------------------------------------------------------------


def find_base(cfg: RunConfig, weights: str | Path | None, read: bool = True) -> BaseModel:
    """Return the base model of a run that begins with the folder `weights`, or with the model that the run file names.

    Unless `read`, hashes are left open."""
    if weights is None:
        return _named_base(cfg, read)
    folder = Path(locate(str(weights)))
    if weight_files(folder):
        refuse_adapter(str(folder), folder)
    base = read_base(folder)
    if base is not None:
        return base
    if adapter_files(folder):  # that another program wrote
        return _named_base(cfg, read)
    return BaseModel(_as_given(cfg, folder), weights=hash_of_weights(cfg, folder) if read else None)


def _named_base(cfg: RunConfig, read: bool) -> BaseModel:
    """Return the model of `model_name_or_path`, or the random weights of the run."""
    name = cfg.model_name_or_path
    if not name:
        return BaseModel(seed=cfg.seed, dtype=cfg.dtype)
    folder, commit = pretrained_source(cfg)
    if commit:
        return BaseModel(name, commit)
    weights_folder(cfg, None)  # which refuses an adapter
    return BaseModel(name, weights=hash_of_weights(cfg, folder) if read else None)


def _as_given(cfg: RunConfig, folder: Path) -> str:
    """Return the path of `folder` as the run file gives it: that of a run may have named only the run."""
    for name in (cfg.init_from, cfg.model_name_or_path):
        if _is_in(folder, name):
            return str(Path(str(name)) / folder.relative_to(locate(str(name))))
    return str(folder)


def _is_in(folder: Path, name: str | None) -> bool:
    """Return whether `folder` is the one that a field names, or one in that."""
    located = Path(locate(name)) if name else None
    return located is not None and (located == folder or located in folder.parents)


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
            return cfg
        return dataclasses.replace(cfg, model_name_or_path=base.name, model_revision=base.commit, model_config=None)
    folder = _folder_of_base(cfg, base, weights)
    return dataclasses.replace(cfg, model_name_or_path=str(folder), model_config=None)


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
def built_with(task: Any, cfg: RunConfig, new_ids: list[int] | None) -> Iterator[None]:
    """Let a task build its model by the fields `cfg` within, with rows for the tokens `new_ids`."""
    own = task.cfg
    task.cfg = cfg
    try:
        with rows_missing(new_ids):
            yield
    finally:
        task.cfg = own


def build_base(task: Any, weights: str | Path | None, empty: bool = False) -> torch.nn.Module:
    """Return what `Task.build` returns, of the base model wherever it is; it becomes `task.base_model`."""
    if not empty:
        task.base_model = find_base(task.cfg, weights)
    elif not hasattr(task, "base_model"):  # a dry run; otherwise rank 0 has sent what it found
        task.base_model = find_base(task.cfg, weights, read=False)
    base: BaseModel = task.base_model
    if empty or (holds_base(weights) and not base.is_random):
        model = task.build(weights, empty)
    else:
        with built_with(task, fields_of_base(task.cfg, base, weights), base.new_ids):
            model = task.build(None)
    if base.is_random and not empty:
        task.base_model = check_random(base, task.saved(model), weights)
        cast_(model, getattr(torch, task.cfg.dtype))
    elif not empty:
        task.base_model = dataclasses.replace(base, new_ids=getattr(task.saved(model), "new_ids", None))
    return model


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


# ---- what a run begins with ------------------------------------------------------------------------------------------


def check_start(cfg: RunConfig, weights: Path) -> None:
    """Raise UsageError if the folder `weights`, a checkpoint or that of init_from, does not fit the run file: it was
    trained on another base model, or with other new tokens.

    A resumed run that began with `init_from` has the base model that its checkpoint names: that of the run file may be a
    newer one by now. The commit that a Hub model had is taken again."""
    base, name = read_base(weights), cfg.model_name_or_path
    begins = _is_in(weights, cfg.init_from)
    if begins:
        _check_added_tokens(cfg, weights)
    if not name or Path(locate(name)) == weights:  # the second under eval.py
        return
    if base is None:
        if begins and adapter_files(weights):
            _check_name(name, weights)
        return
    is_taken_again = cfg.init_from or base.is_random or (base.commit and base.name == name)
    if is_taken_again and not begins:
        return
    named = find_base(cfg, None)
    is_merged_with_it = begins and read_base(locate(name)) == base
    if base.is_same(named) or is_merged_with_it:
        return
    fix = "another --output_dir for a new run"
    if begins:
        fix = "for a new adapter on a whole model, --model_name_or_path without --init_from"
    raise UsageError(
        f"{'init_from' if begins else 'resume'}: {weights} was trained on {base}, but model_name_or_path is {named}: give "
        f"that model; or {fix}"
    )


def _check_name(name: str, weights: Path) -> None:
    """Raise UsageError if an adapter of another program names another base model than `name`; warn of one in few bits."""
    trained_on = named_base(weights)
    if not trained_on or Path(trained_on).name == Path(name).name:
        return
    if ROUNDED.sub("", Path(trained_on).name).lower() == Path(name).name.lower():
        warn(
            f"init_from: the adapter in {weights} was trained on {trained_on}, which has {name} in few bits: with all bits "
            "the model differs a little from that"
        )
    elif Path(locate(trained_on)) != Path(locate(name)):
        raise UsageError(
            f"init_from: the adapter in {weights} was trained on {trained_on}, but model_name_or_path is {name}: give that "
            "model; if it has the same weights under another name, correct adapter_config.json"
        )


def _check_added_tokens(cfg: RunConfig, weights: Path) -> None:
    """Raise UsageError if an adapter has trained rows of other tokens, or in another order, than add_tokens names."""
    config = read_json(weights / "state.json").get("config")
    if config is None and (weights / RUN_CONFIG).exists():
        config = read_yaml(weights / RUN_CONFIG)
    if config is None or not adapter_files(weights):  # the first of another program
        return
    there = config.get("add_tokens") or []
    if there != cfg.add_tokens:
        raise UsageError(
            f"add_tokens: the adapter in {weights} was trained with {' '.join(there) or 'none'}, but this run names "
            f"{' '.join(cfg.add_tokens) or 'none'}: give the same tokens in the same order; or for a new adapter with further "
            "ones, the merged final/ of that run as --model_name_or_path instead of --init_from"
        )
