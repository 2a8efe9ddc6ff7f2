"""The baseline: a hand-written training loop in one file, without checks, checkpoints or resuming.

python benchmarks/plain.py ROWS.jsonl MODEL.yaml [STEPS]   (rows of `input_ids`; prints the end time of each step last)
"""

import json
import sys
import time

import torch
import torch.nn.functional as F
import yaml


def pad(rows: list[dict]) -> dict[str, torch.Tensor]:
    width = max(len(row["input_ids"]) for row in rows)
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        n = len(row["input_ids"])
        ids[i, :n], mask[i, :n] = torch.as_tensor(row["input_ids"]), 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def labels_loss(model, batch: dict) -> torch.Tensor:
    """Return the sum of the token losses, computed by the model from `labels`."""
    return model(**batch, num_items_in_batch=1, use_cache=False).loss


def direct_loss(model, batch: dict) -> torch.Tensor:
    """Return the same sum in the fewest operations: no mask, targets shifted beforehand."""
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum")


class Plain:
    """Model, AdamW with decay groups, clipping, linear schedule and gradient accumulation over a list of batches."""

    def __init__(self, model, loss, learning_rate: float, total: int, ranks: int = 1):
        self.model, self.loss, self.ranks = model, loss, ranks
        groups = [[p for p in model.parameters() if p.dim() >= 2], [p for p in model.parameters() if p.dim() < 2]]
        self.optimizer = torch.optim.AdamW(
            [{"params": groups[0], "weight_decay": 0.01}, {"params": groups[1], "weight_decay": 0.0}],
            lr=learning_rate,
            fused=True,
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: max(0.0, 1 - step / total))
        model.train()

    def step(self, batches: list[dict], weight: float) -> torch.Tensor:
        """Make one optimizer step; return the sum of the losses divided by `weight`."""
        total = 0.0
        for i, batch in enumerate(batches):
            if self.ranks > 1:
                self.model.require_backward_grad_sync = i == len(batches) - 1
            loss = self.loss(self.model, batch) * (self.ranks / weight)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total


def main(rows: str, model_file: str, steps: str = "1") -> None:
    from datasets import load_dataset
    from torch.utils.data import DataLoader
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(42)
    dataset = load_dataset("json", data_files=rows, split="train")
    with open(model_file) as file:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**yaml.safe_load(file)))
    plain = Plain(model, labels_loss, 5e-5, total=int(steps))
    ends = []
    for batch in DataLoader(dataset, batch_size=8, shuffle=True, collate_fn=pad):
        loss = plain.step([batch], int((batch["labels"][:, 1:] != -100).sum())).item()
        ends.append(time.time())
        print(f"step {len(ends)} loss {loss:.4f}")
        if len(ends) == int(steps):
            break
    print(json.dumps(ends))


if __name__ == "__main__":
    main(*sys.argv[1:])
