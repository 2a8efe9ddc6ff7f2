"""A loss over the whole global batch: exact for any number of processes and any micro-batch, and the mutants that are not."""

import json
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from src.data.batch_plan import PlanConfig, plan
from src.tasks import OPTIONS, causal_lm
from tests.helpers import kit

STEPS = 10  # three of 24 rows and a tail of 11 are an epoch of 83
VOCABULARY = 50
GPT2 = kit.TINY | {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}


# ---- three tasks over the same rows ------------------------------------------------------------------------------------


def pair_vectors(model, inputs) -> torch.Tensor:
    """Return (rows, 2, features): the first token's vector times ten, and the mean over the others."""
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


def row_losses(model, inputs) -> torch.Tensor:
    logits = model(input_ids=inputs["input_ids"], use_cache=False).logits
    each = F.cross_entropy(logits.transpose(1, 2), inputs["targets"], reduction="none")
    return each.sum(1) / (inputs["targets"] != -100).sum(1)


class Contrastive(causal_lm.Task):
    has_batch_loss = True

    def collate(self, rows, training):
        return super().collate(rows, training)._replace(weight=len(rows), sums={})

    def represent(self, model, inputs):
        return {"pairs": pair_vectors(model, inputs), "first": inputs["input_ids"][:, 0]}

    def batch_loss(self, vectors, weight):
        return {"loss": info_nce(vectors["pairs"], vectors["first"])}

    def metrics(self, sums, weight):
        return {"rows": weight}

    def row_metrics(self, rows):
        return {"first": int(rows["first"].sum()), "norm": float(np.square(rows["pairs"]).sum())}


class WithinTheMicroBatch(Contrastive):
    """The mutant: the same loss as a sum over micro-batches."""

    has_batch_loss = False

    def loss(self, model, inputs):
        return {"loss": info_nce(pair_vectors(model, inputs), inputs["input_ids"][:, 0])}


class HardExamples(Contrastive):
    """The mean over the quarter of the global batch with the largest losses."""

    def represent(self, model, inputs):
        return {"losses": row_losses(model, inputs)}

    def batch_loss(self, vectors, weight):
        hardest = math.ceil(len(vectors["losses"]) / 4)
        return {"loss": vectors["losses"].topk(hardest).values.sum() * (weight / hardest)}

    def row_metrics(self, rows):
        return {}


class Unrepeatable(Contrastive):
    """Noise from a generator that is not seeded by the micro-batch."""

    generator = torch.Generator()

    def represent(self, model, inputs):
        pairs = pair_vectors(model, inputs)
        return {"pairs": pairs + torch.rand(pairs.shape, generator=self.generator), "first": inputs["input_ids"][:, 0]}


class OtherShapes(Contrastive):
    """Vectors as long as the micro-batch is wide."""

    def represent(self, model, inputs):
        hidden = model.base_model(input_ids=inputs["input_ids"], use_cache=False).last_hidden_state
        return {"pairs": hidden, "first": inputs["input_ids"][:, 0]}


TASKS = (Contrastive, WithinTheMicroBatch, HardExamples, Unrepeatable, OtherShapes)


@pytest.fixture(scope="module", autouse=True)
def _tasks():
    for task in TASKS:
        sys.modules[f"src.tasks.{task.__name__}"] = SimpleNamespace(Task=task, Options=causal_lm.Options)
        OPTIONS[task.__name__] = lambda: causal_lm.Options
    yield
    for task in TASKS:
        del sys.modules[f"src.tasks.{task.__name__}"], OPTIONS[task.__name__]


def recipe(tiny, task, dropout=True, **fields) -> list[str]:
    values = tiny | {"task": task.__name__, "dtype": "float64", "global_batch_size": 24, "max_steps": STEPS}
    values |= {"learning_rate": 3e-3, "lr_scheduler_type": "constant", "logging_steps": 1}
    if not dropout:
        no_dropout = {key: 0.0 for key in GPT2 if key.endswith("pdrop")}
        model = tiny["model_config"].with_name("no_dropout.yaml")
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


def hardest_mean(batches) -> torch.Tensor:
    losses = seeded(row_losses, batches)
    return losses.topk(math.ceil(len(losses) / 4)).values.mean()


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
@pytest.mark.parametrize("world", [2])
def test_sharded_model(data, loops, tmp_path, world):
    env = kit.where("fsdp2", world, mixed_precision="no")
    check(
        kit.run_training(world, tmp_path / "run", *recipe(data, Contrastive, per_device_batch_size=5), env=env),
        loops[5],
    )


@pytest.mark.parametrize("world, micro", [(1, 8), (2, 5)])
def test_hardest_examples_of_the_global_batch(data, tmp_path, world, micro):
    run = kit.run_training(world, tmp_path / "run", *recipe(data, HardExamples, per_device_batch_size=micro))
    check(run, plain_loop(data, micro, hardest_mean))
