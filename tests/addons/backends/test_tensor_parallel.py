"""Tensor parallelism over gloo: the numbers of one process, and checkpoints that fit any backend."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.tensor.parallel  # once, not in every process
from torch.distributed.tensor import DTensor

import train
from engine.distributed import sharded_tensors
from engine.distributed.host_group import HostGroup
from engine.process import private_apis
from engine.run.totals_and_votes import StepTotals
from tests.helpers import kit
from tests.helpers.backend_runs import check_same_checkpoint, check_same_lines, check_same_run, recipe, where

pytestmark = pytest.mark.cluster
STEPS = 6
FIELDS = {
    "max_steps": STEPS,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.5,  # every gradient is clipped
    "adam_epsilon": 1e-4,  # with the default, a gradient that is zero but for rounding would become a whole step
    "pad_to_multiple_of": 97,  # one shape: torch takes a second for each new one
    "eval_steps": 3,
    "save_steps": 3,
}
TP_ONLY = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "2"}


def _train(argv):
    """Train on this rank; return how many parameters are sharded by tensor parallelism, and this rank's part of the others."""
    if "ACCELERATE_USE_FSDP" not in os.environ:  # accelerate has no group without FSDP2 on a CPU
        import accelerate

        start = accelerate.Accelerator.__init__
        accelerate.Accelerator.__init__ = lambda self, cpu, **rest: start(self, **rest)
        private_apis.shard_over_gloo()
    parameters = {}
    kit.after_prepare(lambda backend, module, optimizer: parameters.update(module.named_parameters()))
    train.main([str(word) for word in argv])
    count, others = 0, {}
    for name, value in parameters.items():
        sharded = isinstance(value, DTensor)
        if sharded and "tp" in value.device_mesh.mesh_dim_names:
            count += 1
        else:
            others[name] = value.to_local() if sharded else value.data
    return count, others


def trained(world: int, folder: Path, argv: list[str], env: dict) -> None:
    """Train in `folder`; assert that 7 matrices in each of 2 layers are sharded, and all else is equal within each group."""
    out = kit.spawn(world, _train, [*argv, "--output_dir", folder], out=folder.with_suffix(".out"), env=env)
    assert [count for count, _ in out] == [14] * world
    for (_, one), (_, other) in zip(out[::2], out[1::2], strict=True):
        assert kit.same(one, other)


@pytest.fixture(scope="module")
def one(files, tmp_path_factory) -> kit.Run:
    return kit.run_training(1, tmp_path_factory.mktemp("one") / "run", *recipe(files, **FIELDS))


@pytest.mark.parametrize("world, env", [(2, TP_ONLY), (4, where("fsdp2_tp", 4))])
def test_tensor_parallel_trains_the_numbers_of_one_process(files, one, tmp_path, world, env):
    trained(world, tmp_path / "run", recipe(files, **FIELDS), env)
    run = kit.Run(tmp_path / "run")
    check_same_run(one, run)
    check_same_checkpoint(one, run, STEPS, 1e-5)


def _sum_of_all_processes(self, values):
    vector = torch.as_tensor(values, dtype=torch.float64)
    torch.distributed.all_reduce(vector)
    return vector


@pytest.mark.parametrize("mutant", ["gradients of all processes", "each process counts", "parts are copies"])
def test_mutants_that_take_a_group_for_several_processes_are_caught(files, one, tmp_path, monkeypatch, mutant):
    """Scaled by the number of processes; the weight summed over all; in the norm, parts taken for copies of the whole."""
    if mutant == "gradients of all processes":
        gradient = train.compute_gradient

        def scaled(backend, module, batch, totals):
            return gradient(backend, module, batch, StepTotals(totals, weight=totals.weight / 2))

        monkeypatch.setattr(train, "compute_gradient", scaled)
    elif mutant == "each process counts":
        monkeypatch.setattr(HostGroup, "sum", _sum_of_all_processes)
    else:
        monkeypatch.setattr(sharded_tensors, "math", SimpleNamespace(prod=lambda sizes: 1))
    trained(2, tmp_path / "run", recipe(files, **FIELDS | {"max_steps": 2, "validation_file": None}), TP_ONLY)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    with pytest.raises(AssertionError):
        check_same_lines(one.kind("train")[:2], [line for line in lines if line["kind"] == "train"])


def test_eval_py_finds_the_number_of_one_process(files, one, tmp_path):
    flags = kit.flags(checkpoint=one.folder / "final", validation_file=files / "validation.jsonl")
    found = kit.run_evaluation(4, tmp_path / "here", *flags, env=where("fsdp2_tp", 4))
    check_same_lines(one.kind("eval")[-1:], [found])


@pytest.mark.parametrize("optim", ["adamw", "nadam"])  # nadam has numbers of its own in each group
def test_a_run_moves_from_one_process_to_four_and_back(files, one, tmp_path, optim):
    fields = FIELDS | {"optim": optim}
    one = one if optim == "adamw" else kit.run_training(1, tmp_path / "one", *recipe(files, **fields))
    kit.run_training(1, tmp_path / "run", *recipe(files, **fields | {"max_steps": 2}))
    trained(4, tmp_path / "run", recipe(files, **fields | {"max_steps": 4}), where("fsdp2_tp", 4))
    run = kit.run_training(1, tmp_path / "run", *recipe(files, **fields))
    check_same_lines(one.kind("train"), run.kind("train"))
    assert kit.distance(one.weights, run.weights) <= 1e-5


@pytest.mark.parametrize(
    "world, model, keys, fields, message",
    [
        (4, "dropout.yaml", {}, {}, "tp_size is 2: set attention_dropout"),
        (4, "gpt2.yaml", {}, {}, "tp_size is 2, but transformers has no plan for gpt2"),
        (6, "llama.yaml", {"parallelism_config_tp_size": 3}, {}, "tp_size is 3, which does not divide"),
        (4, "llama.yaml", {"fsdp_cpu_ram_efficient_loading": True}, {}, "fsdp_cpu_ram_efficient_loading: false"),
        (4, "llama.yaml", {}, {"compile": True}, "no compile"),
    ],
)
def test_what_cannot_be_exact_is_refused(files, tmp_path, world, model, keys, fields, message):
    argv = [*recipe(files, model, **FIELDS | fields), "--output_dir", "run"]
    env = where("fsdp2_tp", world, **keys)
    codes, outputs = kit.run_command("train.py", *argv, folder=tmp_path / "here", world=world, env=env)
    assert codes == [2] * world, outputs
    assert message in outputs[0]
