"""Adapters (LoRA and others of the package peft) around any model: the field `peft`.

A checkpoint holds what is trained (adapter.safetensors) and the identity of the base model, but no weight of that
(base_model.py). Tests: tests/addons/adapters/.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from addons.adapters.peft.base_model import build_base, check_start
from addons.adapters.peft.files import ADAPTER, CONFIG_FILE, adapter_files, tensors_of_base
from addons.adapters.peft.injection import add_adapter
from addons.adapters.peft.merging import check_can_merge, write_adapter_alone, write_merged
from addons.adapters.peft.options import UNMERGEABLE_TYPES, read_options
from engine.checkpointing.locate_weights import locate_weights
from engine.checkpointing.tensor_files import file_name, write_tensors
from engine.config.addon import Addon
from engine.config.errors import UsageError
from engine.config.option import option
from engine.config.paths import locate
from engine.models.config_and_tokenizer import named_base
from engine.storage.jsonl import read_json

LOADED_BY_PEFT = ("ForCausalLM", "ForSequenceClassification", "ForTokenClassification")  # ends of names of models
NAMES_ELSEWHERE = (  # fields of TRL, axolotl and LLaMA-Factory
    *("adapter", "finetuning_type", "use_peft", "use_dora", "use_rslora"),
    *("lora_r", "lora_rank", "lora_alpha", "lora_dropout", "lora_modules_to_save"),
    *("lora_target", "lora_target_modules", "lora_target_linear"),
)


@dataclass(frozen=True)
class Peft(Addon):
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
            _, config = read_options(self.peft)
        except UsageError as error:
            yield str(error)
            return
        kind = config.peft_type.value.lower()
        if training and self._merges() and kind in UNMERGEABLE_TYPES:
            yield f"peft: an adapter of type {kind} cannot be merged into the model: give merge: false, or another type"

    def complete(self, cfg: Any) -> dict[str, Any]:
        """Return the base model that an adapter of another program names, if the run file names no model."""
        folder = Path(locate(cfg.init_from)) if cfg.init_from else None
        if folder is None or cfg.model_name_or_path or cfg.model_config or not (folder / CONFIG_FILE).exists():
            return {}
        revision = read_json(folder / CONFIG_FILE).get("revision")
        return {"model_name_or_path": named_base(folder)} | ({"model_revision": revision} if revision else {})

    @classmethod
    def names_elsewhere(cls) -> dict[str, str]:
        """Return the fields of other trainers that are options of an adapter."""
        fix = "give peft: {type: lora, r: 8, lora_alpha: 16, target: [q_proj, v_proj]} (docs/techniques.md, Adapters)"
        return dict.fromkeys(NAMES_ELSEWHERE, fix)

    def build(self, task: Any, weights: str | Path | None, empty: bool) -> torch.nn.Module:
        """Return the base model, wherever it is."""
        if weights and not empty:
            check_start(task.cfg, Path(locate(str(weights))))
        task.attributes_from_weights = (*type(task).attributes_from_weights, "base_model")
        return build_base(task, weights, empty)

    def change_built_model(self, task: Any, model: Any, weights: str | Path | None, empty: bool) -> None:
        """Inject the adapter into the part of the model that is trained."""
        add_adapter(task, model, weights, empty)
        # eval.py does not know `merge`, but has an adapter. All ranks decide alike, also those that build without weights.
        is_new = not (weights and adapter_files(Path(locate(str(weights)))))
        if self._merges() and is_new:
            check_can_merge(task.saved(model))

    def plan_rows(self, cfg: Any, task: Any, train_set: Any, total: int, rows: dict[str, str]) -> dict[str, str]:
        """Return the line of the plan that says whether the adapter is a new one."""
        folder = task.adapter_folder
        if folder is None and cfg.dry_run and cfg.init_from:  # the model of a dry run has no weights
            weights = locate_weights(cfg.init_from, "init_from")
            folder = weights if adapter_files(weights) else None
        base = cfg.init_from or cfg.model_name_or_path or "random weights"
        return {"adapter": f"that of {folder}, trained further" if folder else f"a new one, on {base}"}

    def left_out(self, model: torch.nn.Module, tensors: dict[str, Any], final: bool) -> set[str]:
        """Return the names of the base model's tensors, unless final/ holds the merged model."""
        return set() if final and self._merges() else tensors_of_base(model, tensors)

    def save(
        self, task: Any, model: torch.nn.Module, tensors: dict[str, torch.Tensor], folder: Path, rank: int, world: int
    ) -> dict[str, torch.Tensor] | None:
        """Write the adapter to adapter.safetensors, and which base model it is on. All `tensors` are trained or changed by
        training, unless the adapter is merged: then return them."""
        if "base_names" not in vars(model):
            return tensors
        task.base_model.write(folder)
        if tensors or world == 1:
            write_tensors(tensors, folder / file_name(ADAPTER, rank, world))
        return None

    def _merges(self) -> bool:
        return self.merge is not False

    def finish(self, task: Any, folder: Path) -> bool:
        """Merge the adapter in `folder` into the weights, so that `from_pretrained` needs no peft; or with merge: false,
        write the adapter alone, in the format of peft.

        Costs the memory of one more model on the host."""
        task = copy.copy(task)  # building a model sets attributes of its task
        if self._merges():
            write_merged(task, folder)
        else:
            write_adapter_alone(task, folder)
        return True

    def change_card(self, card: Any, task: Any, model: Any) -> None:
        """Say what the adapter is and on which base model; if it is alone, how it is loaded: peft asks how many labels there
        are."""
        base = task.base_model
        card.base, card.commit, card.weights = base.name, base.commit, base.weights
        options = ", ".join(f"{name} {value}" for name, value in (self.peft or {}).items())
        if self._merges():
            card.paragraphs.append(
                f"Trained with an adapter ({options}), which is merged into the weights here. adapter/ holds it for "
                "`PeftModel.from_pretrained`, an exact evaluation, and further training."
            )
            return
        card.paragraphs.append(
            f"An adapter ({options}) without its base model: `AutoPeftModelForCausalLM.from_pretrained` of the package peft, "
            "or the class of its task, loads both."
        )
        name = type(model).__name__
        end = next((end for end in LOADED_BY_PEFT if name.endswith(end)), "")
        labels = f", num_labels={model.config.num_labels}" if "Classification" in end else ""
        loader = f"AutoPeftModel{end}"
        card.code[:] = [
            f"from peft import {loader}",
            f'model = {loader}.from_pretrained("."{labels})  # this folder, or its name',
        ]
