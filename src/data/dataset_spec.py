"""Dataset specs: the files, or the dataset name and Hub revision, that the run file (YAML) gives for a split.

Tests: tests/data/test_dataset.py and tests/data/test_mixture.py.
"""

from dataclasses import dataclass

from src.config.schema import RunConfig

NAME_FIELDS = ("dataset_name", "dataset_config_name", "dataset_revision", "dataset_split")


@dataclass(frozen=True)
class DatasetSpec:
    """The data of one split as given in the run file: files, or the name of a dataset."""

    field: str  # field of the run file, for messages, such as "mixture: code: train_file"
    split: str
    files: tuple[str, ...] = ()  # paths, globs and URLs
    name: str | None = None  # a folder or a Hub id
    config_name: str | None = None
    revision: str | None = None
    dataset_split: str | None = None  # split of a dataset given by name to train on, if it is not "train"


def dataset_specs(cfg: RunConfig, split: str) -> dict[str, DatasetSpec]:
    """Return the DatasetSpec of each source that has data for `split`, by source name ("" without a mixture)."""
    if cfg.mixture and not (split == "validation" and cfg.validation_file):
        sources = [(name, fields, f"mixture: {name}: ") for name, fields in cfg.mixture.items()]
    else:
        sources = [("", vars(cfg), "")]
    found = {name: _spec(fields, split, where) for name, fields, where in sources}
    return {name: spec for name, spec in found.items() if spec}


def _spec(fields: dict, split: str, where: str) -> DatasetSpec | None:
    if files := fields.get(f"{split}_file"):
        return DatasetSpec(f"{where}{split}_file", split, tuple(files))
    if not fields.get("dataset_name") or fields.get("train_file"):
        return None
    name, config_name, revision, trained = (fields.get(name) for name in NAME_FIELDS)
    trained = None if trained == "train" else trained  # the default: the same data has one cache key
    return DatasetSpec(f"{where}dataset_name", split, (), name, config_name, revision, trained)
