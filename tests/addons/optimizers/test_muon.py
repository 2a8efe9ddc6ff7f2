"""Muon: the matrices of hidden layers, exact for every split, resumed, sharded; its absence."""

import json

import pytest
import torch

from tests.helpers import kit, technique_runs


def fields(folder) -> dict:
    return technique_runs.files(folder) | {"optim": "muon", "optim_args": json.dumps({"momentum": 0.9})}


def plain_weights(values: dict, embeddings: bool = False) -> dict[str, torch.Tensor]:
    """Return the weights of a plain loop with two optimizers; with `embeddings`, Muon also updates the embeddings."""
    plain = technique_runs.Plain(values)
    named = dict(plain.model.named_parameters())
    hidden = {n for n, p in named.items() if p.dim() == 2 and (".h." in n or embeddings)}
    options = {"momentum": 0.9, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    muon = torch.optim.Muon([named[name] for name in hidden], lr=1e-2, **options)
    rest = [{"params": [p], "weight_decay": 0.1 * (p.dim() == 2)} for n, p in named.items() if n not in hidden]
    adamw = torch.optim.AdamW(rest, lr=1e-2)

    def update(step: int) -> None:
        plain.model.zero_grad()
        plain.loss().backward()
        muon.step()
        adamw.step()

    return plain.train(update)


def test_mutant_muon_of_the_embeddings_differs(tmp_path):
    values = fields(tmp_path)
    assert kit.distance(plain_weights(values), plain_weights(values, embeddings=True)) > 1e-4


def test_mutant_a_resume_without_the_moments_of_muon_is_seen(tmp_path, monkeypatch):
    from engine.distributed import optimizer_state

    nested = optimizer_state._nested
    monkeypatch.setattr(optimizer_state, "_nested", lambda flat: {} if "momentum_buffer" in flat else nested(flat))
    with pytest.raises(AssertionError):
        technique_runs.check_resume(tmp_path, fields(tmp_path), world=1, micro=16)
