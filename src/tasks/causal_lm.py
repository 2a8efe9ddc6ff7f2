"""Causal language models: text, chats, prompt and completion, or token ids.

A row is one of
    {"text": "…"}                                        loss on every token
    {"messages": [{"role": "user", "content": "…"}, …]}  loss on the assistant's turns
    {"conversations": [{"from": "human", "value": "…"}, …]}  the same, as ShareGPT writes it
    {"instruction": "…", "input": "…", "output": "…"}    Alpaca: a chat if there is a chat template; loss on the output
    {"prompt": "…", "completion": "…"}                   loss on the completion; both texts, or turns of a chat
    {"input_ids": [5, 6, …], "labels": [-100, 6, …]}     used as it is; labels are optional, -100 is ignored
docs/data.md says more, and how to name columns that are called otherwise.
Tests: tests/src/tasks/test_causal_lm.py.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
import torch

from engine import task as base
from engine.config.errors import UsageError
from engine.config.option import option
from engine.models.build_model import build_model
from engine.models.compile_and_recompute import shapes_repeat
from engine.models.config_and_tokenizer import load_text_decoder
from engine.models.generation import AnswerOptions, Generation
from engine.models.model_checks import has_plain_lm_head
from engine.models.packed_attention import PackedAttention
from engine.models.router_loss import RouterLoss
from engine.rows.chat_options import ChatOptions
from engine.rows.encode_rows import Encoder, make_chat_format
from engine.rows.formats import PARTS
from engine.rows.tokenize_and_pack import IGNORED, padded_length
from engine.task import Batch
from src.losses.chunked_cross_entropy import positions_of_targets, row_losses, score_tokens, sums_from_scored
from src.losses.cross_entropy import CrossEntropy
from src.losses.metrics import check_metrics, compute_metrics


@dataclass
class Options(CrossEntropy, ChatOptions, AnswerOptions):
    needs_model = True  # model_name_or_path or model_config

    max_length: int | None = option(
        "tokens per row; longer rows are truncated (default: the model's limit, at most 1024)",
        min=2,
    )
    packing: bool | Literal["whole"] = option(
        "pack documents into full rows, without attention across; whole: long ones are cut as without it, not split",
        False,
    )
    router_aux_loss_coef: float | None = option(
        "weight of the load-balancing loss of a mixture of experts, computed row by row (default: the model's own if its "
        "output_router_logits is true, else 0)",
        min=0,
    )
    append_eos: bool = option(
        "end every document with the tokenizer's end-of-text token; of a chat, the template decides",
        True,
    )
    sample_prompt: str | None = option(
        "after training, generate text from this prompt and print it (default: no sample)",
        may_be_empty=True,
        may_change_on_resume=True,
        from_checkpoint=False,
    )
    sample_tokens: int = option("tokens to generate from sample_prompt", 120, min=1, may_change_on_resume=True)


class Task(base.Task):
    attributes_from_weights: tuple[str, ...] = ("plain_head", "packed_attention", "generation_config")
    can_shorten = True
    parts = PARTS

    def load(self) -> None:
        options = self.options
        decoder = load_text_decoder(self.cfg, options.max_length)
        self.tokenizer, self.tokenizer_text, self.config, self.max_length, self.vocab_size = decoder
        if self.tokenizer is None and options.sample_prompt:
            raise UsageError("sample_prompt needs a tokenizer: give --tokenizer_name, or omit it")
        self.chat_format = make_chat_format(self.tokenizer, options)
        self.packed_attention = PackedAttention(self.cfg, self.config) if options.packing else None
        # Packed rows are nearly full, so they can all be as wide, in equal counts: then compiled layers have few graphs.
        self.cut_by_cost = self.cut_by_cost and not options.packing
        self.has_one_width = options.packing and self.cfg.compile and shapes_repeat(self.cfg)
        splits = options.packing is True and self.cfg.long_rows == "cut"
        self.row_settings = (self.vocab_size, self.max_length, splits, options.append_eos)
        self.encoder = Encoder(
            self.tokenizer, *self.row_settings, [*self.cfg.columns], self.chat_format, is_mixed=bool(self.cfg.mixture)
        )
        self.router = RouterLoss(self.config, options.router_aux_loss_coef)
        self.generation = Generation(options, self.tokenizer, self.config)
        metrics = options.metrics if self.generation.answers_rows else []
        self.metric_names = check_metrics(metrics, self.cfg.trust_remote_code)

    # ---- rows --------------------------------------------------------------------------------------------------------

    def fingerprint(self) -> str:
        packing = ("whole",) if self.options.packing and not self.encoder.splits else ()
        return repr((self.tokenizer_text, *self.chat_format.settings(self.tokenizer), *self.row_settings, *packing))

    def inspect_columns(self, examples, split: str):
        from datasets import Features, List, Value

        self.encoder = replace(self.encoder)  # each split may have another format
        needed, columns = self.encoder.choose(examples.column_names, split, examples.first)
        self.row_description = self.encoder.format.plan
        self.reads_chats = self.encoder.format.is_chat
        if self.options.packing:
            columns = [*columns, "documents"]  # lengths of the documents in a row
        types: dict[str, Any] = {}
        for name in columns:
            is_list = name in ("input_ids", "labels", "documents")
            types[name] = List(Value("int32")) if is_list else Value("int64")
        return needed, Features(types)

    def encode(self, batch: dict[str, list], locations) -> dict[str, list]:
        return self.encoder.encode_batch(batch, locations)

    def pack(self, rows: dict[str, list]) -> dict[str, list]:
        return self.encoder.pack(rows) if self.options.packing else rows

    def plan_rows(self, has_chats: bool) -> dict[str, str]:
        return self.chat_format.plan() if has_chats else {}

    # ---- model and loss ----------------------------------------------------------------------------------------------

    def build(self, weights: str | None = None, empty: bool = False) -> torch.nn.Module:
        from transformers import AutoModelForCausalLM

        model = build_model(self.cfg, self.config, AutoModelForCausalLM, weights, empty=empty)
        if not empty:
            self.plain_head = has_plain_lm_head(model, self.vocab_size)
            self.generation_config = model.generation_config
        if self.packed_attention:
            self.packed_attention.choose_kernel(model, self.vocab_size, empty)
        if self.router.coefficient and not empty:
            self.router.check(model, self.vocab_size)
        return model

    def collate(self, rows: list[dict[str, np.ndarray]], training: bool) -> Batch:
        lengths = [len(row["input_ids"]) for row in rows]
        if self.has_one_width and training:
            width = self.max_length
        else:
            width = padded_length(lengths, self.cfg.pad_to_multiple_of, self.max_length)
        ids = np.zeros((len(rows), width), np.int64)
        targets = np.full((len(rows), width), IGNORED, np.int64)
        for i, row in enumerate(rows):
            ids[i, : lengths[i]] = row["input_ids"]
            # The target of a token is the next token, so the weight counts predicted tokens, not input tokens.
            targets[i, : max(0, lengths[i] - 1)] = row.get("labels", row["input_ids"])[1:]
            if self.options.packing:
                targets[i, np.cumsum(row["documents"]) - 1] = IGNORED  # the next token belongs to another document
        # Padding is on the right, where causal attention never looks. So no attention mask is needed, and attention
        # uses its fast kernels.
        inputs = {"input_ids": ids, "targets": targets, "lengths": np.array(lengths)}
        inputs |= positions_of_targets(targets)
        if self.packed_attention:
            inputs |= self.packed_attention.inputs([row["documents"] for row in rows], width)
        tensors = {name: torch.from_numpy(values) for name, values in inputs.items()}
        num_targets = int((targets != IGNORED).sum())
        text_bytes = float(sum(int(row["bytes"]) for row in rows))
        return Batch(tensors, num_targets, sum(lengths), ids.size, {"bytes": text_bytes})

    def loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        targets = inputs["targets"]
        experts = {"output_router_logits": True} if self.router.coefficient else {}
        scored = score_tokens(model, inputs, self.plain_head, **experts)
        positions = inputs.get("target_positions")
        sums = sums_from_scored(scored, targets.flatten(), model.training, self.options, positions)
        if not self.router.coefficient:
            return sums
        is_real = torch.arange(targets.shape[1], device=targets.device) < inputs["lengths"][:, None]
        targets_in_row = (targets != IGNORED).sum(1)
        aux_loss = (self.router.by_row(scored.router_logits, is_real) * targets_in_row).sum()
        loss = sums["loss"] + self.router.coefficient * aux_loss
        return sums | {"loss": loss, "aux_loss": aux_loss.detach()}

    def row_losses(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self.router.coefficient:
            raise UsageError("losses of rows have no load-balancing loss of experts: give --router_aux_loss_coef 0")
        return row_losses(score_tokens(model, inputs, self.plain_head), inputs["targets"], self.options)

    def metrics(self, sums: dict[str, float], weight: float) -> dict[str, float]:
        cross_entropy = sums["loss"] - self.router.coefficient * sums.get("aux_loss", 0.0)
        perplexity = math.exp(min(cross_entropy / weight, 700.0))
        metrics = {"perplexity": perplexity, "accuracy": sums["correct"] / weight}
        if "aux_loss" in sums:
            metrics["aux_loss"] = sums["aux_loss"] / weight
        if sums["bytes"]:
            metrics["bits_per_byte"] = cross_entropy / math.log(2) / sums["bytes"]
        return metrics

    # ---- answers -----------------------------------------------------------------------------------------------------

    def on_validation_data(self, split: Any) -> None:
        self.generation.read_rows(split, self.options.packing, self.max_length - (self.cfg.long_rows == "cut"))

    def answer(
        self, model: torch.nn.Module, inputs: dict[str, torch.Tensor], max_new_tokens: int, **settings: Any
    ) -> torch.Tensor:
        model = self.saved(model)  # of distillation, the student
        return self.generation.generate(model, inputs, self.generation_config, max_new_tokens, **settings)

    def answer_metrics(self, answers: list[str], references: list[str]) -> dict[str, float]:
        return compute_metrics(self.metric_names, answers, references, self.cfg.trust_remote_code)

    def sample(self, model: torch.nn.Module) -> str | None:
        prompt = self.options.sample_prompt
        tokenizer = self.tokenizer
        if not prompt:
            return None
        ids = tokenizer(prompt)["input_ids"] or [tokenizer.eos_token_id]  # a tokenizer may drop spaces
        device = next(model.parameters()).device
        inputs = torch.tensor([ids[-self.max_length // 2 :]], device=device)
        torch.manual_seed(self.cfg.seed)
        tokens = cast(Any, model.eval()).generate(  # without dropout
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=min(self.options.sample_tokens, self.max_length - inputs.shape[1]),
            do_sample=True,
            temperature=0.7,
            top_k=40,
        )
        return tokenizer.decode(tokens[0], skip_special_tokens=True)
