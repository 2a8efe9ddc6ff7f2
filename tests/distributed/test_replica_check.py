"""Replicas that are no longer the same end the run, naming rank and first parameter, before anything of it is saved."""

import json
import os

import pytest
import torch

import train
from src.checkpointing import checkpoint_list
from src.checkpointing.checkpointer import Checkpointer
from src.config.errors import Failure
from src.distributed import replica_check
from src.distributed.host_group import HostGroup
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
    } | fields
    return kit.flags(**values)


def flip(parameter: torch.Tensor, bit: int = 0, element: int = -1) -> None:
    """Flip one bit of one element of a float32 tensor: bit 0 is worth a ten-millionth of it."""
    with torch.no_grad():
        parameter.data.view(-1).view(torch.int32)[element] ^= 1 << bit


def flip_at(step: int, rank: int, monkeypatch, change=flip, names=(PARAMETER,)):
    """Let faulty memory change parameters on one rank after its update of `step`."""
    count, update = [0], train.optimizer_step

    def faulty(strategy, module, *args):
        result = update(strategy, module, *args)
        count[0] += 1
        if count[0] == step and strategy.accelerator.process_index == rank:
            for name in names:
                change(strategy.accelerator.unwrap_model(module).model.get_parameter(name))
        return result

    monkeypatch.setattr(train, "optimizer_step", faulty)


def saved(folder) -> list[int]:
    return [checkpoint_list.step_of(path) for path in checkpoint_list.list_checkpoints(folder / "run")]


def trained(files, folder, world: int, **fields):
    """Return (exit codes, what the ranks printed) of a run in `folder`/run."""
    return kit.run_command("train.py", *recipe(files, **fields), "--output_dir", "run", folder=folder, world=world)


@pytest.mark.parametrize(
    "world, rank, said", [(2, 1, "ranks 0 and 1 differ"), (3, 2, "rank 2 differs from the others")]
)
def test_one_flipped_bit_on_one_rank_ends_all(files, tmp_path, monkeypatch, world, rank, said):
    """In step 5: the check is that before the save of step 6."""
    folder = tmp_path / "here"
    folder.mkdir()
    flip_at(5, rank, monkeypatch)
    codes, outputs = trained(files, folder, world)
    assert codes == [1] * world, outputs
    last = outputs[0].rstrip().splitlines()[-1]
    assert f"failed: the replicas are no longer the same at step 6: {said}, first in " in last
    assert PARAMETER in last
    assert "the same command resumes from the last checkpoint" in last
    assert "Traceback" not in "".join(outputs)  # all ranks know it alike
    assert saved(folder) == [2, 4]
    assert not (folder / "run" / "final").exists()
    status = json.loads((folder / "run" / "status.json").read_text())
    assert (status["status"], status["exit_code"]) == ("failed", 1)
    for number in range(world):
        assert "no longer the same" in (folder / "run" / "logs" / f"rank_{number}.log").read_text()


def test_the_first_of_several_parameters_is_named(files, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    flip_at(1, 1, monkeypatch, names=[PARAMETER, "transformer.ln_f.bias", "transformer.h.0.attn.c_attn.weight"])
    codes, outputs = trained(files, tmp_path / "here", 2)
    assert codes == [1, 1]
    assert outputs[0].rstrip().splitlines()[-1].count("transformer.h.0.attn.c_attn.weight") == 1
    assert PARAMETER not in outputs[0]


def test_after_it_the_same_command_goes_on_and_ends_as_if_undisturbed(files, tmp_path):
    (tmp_path / "here").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        flip_at(5, 1, patch)
        assert trained(files, tmp_path / "here", 2)[0] == [1, 1]
    run = kit.run_training(2, tmp_path / "here" / "run", *recipe(files))
    straight = kit.run_training(2, tmp_path / "straight", *recipe(files))
    assert kit.same(run.weights, straight.weights)
    assert saved(tmp_path / "here") == [2, 4, 6, 8]  # equal replicas pass, at every save


def test_mutant_without_the_check_saves_what_has_drifted(files, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    flip_at(5, 1, monkeypatch)
    monkeypatch.setattr(replica_check, "check_replicas", lambda *args: None)
    codes, _ = trained(files, tmp_path / "here", 2)
    assert codes == [0, 0]
    assert saved(tmp_path / "here") == [2, 4, 6, 8]


# ---- the rhythm ------------------------------------------------------------------------------------------------------


def _checks(argv):
    """Train on this rank; return the steps at which replicas were compared, and those that were saved."""
    steps, saves, check, save = [], [], replica_check.check_replicas, Checkpointer.save

    def checked(host_group, model_with_loss, step):
        steps.append(step)
        return check(host_group, model_with_loss, step)

    def saving(self):
        saves.append(self.state.step)
        return save(self)

    replica_check.check_replicas, Checkpointer.save = checked, saving
    train.main([str(word) for word in argv])
    return steps, saves


@pytest.mark.parametrize("every, expected", [(None, [4, 8]), (3, [3, 4, 6, 8, 8]), (1, [1, 2, 3, 4, 4, 5, 6, 7, 8, 8])])
def test_replicas_are_compared_with_each_save_and_every_so_many_steps(files, tmp_path, every, expected):
    flags = recipe(files, save_steps=4, **({"drift_check_steps": every} if every else {}))
    argv = [*flags, "--output_dir", tmp_path / "run"]
    assert kit.spawn(2, _checks, argv, out=tmp_path / "out") == [(expected, [4, 8])] * 2


def test_a_shorter_rhythm_finds_it_sooner(files, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    flip_at(2, 1, monkeypatch)
    codes, outputs = trained(files, tmp_path / "here", 2, save_steps=8, drift_check_steps=3)
    assert codes == [1, 1]
    assert "no longer the same at step 3" in outputs[0]
    assert saved(tmp_path / "here") == []


# ---- what the digest sees --------------------------------------------------------------------------------------------

CHANGES = {
    "its lowest bit": lambda x: flip(x, 0),
    "its sign bit": lambda x: flip(x, 31),
    "the lowest bit of two elements": lambda x: (flip(x, 0, 0), flip(x, 0, 1)),
    "two elements exchanged": lambda x: x.view(-1)[:2].copy_(x.view(-1)[:2].flip(0).clone()),
    "two rows exchanged": lambda x: x[:2].copy_(x[:2].flip(0).clone()),
    "every sign": lambda x: x.neg_(),
    "zeros for all": lambda x: x.zero_(),
    "a not-a-number": lambda x: x.view(-1)[3:4].fill_(float("nan")),
    "another not-a-number": lambda x: (x.view(-1)[3:4].fill_(float("nan")), flip(x, 3, 3)),
}


def _model(dtype=torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 4)).to(dtype)
    return model


@pytest.mark.parametrize("how", CHANGES)
def test_the_digest_of_a_parameter_sees_every_change(how):
    one, other = _model(), _model()
    assert torch.equal(replica_check.digests(one), replica_check.digests(other))
    with torch.no_grad():
        CHANGES[how](other[0].weight)
    assert (replica_check.digests(one) != replica_check.digests(other)).tolist() == [True] + [False] * 5


def test_the_digest_tells_constants_apart():
    one, other = _model(), _model()
    torch.nn.init.zeros_(other[1].weight)  # ones in the other
    assert not torch.equal(replica_check.digests(one), replica_check.digests(other))


@pytest.mark.parametrize("dtype, bits", [(torch.float32, 32), (torch.float64, 64), (torch.bfloat16, 16)])
def test_the_digest_sees_every_single_bit(dtype, bits):
    integers = {32: torch.int32, 64: torch.int64, 16: torch.int16}[bits]
    model = _model(dtype)
    before, parameter = replica_check.digests(model), model[2].bias.data
    for bit in range(bits):
        mask = torch.tensor(1 << bit if bit < bits - 1 else -(1 << bit), dtype=integers)
        parameter.view(integers)[1] ^= mask
        assert replica_check.digests(model)[-1] != before[-1], bit
        parameter.view(integers)[1] ^= mask
    assert torch.equal(replica_check.digests(model), before)


def test_the_digest_of_an_empty_or_frozen_or_strided_parameter_is_no_trouble():
    model = _model()
    model.empty = torch.nn.Parameter(torch.zeros(0, 3))
    model[0].weight.requires_grad_(False)
    model.strided = torch.nn.Parameter(torch.arange(12.0).view(3, 4).t())
    assert torch.equal(replica_check.digests(model), replica_check.digests(model))
    assert replica_check.digests(model).shape == (8,)


def _compare(changed: dict[int, str], mutant: bool):
    """Compare replicas of which some are changed; return what the failure says, or None."""
    from src.config.parsing import RunConfig

    rank = int(os.environ["RANK"])
    accelerator, model = init_accelerator(RunConfig(output_dir="unused")), _model()
    if rank in changed:
        flip(model.get_parameter(changed[rank]), 0)
    if mutant:  # sums in the tensors' own precision
        replica_check.digests = lambda model: torch.stack([p.detach().sum() for p in model.parameters()]).view(
            torch.int32
        )
    try:
        replica_check.check_replicas(HostGroup(accelerator, 60), model, 7)
    except Failure as failure:
        return str(failure)
    return None


@pytest.mark.parametrize(
    "world, changed, said",
    [
        (2, {}, None),
        (3, {}, None),
        (3, {1: "2.bias"}, "rank 1 differs from the others, first in 2.bias"),
        (3, {0: "1.weight"}, "rank 0 differs from the others, first in 1.weight"),
        (4, {1: "0.weight", 3: "0.weight"}, ""),
        (4, {2: "0.bias", 3: "2.bias"}, "rank 2 differs from the others, first in 0.bias"),
    ],
)
def test_every_rank_learns_the_same_of_who_differs(tmp_path, world, changed, said):
    found = kit.spawn(world, _compare, changed, False, out=tmp_path / "out")
    assert len(set(found)) == 1
    assert found[0] is None if said is None else said in found[0]


def test_mutant_digest_that_is_a_sum_misses_a_flipped_bit(tmp_path):
    found = kit.spawn(2, _compare, {1: "0.weight"}, False, out=tmp_path / "out")
    assert "ranks 0 and 1 differ, first in 0.weight" in found[0]
    # A ten-millionth of one of 128 elements is lost in the rounding of their sum.
    assert kit.spawn(2, _compare, {1: "0.weight"}, True, out=tmp_path / "mutant") == [None, None]
