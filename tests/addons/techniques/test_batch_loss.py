"""A loss over the whole global batch: exact for any number of processes and any micro-batch, and the mutants that are not."""

import json
import math
import os
import re
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from addons.techniques._batch_loss import BatchLossTask
from engine.plan.batch_plan import PlanConfig, plan
from engine.process.private_apis import known_masks
from src.tasks import causal_lm
from tests.helpers import kit, plain_task

STEPS = 10  # three of 24 rows and a tail of 11 are an epoch of 83
VOCABULARY = 50
GPT2 = kit.TINY | {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}


# ---- tasks over the same rows ------------------------------------------------------------------------------------


def pair_vectors(model, inputs) -> torch.Tensor:
    """Return (rows, 2, features): the first token's vector times ten, and the mean over the others."""
    with known_masks(packed=False):  # without it, transformers waits for the device
        hidden = model.base_model(input_ids=inputs["input_ids"], use_cache=False).last_hidden_state
    real = (inputs["targets"] != -100).to(hidden.dtype)[..., None]
    mean = (hidden[:, 1:] * real[:, :-1]).sum(1) / real.sum(1)
    pair = F.normalize(torch.stack([hidden[:, 0], mean], 1), dim=-1)
    return pair * torch.tensor([10.0, 1.0], dtype=hidden.dtype)[:, None]


def info_nce(pairs: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Return the sum over the rows; rows with the same first token are no negatives of each other."""
    logits = pairs[:, 0] @ pairs[:, 1].T
    same = (first[:, None] == first[None]) & ~torch.eye(len(first), dtype=torch.bool)
    logits = logits.masked_fill(same, -math.inf)
    rows = torch.arange(len(first))
    return (F.cross_entropy(logits, rows, reduction="sum") + F.cross_entropy(logits.T, rows, reduction="sum")) / 2


class Pairs(causal_lm.Task):
    def collate(self, rows, training):
        return super().collate(rows, training)._replace(weight=len(rows), sums={})

    def metrics(self, sums, weight):
        return {"rows": weight}


class Contrastive(BatchLossTask, Pairs):
    def represent(self, model, inputs):
        return {"pairs": pair_vectors(model, inputs), "first": inputs["input_ids"][:, 0]}

    def batch_loss(self, vectors, weight):
        return {"loss": info_nce(vectors["pairs"], vectors["first"])}

    def row_metrics(self, rows):
        return {"first": int(rows["first"].sum()), "norm": float(np.square(rows["pairs"]).sum())}


class WithinTheMicroBatch(Pairs):
    """The mutant: the same loss as a sum over micro-batches."""

    def loss(self, model, inputs):
        return {"loss": info_nce(pair_vectors(model, inputs), inputs["input_ids"][:, 0])}


class Unrepeatable(Contrastive):
    """Noise from a generator that is not seeded by the micro-batch, on rank 1 only."""

    generator = torch.Generator()

    def represent(self, model, inputs):
        pairs = pair_vectors(model, inputs)
        noise = torch.rand(pairs.shape, generator=self.generator) * float(os.environ["RANK"])
        return {"pairs": pairs + noise, "first": inputs["input_ids"][:, 0]}


class Spoiled(Contrastive):
    """Vectors of rows that begin with this token are not finite."""

    token = 0

    def represent(self, model, inputs):
        vectors = super().represent(model, inputs)
        factor = torch.where(vectors["first"] == self.token, math.inf, 1.0)
        return vectors | {"pairs": vectors["pairs"] * factor[:, None, None]}


TASKS = (Contrastive, WithinTheMicroBatch, Unrepeatable, Spoiled)


@pytest.fixture(scope="module", autouse=True)
def _tasks():
    with ExitStack() as stack:
        for task in TASKS:
            module = SimpleNamespace(Task=task, Options=causal_lm.Options)
            stack.enter_context(plain_task.registered(module, task.__name__))
        yield


def recipe(data, task, dropout=True, **fields) -> list[str]:
    values = data | {
        "validation_file": None,
        "task": task.__name__,
        "dtype": "float64",
        "global_batch_size": 24,
        "max_steps": STEPS,
    }
    values |= {"learning_rate": 3e-3, "lr_scheduler_type": "constant", "logging_steps": 1}
    if not dropout:
        no_dropout = {key: 0.0 for key in GPT2 if key.endswith("pdrop")}
        model = data["model_config"].with_name("no_dropout.yaml")
        values["model_config"] = kit.write_yaml(model, GPT2 | no_dropout)
    return kit.flags(**{name: value for name, value in (values | fields).items() if value is not None})


@pytest.fixture(scope="module")
def data(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("batch_loss")
    return tiny | {"model_config": kit.write_yaml(folder / "gpt2.yaml", GPT2)}


# ---- training ----------------------------------------------------------------------------------------------------------


def plain_loop(data, micro: int, loss_of_batch, dropout=True) -> tuple[list[float], dict]:
    """One process, the graph of a whole global batch in memory, one backward pass; only ids and seeds are ours."""
    from transformers import GPT2Config, GPT2LMHeadModel

    rows = [json.loads(line)["input_ids"] for line in data["train_file"].read_text().splitlines()]
    lengths = np.array([len(row) for row in rows])
    config = {key: value if dropout or not key.endswith("pdrop") else 0.0 for key, value in GPT2.items()}
    torch.manual_seed(42)
    model = GPT2LMHeadModel._from_config(GPT2Config(**config), dtype=torch.float64).train()
    named = list(model.named_parameters())
    groups = [[p for _, p in named if p.dim() > 1], [p for _, p in named if p.dim() < 2]]
    decays = zip(groups, (0.01, 0.0), strict=True)
    optimizer = torch.optim.AdamW([{"params": group, "weight_decay": decay} for group, decay in decays], lr=3e-3)
    losses = []
    for step in range(STEPS):
        batches = []  # (model, inputs, seed)
        for part in plan(PlanConfig(83, 24, micro, 42, lengths), *divmod(step, 4)):
            chosen = [torch.tensor(rows[i]) for i in part.ids]
            ids = torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True)
            targets = torch.nn.utils.rnn.pad_sequence([row[1:] for row in chosen], True, padding_value=-100)
            batches.append((model, {"input_ids": ids, "targets": F.pad(targets, (0, 1), value=-100)}, part.seed))
        loss = loss_of_batch(batches)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value for name, value in model.state_dict().items() if "lm_head" not in name}


def seeded(function, batches) -> torch.Tensor:
    """Return `function(model, inputs)` of all micro-batches, each computed with its seed."""
    return torch.cat([torch.manual_seed(seed) and function(model, inputs) for model, inputs, seed in batches])


def contrastive_mean(batches) -> torch.Tensor:
    first = torch.cat([inputs["input_ids"][:, 0] for _, inputs, _ in batches])
    return info_nce(seeded(pair_vectors, batches), first) / len(first)


@pytest.fixture(scope="module")
def loops(data):
    """The plain loop's losses and weights by micro-batch size, which matters because it decides the dropout masks."""
    return {micro: plain_loop(data, micro, contrastive_mean) for micro in (24, 8, 5)}


def check(run, loop, bound=1e-10):
    losses, weights = loop
    assert len(run.losses()) == STEPS
    assert max(abs(a - b) / abs(b) for a, b in zip(run.losses(), losses, strict=True)) <= bound
    ours = {name.removeprefix("module."): value for name, value in run.weights.items() if "lm_head" not in name}
    assert kit.distance(ours, weights) <= bound


@pytest.mark.parametrize("world, micro", [(1, 24), (4, 24), (2, 8), (1, 5), (2, 5), (4, 5)])
def test_contrastive_run_with_dropout_equals_a_plain_loop(data, loops, tmp_path, world, micro):
    check(
        kit.run_training(world, tmp_path / "run", *recipe(data, Contrastive, per_device_batch_size=micro)), loops[micro]
    )


def test_without_dropout_the_micro_batch_size_does_not_matter(data, tmp_path):
    loop = plain_loop(data, 24, contrastive_mean, dropout=False)
    for number, fields in enumerate([{"per_device_batch_size": 5}, {"per_device_batch_tokens": 40}]):
        run = kit.run_training(2, tmp_path / f"{number}", *recipe(data, Contrastive, dropout=False, **fields))
        check(run, loop)
    mutant = kit.run_training(
        1, tmp_path / "mutant", *recipe(data, WithinTheMicroBatch, False, per_device_batch_size=5)
    )
    with pytest.raises(AssertionError):
        check(mutant, loop, 1e-2)


@pytest.mark.cluster
def test_sharded_model(data, loops, tmp_path):
    flags, env = recipe(data, Contrastive, per_device_batch_size=5), kit.where("fsdp2", 2, mixed_precision="no")
    check(kit.run_training(2, tmp_path / "run", *flags, env=env), loops[5])


def test_loss_that_is_not_finite_skips_the_update_of_all_ranks(data, tmp_path):
    rows = [json.loads(line)["input_ids"] for line in data["train_file"].read_text().splitlines()]
    Spoiled.token = rows[0][0]
    bad = [i for i, row in enumerate(rows) if row[0] == Spoiled.token]
    lengths = np.array([len(row) for row in rows])
    steps = {}  # step -> (its examples by micro-batch, those among them that are not finite)
    for step in range(4):
        parts = [part.ids.tolist() for part in plan(PlanConfig(83, 24, 5, 42, lengths), 0, step)]
        if spoiled := [ids for ids in parts if set(ids) & set(bad)]:
            steps[step + 1] = spoiled
    assert 0 < len(steps) < 4
    run = kit.run_training(2, tmp_path / "run", *recipe(data, Spoiled, per_device_batch_size=5, max_steps=4))
    assert {line["step"] for line in run.kind("train") if line["loss"] is None} == set(steps)
    assert run.kind("train")[-1]["skipped"] == len(steps)
    assert all(value.isfinite().all() for value in run.weights.values())
    output = "".join((tmp_path / "run.out" / f"rank{rank}.txt").read_text() for rank in (0, 1))
    for step, spoiled in steps.items():
        named = re.findall(rf"step {step}: the loss of examples (\[.*?\]) is not finite", output)
        assert sorted(i for ids in named for i in json.loads(ids)) == sorted(i for ids in spoiled for i in ids)


def test_vectors_that_differ_in_the_second_pass_are_refused(data, tmp_path):
    flags = recipe(data, Unrepeatable, per_device_batch_size=5, output_dir="run")
    codes, outputs = kit.run_command("train.py", *flags, folder=tmp_path / "here", world=2)
    assert codes == [2, 2]
    [line] = [line for line in outputs[0].splitlines() if "error: " in line or "failed" in line]
    assert all(word in line for word in ("Unrepeatable", "`pairs`", "twice")), line


# ---- evaluation --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def evaluated(data, tiny, tmp_path_factory):
    """A run of two steps that evaluates 21 rows in global batches of 8, 8 and 5."""
    fields = {"validation_file": tiny["validation_file"], "global_batch_size": 8, "per_device_eval_batch_size": 3}
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    return kit.run_training(2, folder, *recipe(data, Contrastive, per_device_batch_size=3, max_steps=2, **fields))


def test_evaluation_is_the_loss_of_consecutive_global_batches(evaluated, tiny):
    """Computed here by transformers, one row at a time. The mutant takes the micro-batches for global batches."""
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(evaluated.folder / "final").eval()
    rows = [torch.tensor([json.loads(line)["input_ids"]]) for line in tiny["validation_file"].read_text().splitlines()]
    inputs = [{"input_ids": row, "targets": F.pad(row[:, 1:], (0, 1), value=-100)} for row in rows]
    with torch.no_grad():
        pairs = torch.cat([pair_vectors(model, one) for one in inputs])
    first = torch.cat([row[:, 0] for row in rows])

    def mean(size):
        return sum(info_nce(*parts).item() for parts in zip(pairs.split(size), first.split(size), strict=True)) / 21

    line = evaluated.kind("eval")[-1]
    assert line["loss"] == pytest.approx(mean(8), rel=1e-12)
    assert mean(3) != pytest.approx(mean(8), rel=0.1)
    assert (line["weight"], line["rows"], line["examples"]) == (21, 21, 21)
    assert (line["first"], line["norm"]) == (first.sum(), pytest.approx(21 * 101, rel=1e-12))
