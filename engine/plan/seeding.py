"""Seeds: of a micro-batch, its collation, an epoch: derived from the run's seed, and set in all generators.

Tests: tests/engine/plan/test_data_loader.py, tests/conformance/test_promise.py.
"""

import hashlib
import random

import numpy as np
import torch


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed that depends only on `parts`."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_everything(seed: int) -> None:
    """Seed every generator that a collator or a model may draw from: torch on all devices, numpy and random."""
    kind = torch.accelerator.current_accelerator()
    if kind is None or kind.type == "cuda":
        # torch.manual_seed formats a stack trace for each kind of device that is absent: 0.4 ms.
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():  # not in a dataloader worker, which does not use the device
            torch.cuda.manual_seed(seed)
    else:
        torch.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)
