"""Rules of the fields that choose the rows of a dataset: its subset, the split to train on, the held-out share.

Tests: tests/data/test_held_out.py and tests/config/test_config.py.
"""

from collections.abc import Iterator

from src.config.schema import RunConfig


def named_subset(cfg: RunConfig) -> Iterator[str]:
    for name in ("dataset_config_name", "dataset_split"):
        if getattr(cfg, name) and not cfg.dataset_name:
            fix = "give it to a source of the mixture" if cfg.mixture else "give both, or neither"
            yield f"{name} is given without dataset_name: {fix}"


def held_out_rows(cfg: RunConfig) -> Iterator[str]:
    """Yield the errors of other evaluation data beside `validation_split`, and of data without known rows."""
    if not cfg.validation_split:
        return
    if cfg.validation_file:
        yield "validation_split and validation_file are both given: keep one"
    for name, source in (cfg.mixture or {}).items():
        if isinstance(source, dict) and source.get("validation_file"):
            yield f"validation_split and mixture: {name}: validation_file are both given: keep one"
    if cfg.streaming:
        yield (
            "validation_split and streaming are both given, but the held-out rows of a stream are not known before its "
            "end: give validation_file, or remove streaming"
        )


def evaluated_split(cfg: RunConfig) -> Iterator[str]:
    if cfg.dataset_split and not cfg.validation_split:
        yield (
            f"dataset_split is {cfg.dataset_split}, the split to train on: an evaluation reads the split validation, or "
            "test if there is none: remove dataset_split"
        )
