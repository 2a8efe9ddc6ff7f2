"""Optimizers that are not built in: the trial before step 1, their state in checkpoints, sharding."""

import collections
import contextlib
import copy
import io
from types import SimpleNamespace

import pytest
import torch

from src.config.errors import UsageError
from src.config.schema import RunConfig
from src.distributed import optimizer_state
from src.distributed.optimizer_trial import _try
from src.training import optimizers
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


@pytest.mark.cluster
def test_adafactor_is_refused_under_fsdp2(tmp_path):
    """torch's Adafactor changes means over a sharded dimension in place, which DTensor refuses."""
    with pytest.raises(kit.RankFailed, match="optim is adafactor, which cannot train here"):
        technique_runs.train(tmp_path / "run", fields(tmp_path, "adafactor"), 2, 4, env=FSDP2, units=1)


# ---- the trial ---------------------------------------------------------------------------------------------------------


class Own(torch.optim.Optimizer):
    """SGD with a state of every kind; subclasses add an error."""

    def __init__(self, params, lr=1e-2, weight_decay=0.0):
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
                            "best": float("inf"),
                            "named": {"half": torch.zeros_like(p, dtype=torch.bfloat16)},
                        }
                    self.update(p, self.state[p], group)

    def update(self, p, state, group):
        state["parts"][0].lerp_(p.grad, 0.5)
        state["parts"][2][0].add_(1)
        state["named"]["half"].add_(p.grad.to(torch.bfloat16))
        state["best"] = min(state["best"], float(group["count"]))
        count = state["parts"][2][0][0].item() + group["count"] + state["best"]
        p.sub_(state["parts"][0] + state["named"]["half"].to(p.dtype), alpha=group["lr"] * count)


class CountsOutside(Own):
    def update(self, p, state, group):
        self.updates = getattr(self, "updates", 0) + 1
        p.sub_(p.grad, alpha=group["lr"] / self.updates)


class Draws(Own):
    def update(self, p, state, group):
        p.sub_(p.grad + torch.randn_like(p.grad), alpha=group["lr"])


class KeepsAnObject(Own):
    def update(self, p, state, group):
        state["queue"] = collections.deque([1])


class NormOfTheShard(Own):
    def update(self, p, state, group):
        local = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
        p.sub_(p.grad / local.norm().item(), alpha=group["lr"])


def small_model() -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Module()
    model.embed, model.norm = torch.nn.Embedding(6, 4), torch.nn.LayerNorm(4)
    model.layers = torch.nn.ModuleList([torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)])
    model.conv = torch.nn.Conv2d(2, 3, 3)
    return model


def trial(optim: str, **given) -> str | None:
    """Return the reason why an optimizer is refused, or None."""
    try:
        return _try(optimizers.make_optimizer(RunConfig(optim=optim, learning_rate=1e-2, **given), small_model()))
    except UsageError as error:
        return str(error)
    except Exception as error:  # try_optimizer makes a sentence of these
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    "kind, text",
    [
        (Own, None),
        (CountsOutside, "a resumed run would differ"),
        (Draws, "it draws random numbers"),
        (KeepsAnObject, "its state queue is a deque"),
        (NormOfTheShard, None),
    ],
)
def test_the_trial_finds_what_cannot_be_resumed(kind, text):
    model = small_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = kind(optimizers.parameter_groups(model, RunConfig()), lr=1e-2)
    try:
        found = _try(optimizer)
    except UsageError as error:
        found = str(error)
    assert found == text if text is None else text in found
    assert not optimizer.state
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def _train_own(kind, argv):
    import train

    train.optimizers.find_class = lambda name: kind
    train.optimizers.optimizer_arguments = lambda cfg, found: {}
    train.main([str(word) for word in argv])


@pytest.mark.cluster
def test_a_norm_of_the_shard_is_refused_under_fsdp2(tmp_path):
    argv = kit.flags(**technique_runs.files(tmp_path) | {"dtype": "float32", "output_dir": tmp_path / "run"})
    with pytest.raises(kit.RankFailed, match="a sharded matrix is updated in another way"):
        kit.spawn(2, _train_own, NormOfTheShard, argv, out=tmp_path / "out", env=FSDP2)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


# ---- pytorch_optimizer -------------------------------------------------------------------------------------------------

NAMES = ["lion", "soap", "adan", "prodigy", "adamp", "lamb", "ranger", "shampoo", "came", "adopt", "mars", "muonclip"]


@pytest.mark.cluster  # needs an extra package
def test_every_name_of_pytorch_optimizer_works_or_is_refused_with_a_reason():
    package = pytest.importorskip("pytorch_optimizer")
    kinds = [kind for kind in vars(package).values() if isinstance(kind, type)]
    names = [kind.__name__ for kind in kinds if issubclass(kind, torch.optim.Optimizer)]
    reasons = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for name in sorted(names):
            reason = trial(f"pytorch_optimizer/{name}")
            if reason and reason.endswith("give --weight_decay 0"):
                reason = trial(f"pytorch_optimizer/{name}", weight_decay=0.0)
            reasons[name] = reason
    works = {name.lower() for name, reason in reasons.items() if reason is None}
    assert set(NAMES) <= works
    assert len(works) > 80
    assert "schedule_free" in str(reasons["ScheduleFreeAdamW"])


@pytest.mark.cluster  # needs an extra package
@pytest.mark.parametrize("name", ["lion", "soap"])
def test_optimizers_of_the_package_resume(tmp_path, name):
    pytest.importorskip("pytorch_optimizer")
    technique_runs.check_resume(tmp_path, fields(tmp_path, name))


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
def test_lion_under_fsdp2_and_soap_refused(tmp_path):
    pytest.importorskip("pytorch_optimizer")
    values = fields(tmp_path, "lion", learning_rate=1e-3)  # in float64, because a sign may follow the last bit
    one = technique_runs.train(tmp_path / "one", values, 1, 4)
    sharded = technique_runs.train(tmp_path / "sharded", values, 2, 4, env=FSDP2, units=1)
    assert kit.distance(sharded.weights, one.weights) <= 1e-10
    with pytest.raises(kit.RankFailed, match="optim is soap, which cannot train here"):
        technique_runs.train(tmp_path / "soap", fields(tmp_path, "soap"), 2, 4, env=FSDP2, units=1)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam])
def test_a_restored_state_has_nothing_of_the_one_before(kind):
    """A rollback to before a parameter was unfrozen: it then has no moments, as in a run that resumes there."""
    parameters = {name: torch.nn.Parameter(torch.ones(3)) for name in ("early", "late")}
    optimizer = kind(parameters.values())
    parameters["early"].grad = torch.ones(3)
    optimizer.step()
    saved = copy.deepcopy(optimizer_state.flatten(optimizer, list(parameters)))
    parameters["late"].grad = torch.ones(3)
    optimizer.step()
    tensors = {path: value for path, value in saved.items() if torch.is_tensor(value)}
    reader = SimpleNamespace(where=tensors, like=lambda path, current: tensors[path])
    numbers = {path: value for path, value in saved.items() if path not in tensors}
    optimizer_state.restore(optimizer, list(parameters), reader, numbers)
    assert optimizer_state.flatten(optimizer, list(parameters)).keys() == saved.keys()
    assert not optimizer.state.get(parameters["late"])
