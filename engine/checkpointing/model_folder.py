"""Hugging Face model folder: weights, tokenizer, shard index; what add-ons change in final/.

Tests: tests/engine/checkpointing/test_format.py, tests/engine/checkpointing/test_best_model.py,
tests/engine/distributed/test_fsdp2_checkpoints.py.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from engine.checkpointing.tensor_files import Tensors, file_name, write_tensors
from engine.config.addon import Addon, overrides
from engine.config.paths import read_yaml
from engine.config.redact import redact_all
from engine.config.run_config import RunConfig
from engine.models.generation import name_end_of_turn
from engine.process import private_apis
from engine.run.model_with_loss import ModelWithLoss
from engine.run.train_state import Run, TrainState
from engine.storage import verify_hashes

RUN_CONFIG = "run_config.yaml"  # the configuration of the run, without credentials


def write_model(model_with_loss: ModelWithLoss, folder: Path, tensors: Tensors, rank: int = 0, world: int = 1) -> None:
    """Write model and tokenizer so that `from_pretrained(folder)` and `pipeline` work; only one shard if `world` > 1.

    `tensors` are written instead of the weights that the model has by now. A module without `save_pretrained` is written
    as safetensors, with the task's own config.json."""
    task = model_with_loss.task
    model = task.saved(model_with_loss.model)
    file = folder / file_name("model", rank, world)
    if task.reads_chats:
        name_end_of_turn(model, task)
    left: Tensors | None = tensors
    for addon in task.cfg.addons:
        left = None if left is None else addon.save(task, model, left, folder, rank, world)
    tensors = task.write_files(folder, left or {}, rank)
    own_files = {*folder.iterdir()} if rank > 0 else set()
    if left is None:
        _write_without_weights(task, model, folder)
    elif not hasattr(model, "save_pretrained"):
        if tensors or world == 1:  # a rank has no tensors if there are more ranks than layers
            write_tensors(tensors, file, {"format": "pt"})
        _write_config(task, model, folder)
    elif world == 1:
        model.save_pretrained(folder, state_dict=dict(tensors))  # transformers empties the dict
        _check_written(model, folder, tensors)
        _set_dtype(folder / "config.json", tensors)
    else:
        private_apis.save_on_every_rank(model)
        model.save_pretrained(folder, state_dict=dict(tensors), max_shard_size="1000TB")
        if tensors:
            (folder / "model.safetensors").rename(file)
        _set_dtype(folder / "config.json", tensors)
    if rank > 0:  # rank 0 writes the other files for all
        for path in folder.iterdir():
            if path.suffix != ".safetensors" and path not in own_files:
                path.unlink()
        return
    _write_tokenizer(task, folder)


def _write_tokenizer(task: Any, folder: Path) -> None:
    """Write what makes the inputs of the model: a tokenizer, an image processor."""
    tokenizer: Any = getattr(task, "tokenizer", None)
    image_processor: Any = getattr(task, "image_processor", None)
    if getattr(tokenizer, "is_fast", False):
        tokenizer.backend_tokenizer.no_truncation()  # else to the length of the last call, if this process made one
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if image_processor is not None:
        image_processor.save_pretrained(folder)


def _write_without_weights(task: Any, model: torch.nn.Module, folder: Path) -> None:
    """Write the configuration of a model, if add-ons have written all of it that is saved."""
    if not hasattr(model, "save_pretrained"):
        _write_config(task, model, folder)
        return
    private_apis.save_on_every_rank(model)
    model.save_pretrained(folder, state_dict={})
    for path in folder.glob("model*.safetensors*"):
        path.unlink()


def _write_config(task: Any, model: torch.nn.Module, folder: Path) -> None:
    """Write config.json of a model without `save_pretrained`."""
    config = {"task": task.cfg.task, "architectures": [type(model).__name__]} | task.model_config()
    (folder / "config.json").write_text(json.dumps(config, indent=2, allow_nan=False) + "\n")


def _check_written(model: torch.nn.Module, folder: Path, tensors: Tensors) -> None:
    """Raise RuntimeError if `save_pretrained` has written weights of the model that training changes meanwhile.

    Compares one vector, the last one that the files have under the same name; transformers may convert matrices."""
    for path in sorted(folder.glob("*.safetensors"), reverse=True):
        with safe_open(path, "pt") as file:
            vectors = [name for name in file.keys() if name in tensors and tensors[name].dim() == 1]  # noqa: SIM118
            if not vectors:
                continue
            written = file.get_tensor(vectors[-1])
        expected = tensors[vectors[-1]].to(written)
        if written.shape == expected.shape and not torch.equal(written.nan_to_num(), expected.nan_to_num()):
            raise RuntimeError(
                f"save_pretrained of {type(model).__name__} has written other values of {vectors[-1]} than those of its "
                "argument state_dict: it must write these, because training changes the model meanwhile"
            )
        return


def _set_dtype(path: Path, tensors: Tensors) -> None:
    """Set the dtype of the written weights in config.json; transformers writes the dtype of the model in memory."""
    dtypes = {str(value.dtype).removeprefix("torch.") for value in tensors.values() if value.is_floating_point()}
    config = json.loads(path.read_text())
    if len(dtypes) == 1 and not dtypes & {config.get("dtype")}:
        path.write_text(json.dumps(config | {"dtype": dtypes.pop()}, indent=2, sort_keys=True) + "\n")


# ---- final/ ----------------------------------------------------------------------------------------------------------


def best_sentence(cfg: RunConfig, state: TrainState, final_step: int, average: str = "") -> str:
    """Return a sentence about the best step and what final/ holds, the weights of `final_step` or their `average`.

    Return an empty string without metric_for_best_model and average."""
    if not final_step or not (cfg.metric_for_best_model or average):
        return ""
    weights = f"the average ({average}) of step {final_step:,}" if average else f"step {final_step:,}"
    if not cfg.metric_for_best_model or not state.best_step:
        return f"final/ holds {weights}"
    return f"best: step {state.best_step:,}, {state.best_metric} {state.best}; final/ holds {weights}"


def is_final_of(step: int, folder: Path) -> bool:
    """Return whether `folder` is an undamaged final model of this step."""
    return verify_hashes.read_metadata(folder).get("step") == step and not verify_hashes.verify(folder)


def finish_by_addons(folder: Path, run: Run) -> bool:
    """Let add-ons change a complete final/, such as merging an adapter; return whether one has done so."""
    changes = [addon.finish(run.task, folder) for addon in run.cfg.addons]  # each is called
    return any(changes)


def is_finished_alike(folder: Path, cfg: RunConfig, config: dict) -> bool:
    """Return whether final/ was written with the values in `config` of all fields of the add-ons that finish it."""
    written = read_yaml(folder / RUN_CONFIG)
    names: set[str] = set()
    for addon in cfg.addons:
        if overrides(addon, Addon.finish):
            names |= vars(addon).keys()
    now = redact_all(config)
    return all(written.get(name) == now.get(name) for name in names)
