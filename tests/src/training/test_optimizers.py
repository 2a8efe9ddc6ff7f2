"""Optimizers by name: arguments, state in checkpoints, files of addons/optimizers/."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from engine.config import find_addons as addons
from engine.config import optimizer_class
from engine.config.errors import UsageError
from engine.config.run_config import RunConfig
from engine.distributed import backends, optimizer_state
from engine.distributed.backend_checks import check_model
from engine.run.memory import optimizer_moments
from src.training.optimizers import make_optimizer
from tests.helpers import kit, technique_runs


def make(model=None, **given):
    return make_optimizer(RunConfig(**({"learning_rate": 0.1} | given)), model or torch.nn.Linear(4, 4))


class WithState(torch.nn.Identity):
    def get_extra_state(self):
        return {"count": 1}


@pytest.mark.parametrize(
    "module, text",
    [
        (torch.nn.SyncBatchNorm(2), "1 is a SyncBatchNorm"),
        (WithState(), r"1\._extra_state"),
        (torch.nn.Linear(2, 2, bias=False), r"1\.weight: trainable, but in no parameter group"),
    ],
)
def test_models_that_would_train_other_numbers_are_refused(module, text):
    accelerator = SimpleNamespace(num_processes=2)
    backend = SimpleNamespace(is_sharded=True, accelerator=accelerator, cfg=RunConfig())
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), module)
    with pytest.raises(UsageError, match=text):
        check_model(backend, model, make(model[0]))


def test_arguments_reach_the_optimizer():
    nesterov = make(optim="sgd", adam_beta1=0.8, optim_args={"nesterov": True})
    assert [(group["momentum"], group["nesterov"]) for group in nesterov.param_groups] == [(0.8, True)] * 2
    adam = make(optim="NAdam", adam_beta2=0.95, optim_args={"decoupled_weight_decay": True})
    assert type(adam) is torch.optim.NAdam
    assert adam.param_groups[0]["betas"] == (0.9, 0.95)


@pytest.mark.parametrize(
    "given, text",
    [
        ({"optim": "adamm"}, "optim is adamm: .*did you mean adam"),
        ({"optim": "sgd", "optim_args": {"nestrov": True}}, "no argument nestrov; did you mean nesterov"),
        ({"optim": "sgd", "optim_args": {"momentum": 0.9}}, "momentum is set by adam_beta1"),
        ({"optim": "sgd", "adam_beta2": 0.9}, "adam_beta2 is 0.9, which SGD does not read"),
        ({"optim": "rprop"}, "weight_decay is 0.01, which Rprop does not read"),
    ],
)
def test_optimizers_that_cannot_work_are_refused(given, text):
    with pytest.raises(UsageError, match=text):
        make(**given)


# ---- a file of optimizers ----------------------------------------------------------------------------------------------


def serve(monkeypatch, **classes) -> None:
    """Put a file of its own in addons/optimizers/ for each class, in place of the files that are there."""
    for name, kind in classes.items():
        module = ModuleType(f"addons.optimizers.{name}")
        vars(module)[kind.__name__] = kind
        monkeypatch.setitem(sys.modules, module.__name__, module)
    names = addons.addon_names
    for place in (addons, optimizer_class):
        monkeypatch.setattr(place, "addon_names", lambda room: [*classes] if room == "optimizers" else names(room))


class Own(torch.optim.Optimizer):
    """SGD with tensors in lists and dicts, and a count in the group."""

    def __init__(self, params, lr=1e-2, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in (p for p in group["params"] if p.grad is not None):
                if p not in self.state:
                    half = torch.zeros_like(p, dtype=torch.bfloat16)
                    self.state[p] = {"parts": [torch.zeros_like(p), None, (2,)], "named": {"half": half}}
                mean, _, (more,) = self.state[p]["parts"]
                half = self.state[p]["named"]["half"].add_(p.grad.to(torch.bfloat16))
                p.sub_(mean.lerp_(p.grad, 0.5) + half.to(p.dtype), alpha=group["lr"] * (group["count"] + more))


def test_a_file_in_addons_brings_a_class_of_its_own(monkeypatch):
    kind = type("MyOwn", (Own,), {})
    serve(monkeypatch, my_own=kind)
    assert type(make(optim="my_own", weight_decay=0.5)) is kind
    assert type(make(optim="my_own/MyOwn", weight_decay=0.5)) is kind


def test_a_file_may_serve_classes_of_other_names(monkeypatch):
    """A class of torch with the name is taken, unless the file is named."""
    other = type("Adagrad", (Own,), {})
    module = ModuleType("addons.optimizers.several")
    module.classes = lambda: [Own, other, None]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for place in (addons, optimizer_class):
        monkeypatch.setattr(place, "addon_names", lambda room: ["several"])
    assert type(make(optim="own")) is Own
    assert type(make(optim="adagrad")) is torch.optim.Adagrad
    assert type(make(optim="several/adagrad")) is other
    with pytest.raises(UsageError, match="optim is others/own"):
        make(optim="others/own")


def test_only_classes_that_skip_on_the_device_are_fused():
    """A fused SGD that skips the first update of a parameter would leave its momentum uninitialized."""
    assert [make(optim=name).defaults.get("fused") for name in ("adamw", "adam", "sgd")] == [True, True, None]


def test_memory_of_a_class_is_what_its_file_says(monkeypatch):
    serve(monkeypatch, own=Own)
    assert [optimizer_moments(RunConfig(optim=name)) for name in ("adamw", "sgd", "adafactor", "own")] == [2, 1, 0, 2]
    sys.modules["addons.optimizers.own"].STATE_PER_WEIGHT = {"own": 3}  # pyrefly: ignore
    assert optimizer_moments(RunConfig(optim="own")) == 3


@pytest.fixture
def own(tmp_path, monkeypatch) -> dict:
    """The fields of a run with `Own`."""
    serve(monkeypatch, own=Own)
    return technique_runs.files(tmp_path) | {"optim": "own"}


def test_state_of_every_kind_is_resumed(tmp_path, own):
    technique_runs.check_resume(tmp_path, own)


# ---- rates that a class gives its groups -------------------------------------------------------------------------------


class Slow(torch.optim.SGD):
    """SGD that trains vectors at half the rate, and matrices at three times the rate."""

    def __init__(self, params, lr=1e-2, weight_decay=0.0):
        super().__init__(params, lr=lr, weight_decay=weight_decay)
        for group in self.param_groups:
            group["lr"] *= 0.5 if group["params"][0].dim() == 1 else 3.0


class Regrouped(torch.optim.SGD):
    """SGD that makes one group of all parameters."""

    def __init__(self, params, lr=1e-2, weight_decay=0.0):
        super().__init__([p for group in params for p in group["params"]], lr=lr, weight_decay=weight_decay)


@pytest.fixture
def rates(tmp_path, monkeypatch) -> dict:
    serve(monkeypatch, slow=Slow, regrouped=Regrouped)
    return technique_runs.files(tmp_path) | {"optim": "slow", "parameter_groups": json.dumps(FACTORS)}


FACTORS = {"*.ln_*": {"lr_factor": 4.0}, "*.mlp.c_fc.*": {"lr_factor": 0.25}}


def by_hand(values: dict, with_factors: bool = True) -> dict[str, torch.Tensor]:
    """Return the weights of a plain loop with one group for each parameter."""
    plain = technique_runs.Plain(values)
    groups = []
    for name, parameter in plain.model.named_parameters():
        factor = 4.0 if ".ln_" in name else 0.25 if ".mlp.c_fc." in name else 1.0
        own = 0.5 if parameter.dim() == 1 else 3.0
        decay = 0.1 if parameter.dim() >= 2 else 0.0
        rate = 1e-2 * own * (factor if with_factors else 1.0)
        groups.append({"params": [parameter], "lr": rate, "weight_decay": decay})
    return plain.descend(torch.optim.SGD(groups))


def test_factors_of_a_class_and_of_the_run_file_are_multiplied(tmp_path, rates):
    first = technique_runs.check_splits(tmp_path, rates, by_hand(rates))
    mutant = by_hand(rates, with_factors=False)
    assert kit.distance(first.weights, {name: mutant[name] for name in first.weights}) > 1e-4


@pytest.mark.cluster
def test_factors_are_multiplied_under_fsdp2(tmp_path, rates):
    env = kit.where("fsdp2", 2, mixed_precision="no")
    sharded = technique_runs.train(tmp_path / "two", rates, 2, 4, env=env, units=1)
    expected = by_hand(rates)
    assert kit.distance(sharded.weights, {name: expected[name] for name in sharded.weights}) <= 1e-10


def test_a_class_that_drops_factors_is_refused(rates):
    given = {"optim": "regrouped", "weight_decay": 0.0}
    model = torch.nn.Linear(4, 4)
    make(model, **given)
    with pytest.raises(UsageError, match="optim is regrouped: Regrouped makes parameter groups of its own"):
        make(model, **given, parameter_groups={"bias": {"lr_factor": 2.0}})


def test_a_rate_of_a_class_needs_a_learning_rate(rates):
    optimizer = make(optim="slow")
    cfg = RunConfig(optim="slow", learning_rate=0.0)
    with pytest.raises(UsageError, match=r"learning_rate is 0, but optim slow gives a group the rate 0\.3"):
        backends.Backend.own_factor(SimpleNamespace(cfg=cfg), optimizer.param_groups[0])


# ---- state that exists before the first step (accelerate#3855) ---------------------------------------------------------


class Anchored(torch.optim.Optimizer):
    """SGD that is drawn to the initial weights: its first state depends on them, and ranks of FSDP2 lack the weights."""

    def __init__(self, params, lr=1e-2, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        for p in (p for group in self.param_groups for p in group["params"]):
            anchor = p.detach().clone()
            self.state[p] = {"anchors": [anchor], "row": anchor.reshape(-1)[:2].clone(), "size": float(anchor.norm())}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                row = state["row"].full_tensor() if isinstance(state["row"], DTensor) else state["row"]
                pull = float(row.sum()) + state["size"]
                p.sub_(p.grad + 0.1 * pull * (p - state["anchors"][0]), alpha=group["lr"])


@pytest.fixture
def early(tmp_path, monkeypatch):
    serve(monkeypatch, anchored=Anchored)
    return technique_runs.files(tmp_path)


@pytest.mark.cluster
@pytest.mark.parametrize("optim", ["adagrad", "anchored"])
def test_state_before_the_first_step_is_sharded_and_resumed(tmp_path, early, optim):
    fields = early | {"optim": optim}
    one = technique_runs.train(tmp_path / "one", fields, 1, 4)
    env = kit.where("fsdp2", 2, mixed_precision="no")
    sharded = technique_runs.check_resume(tmp_path / "two", fields, 2, 4, env, units=1)
    assert kit.distance(sharded.weights, one.weights) <= 1e-10


@pytest.mark.cluster
def test_mutant_each_rank_keeps_its_own_first_state(tmp_path, early, monkeypatch):
    def like(self, path, parameter):
        value = self.where[path]
        if parameter is None or parameter.shape != value.shape:
            return value
        return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)

    env = kit.where("fsdp2", 2, mixed_precision="no")
    monkeypatch.setattr("engine.distributed.fsdp2.EarlyState.like", like)
    one, two = tmp_path / "one", tmp_path / "two"
    fields = early | {"optim": "anchored"}
    alone = technique_runs.train(one, fields, 1, 4)
    sharded = technique_runs.train(two, fields, 2, 4, env=env, units=1)
    assert kit.distance(sharded.weights, alone.weights) > 1e-3


def test_mutant_a_resume_without_the_values_of_groups_is_seen(tmp_path, own, monkeypatch):
    nested = optimizer_state._nested
    monkeypatch.setattr(optimizer_state, "_nested", lambda flat: {} if "count" in flat else nested(flat))
    with pytest.raises(AssertionError):
        technique_runs.check_resume(tmp_path, own, world=1, micro=16)
