"""What a checkpoint holds: a Hugging Face folder, one safetensors file for each further part, and state.json.

Leave alone. Guarded by tests/test_checkpoint.py and tests/conformance/. No file holds a pickle. src/store.py makes a folder
complete or absent, src/saver.py writes beside training, src/resume.py chooses what to go on from.
"""

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from src import store
from src.fields import RunConfig
from src.inputs import UsageError, locate, read_yaml
from src.progress import Progress
from src.step import Objective

Tensors = dict[str, torch.Tensor]


def checkpoints(output_dir: str | Path) -> list[Path]:
    """Return the checkpoint folders of a run, intact or not, oldest first."""
    found = {path: re.fullmatch(r"step_(\d+)", path.name) for path in Path(output_dir, "checkpoints").glob("step_*")}
    return sorted((path for path, match in found.items() if match), key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def newest(output_dir: str | Path) -> Path | None:
    """Return the newest intact checkpoint of a run, or None."""
    return next((path for path in reversed(checkpoints(output_dir)) if not store.faults(path)), None)


def read_state(checkpoint: Path) -> dict:
    """Return progress, meter, identity, resolved configuration and the numbers of optimizer and scaler."""
    return json.loads((checkpoint / "state.json").read_text())


# ---- out of the process ------------------------------------------------------------------------------------------------


def tensors_of(objective: Objective, parts: dict) -> tuple[dict[str, Tensors], dict[str, dict]]:
    """Return (tensors by part and name, everything else likewise) of the model and of `parts`, under canonical names.

    A part is an optimizer, or has a flat `state_dict` of tensors, numbers and strings (an average of weights, say)."""
    tensors, numbers = {"model": objective.model.state_dict()}, {}
    for part, holder in parts.items():
        flat = _named(objective.model, holder) if isinstance(holder, torch.optim.Optimizer) else holder.state_dict()
        tensors[part] = {name: value for name, value in flat.items() if torch.is_tensor(value)}
        numbers[part] = {name: value for name, value in flat.items() if not torch.is_tensor(value)}
    return tensors, numbers


class HostCopy:
    """Host memory that holds one copy of the training state; allocated by the first copy, used for every other."""

    def __init__(self):
        self.memory: dict[tuple[str, str], torch.Tensor] = {}

    def take(self, tensors: dict[str, Tensors]) -> dict[str, Tensors]:
        """Return the same tensors in host memory, tied ones once; waits for the device."""
        copy, seen, waits = {part: {} for part in tensors}, {}, False
        for part, named in tensors.items():
            for name, value in named.items():
                where = (value.data_ptr(), value.shape, value.stride(), value.dtype)
                if where not in seen or not value.numel():
                    waits |= value.device.type != "cpu"
                    memory = self.memory.get((part, name))
                    if memory is None or memory.shape != value.shape or memory.dtype != value.dtype:
                        memory = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
                        self.memory[part, name] = memory
                    seen[where] = memory.copy_(value, non_blocking=True)
                copy[part][name] = seen[where]
        if waits:
            torch.accelerator.synchronize()
        return copy


def write(folder: Path, objective: Objective, tensors: dict[str, Tensors], state: dict) -> None:
    """Write a checkpoint's files; touches no tensor of the model itself, so it may run beside training."""
    write_model(objective, folder, dict(tensors["model"]))
    for part, named in tensors.items():
        if part != "model":
            first = {value.data_ptr(): name for name, value in reversed(named.items())}
            apart = {name: value if first[value.data_ptr()] == name else value.clone() for name, value in named.items()}
            save_file(apart, folder / f"{part}.safetensors")
    (folder / "state.json").write_text(json.dumps(state, indent=1, allow_nan=False))


def write_model(objective: Objective, folder: Path, tensors: Tensors | None = None) -> None:
    """Write model and tokenizer so that `from_pretrained(folder)` and `pipeline` just work."""
    objective.model.save_pretrained(folder, state_dict=tensors)
    if getattr(objective.task, "tokenizer", None) is not None:
        objective.task.tokenizer.save_pretrained(folder)


def export(folder: Path, run: RunConfig, objective: Objective) -> None:
    """Write a final model: weights, tokenizer and a model card."""
    write_model(objective, folder)
    data = run.dataset_name or ", ".join(Path(file).name for file in run.train_file)
    start = f"Fine-tuned from {run.model_name_or_path}" if run.model_name_or_path else "Trained from random weights"
    (folder / "README.md").write_text(
        f"---\nlibrary_name: transformers\ntags: [{run.task}]\n---\n# {Path(run.output_dir).name}\n\n{start} on {data}; task "
        f"`{run.task}`, seed {run.seed}, global batch {run.global_batch_size}. The run's config.yaml and metrics.jsonl say the rest.\n"
    )


def expendable(run: RunConfig) -> list[Path]:
    """Return the checkpoints to delete: all but the last `save_total_limit`, every `save_keep_every`-th, the best one."""
    found = checkpoints(run.output_dir)
    kept = set(found[-run.save_total_limit :])
    if run.save_keep_every:
        kept |= {path for path in found if step_of(path) % run.save_keep_every == 0}
    if best := best_checkpoint(run):
        kept.add(best)
    return [path for path in found if path not in kept]


def best_checkpoint(run: RunConfig) -> Path | None:
    """Return the checkpoint whose evaluation was best by `metric_for_best_model`, the earliest of equals; or None."""
    metrics = Path(run.output_dir, "metrics.jsonl")
    if not run.metric_for_best_model or not metrics.exists():
        return None
    lines = [line for line in store.objects(metrics) if line["kind"] == "eval"]
    values = {line["step"]: line.get(run.metric_for_best_model) for line in lines}
    found = [path for path in checkpoints(run.output_dir) if values.get(step_of(path)) is not None]
    sign = -1 if run.greater_is_better else 1
    return min(found, key=lambda path: sign * values[step_of(path)], default=None)


def prune(run: RunConfig) -> None:
    for path in expendable(run):
        shutil.rmtree(path)


# ---- into the process --------------------------------------------------------------------------------------------------


def load(checkpoint: Path, objective: Objective, parts: dict, scaler, meter) -> Progress:
    """Put every part (and scaler and meter) where the checkpoint left it; return the progress. The model reads its weights."""
    state = read_state(checkpoint)
    for part, holder in parts.items():
        if part not in state["numbers"]:
            raise UsageError(f"{checkpoint} holds no {part}: it was saved without; begin a new run with --init_from")
        flat = state["numbers"][part] | read_tensors(checkpoint / f"{part}.safetensors")
        if isinstance(holder, torch.optim.Optimizer):
            _set_named(objective.model, holder, flat)
        else:
            holder.load_state_dict(flat)
    if scaler is not None and state["scaler"]:
        scaler.load_state_dict(state["scaler"])
    meter.resume(state["meter"])
    return Progress(**state["progress"])


def read_tensors(path: Path) -> Tensors:
    """Return the tensors of a safetensors file in memory of their own.

    What was read of a file that stays mapped would count twice in memory, so the file is opened anew every 64 MiB."""
    found, file, mapped = {}, safe_open(path, "pt"), 0
    for name in file.keys():  # noqa: SIM118 (it is no dict)
        if mapped > 1 << 26:
            file, mapped = safe_open(path, "pt"), 0
        found[name] = file.get_tensor(name).clone()
        mapped += found[name].nbytes
    return found


def _names(model: torch.nn.Module, optimizer) -> list[str]:
    """Return the names of the optimizer's parameters, in the order of its state dict."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


def _named(model, optimizer) -> dict:
    """Return the optimizer's state, flat, by "key/parameter name"."""
    names = _names(model, optimizer)
    every = optimizer.state_dict()["state"].items()
    return {f"{key}/{names[index]}": value for index, state in every for key, value in state.items()}


def _set_named(model, optimizer, flat: dict) -> None:
    state = {}
    index = {name: i for i, name in enumerate(_names(model, optimizer))}
    for where, value in flat.items():
        key, name = where.split("/", 1)
        state.setdefault(index[name], {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


# ---- into another run, or an evaluation ----------------------------------------------------------------------------------


def begin_with(run: RunConfig) -> Path | None:
    """Return the folder whose weights a new run begins with, by `init_from`; None: those of its model."""
    return weights_in(run.init_from, "init_from") if run.init_from else None


def weights_in(name: str, field: str) -> Path:
    """Return the intact folder with weights that `name` means: a checkpoint, a final model, or those of a run.

    A run stands for its final model, or for its newest intact checkpoint while it has none."""
    folder = Path(locate(name))
    found = next((f for f in (folder, folder / "final") if (f / "config.json").exists()), None)
    if found is None and (found := newest(folder)) is None:
        damaged = f" with an intact one (of {len(checkpoints(folder))})" if checkpoints(folder) else ""
        raise UsageError(
            f"{field}: {name or 'nothing'} is neither a checkpoint nor a run{damaged}: give the folder of one, or for other models "
            "--model_name_or_path"
        )
    ours = (found / store.MANIFEST).exists() or (found / "state.json").exists()
    if ours and (faults := store.faults(found)):
        raise UsageError(f"{field}: {found} is damaged: {'; '.join(faults)}")
    return found


def to_evaluate(argv: list[str]) -> tuple[list[str], dict | None, int | None]:
    """Return (flags without --checkpoint, the run's configuration below them, the step of its weights)."""
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
    weights = weights_in(name, "checkpoint")
    inside = (weights, weights.parent, weights.parent.parent)
    where = next((f for f in inside if (f / "config.yaml").exists()), None)
    if where is None and not (weights / "state.json").exists():
        raise UsageError(f"checkpoint: {name} has no config.yaml; for others than our runs give --model_name_or_path")
    config = read_yaml(where / "config.yaml") if where else read_state(weights)["config"]
    output = where or Path(config["output_dir"])
    base = config | {"model_name_or_path": str(weights), "output_dir": str(output)}
    given = {word[2:].partition("=")[0].replace("-", "_") for word in argv if word.startswith("--")}
    dropped = {"model_config", "tokenizer_name", "resume", "init_from"}
    dropped |= {"train_file", "validation_file"} if "dataset_name" in given else set()
    dropped |= {"dataset_name", "dataset_config_name"} if given & {"train_file", "validation_file"} else set()
    dropped |= {"train_file"} if "validation_file" in given else set()
    step = (
        read_state(weights)["progress"]["step"]
        if (weights / "state.json").exists()
        else store.about(weights).get("step")
    )
    return argv, {k: v for k, v in base.items() if k not in dropped}, step
