"""FSDP2 and HSDP over gloo, by accelerate's own code: the numbers of one process, what travels, memory and precision."""

import json
import os
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import train
from engine.distributed.backends import Backend
from engine.distributed.fsdp2 import FSDP2
from engine.distributed.host_group import HostGroup
from engine.models import varlen_attention
from engine.process.private_apis import attention_kernel
from engine.run import model_with_loss
from src.tasks import causal_lm
from tests.helpers import kit
from tests.helpers.backend_runs import STEPS, at_step, check_same_checkpoint, check_same_numbers, check_same_run, where
from tests.helpers.backend_runs import fsdp2_recipe as recipe

pytestmark = pytest.mark.cluster


def short(files, model: str = "llama.yaml", **fields) -> list[str]:
    return recipe(files, model, **{"max_steps": 4, "eval_steps": 4, "save_steps": 99, "warmup_steps": 0} | fields)


def command(flags: list[str], folder, name: str = "fsdp2", world: int = 2, **keys) -> tuple[list, list[str]]:
    """Return (exit codes, what the ranks printed) of a run in `folder`/run by accelerate_configs/NAME.yaml."""
    argv = [*flags, "--output_dir", "run"]
    return kit.run_command("train.py", *argv, folder=folder, world=world, env=where(name, world, **keys))


# ---- the numbers -------------------------------------------------------------------------------------------------------


def test_two_ranks_train_the_numbers_of_one_process(fsdp2_alone, fsdp2_two):
    check_same_run(fsdp2_alone, fsdp2_two)


@pytest.mark.parametrize(
    "name, world, keys, fields",
    [
        ("fsdp2", 3, {"fsdp_activation_checkpointing": True}, {}),
        ("hsdp", 4, {"fsdp_cpu_ram_efficient_loading": False}, {}),
        ("fsdp2", 2, {"fsdp_reshard_after_forward": False}, {"sync_each_batch": False, "gradient_checkpointing": True}),
    ],
)
def test_so_does_every_other_split(files, fsdp2_alone, tmp_path, name, world, keys, fields):
    flags = recipe(files, save_steps=99, **fields)
    run = kit.run_training(world, tmp_path / "run", *flags, env=where(name, world, **keys))
    check_same_run(fsdp2_alone, run)
    check_same_checkpoint(fsdp2_alone, run, STEPS, 1e-5)


def test_a_model_that_only_the_main_process_builds(files, tmp_path, monkeypatch):
    """Dropout, tied weights, saved buffers, of which each rank writes one; a layer frozen at the end of `build`, as people do: the ranks that get an empty
    model do not reach that line."""
    build = causal_lm.Task.build

    def edited(self, weights=None, empty=False):
        assert empty == (os.environ["RANK"] != "0")
        model = build(self, weights, empty)
        for name in ("mark", "spot"):  # larger than any layer
            model.register_buffer(name, torch.full((50_000,), 0.0 if empty else 7.0))
        if not empty:
            model.transformer.wpe.requires_grad_(False)
        return model

    monkeypatch.setattr(causal_lm.Task, "build", edited)
    flags = short(files, "gpt2.yaml")
    alone = kit.run_training(1, tmp_path / "alone", *flags)
    run = kit.run_training(2, tmp_path / "run", *flags, env=where("fsdp2", 2))
    check_same_numbers(alone, run)
    assert run.weights.keys() == alone.weights.keys()
    assert all((run.weights[name] == 7.0).all() for name in ("mark", "spot"))
    assert "lm_head.weight" not in run.weights
    moments = [kit.load_weights(at_step(r, 4), "optimizer") for r in (alone, run)]
    assert moments[0].keys() == moments[1].keys()
    assert not any("wpe" in name for name in moments[1])


def _kernels(argv) -> list:
    """Train on this rank as if it had a GPU that takes lengths of documents; return the attention of each model."""
    kernels, build = [], causal_lm.Task.build

    def noted(*args, **options):
        model = build(*args, **options)
        kernels.append(attention_kernel(model.config))
        return model

    varlen_attention.is_default_for, causal_lm.Task.build = varlen_attention.fits_flash_kernel, noted
    train.main([str(word) for word in argv])
    return kernels


def test_all_ranks_have_the_attention_that_the_main_process_chose(files, tmp_path):
    argv = [*short(files, packing=True), "--output_dir", tmp_path / "run"]
    assert kit.spawn(2, _kernels, argv, out=tmp_path / "out", env=where("fsdp2", 2)) == [["varlen"]] * 2


def test_weights_that_accelerate_would_untie_are_refused(files, tmp_path, monkeypatch):
    """Without the method that ties them again, a run trains and ends somewhere else."""
    monkeypatch.setattr(model_with_loss.ModelWithLoss, "tie_weights", lambda self: None)
    codes, outputs = command(short(files, "gpt2.yaml"), tmp_path)
    assert codes == [1, 1], outputs
    assert "untied" in outputs[0]


def unpadded_share(backend, micro_batches, rounds):
    return micro_batches[backend.data_rank :: backend.data_world_size]


@pytest.mark.parametrize(
    "holder, name, mutant",
    [
        (Backend, "pad_with_dummy_batches", lambda self, batch, forwards: batch),
        (Backend, "share_of_rank", unpadded_share),
    ],
)
def test_mutants_without_dummy_batches_are_caught(files, tmp_path, monkeypatch, holder, name, mutant):
    """Three ranks have 3, 3 and 2 micro-batches in a step, and 5, 4 and 4 in an evaluation."""
    monkeypatch.setattr(holder, name, mutant)
    codes, _ = command(short(files, ddp_timeout=10), tmp_path, world=3)
    assert 0 not in codes


# ---- what travels ------------------------------------------------------------------------------------------------------


class Collectives(TorchDispatchMode):
    """Counts the collectives of this process by name. (torch's CommDebugMode does not survive a step of several passes.)"""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


def _count_collectives(argv, mutant: bool):
    """Train on this rank; return the collectives of each step's gradient, and the sizes of the vectors summed on the host."""
    steps, vectors = [], []
    gradient, call, sync = train.compute_gradient, HostGroup.sum, FSDP2.no_sync

    def counted(*args):
        with Collectives() as collectives:
            result = gradient(*args)
        steps.append(dict(collectives.counts))
        return result

    train.compute_gradient = counted
    HostGroup.sum = lambda self, values: (vectors.append(len(values)), call(self, values))[1]
    if mutant:  # accelerate's default, unless its own gradient accumulation is used
        FSDP2.no_sync = lambda self, module, unless: sync(self, module, True)
    train.main([str(word) for word in argv])
    return steps, vectors


GROUPS = 3  # of parameters: two layers, and all the rest


@pytest.mark.parametrize(
    "name, world, each, mutant, scattered, reduced",
    [
        ("fsdp2", 2, False, False, GROUPS, 0),
        ("hsdp", 4, True, False, 4 * GROUPS, GROUPS),
        ("hsdp", 4, True, True, 4 * GROUPS, 4 * GROUPS),
    ],
)
def test_how_often_gradients_are_reduced(files, tmp_path, name, world, each, mutant, scattered, reduced):
    """In a step of four micro-batches. Over copies of the model, which may be on nodes far apart, once a step."""
    fields = {"per_device_batch_size": 8 // world, "max_steps": 2, "max_eval_examples": 8, "logging_steps": 100}
    argv = [*short(files, **fields, sync_each_batch=each), "--output_dir", tmp_path / "run"]
    ranks = kit.spawn(world, _count_collectives, argv, mutant, out=tmp_path / "out", env=where(name, world))
    for steps, vectors in ranks:
        gathered = 4 * (2 * GROUPS - 1)  # in each pass: forward, and backward but for the last layers
        assert [counts["_allgather_base_"] for counts in steps] == [gathered] * 2
        assert [counts["_reduce_scatter_base_"] for counts in steps] == [scattered] * 2
        assert [counts.get("allreduce_", 0) for counts in steps] == [reduced] * 2
        # After those of the start: the vector of DDP, and the number of micro-batches of each rank.
        assert vectors[3:5] == [9 + world] * 2


# ---- memory and precision ----------------------------------------------------------------------------------------------


def test_weights_stay_float32_under_mixed_precision(files, fsdp2_alone, tmp_path):
    """An evaluation computes in the precision of training."""
    run = kit.run_training(2, tmp_path / "run", *recipe(files, max_steps=10), env=kit.where("fsdp2", 2))
    for part in (at_step(run, 10), run.folder / "final"):
        assert json.loads((part / "config.json").read_text())["dtype"] == "float32"
        assert {value.dtype for value in kit.load_weights(part).values()} == {torch.float32}
    assert {value.dtype for value in kit.load_weights(at_step(run, 10), "optimizer").values()} == {torch.float32}
    losses = list(zip(run.losses(), fsdp2_alone.losses()[:10], strict=True))
    assert all(a == pytest.approx(b, rel=1e-2) for a, b in losses)
    assert any(abs(a - b) > 1e-6 for a, b in losses)  # matrix products are not in float32
    line = kit.run_evaluation(3, tmp_path / "here", "--checkpoint", run.folder / "final", env=kit.where("fsdp2", 3))
    assert line["loss"] == run.kind("eval")[-1]["loss"]


# ---- what is refused ---------------------------------------------------------------------------------------------------


def test_bfloat16_weights_are_refused_where_fsdp2_would_undo_them(files, tmp_path):
    codes, outputs = command(short(files, dtype="bfloat16"), tmp_path, mixed_precision="bf16")
    assert codes == [2, 2], outputs
    assert "dtype is bfloat16" in outputs[0].rstrip().splitlines()[-1]
