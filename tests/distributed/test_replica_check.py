"""Replicas that differ end the run, naming rank and first parameter, before anything of it is saved."""

import json

import pytest
import torch

import train
from src.distributed import backend_checks
from tests.helpers import kit
from tests.helpers.backend_runs import saved

PARAMETER = "transformer.h.1.mlp.c_fc.weight"


def recipe(files, **fields) -> list[str]:
    values = {"model_config": files / "gpt2.yaml", "train_file": files / "train.jsonl", "per_device_batch_size": 4}
    values |= {"max_steps": 8, "max_length": 16, "logging_steps": 1, "save_steps": 2, "save_total_limit": 10}
    return kit.flags(**values | fields)


def flip(parameter: torch.Tensor, bit: int = 0, element: int = -1) -> None:
    """Flip one bit of one element of a float32 tensor: bit 0 is worth a ten-millionth of it."""
    with torch.no_grad():
        parameter.data.view(-1).view(torch.int32)[element] ^= 1 << bit


def flip_at(step: int, rank: int, monkeypatch, names=(PARAMETER,)) -> None:
    """Let faulty memory change parameters on one rank after its update of `step`."""
    count, update = [0], train.optimizer_step

    def faulty(backend, module, *args):
        result = update(backend, module, *args)
        count[0] += 1
        if count[0] == step and backend.data_rank == rank:
            for name in names:
                flip(backend.accelerator.unwrap_model(module).model.get_parameter(name))
        return result

    monkeypatch.setattr(train, "optimizer_step", faulty)


def trained(files, folder, world=2, **fields):
    """Return (exit codes, what the ranks printed) of a run in `folder`/run."""
    return kit.run_command("train.py", *recipe(files, **fields), "--output_dir", "run", folder=folder, world=world)


def test_one_flipped_bit_on_one_rank_ends_all(files, tmp_path):
    """In step 5: the check before the save of step 6 finds it, and names the first of several parameters. Then the same
    command resumes as if nothing had happened."""
    folder = tmp_path / "here"
    with pytest.MonkeyPatch.context() as patch:
        flip_at(5, 1, patch, names=["transformer.ln_f.bias", PARAMETER])
        codes, outputs = trained(files, folder)
    assert codes == [1, 1], outputs
    last = outputs[0].rstrip().splitlines()[-1]
    assert f"differ at step 6: ranks 0 and 1 differ, first in model.{PARAMETER}" in last
    assert "Traceback" not in "".join(outputs)  # all ranks raise the same Failure
    assert saved(folder / "run") == [2, 4]
    status = json.loads((folder / "run" / "status.json").read_text())
    assert (status["status"], status["exit_code"]) == ("failed", 1)
    for number in range(2):
        assert PARAMETER in (folder / "run" / "logs" / f"rank_{number}.log").read_text()
    run = kit.run_training(2, folder / "run", *recipe(files))
    assert kit.same(run.weights, kit.run_training(2, tmp_path / "straight", *recipe(files)).weights)
    assert saved(folder / "run") == [2, 4, 6, 8]  # equal replicas pass at every save


def sums(model: torch.nn.Module) -> torch.Tensor:
    """Return the sum of each parameter, in whose rounding a ten-millionth of one element is lost."""
    return torch.stack([parameter.detach().sum() for parameter in model.parameters()]).view(torch.int32)


@pytest.mark.parametrize("name, mutant", [("check_replicas", lambda *args: None), ("digests", sums)])
def test_mutants_save_replicas_that_differ(files, tmp_path, monkeypatch, name, mutant):
    """Without the check, and with sums instead of hashes."""
    flip_at(5, 1, monkeypatch)
    monkeypatch.setattr(backend_checks, name, mutant)
    codes, _ = trained(files, tmp_path / "here")
    assert codes == [0, 0]
    assert saved(tmp_path / "here" / "run") == [2, 4, 6, 8]


def test_replicas_are_compared_between_saves_with_drift_check_steps(files, tmp_path, monkeypatch):
    flip_at(5, 1, monkeypatch)
    codes, outputs = trained(files, tmp_path / "here", world=3, drift_check_steps=5)
    assert codes == [1, 1, 1], outputs
    assert "differ at step 5: rank 1 differs from the others" in outputs[0].rstrip().splitlines()[-1]


# ---- what the digest sees ----------------------------------------------------------------------------------------------

CHANGES = {
    "nothing": lambda x: None,
    "lowest bit": lambda x: flip(x, 0),
    "lowest bit of two elements": lambda x: (flip(x, 0, 0), flip(x, 0, 1)),
    "two elements exchanged": lambda x: x.view(-1)[:2].copy_(x.view(-1)[:2].flip(0).clone()),
    "every sign": lambda x: x.neg_(),
    "NaN": lambda x: x.view(-1)[3:4].fill_(float("nan")),
    "another NaN": lambda x: (x.view(-1)[3:4].fill_(float("nan")), flip(x, 3, 3)),
}


@pytest.mark.parametrize("device", ["host", "device"])
def test_digest_sees_every_change(device):
    """The digest for devices runs on a CPU here."""
    results = {}
    for how, change in CHANGES.items():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.LayerNorm(8))
        with torch.no_grad():
            change(model[0].weight)
        results[how] = backend_checks.digests(model)
        if device == "device":
            flat = [parameter.detach().reshape(-1) for parameter in model.parameters()]
            results[how] = torch.stack([backend_checks._digest_on_device(values) for values in flat])
    assert len({digest[0].item() for digest in results.values()}) == len(results)
    assert all(torch.equal(digest[1:], results["nothing"][1:]) for digest in results.values())
