import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers

from addons.techniques.neftune import NEFTune
from engine.plan.batch_plan import PlanConfig, plan
from engine.run.model_with_loss import ModelWithLoss
from tests.helpers import kit, technique_runs

ALPHA = 5.0


def fields(folder) -> dict:
    return technique_runs.files(folder) | {"techniques": '{"neftune": {"alpha": 5}}'}


def plain_weights(values: dict, micro_batch: int) -> dict[str, torch.Tensor]:
    """Return the weights of a loop that draws noise for each micro-batch of the plan, and gives the model embeddings."""
    loop = technique_runs.Plain(values)
    optimizer = loop.optimizer()
    _, splits = kit.open_data(**{n: values[n] for n in ("model_config", "train_file", "dtype")}, output_dir="unused")
    config = PlanConfig(technique_runs.ROWS, technique_runs.ROWS, micro_batch, 42, splits["train"].lengths)

    def update(step: int) -> None:
        optimizer.zero_grad()
        for micro in plan(config, step, 0):
            rows = splits["train"].rows(micro.ids)
            inputs = loop.task.collate(rows, training=True).inputs
            embeddings = loop.model.transformer.wte(inputs["input_ids"])
            torch.manual_seed(micro.seed)
            noise = torch.empty_like(embeddings).uniform_(-1, 1)
            for i, row in enumerate(rows):
                noise[i] *= ALPHA / math.sqrt(len(row["input_ids"]) * embeddings.shape[-1])
            logits = loop.model(inputs_embeds=embeddings + noise).logits.flatten(0, 1)
            loss = F.cross_entropy(logits, inputs["targets"].flatten(), reduction="sum")
            (loss / loop.batch.weight).backward()
        optimizer.step()

    return loop.train(update)


def test_neftune_is_exact_for_every_split(tmp_path):
    values = fields(tmp_path)
    for micro, worlds in ((1, (4,)), (4, (1, 2, 4)), (16, (1,))):
        expected = plain_weights(values, micro)
        for world in worlds:
            more = {"gradient_checkpointing": True} if world == 2 else {}
            run = technique_runs.train(tmp_path / f"{micro}x{world}", values | more, world, micro)
            assert kit.distance(run.weights, {name: expected[name] for name in run.weights}) <= 1e-10


def test_neftune_resumes_and_evaluates_without_noise(tmp_path, monkeypatch):
    values = fields(tmp_path)
    run = technique_runs.check_resume(tmp_path, values)
    reported = run.kind("eval")[-1]
    assert kit.run_evaluation(1, tmp_path / "eval", "--checkpoint", run.folder) == reported

    def in_evaluation(self, embeddings, arguments, output):
        embeddings.training = True
        return add_noise(self, embeddings, arguments, output)

    add_noise = NEFTune._add_noise
    monkeypatch.setattr(NEFTune, "_add_noise", in_evaluation)
    mutant = technique_runs.train(tmp_path / "mutant", values, 2, 4)
    assert mutant.kind("eval")[-1]["loss"] != pytest.approx(reported["loss"], rel=1e-6)


# ---- which embeddings, how much noise ----------------------------------------------------------------------------------


def test_noise_does_not_depend_on_padding():
    model = transformers.AutoModelForCausalLM.from_config(transformers.GPT2Config(**kit.TINY))
    seen = []
    model.transformer.wte.register_forward_hook(lambda module, arguments, output: seen.append(output.detach()))
    task = SimpleNamespace(saved=lambda model: model, loss=lambda model, inputs: model(input_ids=inputs["input_ids"]))
    NEFTune(ALPHA).change_model(module := ModelWithLoss(model, task), None)
    model.transformer.wte.register_forward_hook(lambda module, arguments, output: seen.append(output.detach()))
    ids = torch.zeros(2, 24, dtype=torch.int64)
    for inputs in (
        {"lengths": torch.tensor([4, 24])},
        {"attention_mask": (torch.arange(24) < torch.tensor([[4], [24]]))},
    ):
        seen.clear()
        module({"input_ids": ids} | inputs)
        largest = (seen[1] - seen[0]).abs().amax((1, 2))
        for found, tokens in zip(largest, (4, 24), strict=True):
            limit = ALPHA / math.sqrt(tokens * kit.TINY["n_embd"])
            assert 0.95 * limit < found <= 1.0001 * limit
