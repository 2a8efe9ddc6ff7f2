"""Replicas that differ end the run, naming rank and first parameter, before anything of it is saved."""

import pytest
import torch

import train
from engine.distributed import replica_check
from engine.process import run_status
from tests.helpers import kit
from tests.helpers.backend_runs import recipe, saved

PARAMETER = "transformer.h.1.mlp.c_fc.weight"


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
    values = {"max_steps": 8, "max_length": 16, "save_steps": 2, "output_dir": "run"}
    values |= dict.fromkeys(("validation_file", "learning_rate"))  # with another rate, an update may round the bit away
    return kit.run_command("train.py", *recipe(files, "gpt2.yaml", **values | fields), folder=folder, world=world)


def test_one_flipped_bit_on_one_rank_ends_all(files, tmp_path, monkeypatch):
    """In step 5: the check before the save of step 6 finds it, and names the first of several parameters."""
    flip_at(5, 1, monkeypatch, names=["transformer.ln_f.bias", PARAMETER])
    codes, outputs = trained(files, tmp_path)
    assert codes == [1, 1], outputs
    last = outputs[0].rstrip().splitlines()[-1]
    assert f"differ at step 6: ranks 0 and 1 differ, first in model.{PARAMETER}" in last
    assert "Traceback" not in "".join(outputs)  # all ranks raise the same Failure
    assert saved(tmp_path / "run") == [2, 4]
    status = run_status.read_status(tmp_path / "run")
    assert (status["status"], status["exit_code"]) == ("failed", 1)
    for number in range(2):
        assert PARAMETER in (tmp_path / "run" / "logs" / f"rank_{number}.log").read_text()


def sums(model: torch.nn.Module) -> torch.Tensor:
    """Return the sum of each parameter, in whose rounding a ten-millionth of one element is lost."""
    return torch.stack([parameter.detach().sum() for parameter in model.parameters()]).view(torch.int32)


@pytest.mark.parametrize("name, mutant", [("check_replicas", lambda *args: None), ("digests", sums)])
def test_mutants_save_replicas_that_differ(files, tmp_path, monkeypatch, name, mutant):
    """Without the check, and with sums instead of hashes."""
    flip_at(5, 1, monkeypatch)
    monkeypatch.setattr(replica_check, name, mutant)
    codes, _ = trained(files, tmp_path)
    assert codes == [0, 0]
    assert saved(tmp_path / "run") == [2, 4, 6, 8]


def test_replicas_are_compared_between_saves_with_drift_check_steps(files, tmp_path, monkeypatch):
    flip_at(5, 1, monkeypatch)
    codes, outputs = trained(files, tmp_path, world=3, drift_check_steps=5)
    assert codes == [1, 1, 1], outputs
    assert "differ at step 5: rank 1 differs from the others" in outputs[0].rstrip().splitlines()[-1]


# ---- what the digest sees ----------------------------------------------------------------------------------------------

CHANGES = [
    lambda x: None,
    lambda x: flip(x, 0),
    lambda x: (flip(x, 0, 0), flip(x, 0, 1)),
    lambda x: x[:2].copy_(x[:2].flip(0).clone()),
    lambda x: x.neg_(),
    lambda x: x[3:4].fill_(float("nan")),
    lambda x: (x[3:4].fill_(float("nan")), flip(x, 3, 3)),  # another NaN
]


def test_digests_see_saved_buffers():
    layer = torch.nn.BatchNorm1d(3)
    before = replica_check.digests(layer)
    layer.running_mean[0] += 1
    assert (replica_check.digests(layer) != before).sum() == 1


def test_digest_for_devices_sees_every_change():
    """It runs on a CPU here; the digest for CPUs is xxHash."""
    values = [torch.arange(1.0, 129.0) for _ in CHANGES]
    for change, x in zip(CHANGES, values, strict=True):
        change(x)
    assert len({replica_check._digest_on_device(x).item() for x in values}) == len(CHANGES)
