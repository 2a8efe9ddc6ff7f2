"""The metric that decides which evaluation is best: its name and direction.

Tests: tests/training/test_state.py.
"""

from src.config.schema import RunConfig

LOWER_IS_BETTER = (
    "perplexity",
    "ppl",
    "bits_per_byte",
    "wer",
    "cer",
    "ter",
    "mer",
    "wil",
    "mse",
    "rmse",
    "mae",
    "mape",
)
LOWER_IS_BETTER += ("smape", "mase", "brier_score", "error", "error_rate")


def best_by(cfg: RunConfig) -> tuple[str, bool]:
    """Return (name of the metric that decides which evaluation is best, whether a greater value is better).

    By transformers' rule greater is better unless the name ends in "loss"; its prefix `eval_` is accepted."""
    name = (cfg.metric_for_best_model or "loss").removeprefix("eval_")
    return name, not name.endswith("loss") if cfg.greater_is_better is None else cfg.greater_is_better


def doubts(cfg: RunConfig) -> list[str]:
    """Return warnings about a direction of the metric that is probably not meant, or decides nothing."""
    name, _ = best_by(cfg)
    last = name.split("/")[-1].lower()
    if cfg.greater_is_better is None and (last in LOWER_IS_BETTER or last.endswith(("_error", "_error_rate"))):
        return [
            f"metric_for_best_model is {name}, and by transformers' rule the GREATEST {name} is taken for the best, because the "
            "name does not end in loss. If a smaller one is better, give --greater_is_better false"
        ]
    if cfg.greater_is_better is not None and not cfg.metric_for_best_model and not cfg.early_stopping_patience:
        return ["greater_is_better is ignored: neither metric_for_best_model nor early_stopping_patience is given"]
    return []
