"""Rules of the fields that make batches, rows and their order a function of the step.

Tests: tests/data/test_step_sizes.py and tests/data/test_row_order.py.
"""

from collections.abc import Iterator

from src.config.schema import RunConfig

LENGTH = "length"  # as curriculum_column: the tokens of a row
PAIRS = (
    ("batch_size_warmup_start", "batch_size_warmup_steps"),
    ("sequence_length_warmup_start", "sequence_length_warmup_steps"),
    ("curriculum_column", "curriculum_steps"),
)


def data_order_errors(cfg: RunConfig) -> Iterator[str]:
    """Yield every error between the fields of warmups, curriculum and row weights."""
    for names in PAIRS:
        given = [name for name in names if getattr(cfg, name) is not None]
        if len(given) == 1:
            [missing] = set(names) - {*given}
            yield f"{given[0]} is {getattr(cfg, given[0])}, but {missing} is missing: give both, or neither"
    start, size = cfg.batch_size_warmup_start, cfg.global_batch_size
    if start is not None and start >= size > 0:
        yield (
            f"batch_size_warmup_start is {start}: not less than global_batch_size, which is {size}: lower it, or remove the "
            "batch-size warmup"
        )
    for name in ("curriculum_column", "sample_weight_column"):
        if getattr(cfg, name) and cfg.streaming:
            yield f"{name} and streaming are both given, but the rows of a stream are not known in advance: remove one of them"
    if cfg.sample_weight_column and cfg.mixture:
        yield (
            "sample_weight_column and mixture are both given: give each source of the mixture a `weight`, or remove one of "
            "them"
        )
