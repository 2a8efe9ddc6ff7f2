"""Warn about columns that look meaningful and are not used."""

from src.config.errors import warn

# Columns that mean something in other trainers, and nothing here unless a task names them.
MEANINGFUL = (
    "attention_mask",
    "labels",
    "loss_mask",
    "assistant_mask",
    "assistant_masks",
    "completion_mask",
    "prompt_mask",
    "position_ids",
    "token_type_ids",
    "seq_lengths",
    "cu_seqlens",
    "weight",
    "weights",
    "sample_weight",
    "tools",
)


_warned: set[str] = set()


def warn_of_ignored(names: list[str], needed: list[str], split: str) -> None:
    """Warn once of columns that look as if they had a meaning, and are not used."""
    if ignored := [name for name in MEANINGFUL if name in names and name not in needed]:
        text = f"{split} data: the columns {', '.join(ignored)} are not used: only {', '.join(needed)}"
        if text not in _warned:
            warn(text)
        _warned.add(text)
