"""The contents of a checkpoint: model, optimizer and state as safetensors and JSON.

Tests: tests/checkpointing/test_format.py and tests/conformance/. No file holds a pickle. src/storage/atomic_folder.py makes a folder
complete or absent, src/checkpointing/async_writer.py writes beside training, src/checkpointing/resume.py chooses what to go on from.
"""

import json
import re
import shutil
from pathlib import Path
from urllib.parse import urlsplit

import torch
import yaml
from safetensors import safe_open
from safetensors.torch import save_file

from src.checkpointing.sharded import TensorReader, file_name
from src.config.errors import UsageError
from src.config.redact import publishable, redact_all
from src.config.schema import RunConfig
from src.distributed.sharded_tensors import ShardedTensorRef, gather_full, is_partial, plain_name
from src.storage import atomic_folder
from src.training.state import TrainState
from src.training.step import ModelWithLoss

Tensors = dict[str, torch.Tensor]
RUN_CONFIG = "run_config.yaml"  # in final/: the configuration of the run, without credentials


def list_checkpoints(output_dir: str | Path) -> list[Path]:
    """Return the checkpoint folders of a run, intact or not, oldest first."""
    found = [(step_of(path), path) for path in Path(output_dir, "checkpoints").glob("*")]
    return [path for _, path in sorted(item for item in found if item[0] is not None)]


def step_of(checkpoint: Path) -> int | None:
    """Return the step of a checkpoint folder, which a user may have given another name; None for other folders."""
    if match := re.fullmatch(r"step_(\d+)", checkpoint.name):
        return int(match[1])
    if checkpoint.name.startswith((".", "old_")):  # half-written, or archived
        return None
    try:
        return read_state(checkpoint)["progress"]["step"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def of_step(output_dir: str | Path, step: int) -> Path | None:
    """Return the checkpoint of a step, if the run has one."""
    return next((path for path in list_checkpoints(output_dir) if step_of(path) == step), None)


def inside(checkpoint: Path, output_dir: Path) -> bool:
    """Return whether a checkpoint is one of the run in `output_dir`."""
    return checkpoint.resolve().parent == (output_dir / "checkpoints").resolve()


def newest_intact(output_dir: str | Path) -> Path | None:
    """Return the newest intact checkpoint of a run, or None."""
    return next((path for path in reversed(list_checkpoints(output_dir)) if not atomic_folder.verify(path)), None)


def read_state(checkpoint: Path) -> dict:
    """Return progress, meter, identity, resolved configuration and the numbers of optimizer and scaler."""
    return json.loads((checkpoint / "state.json").read_text())


# ---- out of the process ------------------------------------------------------------------------------------------------


def collect_tensors(model_with_loss: ModelWithLoss, parts: dict) -> tuple[dict[str, Tensors], dict[str, dict]]:
    """Return (tensors by part and name, everything else likewise) of the model and of `parts`, under canonical names.

    A part is an optimizer, or has a flat `state_dict` of tensors, numbers and strings (an average of weights, say)."""
    first = next(iter(parts.values()), None)
    tensors, numbers = {"model": first.weights() if hasattr(first, "weights") else _weights(model_with_loss.model)}, {}
    for part, holder in parts.items():
        if hasattr(holder, "weights"):  # DeepSpeed's
            flat = holder.moments()
        else:
            flat = (
                _named(model_with_loss.model, holder)
                if isinstance(holder, torch.optim.Optimizer)
                else holder.state_dict()
            )
        kinds = (torch.Tensor, ShardedTensorRef)
        tensors[part] = {name: value for name, value in flat.items() if isinstance(value, kinds)}
        numbers[part] = {name: value for name, value in flat.items() if not isinstance(value, kinds)}
    return tensors, numbers


def _weights(model: torch.nn.Module) -> Tensors:
    """Return the state dict of a model; shards as they are, because of them only the parameter itself tells what is tied."""
    held = model.state_dict(keep_vars=True)
    return {name: value if is_partial(value) else value.detach() for name, value in held.items()}


class HostCopy:
    """Host memory that holds one copy of the training state; allocated by the first copy, used for every other."""

    def __init__(self):
        self.memory: dict[tuple[str, str], torch.Tensor] = {}

    def take(self, tensors: dict[str, Tensors], mine=None) -> dict[str, Tensors]:
        """Return the same tensors in host memory, tied ones once; waits for the device.

        Those in parts are gathered one by one, a collective; given `mine`, only those (part, name) in it are kept."""
        copy, seen, waits = {part: {} for part in tensors}, {}, False
        for part, named in tensors.items():
            for name, value in named.items():
                same = is_partial(value) or (value.data_ptr(), value.shape, value.stride(), value.dtype)
                where = id(value) if same is True else same
                if where not in seen or not value.nbytes:
                    full = gather_full(value)
                    seen[where] = self._copy((part, name), full) if mine is None or (part, name) in mine else None
                    waits |= full.device.type != "cpu"
                if seen[where] is not None:
                    copy[part][name] = seen[where]
        if waits:
            torch.accelerator.synchronize()
        return copy

    def _copy(self, key: tuple[str, str], value: torch.Tensor) -> torch.Tensor:
        memory = self.memory.get(key)
        if memory is None or memory.shape != value.shape or memory.dtype != value.dtype:
            memory = self.memory[key] = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
        return memory.copy_(value, non_blocking=True)


def write_checkpoint(
    folder: Path,
    model_with_loss: ModelWithLoss,
    tensors: dict[str, Tensors],
    state: dict,
    rank: int = 0,
    world: int = 1,
):
    """Write a checkpoint's files, or with `world` > 1 those of one rank; touches no tensor of the model itself, so it may run
    beside training."""
    write_model(model_with_loss, folder, dict(tensors["model"]), rank, world)
    for part, named in tensors.items():
        if part != "model" and (named or world == 1):
            first = {value.data_ptr(): name for name, value in reversed(named.items())}
            apart = {name: value if first[value.data_ptr()] == name else value.clone() for name, value in named.items()}
            save_file(apart, folder / file_name(part, rank, world))
    if rank == 0:
        (folder / "state.json").write_text(json.dumps(state, indent=1, allow_nan=False))


def write_model(
    model_with_loss: ModelWithLoss, folder: Path, tensors: Tensors | None = None, rank: int = 0, world: int = 1
) -> None:
    """Write model and tokenizer so that `from_pretrained(folder)` and `pipeline` just work; or one rank's part of it."""
    dtypes = {value.dtype for value in (tensors or {}).values() if value.is_floating_point()}
    named = bool(tensors)  # transformers empties what it is given
    if world == 1:
        model_with_loss.model.save_pretrained(folder, state_dict=tensors)
    else:
        inner = folder / "model"
        model_with_loss.model.should_save_on_this_rank = lambda is_main_process: (
            True
        )  # transformers would write on rank 0 alone
        model_with_loss.model.save_pretrained(inner, state_dict=tensors, max_shard_size="1000TB")
        if named:  # else there are more ranks than layers
            (inner / file_name("model", 0, 1)).rename(inner / file_name("model", rank, world))
        for path in inner.iterdir():
            path.rename(folder / path.name) if rank == 0 or path.suffix == ".safetensors" else path.unlink()
        inner.rmdir()
    if rank == 0 and named:
        _say_dtype(folder / "config.json", dtypes)
    if getattr(model_with_loss.task, "tokenizer", None) is not None and rank == 0:
        model_with_loss.task.tokenizer.save_pretrained(folder)


def _say_dtype(path: Path, dtypes: set[torch.dtype]) -> None:
    """Let config.json name the dtype of the weights that were written; transformers names that of the model in memory."""
    config = json.loads(path.read_text())
    if len(dtypes) == 1 and config.get("dtype") != (name := str(*dtypes).removeprefix("torch.")):
        path.write_text(json.dumps(config | {"dtype": name}, indent=2, sort_keys=True) + "\n")


def write_index(folder: Path) -> None:
    """Name the file of each weight in model.safetensors.index.json, as `from_pretrained` wants it, if there are several."""
    paths = sorted(folder.glob("model-*-of-*.safetensors"))
    if not paths:
        return
    weight_map = {name: path.name for path in paths for name in safe_open(path, "pt").keys()}  # noqa: SIM118
    size = sum(path.stat().st_size for path in paths)
    body = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(body, indent=2) + "\n")


def write_final(
    folder: Path, cfg: RunConfig, model_with_loss: ModelWithLoss, tensors, rank: int, world: int, config: dict
) -> None:
    """Write a final model: weights, tokenizer, a model card and the run's configuration; or one rank's part of it."""
    write_model(model_with_loss, folder, tensors, rank, world)
    if rank == 0:
        write_card(folder, cfg, model_with_loss.model, config)


def write_card(folder: Path, cfg: RunConfig, model: torch.nn.Module, config: dict) -> None:
    """Write what is published beside the weights: README.md and, for eval.py, the run's configuration."""
    from transformers import PreTrainedModel

    library = "library_name: transformers\n" if isinstance(model, PreTrainedModel) else ""
    sources = [cfg.dataset_name, *cfg.train_file] if not cfg.mixture else list(cfg.mixture)
    data = ", ".join(_public_name(source) for source in sources if source)
    base = cfg.model_name_or_path
    start = f"Fine-tuned from {_public_name(base)}" if base else "Trained from random weights"
    (folder / "README.md").write_text(
        f"---\n{library}tags: [{cfg.task}]\n---\n# {Path(cfg.output_dir).name}\n\n{start} on {data}; task `{cfg.task}`, seed "
        f"{cfg.seed}, global batch {cfg.global_batch_size}. {RUN_CONFIG} holds its configuration.\n"
    )
    text = yaml.safe_dump(redact_all(config, publishable), sort_keys=False, allow_unicode=True)
    (folder / RUN_CONFIG).write_text(text, encoding="utf-8")


def _public_name(source: str) -> str:
    """Return a Hub name as it is; of a URL or a path on this machine the last part only."""
    if "://" in source:
        return Path(urlsplit(source).path).name or "a URL"
    return Path(source).name if Path(source).is_absolute() or Path(source).exists() else source


def checkpoints_to_delete(cfg: RunConfig, best_step: int = 0) -> list[Path]:
    """Return the checkpoints to delete: all but the last `save_total_limit`, every `save_keep_every`-th, and the best one
    where a metric is named. What a user has renamed or linked there is never deleted."""
    found = [
        path for path in list_checkpoints(cfg.output_dir) if path.name.startswith("step_") and not path.is_symlink()
    ]
    kept = set(found[-cfg.save_total_limit :])
    if cfg.save_keep_every:
        kept |= {path for path in found if step_of(path) % cfg.save_keep_every == 0}
    if cfg.metric_for_best_model:
        kept |= {path for path in found if step_of(path) == best_step}
    return [path for path in found if path not in kept]


def prune(cfg: RunConfig, best_step: int = 0) -> None:
    for path in checkpoints_to_delete(cfg, best_step):
        shutil.rmtree(path)


# ---- into the process --------------------------------------------------------------------------------------------------


def load_checkpoint(checkpoint: Path, model_with_loss: ModelWithLoss, parts: dict, scaler, meter) -> TrainState:
    """Put every part (and scaler and meter) where the checkpoint left it; return the progress. The model reads its weights."""
    state = read_state(checkpoint)
    for part, holder in parts.items():
        if part not in state["numbers"]:
            raise UsageError(f"{checkpoint} holds no {part}: it was saved without; begin a new run with --init_from")
        reader, numbers = TensorReader(checkpoint, part), state["numbers"][part]
        if hasattr(holder, "weights"):  # DeepSpeed's
            holder.put(reader, numbers)
        elif isinstance(holder, torch.optim.Optimizer):
            _set_named(model_with_loss.model, holder, reader, numbers)
        else:
            holder.load_state_dict(numbers | {name: reader.whole(name) for name in reader.where})
    if scaler is not None and state["scaler"]:
        scaler.load_state_dict(state["scaler"])
    meter.resume(state["meter"])
    progress = TrainState(**state["progress"])
    if progress.best_metric is None:  # saved by a version that did not keep it
        config = state.get("config", {})
        progress.best_metric, progress.best_greater = (
            config.get("metric_for_best_model") or "loss",
            bool(config.get("greater_is_better")),
        )
    return progress


def _names(model: torch.nn.Module, optimizer) -> list[str]:
    """Return the names of the optimizer's parameters, in the order of its state dict."""
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


def _named(model, optimizer) -> dict:
    """Return the optimizer's state, flat, by "key/parameter name"."""
    names = _names(model, optimizer)
    every = optimizer.state_dict()["state"].items()
    return {f"{key}/{names[index]}": value for index, state in every for key, value in state.items()}


def _set_named(model, optimizer, reader: TensorReader, numbers: dict) -> None:
    state, groups = {}, optimizer.state_dict()["param_groups"]
    index = {name: i for i, name in enumerate(_names(model, optimizer))}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for where in [*reader.where, *numbers]:
        key, name = where.split("/", 1)
        value = numbers[where] if where in numbers else reader.like(where, parameters[index[name]])
        state.setdefault(index[name], {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": groups})
