import json

import torch

from tests.helpers import kit, technique_runs

LIMIT = 1e-3  # most elements of the first gradients are larger


def fields(folder) -> dict:
    return technique_runs.files(folder) | {"techniques": json.dumps({"clip_by_value": {"limit": LIMIT}})}


def plain_weights(values: dict, limit: float = LIMIT) -> dict[str, torch.Tensor]:
    plain = technique_runs.Plain(values)
    clip = torch.nn.utils.clip_grad_value_
    return plain.descend(plain.optimizer(), lambda step: clip(plain.model.parameters(), limit))


def test_mutant_without_the_limit_differs(tmp_path):
    values = fields(tmp_path)
    assert kit.distance(plain_weights(values), plain_weights(values, limit=1.0)) > 1e-4
