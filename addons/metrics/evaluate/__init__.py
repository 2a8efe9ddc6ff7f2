"""Metrics of the `evaluate` library: the files of this folder, and Hub or local scripts that the user trusts.

The option `metrics` of a task names them. Tests: tests/addons/metrics/test_evaluate.py.
"""

from importlib import import_module
from pathlib import Path

import numpy as np

from engine.config.errors import UsageError, errors_of
from engine.config.find_addons import addon_names
from src.losses.metrics import BUILT_IN

SHIPPED = "metrics/evaluate"  # this folder


def load_metric(name: str, trust_remote_code: bool):
    """Return the metric `name`: a file of this folder, or with `trust_remote_code` a Hub or local script."""
    if name in addon_names(SHIPPED):
        return _load_shipped(name)
    if not trust_remote_code:
        raise UsageError(
            f"metrics: {name} is none of {', '.join(sorted([*BUILT_IN, *addon_names(SHIPPED)]))}, so loading it would run "
            "a script: give --trust_remote_code true if you trust it"
        )
    local = Path(name, f"{name}.py")
    if Path(name).name == name and local.exists():
        raise UsageError(f"metrics: {name} could be a Hub metric or the local {local}: give ./{local} for the file")
    import evaluate  # takes seconds, so only here

    with errors_of(f"metrics: {name} could not be loaded"):
        return evaluate.load(name)


def _load_shipped(name: str):
    """Return the metric of the file NAME.py. evaluate.load would run a copy from a cache that others may write to."""
    import evaluate

    module = import_module(f"{__name__}.{name}")
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, evaluate.Metric) and value.__module__ == module.__name__:
            with errors_of(f"metrics: {name}"):  # also a missing package
                return value()
    raise UsageError(f"metrics: {module.__file__} defines no subclass of evaluate.Metric")


def compute_metric(name: str, predictions: list, references: list, trust_remote_code: bool) -> dict[str, float]:
    """Return the numbers of a metric of class ids or texts. Precision and recall use the macro average."""
    options = {"average": "macro"} if name in ("precision", "recall") else {}
    values = load_metric(name, trust_remote_code).compute(predictions=predictions, references=references, **options)
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float | np.number)}
