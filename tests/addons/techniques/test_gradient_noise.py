import hashlib
import json
import os

import pytest
import torch

from addons.techniques import gradient_noise
from tests.helpers import kit, technique_runs

ETA, GAMMA = 0.01, 0.55


def fields(folder) -> dict:
    options = {"gradient_noise": {"eta": ETA, "gamma": GAMMA}}
    return technique_runs.files(folder) | {"techniques": json.dumps(options)}


def noise(step: int, name: str, like: torch.Tensor) -> torch.Tensor:
    """Return the noise of step 1, 2, …: standard normal numbers seeded by a hash of (seed, step, name), times the deviation."""
    digest = hashlib.blake2b(repr(("gradient noise", 42, step, name)).encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.randn(like.shape, generator=generator, dtype=like.dtype) * (ETA / step**GAMMA) ** 0.5


def plain_weights(values: dict) -> dict[str, torch.Tensor]:
    plain = technique_runs.Plain(values)

    def add_noise(step: int) -> None:
        for name, parameter in plain.model.named_parameters():
            parameter.grad += noise(step + 1, f"model.{name}", parameter)

    return plain.descend(plain.optimizer(), add_noise)


def test_mutant_noise_that_depends_on_the_rank_is_caught(tmp_path, monkeypatch):
    def seed_by_rank(*parts):
        return derive_seed(*parts) + int(os.environ["RANK"])

    derive_seed = gradient_noise.derive_seed
    monkeypatch.setattr(gradient_noise, "derive_seed", seed_by_rank)
    with pytest.raises(kit.RankFailed, match="replica"):  # the weights differ at the first save
        technique_runs.train(tmp_path / "mutant", fields(tmp_path), 2, 8)
