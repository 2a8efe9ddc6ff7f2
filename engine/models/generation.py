"""Generated answers of a language model: options, padded prompts, generation on one rank or on all, decoded texts.

Tests: tests/engine/models/test_generation.py, tests/src/training/test_answers.py.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from engine.config.errors import UsageError, warn
from engine.config.option import AS_GIVEN, option
from engine.distributed.sharded_tensors import is_partial
from engine.models.config_and_tokenizer import position_limit
from engine.rows.prompts import Prompt, Text, end_of_turn, prompts_of_split, read_prompt
from engine.rows.tokenize_and_pack import IGNORED

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

EXACT_MATCH = ["exact_match"]  # the default of `metrics`


@dataclass
class GenerationOptions:
    """Options of a task that generates the texts of its validation rows and compares them with its targets."""

    metrics: list[str] = option(
        "metrics of the generated texts: exact_match, or files of addons/metrics/evaluate/ (rouge); Hub names or script paths "
        "(code: needs trust_remote_code); or none, which generates nothing",
        EXACT_MATCH,
        is_path=AS_GIVEN,
        may_change_on_resume=True,
        from_checkpoint=True,
    )
    num_beams: int = option("beams of the search", 1, min=1, may_change_on_resume=True)
    do_sample: bool = option("draw tokens at random, seeded by the micro-batch", False, may_change_on_resume=True)


@dataclass
class AnswerOptions(GenerationOptions):
    """Options of a task that continues a prompt: answers to prompts of the run file, and to those of validation rows."""

    sample_prompts: list[str | list[dict]] = option(
        "prompts that each evaluation answers, without chance: texts to continue, or chats as lists of turns (role, content), "
        "rendered by the chat template (default: none)",
        [],
        may_change_on_resume=True,
        from_checkpoint=False,
    )
    sample_max_new_tokens: int = option(
        "tokens of an answer to one of sample_prompts, at most", 128, min=1, may_change_on_resume=True
    )
    predict_with_generate: bool = option(
        "in each evaluation generate the last answer of each validation row (the assistant's last turn, or the completion) "
        "from what stands before it, and compare them by `metrics`",
        False,
        may_change_on_resume=True,
    )
    max_eval_generate_examples: int | None = option(
        "validation rows of each source that predict_with_generate answers: the first ones (default: all)",
        min=1,
        may_change_on_resume=True,
    )
    max_new_tokens: int | None = option(
        "tokens to generate for a validation row at most (default: those of the longest expected answer)",
        min=1,
        may_change_on_resume=True,
    )


class Generation:
    """How the model of a task answers prompts, and the prompts that an evaluation answers."""

    def __init__(self, options: Any, tokenizer: Any, config: "PreTrainedConfig"):
        """Read `sample_prompts`. Raise UsageError for one that cannot be answered."""
        self.options = options
        self.tokenizer = tokenizer
        self.limit = position_limit(config)
        self.samples: list[Prompt] = []
        self.of_rows: list[Prompt] = []  # of validation rows, with the expected answers
        self.max_new_tokens = 0  # for those
        # A task that derives from one with these options may have none of them.
        prompts = getattr(options, "sample_prompts", [])
        self.answers_rows = getattr(options, "predict_with_generate", False) and options.metrics != ["none"]
        if tokenizer is None:
            if prompts or self.answers_rows:
                raise UsageError("sample_prompts and predict_with_generate need a tokenizer: give --tokenizer_name")
            return
        for i, text in enumerate(prompts):
            prompt = self.read_prompt(text, f"sample_prompts: prompt {i}")
            if not self.has_room(prompt, options.sample_max_new_tokens):
                raise UsageError(
                    f"sample_prompts: prompt {i} has {len(prompt.ids)} tokens, which leaves less than "
                    f"sample_max_new_tokens {options.sample_max_new_tokens} of the model's {self.limit} positions: lower it"
                )
            self.samples.append(prompt)

    @cached_property
    def end_of_turn(self) -> int | None:
        """The token that ends an assistant's turn, if the chat template has one."""
        return end_of_turn(self.tokenizer)

    def read_prompt(self, text: Text, where: object, tools: Any = None, of_row: Any = None) -> Prompt:
        """Return a text, or a chat through the chat template, as a prompt; `where` begins an error.

        `tools` and `of_row`: what its row says about functions and about variables of the template."""
        variables = getattr(self.options, "chat_template_kwargs", None) or {}
        return read_prompt(self.tokenizer, text, where, tools, of_row, **variables)

    def has_room(self, prompt: Prompt, max_new_tokens: int) -> bool:
        """Return whether the model has positions for a prompt and an answer."""
        return self.limit is None or len(prompt.ids) + max_new_tokens <= self.limit

    def read_rows(self, split: Any, packing: bool | str, longest: int) -> None:
        """Find the prompts of the validation rows that `predict_with_generate` answers; `split` is None without data.

        `longest`: the tokens of a row that may have been cut are more."""
        options = self.options
        if split is None:
            if self.answers_rows:
                raise UsageError(
                    "predict_with_generate: each evaluation answers, but there is no evaluation data: give "
                    "--validation_file, or remove it"
                )
            if self.samples:
                warn(
                    "sample_prompts are answered at each evaluation, but there is no evaluation data, so they are not: give "
                    "--validation_file"
                )
            return
        if not self.answers_rows:
            for name in ("max_eval_generate_examples", "max_new_tokens"):
                if getattr(options, name, None):
                    warn(f"{name} is not used without predict_with_generate")
            if getattr(options, "metrics", None) not in (None, EXACT_MATCH, ["none"]):
                warn("metrics is not used without predict_with_generate")
            return
        found = prompts_of_split(split, options.max_eval_generate_examples, packing, longest)
        whole = [prompt for prompt in found if prompt is not None]
        longest = max((len(prompt.reference) for prompt in whole), default=1)
        self.max_new_tokens = options.max_new_tokens or longest
        self.of_rows = [prompt for prompt in whole if self.has_room(prompt, self.max_new_tokens)]
        if not self.of_rows:
            raise UsageError(
                "predict_with_generate: no validation row has an answer with something before it: give chats, or rows of "
                "prompt and completion, that are shorter than max_length"
            )
        if len(self.of_rows) < len(found):
            warn(
                f"predict_with_generate: {len(found) - len(self.of_rows):,} of {len(found):,} validation rows are not answered: "
                "they have no answer, were cut to max_length, or leave no room for max_new_tokens"
            )

    def inputs(self, prompts: Iterable[Prompt]) -> dict[str, torch.Tensor]:
        """Return the inputs of `generate` for prompts, padded on the left: what a model adds stands at the right."""
        ids = [prompt.ids for prompt in prompts]
        width = max(map(len, ids))
        padded = np.zeros((len(ids), width), np.int64)
        mask = np.zeros((len(ids), width), np.int64)
        for i, row in enumerate(ids):
            padded[i, width - len(row) :] = row
            mask[i, width - len(row) :] = 1
        return {"input_ids": torch.from_numpy(padded), "attention_mask": torch.from_numpy(mask)}

    def stop_ids(self, generation_config: Any) -> list[int]:
        """Return the tokens that end an answer: of the tokenizer, the model and the chat template."""
        return stop_ids(self.tokenizer, self.end_of_turn, generation_config)

    def generate(
        self, model: Any, inputs: dict[str, torch.Tensor], generation_config: Any, max_new_tokens: int, **settings: Any
    ) -> torch.Tensor:
        """Return the tokens generated after each row of `inputs`, (rows, max_new_tokens), filled up with IGNORED."""
        stop_ids = self.stop_ids(generation_config)
        pad = self.tokenizer.pad_token_id
        if pad is None:
            pad = stop_ids[0] if stop_ids else 0
        # Some models name a cache with which transformers would compile them anew for each width of prompts.
        settings = {"do_sample": False, "num_beams": 1, "use_cache": True, "disable_compile": True} | settings
        config = generation_config or model.generation_config
        tokens = generate_tokens(
            model, inputs, config, max_new_tokens, eos_token_id=stop_ids or None, pad_token_id=pad, **settings
        )
        return cut_after(tokens, stop_ids)

    def texts(self, tokens: np.ndarray | Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each row of generated tokens."""
        return decode_rows(self.tokenizer, [np.asarray(row) for row in tokens])


def stop_ids(tokenizer: Any, end_of_turn: int | None, generation_config: Any) -> list[int]:
    """Return the tokens that end an answer: of the model in their order, then of the tokenizer and the chat template."""
    of_model = getattr(generation_config, "eos_token_id", None)
    of_model = of_model if isinstance(of_model, list) else [of_model]
    ids = dict.fromkeys([*of_model, tokenizer.eos_token_id, end_of_turn])
    return [each for each in ids if each is not None]


def name_end_of_turn(model: Any, task: Any) -> None:
    """Let `generation_config` of a model name the token that ends a turn: servers stop at what it names."""
    generation_config = getattr(model, "generation_config", None)
    end = end_of_turn(getattr(task, "tokenizer", None))
    if generation_config is not None and end is not None:
        ids = stop_ids(task.tokenizer, end, generation_config)
        generation_config.eos_token_id = ids if len(ids) > 1 else ids[0]


def generate_tokens(
    model: "PreTrainedModel",
    inputs: dict[str, torch.Tensor],
    generation_config: "GenerationConfig",
    max_new_tokens: int,
    **settings: Any,
) -> torch.Tensor:
    """Return the generated tokens, (rows, max_new_tokens), filled up with IGNORED.

    `settings` win over `generation_config`. If the model is sharded, each forward pass is a collective, so all ranks
    run as many passes as the longest generation among them needs."""
    model.generation_config = generation_config
    sharded = any(is_partial(p) or hasattr(p, "ds_id") for p in model.parameters())
    several = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    # An encoder-decoder model returns the decoder's start token first, any other the prompt.
    before = 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    tokens = model.generate(
        **inputs,
        max_new_tokens=max_new_tokens,
        num_return_sequences=1,
        return_dict_in_generate=False,
        synced_gpus=sharded and several,
        **settings,
    )[:, before:]
    return F.pad(tokens, (0, max_new_tokens - tokens.shape[1]), value=IGNORED)


def cut_after(tokens: torch.Tensor, stop_ids: list[int]) -> torch.Tensor:
    """Return the tokens with IGNORED after the first of `stop_ids` in each row."""
    is_stop = torch.isin(tokens, torch.tensor(stop_ids, dtype=tokens.dtype, device=tokens.device))
    stops_before = is_stop.cumsum(1) - is_stop.long()
    return tokens.masked_fill(stops_before > 0, IGNORED)


def decode_rows(tokenizer: Any, rows: Iterable[np.ndarray]) -> list[str]:
    """Return the text of each row of token ids that are filled up with IGNORED, without special tokens."""
    ids = [row[row != IGNORED].tolist() for row in rows]
    return [text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]
