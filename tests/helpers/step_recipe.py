"""Flags of the run that tests of the step share."""

from tests.helpers import kit


def recipe(files, **flags) -> list[str]:
    """Return the flags of a run of the tiny Llama in float64; `files` is the fixture."""
    values = {
        "model_config": files / "llama.yaml",
        "train_file": files / "train.jsonl",
        "dtype": "float64",
        "global_batch_size": 32,
        "per_device_batch_size": 32,
        "max_steps": 40,
        "learning_rate": 3e-3,
        "warmup_steps": 5,
        "weight_decay": 0.1,
        "logging_steps": 1,
    }
    return kit.flags(**values | flags)
