"""The metric that decides which evaluation is best: its name and direction.

Tests: tests/training/test_state.py.
"""

from collections.abc import Collection

from src.config.addons import follows_evaluations
from src.config.errors import UsageError, did_you_mean
from src.config.schema import RunConfig

LOWER_IS_BETTER = {"perplexity", "ppl", "bits_per_byte", "brier_score", "error", "error_rate"}
LOWER_IS_BETTER |= {"wer", "cer", "ter", "mer", "wil", "mse", "rmse", "mae", "mape", "smape", "mase"}


def best_by(cfg: RunConfig) -> tuple[str, bool]:
    """Return (name of the metric that decides which evaluation is best, True if greater is better).

    As in transformers, greater is better unless the name ends in "loss". A prefix `eval_` is removed."""
    name = (cfg.metric_for_best_model or "loss").removeprefix("eval_")
    greater = not name.endswith("loss") if cfg.greater_is_better is None else cfg.greater_is_better
    return name, greater


def missing_metric(name: str, known: Collection[str]) -> UsageError:
    """Return the error for a metric_for_best_model that no evaluation has, with the names that there are."""
    return UsageError(
        f"metric_for_best_model: an evaluation has no {name!r}{did_you_mean(name, known)}; it has {', '.join(known)}"
    )


def metric_warnings(cfg: RunConfig) -> list[str]:
    """Return a warning if greater_is_better should probably be false, or if it or early stopping has no effect."""
    if cfg.early_stopping_patience and not cfg.eval_steps:
        return ["early_stopping_patience has no effect: without eval_steps the only evaluation is at the end"]
    name, _ = best_by(cfg)
    last = name.split("/")[-1].lower()
    looks_like_error = last in LOWER_IS_BETTER or last.endswith(("_error", "_error_rate"))
    if cfg.greater_is_better is None and looks_like_error:
        return [
            f"metric_for_best_model is {name}: the evaluation with the GREATEST {name} counts as the best, because the name does "
            "not end in loss (transformers' rule). If smaller is better, give --greater_is_better false"
        ]
    uses = cfg.metric_for_best_model or cfg.early_stopping_patience or follows_evaluations(cfg)
    if cfg.greater_is_better is not None and not uses:
        return ["greater_is_better is ignored: give metric_for_best_model or early_stopping_patience, too"]
    return []
