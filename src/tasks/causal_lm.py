"""Causal language models: text, chats, prompt and completion, or ids.

A row holds `text`; or `messages` (loss on assistant turns); or `prompt` and `completion` (loss on the completion); or
`input_ids` with optional `labels` (-100 is ignored), used as they are.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from src.config.errors import UsageError, warn
from src.config.paths import locate
from src.config.schema import RunConfig, option
from src.models.loading import (
    build_model,
    check_fit,
    check_packing,
    has_plain_lm_head,
    load_config,
    load_tokenizer,
    tokenizer_fingerprint,
)
from src.models.losses import linear_cross_entropy, linear_scores, scores
from src.tasks import Batch, width
from src.text.encode_rows import IGNORED, Encoder
from src.text.packing import pack
from src.text.tokenization import masks_known


@dataclass
class Options:
    _argument_group_name = "task causal_lm"

    max_length: int | None = option(
        "tokens per row; longer rows are cut (default: 1024, or what the model can)", from_checkpoint=True
    )
    packing: bool = option(
        "pack documents into full rows; attention never crosses documents", False, from_checkpoint=True
    )
    text_column: str = option("column that holds the text", "text", from_checkpoint=True)
    append_eos: bool = option("end every document with the tokenizer's end-of-text token", True, from_checkpoint=True)
    # A checkpoint's tokenizer has the template.
    chat_template: str | None = option(
        "file with a Jinja chat template (default: the tokenizer's)", from_checkpoint=False
    )
    sample_prompt: str | None = option(
        "after training, continue this text and print it", may_change_on_resume=True, from_checkpoint=False
    )
    sample_tokens: int = option("tokens of that sample", 120, may_change_on_resume=True, from_checkpoint=False)

    def check(self) -> list[str]:
        short = self.max_length is not None and self.max_length < 2
        faults = [f"max_length is {self.max_length}: a row needs two tokens to have a target"] if short else []
        if self.sample_tokens <= 0:
            faults.append(f"sample_tokens is {self.sample_tokens}: it must be above zero")
        return faults


class Task:
    attributes_from_weights = ("plain_head",)

    def __init__(self, cfg: RunConfig, options: Options):
        self.cfg, self.options = cfg, options

    def load(self) -> None:
        from transformers import AutoModelForCausalLM

        self.tokenizer = load_tokenizer(self.cfg)
        self.tokenizer_text = tokenizer_fingerprint(self.tokenizer)
        self.config = load_config(self.cfg, self.tokenizer)
        if getattr(self.config, "is_decoder", None) is False:
            self.config.is_decoder = True  # or BERT and its kin would look at the tokens that they are to predict
        self.max_length = check_fit(
            self.cfg, self.config, self.tokenizer, self.options.max_length, AutoModelForCausalLM
        )
        for name in ("chat_template", "sample_prompt"):
            if getattr(self.options, name) and self.tokenizer is None:
                raise UsageError(f"{name} is given, but there is no tokenizer: give --tokenizer_name, or leave it out")
        if self.options.chat_template:
            try:
                self.tokenizer.chat_template = Path(locate(self.options.chat_template)).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(f"chat_template: {self.options.chat_template} cannot be read: {error}") from None

    def fingerprint(self) -> str:
        o = self.options
        template = getattr(self.tokenizer, "chat_template", None)
        return repr(
            (
                self.tokenizer_text,
                template,
                self.max_length,
                self.config.vocab_size,
                o.packing,
                o.text_column,
                o.append_eos,
            )
        )

    def on_prepared(self, features) -> None:
        pass

    # ---- rows ------------------------------------------------------------------------------------------------------

    def inspect_columns(self, examples, split: str, whole: bool = True):
        from datasets import Features, List, Value

        self.encoder = Encoder(
            self.tokenizer,
            self.config.vocab_size,
            self.max_length,
            self.options.packing,
            self.options.text_column,
            self.options.append_eos,
        )
        columns, names = self.encoder.choose(examples.column_names, split)
        names = [*names, "documents"] if self.options.packing else names
        lists = ("input_ids", "labels", "documents")
        return columns, Features({name: List(Value("int32")) if name in lists else Value("int64") for name in names})

    def encode(self, batch: dict[str, list], places) -> dict[str, list]:
        rows = self.encoder.encode_batch(batch, places)
        return pack(self.max_length, rows) if self.options.packing else rows

    # ---- model and loss --------------------------------------------------------------------------------------------

    def build(self, weights: str | None = None, empty: bool = False) -> torch.nn.Module:
        from transformers import AutoModelForCausalLM

        model = build_model(self.cfg, self.config, AutoModelForCausalLM, weights, empty=empty)
        if empty:
            return model
        self.plain_head = has_plain_lm_head(model)
        if self.options.packing:
            check_packing(model)
        return model

    def collate(self, rows: list[dict[str, np.ndarray]]) -> Batch:
        lengths = [len(row["input_ids"]) for row in rows]
        shape = (len(rows), width(lengths, self.cfg.pad_to_multiple_of, self.max_length))
        ids, targets = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
        positions = np.zeros(shape, np.int64) if self.options.packing else None
        for i, (row, n) in enumerate(zip(rows, lengths, strict=True)):
            ids[i, :n] = row["input_ids"]
            # The target of a position is the next token, so the weight counts what is predicted, not what is read.
            targets[i, : max(0, n - 1)] = row.get("labels", row["input_ids"])[1:]
            if positions is not None:
                sizes = row["documents"]
                targets[i, np.cumsum(sizes) - 1] = IGNORED  # nothing predicts the first token of the next document
                starts = np.repeat(np.cumsum(sizes) - sizes, sizes)
                positions[i, :n] = np.arange(n) - starts
                positions[i, n:] = np.arange(shape[1] - n)
        # Padding stands on the right, where causal attention never looks back from; so there is no mask, which keeps
        # attention on its fast path and lets transformers see the documents of a packed row in position_ids.
        inputs = {"input_ids": torch.from_numpy(ids), "targets": torch.from_numpy(targets)}
        if positions is not None:
            inputs["position_ids"] = torch.from_numpy(positions)
        weight = int((targets != IGNORED).sum())
        return Batch(inputs, weight, sum(lengths), ids.size, {"bytes": float(sum(int(row["bytes"]) for row in rows))})

    def loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        targets = inputs["targets"].flatten()
        # A cache, even an empty one, switches the recognition of packed documents off without a word.
        arguments = {"input_ids": inputs["input_ids"], "position_ids": inputs.get("position_ids"), "use_cache": False}
        if not self.plain_head:
            with masks_known(packed="position_ids" in inputs):
                logits = model(**arguments).logits.flatten(0, 1)
            if model.training:
                return {"loss": torch.nn.functional.cross_entropy(_full(logits), targets, reduction="sum")}
            loss, correct = scores(logits, targets)
            return {"loss": loss, "correct": correct}
        with masks_known(packed="position_ids" in inputs):
            hidden = model.base_model(**arguments).last_hidden_state.flatten(0, 1)
        head = model.get_output_embeddings()
        if model.training:
            return {"loss": linear_cross_entropy(hidden, head.weight, head.bias, targets)}
        loss, correct = linear_scores(hidden, head.weight, head.bias, targets)
        return {"loss": loss, "correct": correct}

    def metrics(self, sums: dict[str, float], weight: float) -> dict[str, float]:
        loss = sums["loss"] / weight
        more = {"bits_per_byte": sums["loss"] / math.log(2) / sums["bytes"]} if sums["bytes"] else {}
        return {"perplexity": math.exp(min(loss, 700.0)), "accuracy": sums["correct"] / weight} | more

    def row_metrics(self, rows: dict[str, np.ndarray]) -> dict[str, float]:
        return {}

    def sample(self, model: torch.nn.Module) -> str | None:
        if not self.options.sample_prompt or self.tokenizer is None:
            return None
        model.eval()  # without dropout
        torch.manual_seed(self.cfg.seed)
        ids = self._prompt()
        if not ids:
            return None
        inputs = torch.tensor([ids], device=model.device)
        tokens = model.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=min(self.options.sample_tokens, self.max_length - len(ids)),
            do_sample=True,
            temperature=0.7,
            top_k=40,
            pad_token_id=self.tokenizer.pad_token_id
            if self.tokenizer.pad_token_id is not None
            else self.tokenizer.eos_token_id,
        )
        return self.tokenizer.decode(tokens[0], skip_special_tokens=True)

    def _prompt(self) -> list[int]:
        """Return the tokens of `sample_prompt`: of a long one the last ones, so that the sample fits into max_length."""
        ids = self.tokenizer(self.options.sample_prompt)["input_ids"]
        if len(ids) >= self.max_length:
            keep = max(1, self.max_length - min(self.options.sample_tokens, self.max_length // 2))
            warn(
                f"sample_prompt has {len(ids)} tokens, max_length is {self.max_length}: the sample continues the last {keep}",
                alone=True,
            )
            ids = ids[-keep:]
        if not ids:  # a tokenizer may drop spaces
            first = [self.tokenizer.bos_token_id, self.tokenizer.eos_token_id]
            ids = [token for token in first if token is not None][:1]
        if not ids:
            warn(f"sample_prompt {self.options.sample_prompt!r} has no tokens: no sample is printed", alone=True)
        return ids


def _full(logits: torch.Tensor) -> torch.Tensor:
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
