"""Optimizers that are not built in: their names, their state in checkpoints, sharding."""

import collections
import sys
from types import ModuleType

import pytest
import torch

from src.config import optimizer_class
from src.config.errors import UsageError
from src.config.schema import RunConfig
from src.distributed import optimizer_state
from tests.helpers import kit, technique_runs

FSDP2 = kit.where("fsdp2", 2, mixed_precision="no")


def fields(folder, optim: str, **more) -> dict:
    """Return the fields of a run without attention biases: that of the keys has a gradient of zero except for rounding."""
    fixed = {"optim": optim, "adam_epsilon": RunConfig.adam_epsilon, "freeze": ["*.c_attn.bias"]}
    return technique_runs.files(folder) | fixed | more


def plain_run(values: dict) -> technique_runs.Plain:
    plain = technique_runs.Plain(values)
    for name, parameter in plain.model.named_parameters():
        parameter.requires_grad_(not name.endswith("c_attn.bias"))
    return plain


# ---- torch.optim -------------------------------------------------------------------------------------------------------


def test_adafactor_is_exact_for_every_split(tmp_path):
    values = fields(tmp_path, "adafactor")
    plain = plain_run(values)
    optimizer = plain.optimizer(torch.optim.Adafactor)

    def update(step: int) -> None:
        optimizer.zero_grad()
        plain.loss().backward()
        optimizer.step()

    technique_runs.check_splits(tmp_path, values, plain.train(update))


@pytest.mark.parametrize("name", ["nadam", "adagrad"])  # a product of momenta; a state before the first update
def test_optimizers_of_torch_resume(tmp_path, name):
    technique_runs.check_resume(tmp_path, fields(tmp_path, name))


@pytest.mark.cluster
def test_radam_under_fsdp2(tmp_path):
    technique_runs.check_fsdp2(tmp_path, fields(tmp_path, "radam", adam_epsilon=1e-4))


# ---- a package of optimizers -------------------------------------------------------------------------------------------


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


class OtherWeights(Own):
    def eval(self):
        """Put the weights to evaluate into the parameters."""


class NoRate(torch.optim.Optimizer):
    def __init__(self, params, weight_decay=0.0):
        super().__init__(params, {"weight_decay": weight_decay})


@pytest.fixture
def package(monkeypatch):
    """The optimizers above in place of the package pytorch_optimizer."""
    module = ModuleType("pytorch_optimizer")
    vars(module).update({kind.__name__: kind for kind in (Own, KeepsAnObject, OtherWeights, NoRate)})
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
        ({"optim": "pytorch_optimizer/adamw"}, "optim is pytorch_optimizer/adamw: not a class of"),
        ({"optim": "own", "optim_args": {"betta": 1}}, "Own has no argument betta"),
        ({"optim": "other_weights"}, "trains other weights than it evaluates: .*schedule_free"),
        ({"optim": "no_rate"}, "no learning rate"),
    ],
)
def test_what_a_package_lacks_or_would_ignore_is_refused(package, given, text):
    with pytest.raises(UsageError, match=text):
        optimizer_class.optimizer_arguments(RunConfig(**given), optimizer_class.find_class(given["optim"]))


def test_the_package_is_imported_only_for_its_names(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)  # importing it fails
    assert optimizer_class.find_class("Rms_Prop") is torch.optim.RMSprop
    with pytest.raises(UsageError, match=r"optim is nadan: .*did you mean nadam.*pip install pytorch_optimizer"):
        optimizer_class.find_class("nadan")
    with pytest.raises(UsageError, match="pip install pytorch_optimizer"):
        optimizer_class.find_class("pytorch_optimizer/adamw")


# ---- pytorch_optimizer itself ------------------------------------------------------------------------------------------


@pytest.mark.cluster  # needs an extra package
@pytest.mark.parametrize("name, bar", [("lion", 0.0), ("soap", 1e-10)])
def test_optimizers_of_the_package_resume(tmp_path, name, bar):
    """SOAP keeps the transposed matrices of a QR; saved, they lie in another order in memory, and some CPUs
    round products with them differently."""
    pytest.importorskip("pytorch_optimizer")
    technique_runs.check_resume(tmp_path, fields(tmp_path, name), bar=bar)


@pytest.mark.cluster  # needs an extra package
def test_lion_is_that_of_its_paper(tmp_path):
    pytest.importorskip("pytorch_optimizer")
    values = fields(tmp_path, "lion", learning_rate=1e-3)
    plain = plain_run(values)
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
    run = technique_runs.train(tmp_path / "run", values, 2, 4)
    assert kit.distance(run.weights, {name: expected[name] for name in run.weights}) <= 1e-10


@pytest.mark.cluster
def test_lion_under_fsdp2(tmp_path):
    pytest.importorskip("pytorch_optimizer")
    values = fields(tmp_path, "lion", learning_rate=1e-3)  # in float64, because a sign may follow the last bit
    one = technique_runs.train(tmp_path / "one", values, 1, 4)
    sharded = technique_runs.train(tmp_path / "sharded", values, 2, 4, env=FSDP2, units=1)
    assert kit.distance(sharded.weights, one.weights) <= 1e-10
