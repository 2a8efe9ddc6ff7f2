"""Parameter groups: weight decay, frozen parameters, fused kernels."""

import shutil

import pytest
import torch

from src.config.errors import UsageError
from src.config.schema import RunConfig
from src.distributed.strategy_checks import check_groups, rate_factor
from src.training.optimizers import make_optimizer, parameter_groups
from tests.helpers import kit


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


# ---- learning rates by group -------------------------------------------------------------------------------------------


def _rates(argv) -> list[list[float]]:
    """Train with a tenth of the rate for the parameters without weight decay; return the rates of each step."""
    import train

    rates, make, update = [], train.optimizers.make_optimizer, train.optimizer_step

    def made(cfg, *rest):
        optimizer = make(cfg, *rest)
        optimizer.param_groups[1]["lr"] = 0.1 * cfg.learning_rate
        return optimizer

    def updated(strategy, module, optimizer, *rest):
        result = update(strategy, module, optimizer, *rest)
        rates.append([group["lr"] for group in optimizer.param_groups])
        return result

    train.optimizers.make_optimizer, train.optimizer_step = made, updated
    train.main([str(word) for word in argv])
    return rates


@pytest.mark.parametrize("place", [None, pytest.param("zero2", marks=pytest.mark.cluster)])
def test_groups_keep_their_factor_in_every_step_and_after_a_resume(files, tmp_path, place):
    fields = {"model_config": files / "llama.yaml", "train_file": files / "train.jsonl", "learning_rate": 1e-3}
    argv = [*kit.flags(**fields, max_steps=6, warmup_steps=2), "--output_dir", tmp_path / "run"]
    if place:
        pytest.importorskip("deepspeed")
    env = kit.where(place, 2, mixed_precision="no") if place else None
    world = 2 if place else 1
    straight = kit.spawn(world, _rates, [*argv, "--save_steps", 3], out=tmp_path / "straight", env=env)[0]
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000006")
    shutil.rmtree(tmp_path / "run" / "final")
    resumed = kit.spawn(world, _rates, argv, out=tmp_path / "resumed", env=env)[0]
    expected = [1e-3 * factor for factor in (0, 0.5, 1, 0.75, 0.5, 0.25)]
    for rates in (straight, straight[:3] + resumed):
        assert [pair[0] for pair in rates] == pytest.approx(expected)
        assert [pair[1] for pair in rates] == pytest.approx([0.1 * rate for rate in expected])


def test_a_rate_beside_a_learning_rate_of_zero_is_refused():
    assert rate_factor(0.0, 0.0) == 1.0
    with pytest.raises(UsageError, match="learning_rate is 0"):
        rate_factor(0.1, 0.0)


def test_parameter_outside_all_groups_is_refused():
    model = small_model()
    optimizer = make_optimizer(RunConfig(), model)
    check_groups(model, optimizer)
    optimizer.param_groups[0]["params"].pop()
    with pytest.raises(UsageError, match=r"1\.weight: trainable, but in no parameter group"):
        check_groups(model, optimizer)


def test_negative_rate_of_a_group_is_refused():
    with pytest.raises(UsageError, match=r"rate -1"):
        rate_factor(-1.0, 1e-3)
