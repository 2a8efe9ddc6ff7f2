"""Data served by the local Hub, opened in a process of its own as train.py opens it."""

from engine.config.errors import UsageError
from tests.helpers import kit
from tests.helpers.fake_hub import adopt


def _open(environment, fields, before, then):
    adopt(environment)
    before()
    try:
        _, splits = kit.open_data(**fields)
        return then(splits["train"])
    except UsageError as error:
        return str(error)


def open_served(hub, folder, files, then=lambda split: split.stats, before=lambda: None):
    """Return `then(training data)` of files behind URLs, or the message of a UsageError."""
    fields = {"model_config": hub.folder / "gpt2.yaml", "train_file": files, "max_steps": 3}
    fields |= {"streaming": True, "cache_dir": folder / "cache", "global_batch_size": 8}
    (found,) = kit.spawn(1, _open, hub.environment(folder), fields, before, then, out=folder / "out")
    return found
