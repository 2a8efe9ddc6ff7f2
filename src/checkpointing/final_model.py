"""The folder final/: the best or last model, its model card, and a sample from it.

Tests: tests/checkpointing/test_best_model.py.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

from src.checkpointing.checkpoint_list import read_state
from src.config.errors import warn
from src.config.schema import RunConfig
from src.runtime.console import number
from src.storage import atomic_folder, jsonl
from src.storage.disk_errors import DiskError
from src.training.train_state import TrainState


def best(cfg: RunConfig, progress: TrainState, held: int, average: str = "") -> str:
    """Return a sentence about the best step, `held`, the step in final/, and the technique with the average that final/ holds.

    Return an empty string without metric_for_best_model and average."""
    what = f"the average ({average}) of " if average else ""
    if not held or not cfg.metric_for_best_model:
        return f"final/ holds {what}step {held:,}" if held and average else ""
    if not progress.best_step:
        return (
            f"no best step by {progress.best_metric} is known, so final/ holds {what}the last step, {progress.step:,}"
        )
    holds = f"final/ holds its average ({average})" if average else "final/ holds it"
    if held != progress.best_step:
        holds = f"its checkpoint is gone or damaged, so final/ holds {what}step {held:,}"
    metric = f"{progress.best_metric} {progress.best}"
    if average and not str(progress.best_metric).startswith(f"{average}/"):
        metric += " (of other weights)"
    return f"best: step {progress.best_step:,}, {metric}; {holds}"


def complete_card(folder: Path, cfg: RunConfig, progress: TrainState, held: int, average: str = "") -> None:
    """Append the sentences of best() and evaluation() to the model card."""
    card = folder / "README.md"
    for text in filter(None, (best(cfg, progress, held, average), evaluation(cfg, held, average))):
        if card.exists():
            card.write_text(f"{card.read_text()}\n{text[0].upper()}{text[1:]}.\n")


def evaluation(cfg: RunConfig, held: int, average: str = "") -> str:
    """Return the metrics of the evaluation at step `held`, or an empty string if there was none."""
    lines = jsonl.read_lines(Path(cfg.output_dir, "metrics.jsonl"))
    line = next((line for line in reversed(lines) if (line["kind"], line["step"]) == ("eval", held)), {})
    prefix = f"{average}/" if average else ""
    values = {name.removeprefix(prefix): v for name, v in line.items() if name.startswith(prefix)}
    shown = [f"{k} {number(v)}" for k, v in values.items() if "/" not in k and k not in ("kind", "step")]
    return f"evaluation at step {held:,}: {', '.join(shown)}" if shown else ""


def publish_copy(
    folder: Path, candidates: list[Path | None], write_card: Callable[[Path, int], None], mixed_precision: str
) -> int:
    """Copy the model of the first intact candidate to `folder`, without training state; return its step.

    `write_card(folder, step)` adds the files that a checkpoint lacks."""
    for checkpoint in filter(None, candidates):
        if is_usable(checkpoint):
            return _publish_copy(folder, checkpoint, write_card, mixed_precision)
    raise DiskError(None, "no intact checkpoint to copy it from")


def is_intact(folder: Path, step: int) -> bool:
    """Return whether `folder` is an undamaged final model of this step."""
    return atomic_folder.read_metadata(folder).get("step") == step and not atomic_folder.verify(folder)


def is_usable(checkpoint: Path) -> bool:
    """Return whether a checkpoint may be used for final/; warn if it is damaged."""
    if errors := atomic_folder.verify(checkpoint):
        warn(f"{checkpoint} is damaged and not used for final/: {'; '.join(errors)}", any_rank=True)
    return not errors


def _publish_copy(folder: Path, checkpoint: Path, write_card: Callable[[Path, int], None], mixed_precision: str) -> int:
    state = read_state(checkpoint)
    step = state["progress"]["step"]
    training_state = ["state.json", atomic_folder.MANIFEST]
    for part in state["numbers"]:
        training_state += [f"{part}.safetensors", f"{part}-*-of-*.safetensors"]

    def write(temporary: Path) -> None:
        shutil.copytree(checkpoint, temporary, ignore=shutil.ignore_patterns(*training_state), dirs_exist_ok=True)
        write_card(temporary, step)

    atomic_folder.publish(folder, write, step=step, mixed_precision=mixed_precision)
    return step


def sample(task, model, folder: Path, device) -> str | None:
    """Return the sample of a task with the option `sample_prompt` from `model`, else from the model in `folder`."""
    if not getattr(task.options, "sample_prompt", None):
        return None
    return task.sample(model or task.saved(task.build_model(str(folder))).to(device))
