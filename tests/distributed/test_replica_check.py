"""Replicas that differ end the run, naming rank and first parameter, before anything of it is saved."""

import json
import os

import pytest
import torch

import train
from src.checkpointing import checkpoint_folder
from src.config.errors import Failure
from src.config.schema import RunConfig
from src.distributed import backend_checks
from src.distributed.backends import make_backend
from src.distributed.init_accelerator import init_accelerator
from tests.helpers import kit

PARAMETER = "transformer.h.1.mlp.c_fc.weight"


def recipe(files, **fields) -> list[str]:
    values = {
        "model_config": files / "gpt2.yaml",
        "train_file": files / "train.jsonl",
        "per_device_batch_size": 4,
        "max_steps": 8,
        "max_length": 16,
        "logging_steps": 1,
        "save_steps": 2,
        "save_total_limit": 10,
    }
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


def saved(folder) -> list[int]:
    return [checkpoint_folder.step_of(path) for path in checkpoint_folder.list_checkpoints(folder / "run")]


def trained(files, folder, **fields):
    """Return (exit codes, what the ranks printed) of a run in `folder`/run."""
    return kit.run_command("train.py", *recipe(files, **fields), "--output_dir", "run", folder=folder, world=2)


def test_one_flipped_bit_on_one_rank_ends_all(files, tmp_path):
    """In step 5: the check before the save of step 6 finds it, and names the first of several parameters. Then the same
    command resumes as if nothing had happened."""
    folder = tmp_path / "here"
    with pytest.MonkeyPatch.context() as patch:
        flip_at(5, 1, patch, names=["transformer.ln_f.bias", PARAMETER])
        codes, outputs = trained(files, folder)
    assert codes == [1, 1], outputs
    last = outputs[0].rstrip().splitlines()[-1]
    assert all(word in last for word in ("step 6", "ranks 0 and 1", PARAMETER))
    assert "ln_f" not in last
    assert "Traceback" not in "".join(outputs)  # all ranks raise the same Failure
    assert saved(folder) == [2, 4]
    assert not (folder / "run" / "final").exists()
    status = json.loads((folder / "run" / "status.json").read_text())
    assert (status["status"], status["exit_code"]) == ("failed", 1)
    for number in range(2):
        assert PARAMETER in (folder / "run" / "logs" / f"rank_{number}.log").read_text()
    run = kit.run_training(2, folder / "run", *recipe(files))
    assert kit.same(run.weights, kit.run_training(2, tmp_path / "straight", *recipe(files)).weights)
    assert saved(folder) == [2, 4, 6, 8]  # equal replicas pass at every save


def test_mutant_without_the_check_saves_replicas_that_differ(files, tmp_path, monkeypatch):
    flip_at(5, 1, monkeypatch)
    monkeypatch.setattr(backend_checks, "check_replicas", lambda *args: None)
    codes, _ = trained(files, tmp_path / "here")
    assert codes == [0, 0]
    assert saved(tmp_path / "here") == [2, 4, 6, 8]


def test_replicas_are_compared_between_saves_with_drift_check_steps(files, tmp_path, monkeypatch):
    flip_at(5, 1, monkeypatch)
    codes, outputs = trained(files, tmp_path / "here", drift_check_steps=5)
    assert codes == [1, 1], outputs
    assert "step 5" in outputs[0].rstrip().splitlines()[-1]


# ---- what the digest sees ----------------------------------------------------------------------------------------------

CHANGES = {
    "lowest bit": lambda x: flip(x, 0),
    "sign bit": lambda x: flip(x, 31),
    "lowest bit of two elements": lambda x: (flip(x, 0, 0), flip(x, 0, 1)),
    "two elements exchanged": lambda x: x.view(-1)[:2].copy_(x.view(-1)[:2].flip(0).clone()),
    "two rows exchanged": lambda x: x[:2].copy_(x[:2].flip(0).clone()),
    "every sign": lambda x: x.neg_(),
    "zeros": lambda x: x.zero_(),
    "ones": lambda x: x.fill_(1),
    "NaN": lambda x: x.view(-1)[3:4].fill_(float("nan")),
    "another NaN": lambda x: (x.view(-1)[3:4].fill_(float("nan")), flip(x, 3, 3)),
}


def _model(dtype=torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 4)).to(dtype)


@pytest.mark.parametrize("device", ["host", "device"])
def test_digest_sees_every_change(device, monkeypatch):
    """The digest for devices runs on a CPU here."""
    if device == "device":
        monkeypatch.setattr(backend_checks, "digests", lambda m: torch.stack([_on_device(p) for p in m.parameters()]))
    results = {}
    for how, change in {"nothing": lambda x: None, **CHANGES}.items():
        model = _model()
        with torch.no_grad():
            change(model[0].weight)
        results[how] = backend_checks.digests(model)
    assert len({digest[0].item() for digest in results.values()}) == len(results)
    assert all(torch.equal(digest[1:], results["nothing"][1:]) for digest in results.values())


def _on_device(parameter: torch.Tensor) -> torch.Tensor:
    return backend_checks._digest_on_device(parameter.detach().reshape(-1))


def _compare(changes: list[dict[int, str]], mutant: bool) -> list[str]:
    """Compare replicas, each time with bits flipped in some ranks' parameters; return what each failure says."""
    if mutant:  # sums in the tensors' own precision
        sums = lambda model: torch.stack([p.detach().sum() for p in model.parameters()])  # noqa: E731
        backend_checks.digests = lambda model: sums(model).view(torch.int32)
    cfg, messages = RunConfig(output_dir="unused", ddp_timeout=60), []
    backend = make_backend(init_accelerator(cfg), cfg)
    for change in changes:
        model = _model()
        if (name := change.get(int(os.environ["RANK"]))) is not None:
            flip(model.get_parameter(name), 0)
        try:
            backend_checks.check_replicas(backend, model, 7)
            messages.append("")
        except Failure as failure:
            messages.append(str(failure))
    return messages


@pytest.mark.parametrize(
    "world, changes, said",
    [
        (
            3,
            [{}, {1: "2.bias"}, {0: "1.weight"}],
            [
                "",
                "rank 1 differs from the others, first in 2.bias",
                "rank 0 differs from the others, first in 1.weight",
            ],
        ),
        (2, [{1: "0.weight"}], ["ranks 0 and 1 differ, first in 0.weight"]),
    ],
)
def test_every_rank_reports_the_same_difference(tmp_path, world, changes, said):
    first, *others = kit.spawn(world, _compare, changes, False, out=tmp_path / "out")
    assert all(other == first for other in others)
    assert all(words in message and bool(words) == bool(message) for words, message in zip(said, first, strict=True))


def test_mutant_digest_that_is_a_sum_misses_a_flipped_bit(tmp_path):
    """A ten-millionth of one of 128 elements is lost in the rounding of their sum."""
    assert kit.spawn(2, _compare, [{1: "0.weight"}], True, out=tmp_path / "out") == [[""], [""]]
