"""Optimizers by name: weight decay, rates of groups, state in checkpoints, packages of optimizers."""

import collections
import shutil
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from src.config import optimizer_class
from src.config.errors import UsageError
from src.config.schema import RunConfig
from src.distributed import optimizer_state
from src.distributed.strategy_checks import check_model
from src.training.optimizers import make_optimizer, parameter_groups
from tests.helpers import kit, technique_runs


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


def test_parameter_outside_all_groups_is_refused():
    model = small_model()
    optimizer, one_process = make_optimizer(RunConfig(), model), SimpleNamespace(is_sharded=False)
    check_model(one_process, model, optimizer)
    optimizer.param_groups[0]["params"].pop()
    with pytest.raises(UsageError, match=r"1\.weight: trainable, but in no parameter group"):
        check_model(one_process, model, optimizer)


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
        ({"optim": "sgd", "optim_args": {"nestrov": True}}, "no argument nestrov; did you mean nesterov"),
        ({"optim": "sgd", "optim_args": {"momentum": 0.9}}, "momentum is set by adam_beta1"),
        ({"optim_args": {"lr": 0.9}}, "lr is set by learning_rate"),
        ({"optim": "adafactor", "optim_args": {"eps": [1]}}, "Adafactor refuses its arguments or parameters"),
        ({"optim": "rprop"}, "weight_decay is 0.01, which Rprop does not read"),
    ],
)
def test_optimizers_that_cannot_work_are_refused(given, text):
    with pytest.raises(UsageError, match=text):
        make(**given)


# ---- a package of optimizers -------------------------------------------------------------------------------------------


def fields(folder, optim: str, **more) -> dict:
    """Return the fields of a run without attention biases: that of the keys has a gradient of zero except for rounding."""
    fixed = {"optim": optim, "adam_epsilon": RunConfig.adam_epsilon, "freeze": ["*.c_attn.bias"]}
    return technique_runs.files(folder) | fixed | more


class Own(torch.optim.Optimizer):
    """SGD with a state of every kind."""

    def __init__(self, params, lr=1e-2, weight_decay=0.0, **ignored):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    if p not in self.state:
                        self.state[p] = {
                            "parts": [torch.zeros_like(p), None, (torch.zeros(3, dtype=torch.int64), 2)],
                            "limit": float("inf"),
                            "named": {"half": torch.zeros_like(p, dtype=torch.bfloat16)},
                        }
                    self.update(p, self.state[p], group)

    def update(self, p, state, group):
        state["parts"][0].lerp_(p.grad, 0.5)
        state["parts"][2][0].add_(1)
        state["named"]["half"].add_(p.grad.to(torch.bfloat16))
        count = min(state["parts"][2][0][0].item() + group["count"] + state["parts"][2][1], state["limit"])
        p.sub_(state["parts"][0] + state["named"]["half"].to(p.dtype), alpha=group["lr"] * count)


class KeepsAnObject(Own):
    def update(self, p, state, group):
        state["queue"] = collections.deque([1])


@pytest.fixture
def package(monkeypatch):
    """The optimizers above in place of the package pytorch_optimizer."""
    module = ModuleType("pytorch_optimizer")
    vars(module).update({kind.__name__: kind for kind in (Own, KeepsAnObject)})
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", module)


def test_state_of_every_kind_is_resumed(tmp_path, package):
    technique_runs.check_resume(tmp_path, fields(tmp_path, "own"))


def test_mutant_a_resume_without_the_values_of_groups_is_seen(tmp_path, package, monkeypatch):
    nested = optimizer_state._nested
    monkeypatch.setattr(optimizer_state, "_nested", lambda flat: {} if "count" in flat else nested(flat))
    with pytest.raises(AssertionError):
        technique_runs.check_resume(tmp_path, fields(tmp_path, "own"), world=1, micro=16)


def test_a_state_that_no_checkpoint_can_hold_ends_all_ranks_at_the_first_save(tmp_path, package):
    with pytest.raises(kit.RankFailed, match="queue in the state of the optimizer is a deque"):
        technique_runs.train(tmp_path / "run", fields(tmp_path, "keeps_an_object"), 2, 4)


@pytest.mark.parametrize(
    "given, text",
    [
        ({"optim": "owm"}, "optim is owm: not a class of torch.optim or pytorch_optimizer; did you mean own"),
        ({"optim": "own", "optim_args": {"betta": 1}}, "Own has no argument betta"),
    ],
)
def test_what_a_package_lacks_or_would_ignore_is_refused(package, given, text):
    with pytest.raises(UsageError, match=text):
        optimizer_class.optimizer_arguments(RunConfig(**given), optimizer_class.find_class(given["optim"]))


@pytest.mark.cluster  # needs an extra package
def test_lion_is_that_of_its_paper(tmp_path):
    pytest.importorskip("pytorch_optimizer")
    values = fields(tmp_path, "lion", learning_rate=1e-3)
    plain = technique_runs.Plain(values)
    for name, parameter in plain.model.named_parameters():
        parameter.requires_grad_(not name.endswith("c_attn.bias"))
    momentum = {p: torch.zeros_like(p) for p in plain.model.parameters() if p.requires_grad}

    @torch.no_grad()
    def update(step: int) -> None:
        plain.model.zero_grad()
        with torch.enable_grad():
            plain.loss().backward()
        for p, m in momentum.items():
            p.mul_(1 - 1e-3 * (0.1 if p.dim() >= 2 else 0.0)).sub_((0.9 * m + 0.1 * p.grad).sign(), alpha=1e-3)
            m.mul_(0.99).add_(p.grad, alpha=0.01)

    expected = plain.train(update)
    for name, env in (("ddp", None), ("fsdp2", kit.where("fsdp2", 2, mixed_precision="no"))):
        run = technique_runs.train(tmp_path / name, values, 2, 4, env=env)
        assert kit.distance(run.weights, {name: expected[name] for name in run.weights}) <= 1e-10
    technique_runs.check_resume(tmp_path / "resumed", values)
