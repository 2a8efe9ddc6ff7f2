"""Loading of `evaluate` metrics: files of src/metrics/, or scripts that the user trusts.

Tests: tests/config/test_foreign_code.py and tests/tasks/test_text_classification.py.
"""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np

from src.config.errors import UsageError
from src.config.paths import REPOSITORY

METRICS = REPOSITORY / "src" / "metrics"  # add your metrics here


def shipped_metrics() -> dict[str, Path]:
    """Return {name: file} of src/metrics/. The user's metric names are looked up here and never made into a path."""
    return {path.stem: path for path in METRICS.glob("*.py")}


def all_shipped(names) -> bool:
    """Return True for a list of metrics that run no code from a checkpoint."""
    return isinstance(names, list) and set(names) <= {"none", *shipped_metrics()}


def check_metrics(names: list[str], trust_remote_code: bool) -> list[str]:
    """Return the names without `none`, after loading each metric: it should fail before the first evaluation."""
    names = [name for name in names if name != "none"]
    for name in names:
        load_metric(name, trust_remote_code)
    return names


def load_metric(name: str, trust_remote_code: bool):
    """Return the metric `name`: a file of src/metrics/, or with `trust_remote_code` a Hub or local script."""
    shipped = shipped_metrics()
    if name in shipped:
        return _load_shipped(name, shipped[name])
    if not trust_remote_code:
        raise UsageError(
            f"metrics: {name} is not in src/metrics/ ({', '.join(sorted(shipped))}), so loading it would run a "
            "script: give --trust_remote_code true if you trust it"
        )
    local = Path(name, f"{name}.py")
    if Path(name).name == name and local.exists():
        raise UsageError(f"metrics: {name} could be a Hub metric or the local {local}: give ./{local} for the file")
    import evaluate  # takes seconds, so only here

    try:
        return evaluate.load(name)
    except Exception as error:
        raise UsageError(f"metrics: {name} could not be loaded: {error}") from error


def _load_shipped(name: str, path: Path):
    """Return the metric defined in `path`. evaluate.load would run a copy from a cache that others may write to."""
    import evaluate

    spec = spec_from_file_location(f"src.metrics.{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, evaluate.Metric) and value.__module__ == module.__name__:
            try:
                return value()
            except ImportError as error:
                raise UsageError(
                    f"metrics: {name}: {error}: pip install -r requirements-extra.txt, or give other metrics"
                ) from error
    raise UsageError(f"metrics: {path} defines no subclass of evaluate.Metric")


def compute_metrics(names: list[str], predictions: list, references: list, trust_remote_code: bool) -> dict[str, float]:
    """Return the numbers of the named metrics of class ids or texts. F1, precision and recall use the macro average."""
    values = {}
    for name in names:
        options = {"average": "macro"} if name in ("f1", "precision", "recall") else {}
        metric = load_metric(name, trust_remote_code)
        values |= metric.compute(predictions=predictions, references=references, **options)
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float | np.number)}
