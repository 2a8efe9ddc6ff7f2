"""The folder final/: the best or last model, its model card, the configuration of its run, and a sample from it.

Tests: tests/checkpointing/test_best_model.py, tests/config/test_foreign_code.py.
"""

import shutil
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from src.checkpointing.checkpoint_list import read_state
from src.config.addons import functions_of_addons
from src.config.errors import warn
from src.config.redact import redact_all
from src.config.schema import RunConfig
from src.storage import atomic_folder
from src.training.train_state import Run, TrainState

RUN_CONFIG = "run_config.yaml"  # the configuration of the run, without credentials


def is_intact(folder: Path, step: int) -> bool:
    """Return whether `folder` is an undamaged final model of this step."""
    return atomic_folder.read_metadata(folder).get("step") == step and not atomic_folder.verify(folder)


def is_usable(checkpoint: Path) -> bool:
    """Return whether a checkpoint may be used for final/; warn if it is damaged."""
    if errors := atomic_folder.verify(checkpoint):
        warn(f"{checkpoint} is damaged and not used for final/: {'; '.join(errors)}", any_rank=True)
    return not errors


def copy_model(checkpoint: Path, folder: Path) -> None:
    """Copy a checkpoint to `folder` without its training state."""
    training_state = ["state.json", atomic_folder.MANIFEST]
    for part in read_state(checkpoint)["numbers"]:
        training_state += [f"{part}.safetensors", f"{part}-*-of-*.safetensors"]
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns(*training_state), dirs_exist_ok=True)


def best_sentence(cfg: RunConfig, state: TrainState, final_step: int, average: str = "") -> str:
    """Return a sentence about the best step and what final/ holds, the weights of `final_step` or their `average`.

    Return an empty string without metric_for_best_model and average."""
    if not final_step or not (cfg.metric_for_best_model or average):
        return ""
    holds = f"final/ holds {f'the average ({average}) of ' if average else ''}step {final_step:,}"
    if not cfg.metric_for_best_model or not state.best_step:
        return holds
    return f"best: step {state.best_step:,}, {state.best_metric} {state.best}; {holds}"


def write_card(folder: Path, run: Run, config: dict, final_step: int, average: str) -> None:
    """Write the model card (README.md) and the run's configuration, which eval.py reads."""
    from transformers import PreTrainedModel

    cfg, model = run.cfg, run.task.saved(run.model.model)
    library = "library_name: transformers\n" if isinstance(model, PreTrainedModel) else ""
    more = "".join(model_card(cfg) for model_card in functions_of_addons(cfg, "model_card"))
    if best := best_sentence(cfg, run.state, final_step, average):
        more += f"\n{best[0].upper()}{best[1:]}.\n"
    sources = list(cfg.mixture) if cfg.mixture else [cfg.dataset_name, *cfg.train_file]
    data = ", ".join(_public_name(source) for source in sources if source)
    base = cfg.model_name_or_path
    start = f"Fine-tuned from {_public_name(base)}" if base else "Trained from random weights"
    (folder / "README.md").write_text(
        f"---\n{library}tags: [{cfg.task}]\n---\n# {Path(cfg.output_dir).name}\n\n{start} on {data}; task `{cfg.task}`, seed "
        f"{cfg.seed}, global batch {cfg.global_batch_size}. {RUN_CONFIG} holds the configuration.\n{more}"
    )
    text = yaml.safe_dump(redact_all(config), sort_keys=False, allow_unicode=True)
    (folder / RUN_CONFIG).write_text(text, encoding="utf-8")


def _public_name(source: str) -> str:
    """Return a Hub name unchanged, but only the last component of a URL or a local path."""
    if "://" in source:
        return Path(urlsplit(source).path).name or "a URL"
    return Path(source).name if Path(source).is_absolute() or Path(source).exists() else source


def sample(task, model, folder: Path, device) -> str | None:
    """Return the sample of a task with the option `sample_prompt` from `model`, else from the model in `folder`."""
    if not getattr(task.options, "sample_prompt", None):
        return None
    return task.sample(model or task.saved(task.build_model(str(folder))).to(device))
