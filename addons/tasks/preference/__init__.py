# Needs addons/tasks/distillation/.
"""Preference optimization (DPO): a language model learns to prefer one completion of a prompt to another.

A row is one of
    {"prompt": "…", "chosen": "…", "rejected": "…"}      text
    {"chosen": [{"role": "user", …}, …], "rejected": […]}  chats; a `prompt` (text or turns) may stand before both
loss = −log σ(margin), margin = beta · (log-ratio of chosen − log-ratio of rejected), where a log-ratio is the
completion's log-probability under the model minus that under a frozen reference (Rafailov et al. 2023). The tokens that
both completions begin with cancel in the margin, so they are no targets. Tests: tests/addons/tasks/test_preference.py.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from addons.tasks.distillation.frozen_teacher import RANDOM, TaughtTask
from addons.tasks.distillation.token_terms import token_log_probs
from addons.tasks.preference.preference_pairs import SIDES, PairEncoder
from engine.config.option import AS_GIVEN, option
from engine.task import Batch
from engine.text.tokenize_and_pack import IGNORED, padded_length
from src.losses.chunked_cross_entropy import Scored


@dataclass
class Options:
    max_length: int | None = option(
        "tokens of prompt and completion; longer ones are truncated (default: the model's limit, at most 1024)",
        min=2,
    )
    append_eos: bool = option("end every completion with the tokenizer's end-of-text token", True)
    chat_template: str | None = option(
        "file with a Jinja chat template (default: the tokenizer's)", is_path=AS_GIVEN, from_checkpoint=False
    )
    beta: float = option("scale of the log-ratios: higher keeps the model nearer to the reference", 0.1, above=0)
    preference_loss: str = option(
        "sigmoid (DPO) or ipo ((log-ratio difference − 1 / (2 beta))², of whole completions, not by token as TRL)",
        "sigmoid",
        choices=("sigmoid", "ipo"),
    )
    label_smoothing: float = option(
        "share of pairs that are assumed to be the wrong way round (sigmoid)",
        0.0,
        min=0,
        below=0.5,
    )
    # may_change_on_resume, because reference_revision tells whether the weights are the same.
    reference_name_or_path: str | None = option(
        "Hub id, folder or run of the frozen reference (default: the weights that this run begins with)",
        is_path=True,
        may_change_on_resume=True,
        from_checkpoint=True,
    )
    reference_revision: str | None = option(
        "branch, tag or commit of a Hub reference (default: main); of a folder the hash of its weights, filled in",
        from_checkpoint=True,
    )
    # Options of causal_lm that pairs do not have.
    packing, text_column, sample_prompt, router_aux_loss_coef = False, "", None, 0.0

    def check(self) -> list[str]:
        if self.preference_loss == "ipo" and self.label_smoothing:
            return [f"label_smoothing is {self.label_smoothing}, which preference_loss ipo does not have: remove one"]
        return []


class Task(TaughtTask):
    frozen = "reference"
    can_shorten = False  # a pair has two texts
    cut_by_cost = False  # both are padded to the longest text

    def load(self) -> None:
        # An option of the run: a resumed run and eval.py use the same reference, not the weights that they begin with.
        cfg, o = self.cfg, self.options
        o.reference_name_or_path = o.reference_name_or_path or cfg.init_from or cfg.model_name_or_path or RANDOM
        super().load()

    # ---- rows --------------------------------------------------------------------------------------------------------

    def inspect_columns(self, examples, split: str):
        from datasets import Features, List, Value

        self.pairs = PairEncoder(self.encoder, examples, split)
        features = {f"{side}_{part}": List(Value("int32")) for side in SIDES for part in ("ids", "labels")}
        return self.pairs.needed, Features(features | {name: Value("int64") for name in ("length", "targets", "cut")})

    def encode(self, batch: dict[str, list], locations) -> dict[str, list]:
        return self.pairs.encode_batch(batch, locations)

    # ---- model and loss ----------------------------------------------------------------------------------------------

    def collate(self, rows: list[dict[str, np.ndarray]], training: bool) -> Batch:
        """Return the chosen sequences of all rows, then the rejected ones, in one batch of 2 × rows."""
        pairs = [(row[f"{side}_ids"], row[f"{side}_labels"]) for side in SIDES for row in rows]
        width = padded_length([len(ids) for ids, _ in pairs], self.cfg.pad_to_multiple_of, self.max_length)
        ids, targets = np.zeros((len(pairs), width), np.int64), np.full((len(pairs), width), IGNORED, np.int64)
        for i, (tokens, labels) in enumerate(pairs):
            ids[i, : len(tokens)] = tokens
            targets[i, : max(0, len(tokens) - 1)] = labels[1:]
        counted = (targets != IGNORED).any(1).reshape(2, -1).any(0).astype(np.float32)  # a pair without targets is not
        lengths = np.array([len(tokens) for tokens, _ in pairs])
        inputs = {"input_ids": ids, "targets": targets, "counted": counted, "lengths": lengths}
        tensors = {name: torch.from_numpy(value) for name, value in inputs.items()}
        return Batch(tensors, float(counted.sum()), int(lengths.sum()), ids.size)

    def loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: value.sum() for name, value in self._by_pair(model, inputs).items()}

    def row_losses(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"loss": self._by_pair(model, inputs)["loss"], "weight": inputs["counted"]}

    def _by_pair(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return loss, margin and rewards of each pair, (rows,); zero for a pair without targets."""
        o, counted = self.options, inputs["counted"]
        policy, reference = (self._log_probs(scored, inputs["targets"]) for scored in self.score_both(model, inputs))
        chosen, rejected = (policy - reference.detach()).chunk(2)
        margin = o.beta * (chosen - rejected)
        if o.preference_loss == "ipo":
            losses = (chosen - rejected - 1 / (2 * o.beta)) ** 2
        else:
            losses = -(1 - o.label_smoothing) * F.logsigmoid(margin) - o.label_smoothing * F.logsigmoid(-margin)
        values = {"loss": losses, "reward_margin": margin, "reward_accuracy": margin > 0}
        values |= {"chosen_reward": o.beta * chosen, "rejected_reward": o.beta * rejected}
        return {name: value * counted for name, value in values.items()}

    def _log_probs(self, scored: Scored, targets: torch.Tensor) -> torch.Tensor:
        """Return the log-probability of the targets of each sequence, (2 × rows,)."""
        return token_log_probs(scored, targets.flatten()).view_as(targets).sum(-1)

    def metrics(self, sums: dict[str, float], weight: float) -> dict[str, float]:
        return {name: sums[name] / weight for name in sums if "reward" in name}
