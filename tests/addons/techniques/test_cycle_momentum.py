import pytest
import torch
from safetensors.torch import load_file

from addons.schedules.one_cycle import one_cycle_momentum
from engine.config.run_config import RunConfig
from src.training.schedules import make_schedule
from tests.engine.run.test_train_state import not_a_number, poison
from tests.helpers import kit, technique_runs

# torch: the peak is at update pct_start × total_steps − 1, the end at the last update
TORCH = {"max_lr": 2.0, "total_steps": 41, "pct_start": 0.275, "div_factor": 25, "final_div_factor": 4}
RISE = (0.275 * 41 - 1) / 40


def test_rate_and_momentum_are_those_of_torch():
    kwargs = {"rise": RISE, "start": 1 / 25, "end": 1 / 100}
    cfg = RunConfig(learning_rate=2.0, lr_scheduler_type="one_cycle", lr_scheduler_kwargs=kwargs)
    rate, momentum = make_schedule(cfg, 40), one_cycle_momentum(cfg, 40, 0.8, 0.9)
    optimizer = torch.optim.AdamW([torch.zeros(1)], lr=1.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, base_momentum=0.8, max_momentum=0.9, **TORCH)
    for update in range(40):
        group = optimizer.param_groups[0]
        assert [rate(update), momentum(update)] == pytest.approx([group["lr"], group["betas"][0]], rel=1e-9)
        optimizer.step()
        scheduler.step()


def fields(folder) -> dict:
    more = {
        "optim": "sgd",
        "lr_scheduler_type": "one_cycle",
        "lr_scheduler_kwargs": '{"rise": 0.5}',
        "learning_rate": 0.1,
    }
    return technique_runs.files(folder) | more | {"techniques": '{"cycle_momentum": {"base_momentum": 0.5}}'}


def plain_weights(values: dict, constant: float | None = None) -> dict[str, torch.Tensor]:
    """Return the weights of a plain loop; with `constant`, that of one_cycle without cycled momentum."""
    plain = technique_runs.Plain(values)
    cfg = RunConfig(learning_rate=0.1, lr_scheduler_type="one_cycle", lr_scheduler_kwargs={"rise": 0.5})
    rate, steps = make_schedule(cfg, technique_runs.STEPS), technique_runs.STEPS
    optimizer = plain.optimizer(torch.optim.SGD, momentum=0.9)

    def set_momentum(step: int) -> None:
        cosine = 0.5 * (1 - torch.cos(torch.tensor(2 * torch.pi * step / steps, dtype=torch.float64)).item())
        for group in optimizer.param_groups:
            group |= {"lr": rate(step), "momentum": constant or 0.95 - 0.45 * cosine}

    return plain.descend(optimizer, set_momentum)


def test_mutant_constant_momentum_differs(tmp_path):
    values = fields(tmp_path)
    assert kit.distance(plain_weights(values), plain_weights(values, constant=0.9)) > 1e-6


def test_first_update_may_be_skipped_without_momentum_in_the_run_file(tmp_path, monkeypatch):
    """A fused SGD would leave the first momentum as memory happened to be."""
    poison(monkeypatch, not_a_number, {1})
    values = fields(tmp_path) | {"adam_beta1": 0.0, "save_steps": 1}
    run = technique_runs.train(tmp_path / "run", values, 1, 4, env={"NOTES": str(tmp_path)})
    assert [line["skipped"] for line in run.kind("train")] == [1] * technique_runs.STEPS
    assert load_file(run.folder / "checkpoints" / "step_00000001" / "optimizer.safetensors") == {}
