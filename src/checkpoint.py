"""Checkpoints: a Hugging Face folder, the optimizer in safetensors and a few integers in JSON; renamed when complete.

Leave alone. Guarded by tests/test_checkpoint.py and tests/conformance/. No file holds a pickle.
"""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file, save_file

from src.config import RunConfig, to_yaml
from src.inputs import UsageError, locate, read_yaml
from src.step import Objective, Progress

# What a run cannot change and still be the same run.
IDENTITY = [
    "task",
    "seed",
    "model_config",
    "dtype",
    "tokenizer_name",
    "dataset_name",
    "dataset_config_name",
    "train_file",
    "global_batch_size",
    "optim",
    "max_length",
    "packing",
]


def newest(output_dir: str | Path) -> Path | None:
    """Return the newest complete checkpoint of a run, or None."""
    found = sorted(Path(output_dir, "checkpoints").glob("step_*/state.json"))
    return found[-1].parent if found else None


def find(run: RunConfig) -> Path | None:
    """Return the checkpoint that `run.resume` asks for, or None for a start from the beginning."""
    if run.resume == "never":
        return None
    if run.resume == "auto":
        return newest(run.output_dir)
    folder = Path(run.resume)
    if (folder / "state.json").exists():
        return folder
    if found := newest(folder):
        return found
    raise UsageError(
        f"resume: {run.resume} is neither a checkpoint nor a run with one: give auto, never, or such a folder"
    )


def to_evaluate(argv: list[str]) -> tuple[list[str], dict | None, int | None]:
    """Return (flags without --checkpoint, the run's configuration below them, its step).

    A run is evaluated by its final model, or by its newest checkpoint while it has none."""
    argv, name = list(argv), None
    for i, word in enumerate(argv):
        if word == "--checkpoint" or word.startswith("--checkpoint="):
            _, _, name = word.partition("=")
            del argv[i]
            if not name:
                name = argv.pop(i) if i < len(argv) else ""
            break
    if name is None:
        return argv, None, None
    folder = Path(locate(name))
    weights = folder if (folder / "config.json").exists() else folder / "final"
    if not (weights / "config.json").exists():
        weights = newest(folder)
    where = next((f for f in (folder, folder.parent) if (f / "config.yaml").exists()), None)
    if weights is None or where is None:
        raise UsageError(
            f"checkpoint: {name} is neither a run folder nor one of its checkpoints; for others give --model_name_or_path"
        )
    latest = weights if (weights / "state.json").exists() else newest(where)
    step = json.loads((latest / "state.json").read_text())["step"] if latest else None
    output = folder.parent.parent if folder.parent.name == "checkpoints" else where
    base = read_yaml(where / "config.yaml") | {"model_name_or_path": str(weights), "output_dir": str(output)}
    given = {word[2:].partition("=")[0].replace("-", "_") for word in argv if word.startswith("--")}
    dropped = {"model_config", "tokenizer_name", "resume"}
    dropped |= {"train_file", "validation_file"} if "dataset_name" in given else set()
    dropped |= {"dataset_name", "dataset_config_name"} if given & {"train_file", "validation_file"} else set()
    dropped |= {"train_file"} if "validation_file" in given else set()
    return argv, {k: v for k, v in base.items() if k not in dropped}, step


def agreed(accelerator, run: RunConfig, options) -> Path | None:
    """Return the checkpoint to go on from, or None, as the main process decides it for all; faults reach all likewise.

    A micro-batch size of `auto` becomes that of the checkpoint."""
    from accelerate.utils import broadcast_object_list

    outcome = [None, None]
    if accelerator.is_main_process:
        try:
            outcome[0] = find(run)
            if outcome[0]:
                check_same_run(outcome[0], yaml.safe_load(to_yaml(run, options)))
        except (UsageError, OSError) as error:
            outcome[1] = str(error)
    broadcast_object_list(outcome)
    if outcome[1]:
        raise UsageError(outcome[1])
    if outcome[0] and run.per_device_batch_size == "auto":
        run.per_device_batch_size = read_yaml(outcome[0] / "config.yaml")["per_device_batch_size"]
    return outcome[0]


def check_same_run(checkpoint: Path, config: dict) -> None:
    """Refuse to go on with a run whose mathematics changed, with the list of what differs."""
    old = read_yaml(checkpoint / "config.yaml")
    changed = [f"{k}: {old.get(k)} → {config.get(k)}" for k in IDENTITY if old.get(k) != config.get(k)]
    if changed:
        raise UsageError(
            f"{checkpoint.parent.parent} holds another run ({'; '.join(changed)}): give another --output_dir, or start it "
            "anew with --resume never"
        )


def set_aside(accelerator, run: RunConfig, start: Path | None, complete: bool) -> None:
    """Rename what the run that begins now would contradict: everything there for a new one, and for one that goes on
    the checkpoints after `start` and, while it is not complete, the final model. Nothing is lost."""
    if not accelerator.is_main_process:
        return
    folder = Path(run.output_dir)
    stale = [] if complete else [folder / "final"]
    if start is None:
        stale += [folder / "checkpoints", folder / "metrics.jsonl"]
    else:
        stale += [old for old in (folder / "checkpoints").glob("step_*") if old.name > start.name]
    for path in filter(Path.exists, stale):
        base = path.with_name(f"old_{path.name}") if start else path
        n = next(n for n in range(1, 10_000) if not base.with_name(f"{base.name}.old{n}").exists())
        path.rename(base.with_name(f"{base.name}.old{n}"))


def save(accelerator, run: RunConfig, config: str, objective: Objective, optimizer, progress: Progress) -> None:
    """Leave checkpoints/step_N complete or not at all, then delete the oldest beyond save_total_limit; on all ranks."""
    if accelerator.is_main_process:
        _save(run, config, objective, optimizer, accelerator.scaler, progress)
    accelerator.wait_for_everyone()


def _save(run: RunConfig, config: str, objective: Objective, optimizer, scaler, progress: Progress) -> None:
    folder = Path(run.output_dir, "checkpoints", f"step_{progress.step:08d}")
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    write_model(objective, temporary)
    tensors, numbers = _flatten(objective.model, optimizer)
    save_file(tensors, temporary / "optimizer.safetensors")
    state = dataclasses.asdict(progress) | {"optimizer": numbers}
    if scaler is not None:
        state["scaler"] = scaler.state_dict()
    (temporary / "config.yaml").write_text(config)
    (temporary / "state.json").write_text(json.dumps(state, indent=1))
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(temporary, folder)
    for old in sorted(folder.parent.glob("step_*"))[: -run.save_total_limit]:
        shutil.rmtree(old)


def write_model(objective: Objective, folder: Path) -> None:
    """Write model and tokenizer so that `from_pretrained(folder)` and `pipeline` just work."""
    objective.model.save_pretrained(folder)
    if getattr(objective.task, "tokenizer", None) is not None:
        objective.task.tokenizer.save_pretrained(folder)


def export(accelerator, run: RunConfig, objective: Objective) -> Path:
    """Leave final/ complete or not at all: weights, tokenizer and a model card; called on all ranks."""
    folder = Path(run.output_dir, "final")
    if accelerator.is_main_process:
        _export(run, objective, folder)
    accelerator.wait_for_everyone()
    return folder


def _export(run: RunConfig, objective: Objective, folder: Path) -> None:
    temporary = folder.with_name(".final.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    write_model(objective, temporary)
    data = run.dataset_name or ", ".join(Path(file).name for file in run.train_file)
    start = f"Fine-tuned from {run.model_name_or_path}" if run.model_name_or_path else "Trained from random weights"
    (temporary / "README.md").write_text(
        f"---\nlibrary_name: transformers\ntags: [{run.task}]\n---\n# {Path(run.output_dir).name}\n\n{start} on {data}; task "
        f"`{run.task}`, seed {run.seed}, global batch {run.global_batch_size}. The run's config.yaml and metrics.jsonl say the rest.\n"
    )
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(temporary, folder)


def load(checkpoint: Path, objective: Objective, optimizer, scaler) -> Progress:
    """Put the optimizer (and scaler) where the checkpoint left them and return the progress; weights are read by the model."""
    state = json.loads((checkpoint / "state.json").read_text())
    _unflatten(objective.model, optimizer, load_file(checkpoint / "optimizer.safetensors"), state["optimizer"])
    if scaler is not None and "scaler" in state:
        scaler.load_state_dict(state["scaler"])
    return Progress(**{field.name: state[field.name] for field in dataclasses.fields(Progress)})


def _names(model: torch.nn.Module, optimizer) -> list[str]:
    """Return the names of the optimizer's parameters, in the order of its state dict."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


def _flatten(model, optimizer) -> tuple[dict[str, torch.Tensor], dict]:
    """Return the optimizer's state as (tensors by "key/parameter name", the rest likewise)."""
    names, tensors, numbers = _names(model, optimizer), {}, {}
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            where = f"{key}/{names[index]}"
            if torch.is_tensor(value):
                tensors[where] = value.contiguous()
            else:
                numbers[where] = value
    return tensors, numbers


def _unflatten(model, optimizer, tensors: dict, numbers: dict) -> None:
    state = {}
    index = {name: i for i, name in enumerate(_names(model, optimizer))}
    for where, value in (tensors | numbers).items():
        key, name = where.split("/", 1)
        state.setdefault(index[name], {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
