"""Trial save before the first step: what a checkpoint would hold is saved, loaded again and compared.

A model that comes back different would be noticed only when a run resumes, after the training is lost.
Tests: tests/checkpointing/test_trial_save.py.
"""

import copy
import io
import json
import logging
import shutil
import traceback
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch

from src.checkpointing import checkpoint_format, model_folder
from src.checkpointing.async_writer import CheckpointWriter, Tensors
from src.checkpointing.sharded_checkpoint import TensorReader
from src.config.errors import UsageError, one_line, warn
from src.config.paths import REPOSITORY
from src.distributed.sharded_tensors import ShardedTensorRef
from src.distributed.strategies import Strategy
from src.distributed.strategy_checks import check_only_tensors
from src.runtime import run_lock
from src.storage.disk_errors import DiskError, is_disk_error
from src.storage.jsonl import strict_json
from src.training.step import ModelWithLoss
from src.training.trial_evaluation import random_state_kept

log = logging.getLogger("run")
ALTERED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SHOWN = 3  # names in the message


def try_to_save(strategy: Strategy, writer: CheckpointWriter, model: ModelWithLoss, parts: dict, state: dict) -> None:
    """Raise UsageError on every rank if the model or a part cannot be saved and loaded again. A collective.

    Saves altered weights, because initial ones could come back from `build` without a file. If the disk cannot take
    them, only warn. Costs the time and disk space of one save, and a second model in the main process's host memory."""
    folder = writer.folder / ".trial_save.tmp"
    try:
        tensors, numbers = _on_all_ranks(strategy, lambda: _collect(strategy, writer, folder, model, parts))
        host = writer.copy_to_host(tensors)  # a collective if the model is sharded
        _alter(host["model"])
        _on_all_ranks(strategy, lambda: _write(writer, folder, model, host, state | {"numbers": numbers}))
        _on_all_ranks(strategy, lambda: _load(strategy, writer, folder, model, tensors["model"], host["model"]))
    except DiskError as error:
        warn(f"the trial save was skipped, because the disk failed: {error.strerror}")
    finally:
        if writer.is_main:
            shutil.rmtree(folder, ignore_errors=True)


def _on_all_ranks(strategy: Strategy, work: Callable[[], Any]) -> Any:
    """Return `work()`. Raise the first error of all ranks on all: DiskError if a disk failed, else UsageError."""
    from accelerate.utils import gather_object

    result, failed = None, None
    try:
        result = work()
    except Exception as error:
        log.error("%s", traceback.format_exc())
        failed = (is_disk_error(error), _describe(error))
    if found := sorted(item for item in gather_object([failed]) if item is not None):
        is_disk, text = found[0]
        raise DiskError(None, text) if is_disk else UsageError(text)
    return result


def _describe(error: Exception) -> str:
    """Return the message of a UsageError; of another error also its type and the last line of this project."""
    if isinstance(error, UsageError):
        return str(error)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
    path = Path(frames[-1].filename)
    where = path.relative_to(REPOSITORY) if path.is_relative_to(REPOSITORY) else path
    return f"check_save: the trial save failed: {type(error).__name__}: {one_line(error)} ({where}, line {frames[-1].lineno})"


# ---- save ------------------------------------------------------------------------------------------------------------


def _collect(strategy: Strategy, writer: CheckpointWriter, folder: Path, model: ModelWithLoss, parts: dict) -> tuple:
    """Return the tensors and numbers of a checkpoint, and prepare `folder` on the main process."""
    check_only_tensors(model.task.saved(model.model))
    tensors, numbers = checkpoint_format.collect_tensors(strategy, model, parts)
    for part, named in numbers.items():
        for name, value in named.items():
            if not _is_json(value):
                raise UsageError(
                    f"check_save: {name} in the state of {part} is a {type(value).__name__}, which no checkpoint can hold: its "
                    "state_dict must be a flat dict of tensors, finite numbers and strings"
                )
    if writer.is_main:
        run_lock.lock_run_folder(writer.folder)
        if error := writer.disk_error(tensors):
            raise error
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    return tensors, numbers


def _is_json(value: Any) -> bool:
    try:
        return json.loads(json.dumps(strict_json({"value": value})))["value"] == value
    except (TypeError, ValueError):
        return False


def _alter(tensors: Tensors) -> None:
    """Change every weight a little, so that the model still works; tied weights share memory and change once."""
    for value in {value.data_ptr(): value for value in tensors.values()}.values():
        if value.dtype in ALTERED:
            value.mul_(1 + 1 / 16).add_(1 / 64)


def _write(writer: CheckpointWriter, folder: Path, model: ModelWithLoss, host: dict[str, Tensors], state: dict) -> None:
    """Write this rank's files, as for a checkpoint, to a folder of its own in `folder`."""
    if not writer.writes:
        return
    own = folder / str(writer.rank)
    own.mkdir()
    checkpoint_format.write_checkpoint(own, model, host, strict_json(state), writer.rank, writer.world)


# ---- load ------------------------------------------------------------------------------------------------------------


def _load(
    strategy: Strategy, writer: CheckpointWriter, folder: Path, model: ModelWithLoss, live: dict, saved: Tensors
) -> None:
    """Build the model from the files on the main process; raise UsageError if it is not what was saved."""
    if not writer.is_main:
        return
    whole = folder / "0"
    for rank in range(1, writer.world):
        for path in (folder / str(rank)).iterdir():
            path.rename(whole / path.name)
    model_folder.write_index(whole)
    task = copy.copy(model.task)  # `build` sets attributes
    with random_state_kept(strategy.accelerator.device), redirect_stderr(io.StringIO()):  # its warnings were printed
        try:
            kept = task.saved(task.build_model(str(whole)))
        except UsageError as error:
            raise UsageError(
                f"check_save: `build` cannot load what was saved a moment before, so a run could not resume: {error}"
            ) from error
    reader = TensorReader(whole, "model")
    errors = []
    for name, value in kept.state_dict().items():
        if name not in live:
            errors.append(f"{name} comes back, but was not in the model")
        else:
            expected = saved[name] if name in saved else reader.whole(name) if name in reader.where else None
            errors += [f"{name} {text}" for text in _differences(value, live[name], expected)]
    errors += [f"{name} does not come back" for name in live.keys() - kept.state_dict().keys()]
    if errors:
        raise UsageError(_message(type(kept).__name__, sorted(errors)))


def _differences(loaded: torch.Tensor, live: Any, saved: torch.Tensor | None) -> Iterator[str]:
    """Yield how a tensor that was loaded differs from that of the model and, if known, from the saved values."""
    if not isinstance(live, ShardedTensorRef):  # DeepSpeed's have neither shape nor dtype until they are gathered
        if loaded.shape != live.shape:
            yield f"comes back with shape {list(loaded.shape)} instead of {list(live.shape)}"
            return
        if loaded.dtype != live.dtype:
            yield f"comes back as {loaded.dtype} instead of {live.dtype}"
            return
    if saved is not None and not torch.equal(loaded.to(saved.dtype).nan_to_num(), saved.nan_to_num()):
        yield "comes back with other values"


def _message(kind: str, errors: list[str]) -> str:
    more = f"; and {len(errors) - SHOWN} more" if len(errors) > SHOWN else ""
    return (
        f"check_save: {kind} cannot be saved and loaded again: {'; '.join(errors[:SHOWN])}{more}. A run could not resume from "
        "such a checkpoint: `build(weights)` must return the model that was saved. from_pretrained drops a parameter "
        "or buffer that its model class does not have: declare it in the class, load it in `build`, or register a constant "
        "buffer with persistent=False"
    )
