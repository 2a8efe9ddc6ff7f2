"""The field `mixture`: its errors, and its files as absolute paths."""

from src.config.errors import did_you_mean
from src.config.paths import locate
from src.config.schema import RunConfig

FIELDS = ("train_file", "validation_file", "dataset_name", "dataset_config_name", "dataset_revision", "weight")


MOST = 1e100  # of a weight: the sum of several is to be finite


def mixture_errors(cfg: RunConfig) -> list[str]:
    """Return what is wrong with the field `mixture` by itself."""
    if cfg.mixture is None:
        return []
    found = [
        f"mixture and {name} are both given: keep one" for name in ("dataset_name", "train_file") if getattr(cfg, name)
    ]
    if len(cfg.mixture) < 2:
        found.append("mixture: give two sources or more, NAME: {train_file: …, weight: …}")
    weights = []
    for name, told in cfg.mixture.items():
        where = f"mixture: {name}"
        if not isinstance(told, dict):
            found.append(f"{where}: {told!r} where fields were expected, such as train_file")
            continue
        if not str(name).strip() or "/" in str(name) or not str(name).isprintable():
            found.append(
                f"mixture: {name!r}: a name must be of one line, not empty and without a /, for it stands before the numbers "
                "of its source"
            )
        found += [
            f"{where}: {field}: unknown field{did_you_mean(str(field), FIELDS)}"
            for field in told
            if field not in FIELDS
        ]
        for field in FIELDS[:-1]:
            values = as_list(told.get(field))
            if not all(isinstance(value, str) and value for value in values) or (
                len(values) > 1 and "file" not in field
            ):
                found.append(
                    f"{where}: {field}: {told[field]!r}: give {'names of files' if 'file' in field else 'a name'}"
                )
        if bool(told.get("train_file")) == bool(told.get("dataset_name")):
            found.append(f"{where}: give train_file or dataset_name")
        if told.get("dataset_config_name") and not told.get("dataset_name"):
            found.append(f"{where}: dataset_config_name is given without dataset_name: give both, or neither")
        weight = told.get("weight")
        weights.append(weight)
        number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if weight is not None and not (number and 0 < weight <= MOST):
            found.append(f"{where}: weight is {weight!r}: it must be a number above zero, and at most {MOST:g}")
    if None in weights and any(weight is not None for weight in weights):
        found.append("mixture: give all sources a weight, or none (then each has that of its size)")
    return found


def with_absolute_paths(mixture: dict | None) -> dict | None:
    """Return a mixture with absolute paths."""
    if not mixture:
        return None
    found = {}
    for name, told in mixture.items():
        files = {field: [locate(file) for file in as_list(told[field])] for field in told if field.endswith("_file")}
        found[name] = (
            told | files | ({"dataset_name": locate(told["dataset_name"])} if told.get("dataset_name") else {})
        )
    return found


def as_list(value) -> list:
    return value if isinstance(value, list) else [] if value is None else [value]
