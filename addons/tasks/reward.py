# Needs addons/tasks/preference/.
"""Reward models: a number for a prompt with its answer, learned from preference pairs (Bradley and Terry).

Rows are those of preference: {"prompt": "…", "chosen": "…", "rejected": "…"}, or chats as `chosen` and `rejected`.
loss = −log σ(reward of chosen − reward of rejected). The model is one for sequence classification with one label; its
head reads the last token. Tests: tests/addons/tasks/test_reward.py.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from addons.tasks.preference.preference_pairs import PARTS, SIDES, WITHOUT_TARGETS, PairEncoder
from engine import task as base
from engine.config.errors import UsageError
from engine.config.option import option
from engine.models.build_model import build_model
from engine.models.config_and_tokenizer import POSITIONS_AFTER_PADDING, load_text_decoder, text_config
from engine.models.packed_attention import call_on_tokens
from engine.rows.chat_options import ChatOptions
from engine.rows.encode_rows import Encoder, make_chat_format
from engine.rows.tokenize_and_pack import pad_columns, padded_length
from engine.task import Batch
from src.losses.cross_entropy import at_least_float32


@dataclass
class Options(ChatOptions):
    needs_model = True  # model_name_or_path or model_config

    max_length: int | None = option(
        "tokens of prompt and completion; longer ones are truncated (default: the model's limit, at most 1024)",
        min=2,
        from_checkpoint=True,
    )
    append_eos: bool = option("end every completion with the tokenizer's end-of-text token", True, from_checkpoint=True)
    center_rewards_coefficient: float = option(
        "weight of (reward of chosen + reward of rejected)² in the loss, such as 0.01: keeps rewards near 0", 0.0, min=0
    )


class Task(base.Task):
    without_targets = WITHOUT_TARGETS
    parts = PARTS
    cut_by_cost = False  # both sequences of a pair are padded to the longest one
    id_columns = ("chosen_ids", "rejected_ids")
    new_head = ("score", "classifier", "pooler", "pre_classifier", "classification_head")

    def load(self) -> None:
        o = self.options
        decoder = load_text_decoder(self.cfg, o.max_length)
        self.tokenizer, self.tokenizer_text, self.config, self.max_length, self.vocab_size = decoder
        if self.tokenizer is None:
            raise UsageError("reward needs --tokenizer_name, or a model folder with a tokenizer")
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        if self.tokenizer.pad_token_id is None:
            raise UsageError("reward needs a tokenizer that has a pad_token or an eos_token")
        if getattr(self.config, "is_decoder", False):  # BERT and similar models, which read both ways here
            self.config.is_decoder = False
        # The head of a decoder reads the last token that is not this one, whatever the width of the batch.
        if text_config(self.config).model_type not in POSITIONS_AFTER_PADDING:
            text_config(self.config).pad_token_id = self.tokenizer.pad_token_id
        self.config.num_labels = 1
        self.config.problem_type = "regression"  # else pipelines and servers give the sigmoid of the reward
        self.config.use_cache = False
        self.row_settings = (self.vocab_size, self.max_length, False, o.append_eos)
        self.chat_format = make_chat_format(self.tokenizer, o)
        self.encoder = Encoder(self.tokenizer, *self.row_settings, chat_format=self.chat_format)

    # ---- rows --------------------------------------------------------------------------------------------------------

    def fingerprint(self) -> str:
        return repr((self.tokenizer_text, *self.chat_format.settings(self.tokenizer), *self.row_settings))

    def inspect_columns(self, examples, split: str):
        from datasets import Features, List, Value

        self.pairs = PairEncoder(self.encoder, examples, split)
        self.row_description = self.pairs.describe()
        self.reads_chats = self.pairs.chat
        features = {f"{side}_ids": List(Value("int32")) for side in SIDES}
        return self.pairs.needed, Features(features | {name: Value("int64") for name in ("length", "targets", "cut")})

    def encode(self, batch: dict[str, list], locations) -> dict[str, list]:
        """Return both sequences of each pair; `targets` is 0 for one whose sequences are equal, or were truncated so."""
        rows = self.pairs.encode_batch(batch, locations)
        rows = {name: values for name, values in rows.items() if not name.endswith("_labels")}
        pairs = zip(rows["chosen_ids"], rows["rejected_ids"], strict=True)
        return rows | {"targets": [int(chosen != rejected) for chosen, rejected in pairs]}

    def plan_rows(self, has_chats: bool) -> dict[str, str]:
        return self.chat_format.plan() if has_chats else {}

    # ---- model and loss ----------------------------------------------------------------------------------------------

    def build(self, weights: str | None = None, empty: bool = False) -> torch.nn.Module:
        from transformers import AutoModelForSequenceClassification

        return build_model(self.cfg, self.config, AutoModelForSequenceClassification, weights, self.new_head, empty)

    def collate(self, rows: list[dict[str, np.ndarray]], training: bool) -> Batch:
        """Return the chosen sequences of all rows, then the rejected ones, in one batch of 2 × rows."""
        sequences = [{"input_ids": row[f"{side}_ids"]} for side in SIDES for row in rows]
        lengths = [len(sequence["input_ids"]) for sequence in sequences]
        width = padded_length(lengths, self.cfg.pad_to_multiple_of, self.max_length)
        inputs = pad_columns(sequences, {"input_ids": self.tokenizer.pad_token_id}, width)
        differs = [not np.array_equal(row["chosen_ids"], row["rejected_ids"]) for row in rows]
        inputs["counted"] = np.array(differs, np.float32)
        tensors = {name: torch.from_numpy(values) for name, values in inputs.items()}
        weight = float(inputs["counted"].sum())
        return Batch(tensors, weight, tokens=sum(lengths), padded_tokens=len(sequences) * width)

    def loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: value.sum() for name, value in self._by_pair(model, inputs).items()}

    def row_losses(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"loss": self._by_pair(model, inputs)["loss"], "weight": inputs["counted"]}

    def _by_pair(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return loss, margin and rewards of each pair, (rows,); zero for a pair that does not count."""
        counted = inputs["counted"]
        arguments = {name: value for name, value in inputs.items() if name != "counted"}
        rewards = at_least_float32(call_on_tokens(model, arguments).logits[:, 0])
        chosen, rejected = rewards.chunk(2)
        margin = chosen - rejected
        losses = -F.logsigmoid(margin)
        if self.options.center_rewards_coefficient:
            losses = losses + self.options.center_rewards_coefficient * (chosen + rejected) ** 2
        values = {"loss": losses, "reward_margin": margin, "reward_accuracy": margin > 0}
        values |= {"chosen_reward": chosen, "rejected_reward": rejected}
        return {name: value * counted for name, value in values.items()}

    def metrics(self, sums: dict[str, float], weight: float) -> dict[str, float]:
        return {name: sums[name] / weight for name in sums if "reward" in name}
