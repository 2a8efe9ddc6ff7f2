import json

import torch

from tests.helpers import technique_runs

LIMIT = 1e-3  # most elements of the first gradients are larger


def fields(folder) -> dict:
    return technique_runs.files(folder) | {"techniques": json.dumps({"clip_by_value": {"limit": LIMIT}})}


def plain_weights(values: dict, clip_each: bool = False) -> dict[str, torch.Tensor]:
    """Return the weights of a plain loop; with `clip_each`, the naive loop that clips the gradient of each micro-batch."""
    plain = technique_runs.Plain(values)
    optimizer = plain.optimizer()

    def update(step: int) -> None:
        optimizer.zero_grad()
        plain.loss().backward()
        torch.nn.utils.clip_grad_value_(plain.model.parameters(), LIMIT)
        optimizer.step()

    return plain.train(update)


def test_clip_by_value_is_exact_for_every_split(tmp_path):
    values = fields(tmp_path)
    technique_runs.check_splits(tmp_path, values, plain_weights(values))
