import json

import torch

from addons.techniques import adaptive_clipping
from tests.helpers import kit, technique_runs

FACTOR, EPS = 0.3, 1e-3


def fields(folder) -> dict:
    options = {"adaptive_clipping": {"clip_factor": FACTOR, "eps": EPS, "exclude": ["*.wpe.*"]}}
    # Adam would undo a factor of the gradient.
    return technique_runs.files(folder) | {"techniques": json.dumps(options), "optim": "sgd"}


def clip_as_timm(parameter: torch.nn.Parameter) -> bool:
    """Clip as timm's `adaptive_clip_grad`; return whether some units, but not all, were clipped."""
    gradient, weights = parameter.grad, parameter.detach()
    if parameter.ndim <= 1:
        gradient_norm, weight_norm = gradient.norm(2.0), weights.norm(2.0)
    else:
        dims = tuple(range(1, parameter.ndim))
        gradient_norm, weight_norm = (x.norm(2.0, dim=dims, keepdim=True) for x in (gradient, weights))
    largest = weight_norm.clamp(min=EPS).mul(FACTOR)
    clipped = gradient * (largest / gradient_norm.clamp(min=1e-6))
    parameter.grad = torch.where(gradient_norm < largest, gradient, clipped)
    return 0 < int((gradient_norm < largest).sum()) < gradient_norm.numel()


def plain_weights(values: dict) -> dict[str, torch.Tensor]:
    plain = technique_runs.Plain(values)
    partly = []

    def clip(step: int) -> None:
        partly.extend(clip_as_timm(p) for n, p in plain.model.named_parameters() if "wpe." not in n)

    weights = plain.descend(plain.optimizer(torch.optim.SGD, momentum=0.9), clip)
    assert any(partly)
    return weights


def test_mutant_norm_of_the_whole_tensor_is_caught(tmp_path, monkeypatch):
    values = fields(tmp_path)
    reference = plain_weights(values)
    monkeypatch.setattr(adaptive_clipping, "unit_norms", torch.linalg.vector_norm)
    mutant = technique_runs.train(tmp_path / "mutant", values)
    assert kit.distance(mutant.weights, {n: reference[n] for n in mutant.weights}) > 1e-6
