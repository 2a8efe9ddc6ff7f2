"""Whose weights a new run begins with, or an evaluation looks at: those of a run, a checkpoint or a final model.

Leave alone. Guarded by tests/test_resume.py, tests/test_evaluation.py.
"""

from pathlib import Path

from src import store
from src.checkpoint import checkpoints, newest, read_state
from src.fields import RunConfig
from src.inputs import UsageError, locate, read_yaml


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
