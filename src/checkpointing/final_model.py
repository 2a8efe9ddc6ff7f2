"""final/: the best or last model, its model card, and a sample of it.

Tests: tests/checkpointing/test_best_model.py.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

from src.checkpointing import checkpoint_list
from src.config.errors import warn
from src.config.schema import RunConfig
from src.storage import atomic_folder
from src.training.state import TrainState


def best(cfg: RunConfig, progress: TrainState, held: int | None) -> str:
    """Return which evaluation was the best, and which step final/ holds; nothing where no metric is named."""
    if not cfg.metric_for_best_model or held is None:
        return ""
    if not progress.best_step:
        return f"no evaluation by {progress.best_metric} is known: final/ holds the last step, {progress.step:,}"
    holds = "final/ holds it"
    if held != progress.best_step:
        holds = f"its checkpoint is gone or damaged, so final/ holds step {held:,}"
    return f"best: step {progress.best_step:,}, {progress.best_metric} {progress.best}; {holds}"


def complete_card(folder: Path, cfg: RunConfig, progress: TrainState, held: int) -> None:
    """Add to the model card which step the weights are of."""
    card, text = folder / "README.md", best(cfg, progress, held)
    if card.exists() and text:
        card.write_text(f"{card.read_text()}\n{text[0].upper()}{text[1:]}.\n")


def publish_copy(
    folder: Path, candidates: list[Path | None], card: Callable[[Path, int], None], mixed_precision: str
) -> int:
    """Publish the model of the first checkpoint that is intact, without its training state but with what
    `card(folder, step)` writes beside it; return its step."""
    for path in filter(None, candidates):
        if faults := atomic_folder.verify(path):
            warn(f"{path} is damaged and not used for {folder}: {'; '.join(faults)}", alone=True)
            continue
        state = checkpoint_list.read_state(path)
        parts = [f"{part}{end}" for part in state["numbers"] for end in (".safetensors", "-*-of-*.safetensors")]
        others, step = shutil.ignore_patterns("state.json", atomic_folder.MANIFEST, *parts), state["progress"]["step"]

        def write(temporary: Path, path=path, others=others, step=step) -> None:
            shutil.copytree(path, temporary, ignore=others, dirs_exist_ok=True)
            card(temporary, step)

        atomic_folder.publish(folder, write, step=step, mixed_precision=mixed_precision)
        return step
    raise OSError(None, "no checkpoint to make it of is intact")


def sample(task, model, folder: Path, device) -> str | None:
    """Return the task's sample of `model`, or of the one in `folder`."""
    if not getattr(task.options, "sample_prompt", True):
        return None
    return task.sample(model or task.build(str(folder)).to(device))
