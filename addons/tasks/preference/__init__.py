# Needs addons/tasks/distillation/.
"""Preference optimization (DPO, ORPO and others): a language model learns to prefer one completion to another.

A row is one of
    {"prompt": "…", "chosen": "…", "rejected": "…"}      text
    {"chosen": [{"role": "user", …}, …], "rejected": […]}  chats; a `prompt` (text or turns) may stand before both
With a frozen reference, the score of a completion is its log-ratio: its log-probability under the model minus that
under the reference (DPO: Rafailov et al. 2023). Without one (orpo: Hong et al. 2024, simpo, cpo) it is the model's
log-probability. pair_losses.py has the losses; each is a sum over pairs. Where a loss depends on nothing but the
difference of both scores, the tokens that both completions begin with cancel, so they are no targets.
Tests: tests/addons/tasks/test_preference.py.
"""

from dataclasses import dataclass

import numpy as np
import torch

from addons.tasks.distillation.reference import ReferenceOptions, ReferenceTask
from addons.tasks.distillation.token_terms import token_log_probs
from addons.tasks.preference.pair_losses import PAIR_LOSSES, SMOOTHED, PairLoss
from addons.tasks.preference.preference_pairs import PARTS, SIDES, WITHOUT_TARGETS, PairEncoder
from engine.config.option import option
from engine.rows.chat_options import ChatOptions
from engine.rows.tokenize_and_pack import IGNORED, padded_length
from engine.task import Batch
from src.losses.chunked_cross_entropy import Scored, score_tokens


@dataclass
class Options(ReferenceOptions, ChatOptions):
    max_length: int | None = option(
        "tokens of prompt and completion; longer ones are truncated (default: the model's limit, at most 1024)",
        min=2,
    )
    append_eos: bool = option("end every completion with the tokenizer's end-of-text token", True)
    beta: float = option(
        "scale of the scores: higher keeps the model nearer to the reference (orpo: weight of the odds ratio; simpo: 2 or "
        "more)",
        0.1,
        above=0,
    )
    preference_loss: str = option(
        "sigmoid (DPO), ipo ((log-ratio difference − 1 / (2 beta))², of whole completions, not by token as TRL), hinge, "
        "robust, sigmoid_norm (by token), apo_zero; without a reference: orpo, simpo, cpo",
        "sigmoid",
        choices=tuple(PAIR_LOSSES),
    )
    nll_weight: float | None = option(
        "weight of the negative log-likelihood of chosen, the mean over its tokens (default: 1 with orpo and cpo, else 0)",
        min=0,
    )
    simpo_gamma: float = option("target of the margin (simpo)", 0.5, min=0)
    label_smoothing: float = option(
        "share of pairs that are assumed to be the wrong way round (sigmoid, robust, sigmoid_norm, cpo, simpo)",
        0.0,
        min=0,
        below=0.5,
    )
    # Options of causal_lm that pairs do not have.
    packing, sample_prompt, router_aux_loss_coef = False, None, 0.0

    @property
    def loss_of_pairs(self) -> PairLoss:
        """Return the loss that `preference_loss` names."""
        return PAIR_LOSSES[self.preference_loss]

    @property
    def weight_of_nll(self) -> float:
        """Return `nll_weight`, or its default."""
        return self.loss_of_pairs.nll_weight if self.nll_weight is None else self.nll_weight

    @property
    def needs_all_tokens(self) -> bool:
        """Return whether the tokens that both completions begin with matter."""
        return self.loss_of_pairs.needs_all_tokens or self.weight_of_nll > 0

    def check(self) -> list[str]:
        name, errors = self.preference_loss, []
        if self.label_smoothing and name not in SMOOTHED:
            errors.append(
                f"label_smoothing is {self.label_smoothing}, which preference_loss {name} does not have: remove one"
            )
        if self.simpo_gamma != Options.simpo_gamma and name != "simpo":
            errors.append(f"simpo_gamma is {self.simpo_gamma}, which preference_loss {name} does not have: remove one")
        if self.reference_name_or_path and not self.loss_of_pairs.has_reference:
            errors.append(
                f"reference_name_or_path is {self.reference_name_or_path}, but preference_loss {name} has no reference: "
                "remove it"
            )
        return errors


class Task(ReferenceTask):
    without_targets = WITHOUT_TARGETS
    parts = PARTS
    id_columns = ("chosen_ids", "rejected_ids")

    @property
    def has_reference(self) -> bool:
        """Return whether the loss has a reference."""
        return self.options.loss_of_pairs.has_reference

    # ---- rows --------------------------------------------------------------------------------------------------------

    def fingerprint(self) -> str:
        return super().fingerprint() + (" all tokens" if self.options.needs_all_tokens else "")

    def inspect_columns(self, examples, split: str):
        from datasets import Features, List, Value

        self.pairs = PairEncoder(self.encoder, examples, split, self.options.needs_all_tokens)
        self.reads_chats = self.pairs.chat
        self.row_description = self.pairs.describe()
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
        has_targets = (targets != IGNORED).any(1).reshape(2, -1)
        counted = has_targets.all(0) if self.options.needs_all_tokens else has_targets.any(0)
        counted = counted.astype(np.float32)
        lengths = np.array([len(tokens) for tokens, _ in pairs])
        inputs = {"input_ids": ids, "targets": targets, "counted": counted, "lengths": lengths}
        tensors = {name: torch.from_numpy(value) for name, value in inputs.items()}
        return Batch(tensors, float(counted.sum()), int(lengths.sum()), ids.size)

    def loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: value.sum() for name, value in self._by_pair(model, inputs).items()}

    def row_losses(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"loss": self._by_pair(model, inputs)["loss"], "weight": inputs["counted"]}

    def _by_pair(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return loss, margin and rewards of each pair, (rows,); zero for a pair that does not count."""
        o, counted = self.options, inputs["counted"]
        log_probs, scores = self._scores(model, inputs)
        chosen, rejected = scores.chunk(2)
        losses = o.loss_of_pairs.of_scores(chosen, rejected, o)
        margin = o.beta * (chosen - rejected)
        values = {"reward_margin": margin, "reward_accuracy": margin > 0}
        values |= {"chosen_reward": o.beta * chosen, "rejected_reward": o.beta * rejected}
        if o.weight_of_nll:
            nll = -(log_probs / self._tokens(inputs)).chunk(2)[0]
            losses = losses + o.weight_of_nll * nll
            values["chosen_nll"] = nll
        return {name: value * counted for name, value in ({"loss": losses} | values).items()}

    def _scores(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (log-probabilities, scores) of the completions, chosen and then rejected ones, (2 × rows,)."""
        targets = inputs["targets"]
        if not self.has_reference:
            log_probs = self._log_probs(score_tokens(model, inputs, self.plain_head), targets)
            scores = log_probs
        else:
            policy, reference = self.score_both(model, inputs)
            log_probs = self._log_probs(policy, targets)
            scores = log_probs - self._log_probs(reference, targets).detach()
        if self.options.loss_of_pairs.by_token:
            scores = scores / self._tokens(inputs)
        return log_probs, scores

    def _log_probs(self, scored: Scored, targets: torch.Tensor) -> torch.Tensor:
        """Return the log-probability of the targets of each sequence, (2 × rows,)."""
        return token_log_probs(scored, targets.flatten()).view_as(targets).sum(-1)

    def _tokens(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the number of targets of each sequence, (2 × rows,), at least 1."""
        return (inputs["targets"] != IGNORED).sum(-1).clamp(min=1)

    def metrics(self, sums: dict[str, float], weight: float) -> dict[str, float]:
        return {name: sums[name] / weight for name in sums if "reward" in name or name == "chosen_nll"}
