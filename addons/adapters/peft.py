"""Adapters (LoRA and others of the package peft) around any model: the field `peft`.

A checkpoint holds what is trained (adapter.safetensors) and the identity of the base model, but no weight of that
(engine/models/base_model.py). Tests: tests/addons/adapters/.
"""

import copy
import json
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from engine.checkpointing.locate_weights import locate_weights
from engine.checkpointing.model_folder import write_model
from engine.checkpointing.tensor_files import file_name, write_index, write_tensors
from engine.config.add_on import AddOn
from engine.config.addons import first_answer, used_addons
from engine.config.errors import UsageError, did_you_mean, errors_of, warn
from engine.config.option import option
from engine.config.paths import locate
from engine.loop.model_with_loss import ModelWithLoss, tied_names
from engine.models.base_model import read_base, tensors_of_base
from engine.models.config_and_tokenizer import CONFIG_OF_ADAPTER, named_base
from engine.models.new_tokens import token_ids
from engine.process import private_apis
from engine.storage.jsonl import read_json

ADAPTER = "adapter"  # adapter.safetensors of a checkpoint; in final/ also a folder in the format of peft
NAME = "default"  # the name that peft gives the only adapter of a model; it is part of parameter names
PREFIX = "base_model.model."  # of names in the format of peft
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"  # of the format of peft
# peft's type of a task -> names of the model classes of transformers
TASK_TYPES = {
    "CAUSAL_LM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "SEQ_CLS": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "SEQ_2_SEQ_LM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "TOKEN_CLS": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "FEATURE_EXTRACTION": "MODEL_MAPPING_NAMES",
}
# Options that decide where layers are, which their names say, or that count only in training.
FREE_OPTIONS = {"auto_mapping", "base_model_name_or_path", "exclude_modules", "fan_in_fan_out", "inference_mode"}
FREE_OPTIONS |= {"init_lora_weights", "init_weights", "layers_pattern", "layers_to_transform", "modules_to_save"}
FREE_OPTIONS |= {"peft_version", "revision", "target_modules", "target_parameters", "task_type", "feedforward_modules"}
FREE_OPTIONS |= {"trainable_token_indices"}  # of add_tokens
MERGED_AT_ONCE = 4 << 30  # bytes of layers that are merged and written together, in one file
UNLOAD = "unload_and_optionally_merge_module"  # method of peft's wrappers that are no adapters of a single layer
WRAPPED = re.compile(r"\.(base_layer|original_module|token_adapter)(?=\.|$)")  # peft adds these to names of the base
TOKENS = "token_adapter.base_layer"  # where peft keeps a weight of which it trains single rows
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
    with errors_of("peft"):  # also a pattern that is none
        _check_names(model, config)
    _train_new_tokens(config, model, token_ids(getattr(task, "tokenizer", None)))
    names, tied = list(model.state_dict()), tied_names(model)
    torch.manual_seed(cfg.seed)
    with errors_of("peft"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out")  # peft sets it itself
        tuner = tuner_class(model, config, adapter_name=NAME)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad or name in new_head)  # a temperature
        if parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(getattr(torch, cfg.dtype))
    _widen_adapter(model, getattr(torch, cfg.dtype))
    vars(model)["base_names"] = _base_names(model, names, tied)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if getattr(task, "plain_head", False) and head is not None and type(head).__module__.startswith("peft."):
        task.plain_head = False  # the loss would read the weight of the head without its adapter
    if folder:
        _load(task, model, folder, config)
    task.adapter_folder = folder
    return tuner


def _check_names(model: torch.nn.Module, config: Any) -> None:
    """Raise UsageError for a name of a layer that the model does not have: peft ignores one beside others that it has."""
    layers = [
        name
        for name, module in model.named_modules()
        if name and next(module.parameters(recurse=False), None) is not None
    ]
    modules = [name for name, _ in model.named_modules() if name]
    parameters = [name for name, _ in model.named_parameters()]
    for option_name, known in (
        ("target_modules", modules),
        ("modules_to_save", modules),
        ("target_parameters", parameters),
    ):
        wanted = getattr(config, option_name, None)
        if isinstance(wanted, str) and wanted != "all-linear" and not any(re.fullmatch(wanted, name) for name in known):
            wanted = [wanted]  # a pattern; one without a match is refused below, with the names that there are
        for name in sorted(wanted) if isinstance(wanted, list | set | tuple) else ():
            end = name if option_name == "modules_to_save" else f".{name}"  # as peft compares them
            if any(each == name or each.endswith(end) for each in known):
                continue
            choices = sorted({each.rpartition(".")[2] for each in (known if known is parameters else layers)})
            raise UsageError(
                f"peft: {option_name}: {name} is no part of {type(model).__name__}{did_you_mean(name, choices)}; choose from "
                f"{', '.join(choices)}"
            )


def _widen_adapter(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast the adapter to `dtype`, but to float32 if that has 16 bits: so do its moments, and updates are not lost.

    As in peft, `modules_to_save` and new heads keep the dtype of the base model, because their inputs have it."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    wide = torch.float32 if dtype.itemsize < 4 else dtype
    for module in model.modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and not name.startswith("base_layer."):
                parameter.data = parameter.data.to(wide)
    narrow = [name for name, value in model.named_parameters() if value.requires_grad and value.itemsize < 4]
    if narrow:
        warn(
            f"dtype is {str(dtype).removeprefix('torch.')}, so {narrow[0]} and {len(narrow) - 1} more trained weights beside the "
            "adapter have no float32 copy and lose updates smaller than 1/256 of a weight: set mixed_precision: bf16 in "
            "the accelerate file (YAML) and keep dtype float32, or train none of them"
        )


def _train_new_tokens(config: Any, model: torch.nn.Module, ids: list[int]) -> None:
    """Let the adapter train the rows of the tokens `ids` of add_tokens, in the embedding and in a head of its own."""
    if not ids:
        return
    if not hasattr(config, "trainable_token_indices"):
        raise UsageError(f"peft: type {config.peft_type.value.lower()} cannot train the rows of add_tokens: give lora")
    if config.trainable_token_indices:
        raise UsageError("peft: trainable_token_indices and add_tokens are both given: remove one of them")
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    layers = [embedding]
    if head is not None and head.weight is not embedding.weight:
        layers.append(head)
        if getattr(head, "bias", None) is not None:  # peft leaves it out (0.21)
            raise UsageError(
                "peft: add_tokens needs a head without bias: train the whole model, or do without new tokens"
            )
    names = [name for name, module in model.named_modules() if any(module is layer for layer in layers)]
    fully = [name for name in names if any(name.endswith(part) for part in config.modules_to_save or ())]
    config.trainable_token_indices = {name: ids for name in names if name not in fully} or None


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
        trains_tokens = all(f"{name.removesuffix('.weight')}.{TOKENS}.weight" in base_of for name in group)
        if moved & set(group) and not trains_tokens:  # rows of tokens stay tied, and are merged once
            raise UsageError(
                f"peft: {' and '.join(group)} are one weight, so an adapter of one layer could not be merged: give a target "
                "(or modules_to_save) without these layers"
            )
    return base_of


# ---- files -----------------------------------------------------------------------------------------------------------


def adapter_files(folder: Path) -> list[Path]:
    """Return the files of the adapter that a run has saved in `folder`, or of one in the format of peft, if any."""
    ours = sorted([*folder.glob(f"{ADAPTER}.safetensors"), *folder.glob(f"{ADAPTER}-*-of-*.safetensors")])
    in_format_of_peft = (folder / CONFIG_FILE).exists()
    return ours or ([folder / WEIGHTS_FILE] if in_format_of_peft and (folder / WEIGHTS_FILE).exists() else [])


def _names_in_peft(model: torch.nn.Module, trained: Iterable[str]) -> dict[str, str]:
    """Return {name of what is trained: its name in adapter_model.safetensors}.

    peft itself renames numbers in place of the tensors. What it does not export, such as buffers, keeps its name below
    the prefix, so that peft loads it, too."""
    from peft.utils import get_peft_model_state_dict

    trained = list(trained)
    numbers = {name: torch.tensor(index) for index, name in enumerate(trained)}
    export = get_peft_model_state_dict(model, state_dict=numbers, adapter_name=NAME, save_embedding_layers=False)
    named = {trained[int(number)]: PREFIX + name for name, number in export.items()}
    return {name: named.get(name, PREFIX + name) for name in trained}


@torch.no_grad()
def _load(task: Any, model: torch.nn.Module, folder: Path, config: Any) -> None:
    """Copy the tensors of an adapter into the model. In an older final/, the unmerged weights are among them."""
    _check_options(folder, config)
    state = model.state_dict(keep_vars=True)
    files = adapter_files(folder)
    stored = {name: value for path in files for name, value in load_file(path).items()}
    if files[0].name == WEIGHTS_FILE:
        stored = {PREFIX + name.removeprefix(PREFIX): value for name, value in stored.items()}
        names = {other: name for name, other in _names_in_peft(model, trained_tensors(task, model)).items()}
        stored = {names.get(name, name): value for name, value in stored.items()}
    missing = state.keys() - vars(model)["base_names"].keys() - stored.keys()
    other = [name for name, value in stored.items() if name not in state or state[name].shape != value.shape]
    if missing or other:
        name = min([*missing, *other])
        difference = "this run has no such layer"
        if name in missing:
            difference = "the adapter has no such layer"
        elif name in state:
            difference = f"{list(stored[name].shape)} there, {list(state[name].shape)} here"
        raise UsageError(
            f"peft: the adapter in {folder} has other layers than this field asks for ({name}: {difference}): give the options "
            "of the run that saved it; or for a new adapter on its merged model, --model_name_or_path instead of --init_from"
        )
    for name, value in stored.items():
        state[name].copy_(value)


def _check_options(folder: Path, config: Any) -> None:
    """Raise UsageError if the adapter in `folder` was trained with other options, such as another lora_alpha."""
    saved = _saved_options(folder)
    here = _plain_options(config.to_dict())
    for name in sorted(saved.keys() & here.keys() - FREE_OPTIONS):
        counts_in_training_only = name.endswith(("dropout", "_config"))
        if saved[name] != here[name] and not counts_in_training_only:
            option_name = "type" if name == "peft_type" else name
            raise UsageError(
                f"peft: the adapter in {folder} was trained with {option_name} {saved[name]}, but this field says {here[name]}: "
                f"give {option_name}: {saved[name]}"
            )


def _saved_options(folder: Path) -> dict[str, Any]:
    """Return the options of an adapter: of peft's own file, or of the run that saved a checkpoint; {} if there are none."""
    for place in (folder, folder / ADAPTER):
        if (place / CONFIG_FILE).exists():
            return _plain_options(read_json(place / CONFIG_FILE))
    given = read_json(folder / "state.json").get("config", {}).get("peft")
    return _plain_options(read_options(given)[1].to_dict()) if given else {}


def _plain_options(values: dict[str, Any]) -> dict[str, Any]:
    """Return options as JSON has them; a set as a sorted list."""
    plain = json.dumps(values, default=lambda value: sorted(value) if isinstance(value, set) else str(value))
    return json.loads(plain)


def trained_tensors(task: Any, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return what a checkpoint holds of an adapted model, by name: all but the base model.

    If the base model is nowhere else (older checkpoints), this includes what merging would change of it."""
    state = model.state_dict(keep_vars=True)
    left_out = tensors_of_base(task, model, state)
    if not left_out:
        names = vars(model)["base_names"]
        left_out = {name for name in state if names.get(name) == name}
    return {name: value.detach() for name, value in state.items() if name not in left_out}


def write_in_format_of_peft(task: Any, tuner: Any, folder: Path, trained: dict[str, torch.Tensor]) -> None:
    """Write adapter_config.json and adapter_model.safetensors, which `PeftModel` and `AutoPeftModelFor…` load."""
    model, config = tuner.model, copy.copy(tuner.peft_config[NAME])
    base = task.base_model
    # Of a folder, its path as the run file gives it: AutoPeftModelForCausalLM looks for the base model there.
    config.base_model_name_or_path = base.name if base else None
    config.revision = base.commit if base else None
    config.inference_mode = True
    config.task_type, mapping = _task_type(model)
    if getattr(config, "feedforward_modules", None) and isinstance(config.target_modules, set):
        config.feedforward_modules = set(config.feedforward_modules) & config.target_modules  # else peft cannot load it
    config.save_pretrained(folder, auto_mapping_dict=mapping)
    names = _names_in_peft(model, trained)
    named = {names[name]: value.clone().contiguous() for name, value in trained.items()}
    save_file(named, folder / WEIGHTS_FILE, {"format": "pt"})


def _task_type(model: torch.nn.Module) -> tuple[str | None, dict[str, str] | None]:
    """Return (peft's type of the task, its auto_mapping) of a model of transformers; one of them is None, else both."""
    from transformers import PreTrainedModel
    from transformers.models.auto import modeling_auto

    if not isinstance(model, PreTrainedModel):
        return None, None
    name = type(model).__name__
    for task_type, mapping in TASK_TYPES.items():
        if name in getattr(modeling_auto, mapping).values():
            return task_type, None
    return None, {"base_model_class": name, "parent_library": type(model).__module__}


# ---- final/ ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def write_merged(task: Any, folder: Path) -> None:
    """Merge the adapter in `folder` into its base model; write that model, and the adapter as peft does to FOLDER/adapter.

    adapter.safetensors holds what an exact evaluation or further training needs besides the base model."""
    whole = task.build_base(str(folder))
    dtype = first_answer(addon.change_base_to_merge(task, whole) for addon in used_addons(task.cfg))
    tuner = add_adapter(task, whole, folder)
    trained = {name: value.clone() for name, value in trained_tensors(task, tuner.model).items()}
    (folder / ADAPTER).mkdir()
    exported = trained
    if task.base_model is None:  # the weights that merging changes are those of the base model
        base = vars(tuner.model)["base_names"]
        exported = {name: value for name, value in trained.items() if name not in base}
    write_in_format_of_peft(task, tuner, folder / ADAPTER, exported)
    for path in [*folder.glob("model*.safetensors*"), *adapter_files(folder)]:
        path.unlink()
    task.base_model = None  # this folder holds the whole model, too
    base_names = vars(tuner.model).pop("base_names")
    groups = _groups_of_layers(tuner.model, base_names)
    parts = folder / "parts"
    for number, names in enumerate(groups):
        place = folder if number == 0 else parts
        place.mkdir(exist_ok=True)
        tensors = _merge_layers(tuner.model, {name: base_names[name] for name in names})
        if dtype is not None:
            tensors = {name: x.to(dtype) if x.is_floating_point() else x for name, x in tensors.items()}
        write_model(ModelWithLoss(whole, task), place, tensors, number, len(groups))
        tensors.clear()
        _free(tuner.model, names)
        for file in parts.glob("*.safetensors"):
            file.rename(folder / file.name)
    shutil.rmtree(parts, ignore_errors=True)
    write_index(folder)
    write_tensors(trained, folder / f"{ADAPTER}.safetensors")


def _groups_of_layers(model: torch.nn.Module, base_names: dict[str, str]) -> list[list[str]]:
    """Return the names of the base model's tensors below the adapter, in groups of at most MERGED_AT_ONCE bytes.

    Layers are not divided: transformers converts some models layer by layer when it saves them."""
    state = model.state_dict(keep_vars=True)
    groups: list[list[str]] = [[]]
    size = 0
    by_layer: dict[str, list[str]] = {}
    for name, base_name in base_names.items():
        match = re.match(r".*?\.\d+(?=\.)", base_name)  # up to the first number, the index of the layer
        by_layer.setdefault(match[0] if match else "", []).append(name)
    for names in by_layer.values():
        of_layer = sum(state[name].nbytes for name in names)
        if groups[-1] and size + of_layer > MERGED_AT_ONCE:
            groups.append([])
            size = 0
        groups[-1] += names
        size += of_layer
    return groups


def _merge_layers(model: torch.nn.Module, base_names: dict[str, str]) -> dict[str, torch.Tensor]:
    """Merge the adapter into these layers, in place; return their tensors by the names of the base model.

    `base_names`: {name below the adapter: name in the base model}."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted: dict[str, torch.nn.Module] = {}  # the outermost ones
    for path, module in model.named_modules():
        is_inside = any(path.startswith(f"{outer}.") for outer in adapted)
        if not is_inside and (isinstance(module, BaseTunerLayer) or hasattr(module, UNLOAD)):
            adapted[path] = module
    tensors: dict[str, torch.Tensor] = {}
    replaced: dict[str, torch.Tensor] = {}
    for path, module in adapted.items():
        if not any(name.startswith(f"{path}.") for name in base_names):
            continue
        if hasattr(module, UNLOAD):  # modules_to_save, attention of torch
            unloaded = getattr(module, UNLOAD)(merge=True, safe_merge=False, adapter_names=None)
            replaced |= {f"{WRAPPED.sub('', path)}.{name}": value for name, value in unloaded.state_dict().items()}
        else:
            for inner in reversed([part for part in module.modules() if isinstance(part, BaseTunerLayer)]):
                inner.merge()  # parameters of experts are nested
    state = model.state_dict()
    for name, base_name in base_names.items():
        tensors[base_name] = replaced[base_name] if base_name in replaced else state[name]
    return tensors


def _free(model: torch.nn.Module, names: list[str]) -> None:
    """Free tensors that are written, so that merging needs the memory of a few layers only."""
    state = model.state_dict(keep_vars=True)
    for name in names:
        if name in state:
            state[name].data = torch.empty(0, dtype=state[name].dtype)


@torch.no_grad()
def write_adapter_alone(task: Any, folder: Path) -> None:
    """Replace the adapter in `folder` by one in the format of peft, which names its base model.

    Beside a config.json, `from_pretrained` would want weights: the configuration gets another name."""
    whole = task.build_base(str(folder))
    tuner = add_adapter(task, whole, folder)
    trained = trained_tensors(task, tuner.model)
    for path in adapter_files(folder):
        path.unlink()
    write_in_format_of_peft(task, tuner, folder, trained)
    (folder / "config.json").rename(folder / CONFIG_OF_ADAPTER)


# ---- the add-on --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peft(AddOn):
    peft: dict | None = option(
        "adapter around the model, which alone is trained: {type: lora, r: 8, target: [q_proj, v_proj], …}; types and options "
        "are those of the package peft (docs/techniques.md)",
        group="model",
        from_checkpoint=True,
    )
    merge: bool | None = option(
        "write the merged model to final/, with the adapter in final/adapter/ (default: true); false: the adapter alone",
        may_change_on_resume=True,
        is_rare=True,
    )

    def errors(self, cfg: Any, training: bool) -> Iterator[str]:
        """Yield the error of the field `peft`, if there is one."""
        if self.peft is None:
            yield f"merge is {str(self.merge).lower()}, but there is no adapter to merge: give peft, or remove it"
            return
        try:
            read_options(self.peft)
        except UsageError as error:
            yield str(error)

    def complete(self, cfg: Any) -> dict[str, Any]:
        """Return the base model that an adapter of another program names, if the run file names no model."""
        folder = Path(locate(cfg.init_from)) if cfg.init_from else None
        if folder is None or cfg.model_name_or_path or cfg.model_config or not (folder / CONFIG_FILE).exists():
            return {}
        revision = read_json(folder / CONFIG_FILE).get("revision")
        return {"model_name_or_path": named_base(folder)} | ({"model_revision": revision} if revision else {})

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

    def writes_base(self) -> bool:
        """Return whether final/ holds the merged model."""
        return self._merges()

    def _merges(self) -> bool:
        return self.merge is not False

    def change_final_model(self, folder: Path, task: Any) -> bool:
        """Merge the adapter in `folder` into the weights, so that `from_pretrained` needs no peft; or with merge: false,
        write the adapter alone, in the format of peft.

        Costs the memory of one more model on the host."""
        task = copy.copy(task)  # building a model sets attributes of its task
        if self._merges() or read_base(folder) is None:
            write_merged(task, folder)
        else:
            write_adapter_alone(task, folder)
        return True

    def model_card(self, cfg: Any) -> str:
        """Return the paragraph of the model card about the adapter."""
        options = ", ".join(f"{name} {value}" for name, value in (self.peft or {}).items())
        if not self._merges():
            return (
                f"\nAn adapter ({options}) without its base model: `AutoPeftModelForCausalLM.from_pretrained` of the package peft, "
                "or the class of its task, loads both.\n"
            )
        return (
            f"\nTrained with an adapter ({options}), which is merged into the weights here. adapter/ holds it for "
            "`PeftModel.from_pretrained`, adapter.safetensors what an exact evaluation or further training needs.\n"
        )
