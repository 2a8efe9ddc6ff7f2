"""Parameter groups: weight decay, frozen parameters, fused kernels."""

import pytest
import torch

from src.config.errors import UsageError
from src.config.schema import RunConfig
from src.training.optimizers import make_optimizer, parameter_groups


def small_model():
    model = torch.nn.Sequential(
        torch.nn.Embedding(5, 4), torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 3)
    )
    model[3].weight.requires_grad_(False)
    return model


def test_weight_decay_on_two_dimensions_or_more():
    model = small_model()
    decayed, plain = parameter_groups(model, 0.1)
    assert [id(p) for p in decayed["params"]] == [id(model[0].weight), id(model[1].weight)]
    assert [id(p) for p in plain["params"]] == [
        id(p) for p in (model[1].bias, model[2].weight, model[2].bias, model[3].bias)
    ]
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)


def test_a_frozen_parameter_does_not_move():
    model = small_model()
    optimizer = make_optimizer(RunConfig(learning_rate=0.1, weight_decay=0.5), model)
    before = model[3].weight.clone()
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    assert torch.equal(model[3].weight, before)
    assert all(group["fused"] for group in optimizer.param_groups)


def test_nothing_to_train_is_refused():
    model = small_model().requires_grad_(False)
    with pytest.raises(UsageError, match="trainable"):
        make_optimizer(RunConfig(), model)
