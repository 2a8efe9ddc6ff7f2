"""Adapters (LoRA and others of the package peft) around any model: the field `peft`.

A checkpoint holds what is trained (adapter.safetensors) and the identity of the base model, but no weight of that
(engine/models/base_model.py). Tests: tests/addons/adapters/.
"""

import copy
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from engine.checkpointing.locate_weights import locate_weights
from engine.checkpointing.model_folder import write_model
from engine.checkpointing.tensor_files import file_name, write_tensors
from engine.config.add_on import AddOn
from engine.config.errors import UsageError, errors_of
from engine.config.option import option
from engine.config.paths import locate
from engine.loop.model_with_loss import ModelWithLoss, tied_names
from engine.models.base_model import read_base, tensors_of_base
from engine.process import private_apis

ADAPTER = "adapter"  # adapter.safetensors of a checkpoint; in final/ also a folder in the format of peft
NAME = "default"  # the name that peft gives the only adapter of a model; it is part of parameter names
WRAPPED = re.compile(r"\.(base_layer|original_module|token_adapter)(?=\.|$)")  # peft adds these to names of the base
# peft would train these to a wrong result: adalora changes its ranks and its loss in every step, poly needs a task for each
# row, xlora mixes other adapters, osf replaces weights of the base model; shadow it does not inject into a model.
REFUSED_TYPES = ("adalora", "osf", "poly", "shadow", "xlora")
REFUSED_OPTIONS = {
    "megatron_core": "it imports a module by name",
    "module_dropout": "it skips layers at random, and other processes wait for their gradients: give rank_dropout",
}
INITIAL = (True, False, "gaussian", "orthogonal")  # values of init_lora_weights that leave the base model as it is


# ---- options ---------------------------------------------------------------------------------------------------------


def read_options(given: dict[str, Any] | None) -> tuple[type, Any]:
    """Return peft's classes for the field `peft`: the tuner, which injects layers, and its configuration.

    Raise UsageError for what peft refuses, and for what would silently train something else."""
    if not given:
        raise UsageError("peft: it gives no type, so the whole model would be trained: give {type: lora}, or remove it")
    private_apis.bitsandbytes()  # if it is there, peft imports it
    try:
        from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
    except ImportError as error:
        raise UsageError(f"peft: {error}; install it: pip install peft (requirements-extra.txt)") from error
    given = {"target_modules" if name == "target" else name: v for name, v in given.items() if v is not None}
    name = str(given.pop("type", "lora")).lower()
    tuners = {kind.value.lower(): tuner for kind, tuner in PEFT_TYPE_TO_TUNER_MAPPING.items()}
    configs = {kind.value.lower(): config for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    configs = {each: config for each, config in configs.items() if _is_exact(each, config, tuners.get(each))}
    if name not in configs:
        works = ", ".join(sorted(configs))
        raise UsageError(f"peft: type is {name}: unknown, or no adapter of single layers; choose from {works}")
    if refused := sorted(given.keys() & REFUSED_OPTIONS.keys()):
        raise UsageError(f"peft: {refused[0]}: {REFUSED_OPTIONS[refused[0]]}")
    if (value := given.get("init_lora_weights", True)) not in INITIAL:
        raise UsageError(f"peft: init_lora_weights is {value!r}, which changes the base model or needs data: give true")
    with errors_of("peft"):  # also a package that one type needs
        return tuners[name], configs[name](**given)


def _is_exact(name: str, config: type, tuner: Any) -> bool:
    """Return whether a type changes layers in the model, and these share no weights outside of it."""
    in_layers = tuner is not None and "target_modules" in vars(config)["__dataclass_fields__"]
    return in_layers and name not in REFUSED_TYPES and not getattr(tuner, "uses_shared_state", True)


# ---- injection -------------------------------------------------------------------------------------------------------


def add_adapter(task: Any, whole: torch.nn.Module, weights: str | Path | None, empty: bool = False) -> Any:
    """Inject the adapter into the part of `whole` that is trained, in place; return peft's tuner.

    Only the adapter, `modules_to_save` and a head that pretrained weights lack (`new_head` of the task) stay trainable. The
    initial adapter depends on the seed only. If `weights`, the model of a run, have an adapter, load it. A model that
    model_name_or_path names gets a new one, also if it is the merged model of a run."""
    cfg, model = task.cfg, task.saved(whole)
    tuner_class, config = read_options(cfg.peft)
    folder = Path(locate(str(weights))) if weights and not empty else None
    folder = folder if folder and adapter_files(folder) else None
    new_head = getattr(task, "new_head", ())
    if config.target_modules is None and not getattr(config, "target_parameters", None):
        architecture = getattr(getattr(model, "config", None), "model_type", None)
        if architecture not in (getattr(tuner_class, "target_module_mapping", None) or {}):
            config.target_modules = "all-linear"
    if hasattr(config, "modules_to_save"):
        config.modules_to_save = [*(config.modules_to_save or []), *_outermost(model, new_head)] or None
    names, tied = list(model.state_dict()), tied_names(model)
    torch.manual_seed(cfg.seed)
    with errors_of("peft"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out")  # peft sets it itself
        tuner = tuner_class(model, config, adapter_name=NAME)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad or name in new_head)  # a temperature
        if parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(getattr(torch, cfg.dtype))
    vars(model)["base_names"] = _base_names(model, names, tied)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if getattr(task, "plain_head", False) and head is not None and type(head).__module__.startswith("peft."):
        task.plain_head = False  # the loss would read the weight of the head without its adapter
    if folder:
        _load(model, folder)
    task.adapter_folder = folder
    return tuner


def _outermost(model: torch.nn.Module, parts: tuple[str, ...]) -> list[str]:
    """Return the outermost modules with a name that contains one of `parts`."""
    names: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in names)
        if not inside and any(part in f"{name}." for part in parts) and next(module.parameters(), None) is not None:
            names.append(name)
    return names


def _base_names(model: torch.nn.Module, names: list[str], tied: list[list[str]]) -> dict[str, str]:
    """Return {name in the adapted model: name in the base model}; raise UsageError if a weight of two layers has one."""
    before, base_of = set(names), {name: WRAPPED.sub("", name) for name in model.state_dict()}
    base_of = {name: base for name, base in base_of.items() if base in before}
    if sorted(base_of.values()) != sorted(names):
        raise UsageError(f"peft: this type changes the names of {type(model).__name__}: give another type")
    moved = {base for name, base in base_of.items() if name != base}
    for group in tied:
        if moved & set(group):
            raise UsageError(
                f"peft: {' and '.join(group)} are one weight, so an adapter of one layer could not be merged: give a target "
                "(or modules_to_save) without these layers"
            )
    return base_of


# ---- files -----------------------------------------------------------------------------------------------------------


def adapter_files(folder: Path) -> list[Path]:
    """Return the files of the adapter that a run has saved in `folder`, if any."""
    return sorted([*folder.glob(f"{ADAPTER}.safetensors"), *folder.glob(f"{ADAPTER}-*-of-*.safetensors")])


@torch.no_grad()
def _load(model: torch.nn.Module, folder: Path) -> None:
    """Copy the tensors of adapter*.safetensors into the model. In final/, the unmerged weights are among them."""
    state = model.state_dict(keep_vars=True)
    stored = {name: value for path in adapter_files(folder) for name, value in load_file(path).items()}
    wrong = [name for name, value in stored.items() if name not in state or state[name].shape != value.shape]
    wrong += state.keys() - vars(model)["base_names"].keys() - stored.keys()
    if wrong:
        raise UsageError(
            f"peft: the adapter in {folder} has other layers than this field asks for ({min(wrong)}): give the options of the "
            "run that saved it; or for a new adapter on its merged model, --model_name_or_path instead of --init_from"
        )
    for name, value in stored.items():
        state[name].copy_(value)


def trained_tensors(task: Any, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return what a checkpoint holds of an adapted model, by name: all but the base model.

    If the base model is nowhere else (older checkpoints), this includes what merging would change of it."""
    state = model.state_dict(keep_vars=True)
    left_out = tensors_of_base(task, model, state)
    if not left_out:
        names = vars(model)["base_names"]
        left_out = {name for name in state if names.get(name) == name}
    return {name: value.detach() for name, value in state.items() if name not in left_out}


@torch.no_grad()
def merge(task: Any, folder: Path) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Return (the model of `folder` with its adapter merged, what was trained of it before merging, by name).

    Write the adapter as peft does to FOLDER/adapter."""
    from peft.utils import get_peft_model_state_dict

    whole = task.build_base(str(folder))
    tuner = add_adapter(task, whole, folder)
    model, config = tuner.model, tuner.peft_config[NAME]
    export = get_peft_model_state_dict(model, adapter_name=NAME, save_embedding_layers=False)
    base = task.cfg.model_name_or_path
    is_local = not base or Path(locate(base)).exists()
    config.base_model_name_or_path = None if is_local else base  # no path of this machine
    config.revision, config.inference_mode = task.cfg.model_revision if base else None, True
    if getattr(config, "feedforward_modules", None) and isinstance(config.target_modules, set):
        config.feedforward_modules = set(config.feedforward_modules) & config.target_modules  # else peft cannot load it
    config.save_pretrained(folder / ADAPTER)
    named = {f"base_model.model.{name}": value.clone() for name, value in export.items()}
    save_file(named, folder / ADAPTER / "adapter_model.safetensors", {"format": "pt"})
    trained = {name: value.clone() for name, value in trained_tensors(task, model).items()}
    vars(model).pop("base_names")
    tuner.merge_and_unload()
    return whole, trained


# ---- the add-on --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peft(AddOn):
    peft: dict | None = option(
        "adapter around the model, which alone is trained: {type: lora, r: 8, target: [q_proj, v_proj], …}; types and options "
        "are those of the package peft (docs/techniques.md)",
        group="model",
        from_checkpoint=True,
    )

    def errors(self, cfg: Any, training: bool) -> Iterator[str]:
        """Yield the error of the field `peft`, if there is one."""
        try:
            read_options(self.peft)
        except UsageError as error:
            yield str(error)

    @classmethod
    def names_elsewhere(cls) -> dict[str, str]:
        """Return a field of axolotl."""
        return {"lora_r": "give peft: {type: lora, r: 8, target: [q_proj, v_proj]}"}

    def change_built_model(self, task: Any, model: Any, weights: str | Path | None, empty: bool) -> None:
        """Inject the adapter into the part of the model that is trained."""
        add_adapter(task, model, weights, empty)

    def plan_rows(self, cfg: Any, task: Any, train_set: Any, total: int, rows: dict[str, str]) -> dict[str, str]:
        """Return the line of the plan that says whether the adapter is a new one."""
        folder = task.adapter_folder
        if folder is None and cfg.dry_run and cfg.init_from:  # the model of a dry run has no weights
            weights = locate_weights(cfg.init_from, "init_from")
            folder = weights if adapter_files(weights) else None
        base = cfg.init_from or cfg.model_name_or_path or "random weights"
        return {"adapter": f"that of {folder}, trained further" if folder else f"a new one, on {base}"}

    def names_of_base(self, model: torch.nn.Module) -> set[str]:
        """Return the names that the tensors of the base model have below the adapter; none if it is merged."""
        return set(vars(model).get("base_names", ()))

    def has_trained(self, folder: Path) -> bool:
        """Return whether a checkpoint or final/ has an adapter."""
        return bool(adapter_files(folder))

    def write_own_tensors(
        self, model: torch.nn.Module, tensors: dict[str, torch.Tensor], folder: Path, rank: int, world: int
    ) -> dict[str, torch.Tensor]:
        """Write the adapter to adapter.safetensors; return the tensors of the base model under its own names.

        If checkpoints leave out the base model, all `tensors` are trained or changed by training: write them."""
        if "base_names" not in vars(model):
            return tensors  # the adapter is merged
        base: dict[str, str] = vars(model)["base_names"]
        if read_base(folder) is not None:
            base = {}
        adapter = {name: value for name, value in tensors.items() if name not in base}
        if adapter or world == 1:
            write_tensors(adapter, folder / file_name(ADAPTER, rank, world))
        return {base[name]: value for name, value in tensors.items() if name in base}

    def change_final_model(self, folder: Path, task: Any) -> bool:
        """Merge the adapter in `folder` into the weights, so that `from_pretrained` needs no peft.

        The adapter and the weights before merging stay beside them. Costs the memory of one more model on the host."""
        task = copy.copy(task)  # building a model sets attributes of its task
        whole, trained = merge(task, folder)
        for path in [*folder.glob("model*.safetensors*"), *adapter_files(folder)]:
            path.unlink()
        task.base_model = None  # this folder holds the whole model, too
        write_model(ModelWithLoss(whole, task), folder, task.saved(whole).state_dict())
        write_tensors(trained, folder / f"{ADAPTER}.safetensors")
        return True

    def model_card(self, cfg: Any) -> str:
        """Return the paragraph of the model card about the adapter."""
        options = ", ".join(f"{name} {value}" for name, value in (self.peft or {}).items())
        return (
            f"\nTrained with an adapter ({options}), which is merged into the weights here. adapter/ holds it for "
            "`PeftModel.from_pretrained`, adapter.safetensors what an exact evaluation or further training needs.\n"
        )
