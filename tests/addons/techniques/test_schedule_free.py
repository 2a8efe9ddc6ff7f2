import pytest
import torch

from addons.techniques.schedule_free import ScheduleFree
from engine.config.errors import UsageError
from engine.config.find_addons import run_config
from tests.helpers import kit, technique_runs


def fields(folder, **more) -> dict:
    more = {"adam_beta1": 0.0, "warmup_steps": 3, "lr_scheduler_type": "constant_with_warmup"} | more
    return technique_runs.files(folder) | more | {"techniques": '{"schedule_free": {"beta": 0.8}}'}


def plain_weights(values: dict, beta: float = 0.8, decay: float = 0.1) -> dict[str, torch.Tensor]:
    """Return x of a plain loop over x, y and z, with Adam's second moment by hand."""
    plain = technique_runs.Plain(values)
    model = list(plain.model.parameters())
    x, z = ([p.detach().clone() for p in model] for _ in range(2))
    second, total = [torch.zeros_like(p) for p in model], 0.0

    @torch.no_grad()
    def update(step: int) -> None:
        nonlocal total
        rate = 1e-2 * min(1.0, step / 3)
        for p, average, fast in zip(model, x, z, strict=True):
            p.copy_(beta * average + (1 - beta) * fast)
        plain.model.zero_grad()
        with torch.enable_grad():
            plain.loss().backward()
        total += rate**2
        share = rate**2 / total if total else 0.0
        for p, average, fast, v in zip(model, x, z, second, strict=True):
            v.mul_(0.999).add_(p.grad**2, alpha=0.001)
            fast.mul_(1 - rate * (decay if p.dim() >= 2 else 0.0))
            fast.sub_(rate * p.grad / ((v / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8))
            average.mul_(1 - share).add_(fast, alpha=share)
            p.copy_(average)

    return plain.train(update)


def test_mutant_gradients_at_the_fast_weights_differ(tmp_path):
    values = fields(tmp_path)
    assert kit.distance(plain_weights(values), plain_weights(values, beta=0.0)) > 1e-6  # plain averaging


@pytest.mark.parametrize(
    "given, text",
    [
        ({}, "adam_beta1 is 0.9"),
        ({"optim": "nadam"}, "adam_beta1 is 0.9"),
        ({"adam_beta1": 0.0, "techniques": {"cycle_momentum": None}}, "which cycle_momentum sets"),
        ({"dtype": "bfloat16"}, "dtype is bfloat16"),
    ],
)
def test_schedule_free_refuses_momentum_and_16_bits(given, text):
    with pytest.raises(UsageError, match=text):
        ScheduleFree().change_model(torch.nn.Linear(1, 1), run_config(**{"techniques": None} | given))
