"""New tokens (`add_tokens`): added to the tokenizer, with rows of their own in the embedding and the head.

Tests: tests/engine/models/test_new_tokens.py.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.config.errors import UsageError, warn
from engine.storage.jsonl import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

CHUNK = 4096  # rows of an embedding that are summed in float64 at once
ROWS_MISSING: ContextVar[list[int] | None] = ContextVar("rows_missing", default=None)  # of `rows_missing`


def add_tokens(tokenizer: Any, tokens: list[str]) -> None:
    """Add tokens to a tokenizer. Its attribute `token_ids` then has the ids of all, `new_ids` of those that it lacked.

    Raise UsageError for one that cannot be a token."""
    from tokenizers import AddedToken

    known = tokenizer.get_vocab()
    for token in tokens:
        if not token.strip():
            raise UsageError(f"add_tokens: {token!r} is empty: remove it")
        if tokens.count(token) > 1:
            raise UsageError(f"add_tokens: {token!r} is given twice: remove one")
    new = [token for token in tokens if token not in known]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in new])
    ids = [tokenizer.convert_tokens_to_ids(token) for token in new]
    if len(set(ids)) < len(new) or set(ids) & {*known.values()}:
        raise UsageError(f"add_tokens: the tokenizer does not take all of {', '.join(new)}: give other tokens")
    tokenizer.new_ids = ids
    tokenizer.token_ids = [tokenizer.convert_tokens_to_ids(token) for token in tokens]


def check_tokens(task: Any, tokens: list[str]) -> None:
    """Warn of tokens that a task's tokenizer had before. Raise UsageError if the task has added none."""
    tokenizer = getattr(task, "tokenizer", None)
    if not token_ids(tokenizer):
        raise UsageError(f"add_tokens: task {task.cfg.task} has no tokenizer that takes new tokens: remove it")
    for token, i in zip(tokens, token_ids(tokenizer), strict=True):
        if i not in new_ids(tokenizer):
            warn(f"add_tokens: the tokenizer has {token!r} (id {i}): its row begins as it is")


def token_ids(tokenizer: Any) -> list[int]:
    """Return the ids of the tokens that `add_tokens` names, also of those that the tokenizer had."""
    return list(getattr(tokenizer, "token_ids", ()))


def new_ids(tokenizer: Any) -> list[int]:
    """Return the ids of the tokens that this run adds to a tokenizer."""
    return list(getattr(tokenizer, "new_ids", ()))


@contextmanager
def rows_missing(ids: list[int] | None) -> Iterator[None]:
    """Let `build_model` give rows to the new tokens `ids` within, as is recorded of its weights; None: as the tokenizer
    tells."""
    token = ROWS_MISSING.set(ids)
    try:
        yield
    finally:
        ROWS_MISSING.reset(token)


def ids_without_rows(tokenizer: Any, saved: Any, folder: Path) -> list[int]:
    """Return the ids of the new tokens that the model of a run in `folder` has not been trained with.

    `saved` is the tokenizer of that folder, with the same tokens added; None: it has none. Raise UsageError if so, and for
    a token that has another id there."""
    if saved is None:
        raise UsageError(
            f"add_tokens: {folder} has no tokenizer that tells which tokens its model was trained with: save it there, beside "
            "the weights"
        )
    missing = []
    for i in new_ids(tokenizer):
        token = tokenizer.convert_ids_to_tokens(i)
        there = saved.convert_tokens_to_ids(token)
        if there in new_ids(saved):
            missing.append(i)
        elif there != i:
            raise UsageError(
                f"add_tokens: {token!r} has id {i}, but {there} in {folder}: give the tokens of that run, in their order, "
                "before new ones"
            )
    return missing


def set_vocabulary(config: "PreTrainedConfig", size: int) -> None:
    """Set the vocabulary of a configuration to `size`, unless it is as large."""
    text = config.get_text_config()
    if isinstance(text.vocab_size, int) and text.vocab_size < size:
        text.vocab_size = size


def config_of_weights(config: "PreTrainedConfig", folder: Path) -> "PreTrainedConfig":
    """Return a configuration with the vocabulary that the weights in a folder have, if that is smaller."""
    saved = read_json(folder / "config.json")
    saved = {**saved, **saved.get("text_config", {})} if isinstance(saved.get("text_config"), dict) else saved
    size = saved.get("vocab_size")
    if not isinstance(size, int) or size >= config.get_text_config().vocab_size:
        return config
    config = copy.deepcopy(config)
    config.get_text_config().vocab_size = size
    return config


@torch.no_grad()
def add_rows(model: "PreTrainedModel", size: int, ids: list[int]) -> None:
    """Give a model's embedding and head `size` rows. Those of the new tokens `ids` begin as the mean of the rows before.

    The mean is summed in float64 on one thread, so it is the same on any machine. Rows of a padded vocabulary that `ids`
    now use are overwritten, too."""
    if model.get_input_embeddings().weight.shape[0] < size:
        model.resize_token_embeddings(size, mean_resizing=False)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    first = min(ids)
    tensors = [embedding.weight]
    if head is not None:
        bias = getattr(head, "bias", None)
        tensors += [each for each in (head.weight, bias) if each is not None and each is not embedding.weight]
    for tensor in tensors:
        tensor[ids] = _mean(tensor[:first]).to(tensor.dtype)


def _mean(rows: torch.Tensor) -> torch.Tensor:
    """Return the mean of rows in float64."""
    total = np.zeros(tuple(rows.shape[1:]))
    for chunk in rows.split(CHUNK):
        total += chunk.double().numpy().sum(0)
    return torch.from_numpy(np.asarray(total / len(rows)))
