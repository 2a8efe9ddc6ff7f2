"""Text sampling: continue a prompt with a trained language model.

Tests: tests/tasks/test_causal_lm.py.
"""

from typing import TYPE_CHECKING

import torch

from src.config.errors import warn

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def sample_text(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompt: str,
    new_tokens: int,
    max_length: int,
    seed: int,
) -> str | None:
    """Return the prompt and up to `new_tokens` sampled tokens as text, None if the prompt has no tokens."""
    ids = prompt_ids(tokenizer, prompt, new_tokens, max_length)
    if not ids:
        return None
    model.eval()  # without dropout
    torch.manual_seed(seed)
    inputs = torch.tensor([ids], device=model.device)
    padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    tokens = model.generate(
        input_ids=inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=min(new_tokens, max_length - len(ids)),
        do_sample=True,
        temperature=0.7,
        top_k=40,
        pad_token_id=padding,
    )
    return tokenizer.decode(tokens[0], skip_special_tokens=True)


def prompt_ids(tokenizer: "PreTrainedTokenizerBase", prompt: str, new_tokens: int, max_length: int) -> list[int]:
    """Return the tokens of the prompt, or only its last ones if the prompt alone fills max_length."""
    ids = tokenizer(prompt)["input_ids"]
    if len(ids) >= max_length:
        keep = max(1, max_length - min(new_tokens, max_length // 2))
        warn(
            f"sample_prompt has {len(ids)} tokens, but max_length is {max_length}: the sample continues the last "
            f"{keep} tokens",
            any_rank=True,
        )
        ids = ids[-keep:]
    if not ids:  # the prompt is empty, or the tokenizer drops spaces
        first_tokens = [tokenizer.bos_token_id, tokenizer.eos_token_id]
        ids = [token for token in first_tokens if token is not None][:1]
    if not ids:
        warn(f"sample_prompt {prompt!r} has no tokens: no sample is printed", any_rank=True)
    return ids
