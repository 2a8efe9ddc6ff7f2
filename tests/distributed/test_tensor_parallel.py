"""Layers cut over processes that compute together: the numbers of one process, and checkpoints that fit any strategy."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.tensor.parallel  # once, not in every process
from torch.distributed.tensor import DTensor

import train
from src.distributed import tensor_parallel
from src.distributed.host_group import HostGroup
from tests.helpers import kit

pytestmark = pytest.mark.cluster
STEPS = 6


def recipe(files, **fields) -> list[str]:
    values = {
        "model_config": files / "llama.yaml",
        "train_file": files / "train.jsonl",
        "validation_file": files / "validation.jsonl",
        "per_device_batch_size": 4,
        "max_steps": STEPS,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.5,  # every gradient is clipped
        "pad_to_multiple_of": 97,  # one shape: torch takes a second for each new one
        "logging_steps": 1,
        "eval_steps": 3,
        "save_steps": 3,
    }
    return kit.flags(**{name: value for name, value in (values | fields).items() if value is not None})


def where(world: int, **keys) -> dict[str, str]:
    return kit.where("fsdp2_tp", world, **{"mixed_precision": "no"} | keys)


ALONE = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "2"}


def _train(argv):
    """Train on this rank; return what it holds of parameters that are not cut, whole or this rank's rows."""
    if "ACCELERATE_USE_FSDP" not in os.environ:  # accelerate has no group without FSDP2 on a CPU
        import accelerate
        from accelerate.state import PartialState

        start, PartialState._prepare_backend = accelerate.Accelerator.__init__, kit._over_gloo
        accelerate.Accelerator.__init__ = lambda self, cpu, **rest: start(self, **rest)
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        os.environ.pop("ACCELERATE_USE_CPU")
    held = {}
    kit.after_prepare(lambda strategy, module, optimizer: held.update(module.named_parameters()))
    train.main([str(word) for word in argv])
    names = {name: value.device_mesh.mesh_dim_names for name, value in held.items() if isinstance(value, DTensor)}
    cut = [name for name, dims in names.items() if "tp" in dims]
    return len(cut), {n: v.to_local() if n in names else v.data for n, v in held.items() if n not in cut}


def trained(world: int, folder: Path, argv: list[str], env: dict) -> kit.Run:
    """Train in `folder`; assert that 7 matrices in each of 2 layers were cut, and that the rest is the same where it is held twice."""
    out = kit.spawn(world, _train, [*argv, "--output_dir", folder], out=folder.with_suffix(".out"), env=env)
    assert [cut for cut, _ in out] == [14] * world
    for (_, one), (_, other) in zip(out[::2], out[1::2], strict=True):
        assert kit.same(one, other)
    return kit.Run(folder)


@pytest.fixture(scope="module")
def one(files, tmp_path_factory) -> kit.Run:
    return kit.run_training(1, tmp_path_factory.mktemp("one") / "run", *recipe(files))


def check_same_lines(one: list[dict], other: list[dict]) -> None:
    for a, b in zip(one, other, strict=True):
        names = [name for name in ("loss", "grad_norm", "weight", "examples") if name in a]
        assert [b[name] for name in names] == pytest.approx([a[name] for name in names], rel=1e-6)


def check_same_numbers(one: kit.Run, other: kit.Run) -> None:
    assert kit.ledger_text(one.folder) == kit.ledger_text(other.folder)
    for kind in ("train", "eval"):
        check_same_lines(one.kind(kind), other.kind(kind))
    assert kit.distance(one.weights, other.weights) <= 1e-5


@pytest.mark.parametrize("world, env", [(2, ALONE), (4, None)])
def test_processes_that_compute_together_train_what_one_process_trains(files, one, tmp_path, world, env):
    run = trained(world, tmp_path / "run", recipe(files), env or where(world))
    check_same_numbers(one, run)
    for part in ("model", "optimizer"):
        name = f"checkpoints/step_{STEPS:08d}"
        assert kit.distance(*(kit.load_weights(r.folder / name, part) for r in (one, run))) <= 1e-5


@pytest.mark.parametrize("mutant", ["gradients of all processes", "each process counts", "parts are copies"])
def test_mutants_that_take_a_group_for_several_are_caught(files, one, tmp_path, monkeypatch, mutant):
    """Scaled by the number of processes; the weight summed over all; parts taken for copies of the whole in the norm."""
    if mutant == "gradients of all processes":
        gradient = train.compute_gradient
        naive = lambda strategy, module, window, weight: gradient(strategy, module, window, weight / 2)  # noqa: E731
        monkeypatch.setattr(train, "compute_gradient", naive)
    elif mutant == "each process counts":
        monkeypatch.setattr(HostGroup, "sum", _uncounted)
    else:
        monkeypatch.setattr(tensor_parallel, "math", SimpleNamespace(prod=lambda sizes: 1))
    argv = recipe(files, max_steps=2, validation_file=None)
    trained(2, tmp_path / "run", argv, ALONE)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    with pytest.raises(AssertionError):
        check_same_lines(one.kind("train")[:2], [line for line in lines if line["kind"] == "train"])


def _uncounted(self, values):
    vector = torch.as_tensor(values, dtype=torch.float64)
    torch.distributed.all_reduce(vector)
    return vector


def test_eval_py_finds_the_number_of_one_process(files, one, tmp_path):
    flags = kit.flags(checkpoint=one.folder / "final", validation_file=files / "validation.jsonl")
    found = kit.run_evaluation(4, tmp_path / "here", *flags, env=where(4))
    check_same_lines(one.kind("eval")[-1:], [found])


def test_a_run_moves_from_one_process_to_four_and_back(files, one, tmp_path):
    """Two steps on each; the last checkpoint is that of the straight run."""
    kit.run_training(1, tmp_path / "run", *recipe(files, max_steps=2))
    trained(4, tmp_path / "run", recipe(files, max_steps=4), where(4))
    run = kit.run_training(1, tmp_path / "run", *recipe(files))
    check_same_lines(one.kind("train"), run.kind("train"))
    assert kit.distance(one.weights, run.weights) <= 1e-5


@pytest.mark.parametrize(
    "world, model, keys, fields, message",
    [
        (4, "dropout.yaml", {}, {}, "tp_size is 2: set attention_dropout of the model to 0"),
        (4, "gpt2.yaml", {}, {}, "tp_size is 2, but transformers has no plan for gpt2"),
        (3, "llama.yaml", {}, {}, "parallelism_config_tp_size 2 does not divide 3 processes"),
        (6, "llama.yaml", {"parallelism_config_tp_size": 3}, {}, "tp_size is 3, which does not divide all of"),
        (4, "llama.yaml", {"fsdp_cpu_ram_efficient_loading": True}, {}, "fsdp_cpu_ram_efficient_loading: false"),
        (4, "llama.yaml", {}, {"compile": True}, "and no compile"),
    ],
)
def test_what_cannot_be_cut_exactly_is_refused(files, tmp_path, world, model, keys, fields, message):
    argv = recipe(files, model_config=files / model, **fields)
    (tmp_path / "here").mkdir()
    codes, outputs = kit.run_command(
        "train.py", *argv, "--output_dir", "run", folder=tmp_path / "here", world=world, env=where(world, **keys)
    )
    assert codes == [2] * world, outputs
    assert message in outputs[0]
