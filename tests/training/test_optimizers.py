"""Parameter groups: weight decay, frozen parameters, fused kernels."""

import shutil

import pytest
import torch

from src.config.errors import UsageError
from src.config.schema import RunConfig
from src.distributed.strategy_checks import check_groups, rate_factor
from src.training.optimizers import make_optimizer
from src.training.parameter_groups import parameter_groups
from tests.helpers import kit


def small_model():
    model = torch.nn.Sequential(
        torch.nn.Embedding(5, 4), torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 3)
    )
    model[3].weight.requires_grad_(False)
    return model


def test_weight_decay_on_two_dimensions_or_more():
    model = small_model()
    decayed, plain = parameter_groups(model, RunConfig(weight_decay=0.1))
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


def test_groups_keep_their_factor_in_every_step_and_after_a_resume(files, tmp_path):
    check_factors(files, tmp_path)


def check_factors(files, tmp_path, world: int = 1, env: dict | None = None) -> None:
    """Assert the rates of two groups in each step of a straight and a resumed run."""
    fields = {"model_config": files / "llama.yaml", "train_file": files / "train.jsonl", "learning_rate": 1e-3}
    argv = [*kit.flags(**fields, max_steps=6, warmup_steps=2), "--output_dir", tmp_path / "run"]
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


# ---- optimizers by name ------------------------------------------------------------------------------------------------


def make(model=None, **given):
    return make_optimizer(RunConfig(**({"learning_rate": 0.1} | given)), model or small_model())


def test_arguments_reach_the_optimizer():
    nesterov = make(optim="sgd", adam_beta1=0.8, optim_args={"nesterov": True})
    assert [(group["momentum"], group["nesterov"]) for group in nesterov.param_groups] == [(0.8, True)] * 2
    adam = make(optim="NAdam", adam_beta2=0.95, optim_args={"decoupled_weight_decay": True})
    assert type(adam) is torch.optim.NAdam
    assert adam.param_groups[0]["betas"] == (0.9, 0.95)
    assert adam.param_groups[1]["decoupled_weight_decay"] is True


@pytest.mark.parametrize(
    "given, text",
    [
        ({"optim": "adamm"}, "optim is adamm: .*did you mean adam"),
        ({"optim": "torch/adam"}, "optim is torch/adam: not a class of torch.optim or pytorch_optimizer"),
        ({"optim": "sgd", "optim_args": {"nestrov": True}}, "no argument nestrov; did you mean nesterov"),
        ({"optim": "sgd", "optim_args": {"momentum": 0.9}}, "momentum is set by adam_beta1"),
        ({"optim_args": {"lr": 0.9}}, "lr is set by learning_rate"),
        ({"optim_args": {"fused": True}}, "fused is set by the strategy"),
        ({"optim_args": {"differentiable": True}}, "AdamW refuses its arguments or parameters: .*differentiable"),
        ({"optim": "adafactor", "optim_args": {"eps": [1]}}, "Adafactor refuses its arguments or parameters"),
        ({"optim": "adadelta", "optim_args": {"rho": "high"}}, "Adadelta refuses its arguments or parameters"),
        ({"optim": "rprop"}, "weight_decay is 0.01, which Rprop does not read"),
        ({"optim": "adafactor", "adam_beta1": 0.5}, "adam_beta1 is 0.5, which Adafactor does not read"),
        ({"optim": "sgd", "adam_beta1": 0.0, "optim_args": {"nesterov": True}}, "SGD refuses .* momentum"),
    ],
)
def test_optimizers_that_cannot_work_are_refused(given, text):
    with pytest.raises(UsageError, match=text):
        make(**given)
