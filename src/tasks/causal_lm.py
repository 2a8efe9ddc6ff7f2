"""Causal language models: the example of a task, to edit or to copy. Guarded by tests/test_causal_lm.py, tests/conformance/.

A row holds `text`; or `messages` (loss on assistant turns); or `prompt` and `completion` (loss on the completion); or
`input_ids` with optional `labels` (-100 is ignored), used as they are.
"""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from src.config import RunConfig, UsageError, say
from src.losses import linear_cross_entropy, linear_scores, scores
from src.models import build_model, check_fit, load_config, load_tokenizer, tokenizer_text
from src.tasks import Batch
from src.text import pack, render_chat, require_text, token_bytes

IGNORED = -100
PACKING_BLOCK = 10_000  # documents that are packed together; bounds the memory of packing


@dataclass
class Options:
    _argument_group_name = "task causal_lm"

    max_length: int | None = say("tokens per row; longer rows are cut (default: 1024, or what the model can)")
    packing: bool = say("pack documents into full rows; attention never crosses documents", False)
    text_column: str = say("column that holds the text", "text")
    append_eos: bool = say("end every document with the tokenizer's end-of-text token", True)
    chat_template: str | None = say("file with a Jinja chat template (default: the tokenizer's)")
    sample_prompt: str | None = say("after training, continue this text and print it")
    sample_tokens: int = say("tokens of that sample", 120)

    def check(self) -> list[str]:
        short = self.max_length is not None and self.max_length < 2
        return [f"max_length is {self.max_length}: a row needs two tokens to have a target"] if short else []


class Task:
    def __init__(self, run: RunConfig, options: Options):
        self.run, self.options = run, options

    def load(self) -> None:
        self.tokenizer = load_tokenizer(self.run)
        self.tokenizer_text = tokenizer_text(self.tokenizer)
        self.config = load_config(self.run, self.tokenizer)
        self.max_length = check_fit(self.run, self.config, self.tokenizer, self.options.max_length)
        if self.tokenizer is not None and self.options.chat_template:
            try:
                self.tokenizer.chat_template = Path(self.options.chat_template).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(f"chat_template: {self.options.chat_template}: {error}") from None

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

    def opened(self, dataset) -> None:
        pass

    # ---- rows ------------------------------------------------------------------------------------------------------

    def prepare(self, examples, split: str, folder: str):
        from datasets import Features, List, Value

        columns = examples.column_names
        if "input_ids" in columns:
            encode, labelled = self._encode_ids, "labels" in columns
        elif "messages" in columns:
            encode, labelled = self._encode_messages, True
        elif "prompt" in columns and "completion" in columns:
            encode, labelled = self._encode_completion, True
        elif self.options.text_column in columns:
            encode, labelled = self._encode_text, False
        else:
            raise UsageError(
                f"{split} data: no usable column among {', '.join(columns)}: a row needs `{self.options.text_column}` (see "
                "--text_column), `messages`, `prompt` and `completion`, or `input_ids`"
            )
        if self.tokenizer is None and encode != self._encode_ids:
            raise UsageError(f"{split} data: the rows hold text, so give --tokenizer_name")
        names = ["input_ids", *(["labels"] if labelled else []), "length", "targets", "bytes", "cut"]
        types = {"input_ids": List(Value("int32")), "labels": List(Value("int32"))}
        features = {name: types.get(name, Value("int64")) for name in names}
        encoded = examples.map(
            partial(self._encode_batch, encode, names, split),
            batched=True,
            with_indices=True,
            remove_columns=columns,
            features=Features(features),
            cache_file_name=f"{folder}/encoded.arrow",
            load_from_cache_file=False,
            desc=f"tokenising {split}",
        )
        if not self.options.packing:
            return encoded
        return encoded.map(
            partial(pack, self.max_length),
            batched=True,
            batch_size=PACKING_BLOCK,
            features=Features(features | {"documents": List(Value("int32"))}),
            cache_file_name=f"{folder}/packed.arrow",
            load_from_cache_file=False,
            desc=f"packing {split}",
        )

    def _encode_batch(self, encode, names: list[str], split: str, batch: dict, indices: list[int]) -> dict:
        """Return the encoded columns of a batch of examples; a fault names the row, counted from 0."""
        rows = []
        for ids, labels, sizes in encode(batch, [f"{split} data, row {index}" for index in indices]):
            rows += self._rows(ids, labels, sizes)
        return {name: [row[name] for row in rows] for name in names}

    def _rows(self, ids: list[int], labels: list[int] | None, sizes: np.ndarray | None) -> list[dict]:
        """Return a document as one row cut to max_length, or, where rows will be packed, in as many as it takes.

        `sizes` are the bytes of text that each token stands for; a row's bytes are those of its targets."""
        end, step, limit = max(len(ids), 1), self.max_length, self.max_length
        starts = range(0, end, step) if self.options.packing else range(1)
        rows = []
        for start in starts:
            part = ids[start : start + limit]
            wanted = np.array(part if labels is None else labels[start : start + limit])[1:] != IGNORED
            size = 0 if sizes is None else int(sizes[start + 1 : start + len(part)][wanted].sum())
            cut = 0 if self.options.packing else len(ids) - len(part)
            row = {"input_ids": part, "length": len(part), "targets": int(wanted.sum()), "bytes": size, "cut": cut}
            rows.append(row if labels is None else row | {"labels": labels[start : start + limit]})
        return rows

    def _tokenize(self, texts: list[str], **options) -> list[tuple[list[int], np.ndarray | None]]:
        """Return the token ids of each text, and the bytes that each token stands for where the tokenizer can tell."""
        fast = getattr(self.tokenizer, "is_fast", False)
        encoded = self.tokenizer(texts, return_offsets_mapping=fast, verbose=False, **options)
        if not fast:
            return [(list(ids), None) for ids in encoded["input_ids"]]
        spans = encoded["offset_mapping"]
        return [
            (list(ids), token_bytes(text, s)) for ids, text, s in zip(encoded["input_ids"], texts, spans, strict=True)
        ]

    def _ended(self, ids: list[int], sizes: np.ndarray | None) -> tuple[list[int], np.ndarray | None]:
        eos = self.tokenizer.eos_token_id
        if not self.options.append_eos or eos is None or (ids and ids[-1] == eos):
            return ids, sizes
        return [*ids, eos], None if sizes is None else np.append(sizes, 0)

    def _encode_text(self, batch: dict, where: list[str]):
        texts = batch[self.options.text_column]
        require_text(texts, self.options.text_column, where)
        for ids, sizes in self._tokenize(texts):
            ids, sizes = self._ended(ids, sizes)
            yield ids, None, sizes

    def _encode_ids(self, batch: dict, where: list[str]):
        vocabulary = self.config.vocab_size
        for ids, labels, place in zip(
            batch["input_ids"], batch.get("labels") or [None] * len(where), where, strict=True
        ):
            for name, values in (("input_ids", ids), ("labels", labels)):
                if values is None and name == "labels":
                    continue
                if not isinstance(values, list) or not all(type(value) is int for value in values):
                    raise UsageError(f"{place}: `{name}` must be a list of integers")
                for value in {v for v in (min(values, default=0), max(values, default=0)) if not 0 <= v < vocabulary}:
                    if name == "labels" and value == IGNORED and all(v >= 0 or v == IGNORED for v in values):
                        continue
                    raise UsageError(
                        f"{place}: `{name}` holds {value}, outside the vocabulary of {vocabulary}: 0 to {vocabulary - 1}"
                    )
            if labels is not None and len(labels) != len(ids):
                raise UsageError(
                    f"{place}: {len(labels)} labels for {len(ids)} input_ids: give one label per token, -100 to ignore it"
                )
            yield (
                ids,
                labels if "labels" in batch and labels is not None else (list(ids) if "labels" in batch else None),
                None,
            )

    def _encode_completion(self, batch: dict, where: list[str]):
        for name in ("prompt", "completion"):
            require_text(batch[name], name, where)
        # Tokenised apart, because at generation the prompt will stand alone.
        prompts = self._tokenize(batch["prompt"])
        completions = self._tokenize(batch["completion"], add_special_tokens=False)
        for (head, _), (tail, sizes) in zip(prompts, completions, strict=True):
            head = head[:-1] if head and head[-1] == self.tokenizer.eos_token_id else head
            tail, sizes = self._ended(tail, sizes)
            sizes = None if sizes is None else np.concatenate([np.zeros(len(head), np.int64), sizes])
            yield head + tail, [IGNORED] * len(head) + tail, sizes

    def _encode_messages(self, batch: dict, where: list[str]):
        if not getattr(self.tokenizer, "is_fast", False):
            raise UsageError("rows with `messages` need a fast tokenizer: it knows which characters a token stands for")
        if not self.tokenizer.chat_template:
            raise UsageError(f"{where[0]}: the tokenizer has no chat template: give one with --chat_template FILE")
        for messages, place in zip(batch["messages"], where, strict=True):
            text, turns = render_chat(self.tokenizer, messages, place)
            encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            ids, spans = list(encoded["input_ids"]), encoded["offset_mapping"]
            inside = [any(a <= start < b for a, b in turns) for start, _ in spans]
            labels = [token if keep else IGNORED for token, keep in zip(ids, inside, strict=True)]
            yield ids, labels, token_bytes(text, spans)

    # ---- model and loss --------------------------------------------------------------------------------------------

    def build(self, weights: str | None = None) -> torch.nn.Module:
        from transformers import AutoModelForCausalLM

        model = build_model(self.run, self.config, AutoModelForCausalLM, weights)
        self.plain_head = _head_is_plain(model)
        return model

    def collate(self, rows: list[dict[str, np.ndarray]]) -> Batch:
        lengths = [len(row["input_ids"]) for row in rows]
        shape = (len(rows), max(1, *lengths))
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
            logits = model(**arguments).logits.flatten(0, 1)
            if model.training:
                return {"loss": torch.nn.functional.cross_entropy(_full(logits), targets, reduction="sum")}
            loss, correct = scores(logits, targets)
            return {"loss": loss, "correct": correct}
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
        torch.manual_seed(self.run.seed)
        inputs = self.tokenizer(self.options.sample_prompt, return_tensors="pt").to(model.device)
        room = max(1, self.max_length - inputs["input_ids"].shape[1])
        tokens = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=min(self.options.sample_tokens, room),
            do_sample=True,
            temperature=0.7,
            top_k=40,
            pad_token_id=self.tokenizer.pad_token_id
            if self.tokenizer.pad_token_id is not None
            else self.tokenizer.eos_token_id,
        )
        return self.tokenizer.decode(tokens[0], skip_special_tokens=True)


def _full(logits: torch.Tensor) -> torch.Tensor:
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


@torch.no_grad()
def _head_is_plain(model: torch.nn.Module) -> bool:
    """Return whether the logits are the output embedding of the last hidden state, and nothing else.

    Some models scale or cap their logits; computing the loss from their hidden states would be wrong without a word.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear):
        return False
    training = model.training
    model.eval()
    ids = torch.arange(8).remainder(model.config.vocab_size)[None]
    expected = model(input_ids=ids, use_cache=False).logits
    got = head(model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    model.train(training)
    return torch.allclose(got, expected, rtol=1e-3, atol=1e-5)
