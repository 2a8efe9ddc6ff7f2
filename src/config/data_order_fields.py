"""Rules of the fields that make batches, rows and their order a function of the step.

Tests: tests/data/test_step_sizes.py and tests/data/test_row_order.py.
"""

from collections.abc import Iterator

from src.config.schema import RunConfig


def data_order_errors(cfg: RunConfig) -> Iterator[str]:
    """Yield every error between the fields of batch-size and sequence-length warmup."""
    for kind in ("batch_size", "sequence_length"):
        names = f"{kind}_warmup_start", f"{kind}_warmup_steps"
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
