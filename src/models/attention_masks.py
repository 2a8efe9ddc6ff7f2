"""Attention masks of transformers without a host sync.

Tests: tests/training/test_step.py and tests/tasks/test_causal_lm.py.
"""

from contextlib import contextmanager

import torch


@contextmanager
def known_masks(packed: bool):
    """Tell transformers whether rows are packed or padded, so that it does not read this from the device.

    It asks `mask.all()` in every forward pass, and the host waits for all queued work. This patches private functions of
    transformers 5; in a version without them only the wait remains.
    """
    from transformers import masking_utils

    def find_packed_sequence_indices(position_ids):
        if not packed:
            return None
        return (torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)

    def ignore_mask(padding_mask, kv_length, local_attention_size=None):
        return padding_mask is None and (local_attention_size is None or kv_length < local_attention_size)

    ours = {
        "find_packed_sequence_indices": find_packed_sequence_indices,
        "_ignore_bidirectional_mask_sdpa": ignore_mask,
    }
    original = {name: getattr(masking_utils, name) for name in ours if hasattr(masking_utils, name)}
    try:
        vars(masking_utils).update({name: ours[name] for name in original})
        yield
    finally:
        vars(masking_utils).update(original)
