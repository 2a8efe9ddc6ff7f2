# Needs addons/tasks/distillation/ and addons/techniques/_batch_loss.py.
"""KTO: a language model learns from single answers that are good or bad (Ethayarajh et al. 2024).

A row is {"prompt": "…", "completion": "…", "label": true}. The reward of a completion is beta · its log-ratio to a frozen
reference. The loss of a good one is desirable_weight · (1 − σ(reward − z)), that of a bad one undesirable_weight ·
(1 − σ(z − reward)). The baseline z is beta · max(0, mean log-ratio of mismatched pairs), which estimates the divergence
from the reference: each prompt with the answer of the row before it. The mean is taken over the whole global batch,
so that it is the same on any number of processes and for any micro-batch; this costs a forward pass of both models
without gradients, as in TRL. Tests: tests/addons/tasks/test_kto.py.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from addons.tasks.distillation.reference import ReferenceOptions, ReferenceTask
from addons.tasks.distillation.token_terms import token_log_probs
from addons.techniques._batch_loss import BatchLossTask
from engine.config.errors import UsageError, warn
from engine.config.option import option
from engine.plan.seeding import seed_everything
from engine.rows.chat_options import ChatOptions
from engine.rows.foreign_turns import split_prompt
from engine.rows.formats import TEXT_PAIRS, as_bool
from engine.rows.tokenize_and_pack import IGNORED, padded_length
from engine.run.totals_and_votes import ComputeGradient
from engine.task import Batch

MISMATCHED = "mismatched_"  # begins the names of a mismatched pair
COLUMNS = {"": ("input_ids", "labels"), MISMATCHED: ("mismatched_ids", "mismatched_labels")}  # of the prepared rows


@dataclass
class Options(ReferenceOptions, ChatOptions):
    max_length: int | None = option(
        "tokens of prompt and completion; longer ones are truncated (default: the model's limit, at most 1024)",
        min=2,
    )
    append_eos: bool = option("end every completion with the tokenizer's end-of-text token", True)
    beta: float = option("scale of the log-ratios: higher keeps the model nearer to the reference", 0.1, above=0)
    kto_loss: str = option(
        "kto, or apo_zero_unpaired (the same with z = 0: no mismatched pairs, so half the forward passes)",
        "kto",
        choices=("kto", "apo_zero_unpaired"),
    )
    desirable_weight: float = option("weight of the loss of rows with label true", 1.0, min=0)
    undesirable_weight: float = option("weight of the loss of rows with label false", 1.0, min=0)
    # Options of causal_lm that rated answers do not have.
    packing, sample_prompt, router_aux_loss_coef = False, None, 0.0


class Task(ReferenceTask):
    row_losses: Any = None  # a row's loss depends on the whole global batch
    baseline: torch.Tensor | float = 0.0  # mean log-ratio of mismatched pairs of the global batch, at least 0

    @property
    def has_baseline(self) -> bool:
        """Return whether the loss has a baseline from mismatched pairs."""
        return self.options.kto_loss == "kto"

    # ---- rows --------------------------------------------------------------------------------------------------------

    def load(self) -> None:
        super().load()
        self.encoder.formats = (TEXT_PAIRS,)

    def fingerprint(self) -> str:
        return super().fingerprint() + self.options.kto_loss

    def inspect_columns(self, examples, split: str):
        from datasets import Features, List, Value

        columns = examples.column_names
        if missing := [name for name in ("prompt", "completion", "label") if name not in columns]:
            pairs = "; pairs of `chosen` and `rejected` are rows of --task preference"
            raise UsageError(
                f"{split} data: {' and '.join(missing)} not among the columns {', '.join(columns)}: a row needs `prompt`, "
                f"`completion` and `label`{pairs if {'chosen', 'rejected'} <= {*columns} else ''}"
            )
        raw, _ = super().inspect_columns(examples, split)
        self.raw_columns = [name for name in raw if name != "label"]  # which says here that an answer is bad
        self.encoder.require_one_sequence()
        prefixes = ("", MISMATCHED) if self.has_baseline else ("",)
        features: dict[str, Any] = {name: List(Value("int32")) for prefix in prefixes for name in COLUMNS[prefix]}
        features |= {name: Value("int64") for name in ("length", "targets", "cut", "label")}
        return [*self.raw_columns, "label"], Features(features)

    def encode(self, batch: dict[str, list], locations) -> dict[str, list]:
        """Return completions and mismatched pairs as ids and labels. `targets` is 0 for a row truncated in the prompt.

        The mismatched completion of a row is that of the row before it in the block, of the first row the last one. A
        block of one row has none."""
        labels = [as_bool(label) for label in batch["label"]]
        for label, location in zip(labels, locations, strict=True):
            if not isinstance(label, bool):
                held = "null" if label is None else repr(label)
                raise UsageError(f"{location}: `label` is {held}: give true for a good completion, false for a bad one")
        raw = {name: batch[name] for name in self.raw_columns}
        made = self.encoder.encode_batch(raw, locations)
        rows = {name: made[name] for name in ("input_ids", "labels", "length", "cut")}
        rows["targets"] = [int(count > 0) for count in made["targets"]]
        rows["label"] = [int(label) for label in labels]
        if self.has_baseline:
            prompts, answers = self._prompts_and_answers(raw)
            before = [*answers[-1:], *answers[:-1]]
            made = self.encoder.encode_batch(raw | {"prompt": prompts, "completion": before}, locations)
            alone = len(before) == 1
            rows["mismatched_ids"] = [[]] if alone else made["input_ids"]
            rows["mismatched_labels"] = [[]] if alone else made["labels"]
            # Both are computed apart, so the longer one is what must fit into per_device_batch_tokens.
            pairs = zip(rows["input_ids"], rows["mismatched_ids"], strict=True)
            rows["length"] = [max(map(len, pair)) for pair in pairs]
        return rows

    def _prompts_and_answers(self, raw: dict[str, list]) -> tuple[list, list]:
        """Return what stands before the answer of each row, and the answer; a completion may repeat its prompt."""
        prompts, completions = raw["prompt"], raw["completion"]
        if not self.encoder.format.is_chat:
            return prompts, completions
        pairs = [_split_chat(*row) for row in zip(prompts, completions, strict=True)]
        return [before for before, _ in pairs], [answer for _, answer in pairs]

    def on_train_data(self, train_set: Any) -> None:
        """Warn if all rows have one label; the labels of a stream are not known."""
        sources = [rows for _, _, rows in train_set.segments()] if train_set is not None else []
        labels = {bool(label) for rows in sources for label in np.unique(rows.values("label"))}
        if len(labels) == 1:
            label = str(labels.pop()).lower()
            warn(f"`label` is {label} in all rows of the training data: KTO needs good and bad completions")

    # ---- model and loss ----------------------------------------------------------------------------------------------

    def collate(self, rows: list[dict[str, np.ndarray]], training: bool) -> Batch:
        """Return the completions of all rows and, with names that begin with MISMATCHED, the mismatched pairs."""
        inputs = self._padded(rows, "")
        if self.has_baseline:
            inputs |= self._padded(rows, MISMATCHED)
        inputs["is_desirable"] = np.array([row["label"] for row in rows], np.float32)
        tensors = {name: torch.from_numpy(values) for name, values in inputs.items()}
        tokens = sum(len(row["input_ids"]) for row in rows)
        return Batch(tensors, float(inputs["counted"].sum()), tokens, inputs["input_ids"].size)

    def _padded(self, rows: list[dict[str, np.ndarray]], prefix: str) -> dict[str, np.ndarray]:
        """Return ids, targets and whether a sequence has targets."""
        ids_column, labels_column = COLUMNS[prefix]
        sequences = [(row[ids_column], row[labels_column]) for row in rows]
        width = padded_length([len(ids) for ids, _ in sequences], self.cfg.pad_to_multiple_of, self.max_length)
        ids = np.zeros((len(rows), width), np.int64)
        targets = np.full((len(rows), width), IGNORED, np.int64)
        for i, (tokens, labels) in enumerate(sequences):
            ids[i, : len(tokens)] = tokens
            targets[i, : max(0, len(tokens) - 1)] = labels[1:]
        counted = (targets != IGNORED).any(1).astype(np.float32)
        return {f"{prefix}input_ids": ids, f"{prefix}targets": targets, f"{prefix}counted": counted}

    def loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return in training the sums of a micro-batch, with the baseline that `wrap_gradient` has set; in evaluation
        the log-ratios of its rows, for `batch_loss`; of mismatched pairs alone their sum."""
        if "input_ids" not in inputs:
            log_ratios = self._log_ratios(model, inputs, MISMATCHED)
            return {"loss": log_ratios.sum(), "counted": inputs[f"{MISMATCHED}counted"].sum()}
        log_ratios = self._log_ratios(model, inputs, "")
        if model.training:
            losses = self._losses(log_ratios, inputs["is_desirable"], self.baseline)
            sums = {"loss": (losses * inputs["counted"]).sum()}
            return sums | {"kl": inputs["counted"].sum() * self.baseline} if self.has_baseline else sums
        rows = {"log_ratio": log_ratios, "is_desirable": inputs["is_desirable"], "counted": inputs["counted"]}
        if self.has_baseline:
            rows["mismatched_log_ratio"] = self._log_ratios(model, inputs, MISMATCHED)
            rows["mismatched_counted"] = inputs["mismatched_counted"]
        return rows

    def _log_ratios(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor], prefix: str) -> torch.Tensor:
        """Return the log-ratio of each completion to the reference, (rows,)."""
        targets = inputs[f"{prefix}targets"]
        scored = self.score_both(model, {"input_ids": inputs[f"{prefix}input_ids"]})
        policy, reference = (token_log_probs(each, targets.flatten()).view_as(targets).sum(-1) for each in scored)
        return policy - reference.detach()

    def _losses(self, log_ratios: torch.Tensor, is_desirable: torch.Tensor, baseline: Any) -> torch.Tensor:
        o = self.options
        margin = o.beta * (log_ratios - baseline)
        desirable = o.desirable_weight * (1 - torch.sigmoid(margin))
        undesirable = o.undesirable_weight * (1 - torch.sigmoid(-margin))
        return torch.where(is_desirable > 0, desirable, undesirable)

    def wrap_gradient(self, compute: ComputeGradient) -> ComputeGradient:
        if not self.has_baseline:
            return compute

        def with_baseline(backend, module, batch, totals):
            self.baseline = baseline_of_batch(backend, module, batch)
            return compute(backend, module, batch, totals)

        return with_baseline

    # ---- evaluation --------------------------------------------------------------------------------------------------

    sums_by_block = BatchLossTask.sums_by_block  # of `global_batch_size` rows, as in training

    def batch_loss(self, vectors: dict[str, torch.Tensor], weight: float) -> dict[str, torch.Tensor]:
        """Return the sums of a global batch of an evaluation."""
        log_ratios, is_desirable, counted = (vectors[n] for n in ("log_ratio", "is_desirable", "counted"))
        baseline = torch.zeros((), dtype=log_ratios.dtype)
        if self.has_baseline:
            total = (vectors["mismatched_log_ratio"] * vectors["mismatched_counted"]).sum()
            baseline = _baseline(total, vectors["mismatched_counted"].sum())
        losses = self._losses(log_ratios, is_desirable, baseline)
        rewards = self.options.beta * log_ratios * counted
        desirable = is_desirable * counted
        return {
            "loss": (losses * counted).sum(),
            "kl": baseline * weight,
            "desirable": desirable.sum(),
            "desirable_reward": (rewards * desirable).sum(),
            "undesirable_reward": (rewards * (1 - is_desirable)).sum(),
        }

    def metrics(self, sums: dict[str, float], weight: float) -> dict[str, float]:
        counts = {"desirable": sums["desirable"], "undesirable": weight - sums["desirable"]}
        means = {f"{n}_reward": sums[f"{n}_reward"] / count if count else math.nan for n, count in counts.items()}
        margin = means["desirable_reward"] - means["undesirable_reward"]
        return means | {"reward_margin": margin, "kl": sums["kl"] / weight}

    def row_metrics(self, rows: dict[str, np.ndarray]) -> dict[str, float]:
        return {}


def _split_chat(prompt: Any, completion: Any) -> tuple[list[dict], list[dict]]:
    """Return a row as (the turns before the assistant's first one of the completion, that turn and those after it)."""
    before, answer = split_prompt(prompt, completion, ("prompt", "completion"))
    first = next((i for i, turn in enumerate(answer) if turn["role"] == "assistant"), 0)
    return [*before, *answer[:first]], answer[first:]


def _baseline(total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Return the mean log-ratio of mismatched pairs, at least 0, and 0 without such pairs."""
    return (total / count.clamp(min=1)).clamp(min=0)


@torch.no_grad()
def baseline_of_batch(backend: Any, module: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Return the baseline of the global batch, the same on every rank; one all-reduce on the device."""
    # Only the forward pass of a sharded model is a collective; without DDP's wrapper no other is.
    caller = module if backend.is_sharded else backend.accelerator.unwrap_model(module)
    device = backend.accelerator.device
    # The same on a rank that has only dummy batches.
    dtype = torch.promote_types(next(module.parameters()).dtype, torch.float32)
    totals = [torch.zeros(2, dtype=dtype, device=device)]
    for micro, rows in batch:
        if micro.dummy and not backend.is_sharded:
            continue
        mismatched = {name: value for name, value in rows.inputs.items() if name.startswith(MISMATCHED)}
        inputs = {name: value.to(device, non_blocking=True) for name, value in mismatched.items()}
        seed_everything(micro.seed)
        with backend.buffers.unchanged():  # running statistics
            out = caller(inputs)
        if not micro.dummy:
            totals.append(torch.stack([out["loss"], out["counted"]]).to(dtype))
    return _baseline(*backend.sum_over_micro_batches(torch.stack(totals)))
