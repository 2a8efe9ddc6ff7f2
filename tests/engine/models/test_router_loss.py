"""Load-balancing loss of a mixture of experts: equal to that of transformers for a row, and a sum over rows."""

import numpy as np
import pytest
import torch

from engine.config.errors import UsageError
from engine.models import router_loss
from tests.helpers import kit

EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.2}
MODELS = {
    "mixtral": kit.LLAMA | EXPERTS | {"model_type": "mixtral", "num_local_experts": 4},
    "qwen3_moe": kit.LLAMA | EXPERTS | {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 16},
    "dense": kit.LLAMA,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    generator = np.random.default_rng(0)
    rows = [{"input_ids": generator.integers(0, 500, n).tolist()} for n in generator.integers(2, 30, 40)]
    kit.write_jsonl(folder / "rows.jsonl", rows)
    for name, values in MODELS.items():
        kit.write_yaml(folder / f"{name}.yaml", values)
    return folder


def fields(folder, model, **more):
    return {"model_config": folder / f"{model}.yaml", "train_file": folder / "rows.jsonl", "dtype": "float64"} | more


def open_model(folder, model, **more):
    task, splits = kit.open_data(**fields(folder, model, cache_dir=folder / "cache", **more))
    return task, task.build(), splits["train"].rows(np.arange(4))


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_loss_of_a_row_is_that_of_transformers(folder, name):
    task, model, rows = open_model(folder, name)
    for row in rows:
        batch = task.collate([row], True)
        ours = task.loss(model.train(), batch.inputs)
        ids = batch.inputs["input_ids"]
        expected = model(input_ids=ids, labels=ids)
        assert ours["loss"].item() / batch.weight == pytest.approx(expected.loss.item(), rel=1e-6)
        assert ours["aux_loss"].item() / batch.weight == pytest.approx(expected.aux_loss.item(), rel=1e-6)
        parameters = [p for n, p in model.named_parameters() if "gate" in n]
        one, other = (torch.autograd.grad(x, parameters) for x in (ours["loss"] / batch.weight, expected.loss))
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(one, other, strict=True))


def test_weights_do_not_depend_on_the_split(folder, tmp_path, monkeypatch):
    more = {"global_batch_size": 16, "max_steps": 4, "learning_rate": 1e-3}
    flags = fields(folder, "mixtral", validation_file=folder / "rows.jsonl", **more)
    small = kit.flags(**flags, per_device_batch_size=3, per_device_eval_batch_size=3)
    one = kit.run_training(1, tmp_path / "one", *kit.flags(**flags, per_device_batch_size=16))
    two = kit.run_training(2, tmp_path / "two", *small)
    assert kit.distance(one.weights, two.weights) <= 1e-6  # RMSNorm and router compute in float32
    (first,), (second,) = one.kind("eval"), two.kind("eval")
    assert first["aux_loss"] == pytest.approx(second["aux_loss"], rel=1e-6)
    assert np.log(first["perplexity"]) == pytest.approx(first["loss"] - 0.2 * first["aux_loss"], rel=1e-9)
    balance = router_loss.balance_losses

    def mutant(logits, is_real, top_k):
        """As transformers: the mean routing of all tokens of a micro-batch, padding included."""
        return balance(logits, torch.ones(1, is_real.numel()), top_k).expand(len(is_real))

    monkeypatch.setattr(router_loss, "balance_losses", mutant)
    other = kit.run_training(2, tmp_path / "mutant", *small)
    assert kit.distance(one.weights, other.weights) > 1e-4
    assert other.kind("eval")[0]["aux_loss"] != pytest.approx(first["aux_loss"], rel=1e-4)


def test_coefficient_is_the_models_or_the_users(folder):
    assert open_model(folder, "mixtral", router_aux_loss_coef=0)[0].router.coefficient == 0
    with pytest.raises(UsageError, match=r"LlamaForCausalLM.*--router_aux_loss_coef 0"):
        open_model(folder, "dense", router_aux_loss_coef=0.1)
