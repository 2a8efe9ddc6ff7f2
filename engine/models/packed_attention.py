"""Packed and padded rows of tokens in a model of transformers: kernel of attention, inputs, masks.

Tests: tests/src/tasks/test_causal_lm.py; on a GPU tests/gpu/test_gpu.py.
"""

from typing import Any

import numpy as np
import torch

from engine.config.run_config import RunConfig
from engine.models.model_checks import check_packing_and_choose_kernel
from engine.models.varlen_attention import document_bounds, takes_lengths, use_in
from engine.process.private_apis import attention_kernel, known_masks


class PackedAttention:
    """How attention keeps the documents of packed rows apart: by their lengths, else by a mask.

    Rank 0 decides when it builds the model; a task names its attribute in `attributes_from_weights`."""

    def __init__(self, cfg: RunConfig, config: Any):
        """Read what the run file or the model's configuration asks for."""
        self.asked = cfg.attn_implementation
        self.by_lengths = takes_lengths(self.asked or attention_kernel(config))

    def choose_kernel(self, model: Any, vocab_size: int, empty: bool) -> None:
        """Give the model the kernel by lengths where it is the default, or if it is `empty`, where rank 0 has it.

        Raise UsageError if the documents of a row would see each other."""
        if not empty:
            self.by_lengths = check_packing_and_choose_kernel(model, vocab_size, self.asked)
        elif self.by_lengths and not takes_lengths(attention_kernel(model.config)):
            use_in(model)

    def inputs(self, rows: list[np.ndarray], width: int) -> dict[str, np.ndarray]:
        """Return the inputs of a batch beside its tokens. `rows` has the lengths of each row's documents."""
        # transformers recognizes the documents of a packed row by their position_ids.
        inputs = {"position_ids": np.stack([packed_positions(documents, width) for documents in rows])}
        if self.by_lengths:
            inputs["documents"] = document_lengths(rows, width)
        return inputs


def call_on_tokens(
    model: Any, inputs: dict[str, Any], documents: torch.Tensor | None = None, headless: bool = False
) -> Any:
    """Return the output of a model of transformers, or of its part without a head, for rows of tokens.

    Rows are packed if they have `position_ids`; `documents` is that of `PackedAttention.inputs`. Beside it only an
    `attention_mask` says what is padding. The host knows the masks, so it does not wait for the device."""
    by_lengths = documents is not None and takes_lengths(attention_kernel(model.config))
    if by_lengths:
        inputs = inputs | document_bounds(documents, inputs["input_ids"].shape[1])
    is_packed = inputs.get("position_ids") is not None
    with known_masks(packed=is_packed and not by_lengths):
        return model.base_model(**inputs) if headless else model(**inputs)


def packed_positions(documents: np.ndarray, width: int) -> np.ndarray:
    """Return the position of each token in its document, for a row padded to `width`. Padding is one more document."""
    sizes = np.append(documents, width - documents.sum())
    starts = np.cumsum(sizes) - sizes
    return np.arange(width) - np.repeat(starts, sizes)


def document_lengths(rows: list[np.ndarray], width: int) -> np.ndarray:
    """Return the lengths of the documents of rows padded to `width`, row after row, (documents,). Padding is one more."""
    lengths = np.concatenate([np.append(documents, width - documents.sum()) for documents in rows])
    return lengths[lengths > 0].astype(np.int32)
