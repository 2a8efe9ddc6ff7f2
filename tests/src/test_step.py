"""The gradient of one global batch and its update, against a loop written without any of our code."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator

import train
from engine.config.run_config import RunConfig
from engine.distributed.choose_backend import make_backend
from engine.distributed.host_group import HostGroup
from engine.plan.batch_plan import PlanConfig, plan
from engine.run.model_with_loss import ModelWithLoss
from engine.run.totals_and_votes import StepTotals
from src.training.evaluation import evaluate
from src.training.training_model import choose_kernels
from tests.conformance.checks import NoWaiting
from tests.helpers import kit
from tests.helpers.backend_runs import at_step, same_state
from tests.helpers.fp16 import train_in_fp16
from tests.helpers.step_recipe import recipe


def plain_loop(files, steps: int) -> tuple[list[float], list[float], dict]:
    """Full batches, torch's AdamW with decay groups, clipping at 1, linear schedule with warm-up; only the ids are ours."""
    from transformers import AutoConfig, AutoModelForCausalLM

    rows = [json.loads(line)["input_ids"] for line in (files / "train.jsonl").read_text().splitlines()]
    torch.manual_seed(42)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**kit.LLAMA), dtype=torch.float64)
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in named if "norm" not in n], "weight_decay": 0.1},
            {"params": [p for n, p in named if "norm" in n], "weight_decay": 0.0},
        ],
        lr=3e-3,
    )
    losses, norms = [], []
    for s in range(steps):
        epoch, within = divmod(s, 32)
        ids = np.concatenate([m.ids for m in plan(PlanConfig(1003, 32, 32, 42), epoch, within)])
        batch = [torch.tensor(rows[i]) for i in ids]
        inputs = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
        labels = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=-100)
        logits = model(input_ids=inputs).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        factor = s / 5 if s < 5 else (40 - s) / 35
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * factor
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, model.state_dict()


def test_a_full_batch_run_equals_an_independent_loop(files, tmp_path):
    losses, norms, weights = plain_loop(files, 40)
    run = kit.run_training(1, tmp_path / "run", *recipe(files))
    assert max(abs(a - b) for a, b in zip(losses, run.losses(), strict=True)) <= 1e-8
    assert max(abs(a - line["grad_norm"]) for a, line in zip(norms, run.kind("train"), strict=True)) <= 1e-7
    assert kit.distance(weights, run.weights) <= 1e-7
    assert run.kind("train")[0]["learning_rate"] == 0  # the first update of a warm-up from zero


def test_more_ranks_than_micro_batches(files, tmp_path, monkeypatch):
    """Global batches of 6 in micro-batches of 4 leave two of four ranks with a dummy batch. The mutant gives it weight."""
    flags = recipe(files, model_config=files / "exact.yaml", global_batch_size=6, per_device_batch_size=4, max_steps=6)
    one, four = (kit.run_training(world, tmp_path / f"{world}", *flags) for world in (1, 4))
    assert kit.distance(one.weights, four.weights) <= 1e-10
    gradient = train.compute_gradient

    def counting_dummies(backend, module, batch, totals):
        return gradient(backend, module, [(replace(micro, dummy=False), rows) for micro, rows in batch], totals)

    monkeypatch.setattr(train, "compute_gradient", counting_dummies)
    assert kit.distance(one.weights, kit.run_training(4, tmp_path / "mutant", *flags).weights) > 1e-10


def test_a_global_batch_without_targets_is_skipped_on_all_ranks(files, tmp_path):
    """Every third row has no target; global batches are of one row."""
    ids = np.random.default_rng(3).integers(0, 500, (12, 9)).tolist()
    rows = [{"input_ids": row, "labels": row if i % 3 else [-100] * 9} for i, row in enumerate(ids)]
    values = {"train_file": kit.write_jsonl(tmp_path / "train.jsonl", rows), "global_batch_size": 1}
    values |= {"per_device_batch_size": 1, "max_steps": 12, "warmup_steps": 0, "save_steps": 1, "save_total_limit": 20}
    run = kit.run_training(2, tmp_path / "run", *recipe(files, **values))
    lines = run.kind("train")
    empty = [line["step"] for line in lines if line["weight"] == 0]
    assert len(empty) == lines[-1]["skipped"] == 4
    assert all(line["loss"] is None for line in lines if line["step"] in empty)
    rates = [line["learning_rate"] for line in lines if line["weight"]]
    assert rates == pytest.approx([3e-3 * (1 - u / 12) for u in range(8)])  # a skipped step does not advance it
    assert all(same_state(at_step(run, step - 1), at_step(run, step)) for step in empty if step > 1)


# ---- one reduction per step ------------------------------------------------------------------------------------------


def _count_reductions(argv, no_sync: bool):
    """Train on this rank; return (steps, gradient reductions per bucket, sizes of the vectors summed on the host)."""
    reductions, vectors, steps = [], [], []
    update, call, in_order = train.optimizer_step, HostGroup.sum, HostGroup.sum_in_order

    def hooked(backend, module, optimizer):
        def hook(state, bucket):
            reductions.append(bucket.index())
            future = torch.distributed.all_reduce(bucket.buffer(), async_op=True).get_future()
            return future.then(lambda f: f.value()[0] / backend.accelerator.num_processes)

        module.register_comm_hook(None, hook)
        if not no_sync:
            backend.accelerator.no_sync = lambda module: nullcontext()

    kit.after_prepare(hooked)
    train.optimizer_step = lambda *args: (steps.append(1), update(*args))[1]
    HostGroup.sum = lambda self, values: (vectors.append(len(values)), call(self, values))[1]
    HostGroup.sum_in_order = lambda self, values: (vectors.append(len(values)), in_order(self, values))[1]
    train.main([str(word) for word in argv])
    return len(steps), len(reductions) / len(set(reductions)), vectors


def test_a_vote_is_summed_by_its_name():
    backend = make_backend(Accelerator(cpu=True), RunConfig())
    totals = StepTotals.sum_over_ranks(backend, [], {"pause": 2.0, "stop": 1.0})
    assert (totals.pause, totals.stop, totals.examples, totals.forwards) == (2.0, 1.0, 0.0, [])
    with pytest.raises(AttributeError, match=r"no sum named 'paus'.* pause"):
        _ = totals.paus
    with pytest.raises(ValueError, match="'weight'"):
        StepTotals.sum_over_ranks(backend, [], {"weight": 1.0})


def test_one_gradient_reduction_and_one_small_vector_per_step(files, tmp_path):
    flags = recipe(files, global_batch_size=32, per_device_batch_size=2, max_steps=5, logging_steps=100)
    argv = [*flags, "--output_dir", tmp_path / "run"]
    for steps, reductions, vectors in kit.spawn(2, _count_reductions, argv, True, out=tmp_path / "out"):
        assert steps == 5
        assert reductions == 5  # accumulation is 8, and each bucket travels once per optimizer step
        # One number before the first step; nine a step (weight, tokens, padded tokens, examples, ids, requests); the losses
        # of the one train line after a count of new names; at the end, whether the last save and the final model were
        # written.
        assert vectors[:7] == [1] + [9] * 5 + [6]
        assert set(vectors[7:]) == {1}
    mutant = kit.spawn(2, _count_reductions, [*argv, "--resume", "never"], False, out=tmp_path / "mutant")
    assert mutant[0][1] == 40


# ---- no wait for the device ------------------------------------------------------------------------------------------


def _train_without_waiting(argv, mutant: bool) -> int:
    """Train; return the number of gradients and updates in which no operation made the host wait for the device."""
    gradient, update, calls = train.compute_gradient, train.optimizer_step, []

    def watched(function):
        def call(*args):
            with NoWaiting():
                result = function(*args)
                if mutant and function is gradient:
                    result.losses.sum().item()
            calls.append(function)
            return result

        return call

    train.compute_gradient, train.optimizer_step = watched(gradient), watched(update)
    train.main([str(word) for word in argv])
    return len(calls)


def test_nothing_waits_for_the_device_between_log_steps(files, tmp_path):
    flags = recipe(files, dtype="float32", per_device_batch_size=8, max_steps=6, logging_steps=100)
    argv = [*flags, "--output_dir", tmp_path / "run"]
    assert kit.spawn(2, _train_without_waiting, argv, False, out=tmp_path / "out") == [12, 12]
    with pytest.raises(kit.RankFailed, match="_local_scalar_dense, for which the host waits"):
        kit.spawn(2, _train_without_waiting, [*argv, "--resume", "never"], True, out=tmp_path / "mutant")


# ---- the gradient scaler of fp16 -------------------------------------------------------------------------------------

# Few and short rows: a CPU computes float16 a hundred times slower than float32.
HALF = {"dtype": "float32", "global_batch_size": 8, "per_device_batch_size": 4, "warmup_steps": 0}
HALF |= {"max_steps": 12, "max_length": 16}


def train_with_scale(files, folder, scale: float) -> kit.Run:
    """Train in fp16 with this loss scale at the start."""
    argv = recipe(files, **HALF, output_dir=folder / "run")
    kit.spawn(1, train_in_fp16, argv, scale, out=folder / "out")
    return kit.Run(folder / "run")


def test_fp16_scales_unscales_clips_and_skips(files, tmp_path):
    reference = kit.run_training(1, tmp_path / "fp32", *recipe(files, **HALF))
    run = train_with_scale(files, tmp_path, 2.0**10)
    assert run.kind("train")[-1]["skipped"] == 0
    # Unscaled before it is clipped and logged: the norm is that of float32, not 1024 times as much.
    for half, full in zip(run.kind("train"), reference.kind("train"), strict=True):
        assert half["grad_norm"] == pytest.approx(full["grad_norm"], rel=0.02)
        assert half["loss"] == pytest.approx(full["loss"], rel=0.005)


def test_fp16_overflow_does_not_advance_the_schedule(files, tmp_path):
    run = train_with_scale(files, tmp_path, 2.0**120)
    lines = run.kind("train")
    assert lines[-1]["skipped"] == 12  # each step halves the scale, and 2^108 still overflows
    assert [line["learning_rate"] for line in lines] == [3e-3] * 12
    initial = kit.run_training(1, tmp_path / "initial", *recipe(files, **HALF | {"learning_rate": 0, "max_steps": 1}))
    assert kit.same(run.weights, initial.weights)


@pytest.mark.parametrize("few", [{"pad_to_multiple_of": 64}, {"packing": "whole"}, {"equal": True}, {}])
def test_rows_of_many_lengths_are_not_computed_by_cudnn(files, tmp_path, few):
    """Its plan for each new shape would cost a tenth of a second; rows of few shapes keep torch's first choice.

    An evaluation has the kernels of its own rows, as in eval.py, not those of the training data."""
    lengths = [9] * 8 if few == {"equal": True} else range(4, 12)
    rows = kit.write_jsonl(tmp_path / "rows.jsonl", [{"input_ids": list(range(length))} for length in lengths])
    options = few if few != {"equal": True} else {}
    task, splits = kit.open_data(model_config=files / "llama.yaml", train_file=rows, validation_file=rows, **options)
    seen, backend = [], make_backend(Accelerator(cpu=True), task.cfg)

    def probe(module, inputs):
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())

    try:
        choose_kernels(task.cfg, task, splits["train"], torch.device("cpu"))
        assert torch.backends.cuda.cudnn_sdp_enabled() == bool(few)
        for of_training in (True, False):
            torch.backends.cuda.enable_cudnn_sdp(of_training)
            module = ModelWithLoss(task.build_model(None), task)
            module.register_forward_pre_hook(probe)
            evaluate(backend, module, task, splits["validation"], task.cfg)
            with pytest.raises(ZeroDivisionError):  # an error changes no kernels
                evaluate(
                    backend,
                    module,
                    task,
                    splits["validation"],
                    task.cfg,
                    SimpleNamespace(any_rank_stops=lambda hosts: 1 / 0),
                )
            assert torch.backends.cuda.cudnn_sdp_enabled() == of_training
        assert set(seen) == {bool(few)}
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


ALLOCATION = "expandable_segments:True,pinned_use_cuda_host_register:True,pinned_num_register_threads:8"


@pytest.mark.parametrize("name, printed", [("OTHER", ALLOCATION), ("PYTORCH_CUDA_ALLOC_CONF", "None")])
def test_memory_of_a_gpu_is_expandable_unless_the_user_decides(name, printed):
    environment = {key: value for key, value in os.environ.items() if "ALLOC_CONF" not in key} | {name: "x:1"}
    command = [sys.executable, "-c", "import engine.startup, os; print(os.environ.get('PYTORCH_ALLOC_CONF'))"]
    done = subprocess.run(command, env=environment, cwd=kit.REPOSITORY, capture_output=True, text=True)
    assert done.stdout.strip() == printed, done.stderr
