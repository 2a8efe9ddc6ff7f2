"""Hugging Face model folder: weights, tokenizer, shard index.

Tests: tests/checkpointing/test_format.py, tests/distributed/test_fsdp2.py, tests/config/test_foreign_code.py.
"""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from src.checkpointing.sharded_checkpoint import file_name
from src.config.addons import functions_of_addons
from src.runtime import private_apis
from src.tasks import Task
from src.training.step import ModelWithLoss


def write_model(
    model_with_loss: ModelWithLoss,
    folder: Path,
    tensors: dict[str, torch.Tensor] | None = None,
    rank: int = 0,
    world: int = 1,
) -> None:
    """Write model and tokenizer so that `from_pretrained(folder)` and `pipeline` work; only one shard if `world` > 1.

    A module without `save_pretrained` is written as safetensors, with the task's own config.json. `tensors` are written
    instead of the model's own weights; transformers empties the dict."""
    task = model_with_loss.task
    model = task.saved(model_with_loss.model)
    for write_own_tensors in functions_of_addons(task.cfg, "write_own_tensors"):
        tensors = write_own_tensors(model, tensors, folder, rank, world)
    dtypes = {value.dtype for value in (tensors or {}).values() if value.is_floating_point()}
    has_tensors = bool(tensors)
    if not hasattr(model, "save_pretrained"):
        _write_plain(model, folder, tensors, rank, world)
        if rank == 0:
            config = {"task": task.cfg.task, "architectures": [type(model).__name__]} | task.model_config()
            (folder / "config.json").write_text(json.dumps(config, indent=2, allow_nan=False) + "\n")
        has_tensors = False
    elif world == 1:
        given = dict(tensors or {})
        model.save_pretrained(folder, state_dict=tensors)
        _check_written(model, folder, given)
    else:
        _write_shard(model, folder, tensors or {}, rank, world)
    if rank > 0:
        return
    if not (folder / "config.json").exists():
        names = ", ".join(sorted(path.name for path in folder.iterdir()))
        raise RuntimeError(
            f"save_pretrained of {type(model).__name__} has written no config.json, only {names}: `build` could not load this "
            "folder; let the task's `saved` return the model inside, or give the class its own save_pretrained"
        )
    if has_tensors:
        _set_dtype(folder / "config.json", dtypes)
    for name in ("tokenizer", "image_processor"):
        if (part := getattr(task, name, None)) is not None:
            part.save_pretrained(folder)


def _check_written(model: torch.nn.Module, folder: Path, given: dict[str, torch.Tensor]) -> None:
    """Raise RuntimeError if `save_pretrained` has written weights of the model that training changes meanwhile.

    Compares one vector, the last of those whose name the files have; transformers may convert matrices."""
    where = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            where |= dict.fromkeys(file.keys(), path)
    if not (names := [name for name, value in given.items() if name in where and value.dim() == 1]):
        return
    with safe_open(where[names[-1]], "pt") as file:
        written, expected = file.get_tensor(names[-1]), given[names[-1]]
    if written.shape == expected.shape and not torch.equal(
        written.nan_to_num(), expected.to(written.dtype).nan_to_num()
    ):
        raise RuntimeError(
            f"save_pretrained of {type(model).__name__} has written other values of {names[-1]} than those of its argument "
            "state_dict: it must write these, because training changes the model meanwhile"
        )


def _write_plain(model: torch.nn.Module, folder: Path, tensors: dict | None, rank: int, world: int) -> None:
    """Write `tensors`, or without them the state dict, as one safetensors file, or one rank's file of several."""
    named = model.state_dict() if tensors is None else tensors
    if named or world == 1:  # a rank has no tensors if there are more ranks than layers
        write_tensors(named, folder / file_name("model", rank, world))


def write_tensors(named: dict[str, torch.Tensor], file: Path) -> None:
    """Write tensors by name as one safetensors file; tied ones are written twice."""
    contiguous = {name: value.contiguous() for name, value in named.items()}
    save_file(without_sharing(contiguous), file, {"format": "pt"})


def without_sharing(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with tied weights cloned, because safetensors refuses two names for the same memory."""
    result, seen = {}, set()
    for name, value in named.items():
        memory = value.untyped_storage().data_ptr()
        result[name] = value.clone() if memory in seen else value
        seen.add(memory)
    return result


def _write_shard(model: torch.nn.Module, folder: Path, tensors: dict, rank: int, world: int) -> None:
    """Write one rank's tensors as model-RANK-of-WORLD.safetensors; rank 0 also writes the configuration files."""
    inner, has_tensors = folder / "model", bool(tensors)
    private_apis.save_on_every_rank(model)
    model.save_pretrained(inner, state_dict=tensors, max_shard_size="1000TB")
    if has_tensors:  # a rank has no tensors if there are more ranks than layers
        (inner / file_name("model", 0, 1)).rename(inner / file_name("model", rank, world))
    for path in inner.iterdir():
        if rank == 0 or path.suffix == ".safetensors":
            path.rename(folder / path.name)
        else:
            path.unlink()
    inner.rmdir()


def _set_dtype(path: Path, dtypes: set[torch.dtype]) -> None:
    """Set the dtype of the written weights in config.json; transformers writes the dtype of the model in memory."""
    config = json.loads(path.read_text())
    if len(dtypes) == 1 and config.get("dtype") != (name := str(*dtypes).removeprefix("torch.")):
        path.write_text(json.dumps(config | {"dtype": name}, indent=2, sort_keys=True) + "\n")


def write_index(folder: Path) -> None:
    """Write model.safetensors.index.json, which `from_pretrained` needs to load several weight files."""
    paths = sorted(folder.glob("model-*-of-*.safetensors"))
    if not paths:
        return
    weight_map = {name: path.name for path in paths for name in safe_open(path, "pt").keys()}  # noqa: SIM118
    size = sum(path.stat().st_size for path in paths)
    body = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(body, indent=2) + "\n")


def change_final_model(folder: Path, task: Task) -> bool:
    """Let add-ons change the written model in `folder`, such as merging an adapter; return whether one has done so."""
    functions = functions_of_addons(task.cfg, "change_final_model")
    for change in functions:
        change(folder, task)
    return bool(functions)
