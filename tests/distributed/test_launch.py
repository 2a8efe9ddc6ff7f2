"""The process group that was asked for is the one we get, or the launch ends with the reason; and nothing hangs."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.helpers import kit

ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}  # where people begin
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
EIGHT = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "8"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
MULTI_CPU = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "MULTI_CPU",
    "use_cpu": True,
    "num_processes": 2,
}


def recipe(files, **flags) -> list[str]:
    values = {"model_config": files / "llama.yaml", "train_file": files / "train.jsonl", "max_steps": 3}
    values |= {"global_batch_size": 8, "per_device_batch_size": 2, "logging_steps": 1} | flags
    return [str(word) for name, value in values.items() for word in (f"--{name}", value)]


@pytest.fixture(scope="module")
def plain(files, tmp_path_factory):
    return kit.run_training(1, tmp_path_factory.mktemp("launch") / "plain", *recipe(files, optim="sgd"))


def launched(launcher, files, folder: Path, env=None, **flags) -> subprocess.CompletedProcess:
    """Launch train.py for real, in an environment that says nothing of accelerate."""
    command = [*launcher, str(kit.REPOSITORY / "train.py"), *recipe(files, output_dir=folder / "run", **flags)]
    return subprocess.run(
        command, cwd=folder, env=ENVIRONMENT | (env or {}), capture_output=True, text=True, timeout=180, check=False
    )


def refused(files, folder, env: dict, world: int = 1, **flags) -> str:
    """Return the last lines of a run that must end with exit code 2 on every rank and write nothing."""
    folder.mkdir(exist_ok=True)
    codes, outputs = kit.run_command(
        "train.py", *recipe(files, output_dir="run", **flags), folder=folder, env=env, world=world
    )
    assert codes == [2] * world, outputs
    assert not (folder / "run").exists()
    return outputs[0].rstrip().splitlines()[-1]


# ---- real launches: some of these give one process, or two that do not know each other, without a word ----------------


@pytest.mark.parametrize("how", ["--cpu", "MULTI_CPU"])
def test_a_launch_that_gives_one_process_for_two_stops(files, tmp_path, how):
    way = (
        ["--cpu"] if how == "--cpu" else ["--config_file", str(kit.write_yaml(tmp_path / "multi_cpu.yaml", MULTI_CPU))]
    )
    done = launched([*ACCELERATE, *way, "--num_processes", "2"], files, tmp_path)
    assert done.returncode != 0
    assert "several processes were requested, but accelerate launch started one" in done.stderr
    assert "accelerate_configs/cpu_ddp.yaml" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("how", ["accelerate", "torchrun"])
def test_a_launch_without_settings_in_the_environment_trains_on_two(files, plain, tmp_path, how):
    config = kit.REPOSITORY / "accelerate_configs" / "cpu_ddp.yaml"
    if how == "accelerate":
        done = launched([*ACCELERATE, "--config_file", str(config)], files, tmp_path, optim="sgd")
    else:  # a second question to the same launch: is an accumulation that we ignore said to be ignored?
        done = launched([*TORCHRUN, "--nproc_per_node", "2"], files, tmp_path, env=EIGHT, optim="sgd")
    assert done.returncode == 0, done.stderr
    said = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert said["world_size"] == 2
    assert said["strategy"] == "DDP over gloo"
    assert "2 ranks × 2 accumulated" in said["global_batch"]
    assert {path.name for path in (tmp_path / "run" / "logs").iterdir()} == {"rank_0.log", "rank_1.log"}
    assert ("gradient accumulation of 8 is set for accelerate and ignored here" in done.stderr) == (how == "torchrun")
    # Two replicas that know nothing of each other would each see all the data: the weight of a step tells.
    run = kit.Run(tmp_path / "run")
    assert [line["weight"] for line in run.kind("train")] == [line["weight"] for line in plain.kind("train")]
    assert kit.distance(run.weights, plain.weights) < 1e-6


# ---- settings that cannot be had --------------------------------------------------------------------------------------


def test_fp16_on_a_cpu_is_refused(files, tmp_path):
    said = refused(files, tmp_path / "here", {"ACCELERATE_MIXED_PRECISION": "fp16"})
    assert "mixed_precision is fp16, which a CPU would silently ignore: use 'no' or bf16" in said


@pytest.mark.parametrize(
    "name, value, said",
    [
        ("WORLD_SIZE", "two", "WORLD_SIZE is 'two', not a whole number"),
        ("ACCELERATE_MIXED_PRECISION", "fp12", "mixed_precision is 'fp12': give one of no, bf16, fp16, fp8"),
    ],
)
def test_settings_of_the_launcher_that_make_no_sense_are_refused(files, tmp_path, name, value, said):
    assert said in refused(files, tmp_path / "here", {name: value})


def test_float64_with_bf16_is_refused(files, tmp_path):
    said = refused(files, tmp_path / "here", {"ACCELERATE_MIXED_PRECISION": "bf16"}, dtype="float64")
    assert "dtype is float64, but the accelerate file asks for bf16" in said


@pytest.mark.parametrize("name", ["FSDP", "DEEPSPEED"])
def test_sharding_on_a_cpu_is_refused(files, tmp_path, name):
    said = refused(files, tmp_path / "here", {f"ACCELERATE_USE_{name}": "true"})
    assert name in said.upper().replace("_", "")


def test_bf16_on_a_cpu_trains(files, tmp_path):
    run = kit.run_training(1, tmp_path / "run", *recipe(files), env={"ACCELERATE_MIXED_PRECISION": "bf16"})
    assert {tensor.dtype for tensor in run.weights.values()} == {torch.float32}
    assert "computing in bf16" in json.loads((run.folder / "environment.json").read_text())["precision"]


# ---- accumulation is ours ---------------------------------------------------------------------------------------------


def test_accumulation_in_the_environment_is_ignored(files, plain, tmp_path):
    run = kit.run_training(1, tmp_path / "run", *recipe(files, optim="sgd"), env=EIGHT)
    assert kit.same(run.weights, plain.weights)
    assert run.losses() == plain.losses()


def test_mutant_accumulation_of_accelerate_is_caught(files, plain, tmp_path, monkeypatch):
    import train

    def start(run, original=train.init_accelerator):
        accelerator = original(run)
        accelerator.gradient_accumulation_steps = 8  # as accelerate has it, from the environment
        return accelerator

    monkeypatch.setattr(train, "init_accelerator", start)
    run = kit.run_training(1, tmp_path / "run", *recipe(files, optim="sgd"), env=EIGHT)
    assert not kit.same(run.weights, plain.weights)


# ---- one process, and several -----------------------------------------------------------------------------------------


def _prepared(mutant: bool) -> tuple[str, bool, int]:
    """Return (kind of group, whether the module is DDP's, reductions of a window of four micro-batches)."""
    from src.config.schema import RunConfig
    from src.distributed.init_accelerator import init_accelerator
    from src.distributed.strategies import make_strategy

    cfg = RunConfig(output_dir="unused")
    accelerator = init_accelerator(cfg)
    prepare = accelerator.prepare if mutant else make_strategy(accelerator, cfg).prepare
    model_with_loss = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model_with_loss.parameters(), lr=0.1)
    module, _ = prepare(model_with_loss, optimizer)
    count, wrapped = [0], isinstance(module, torch.nn.parallel.DistributedDataParallel)
    if wrapped:

        def counted(state, bucket):
            count[0] += 1
            future = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        module.register_comm_hook(None, counted)
    for i in range(4):
        with accelerator.no_sync(module) if i < 3 else torch.enable_grad():
            accelerator.backward(module(torch.ones(2, 3)).sum())
    return accelerator.distributed_type.value, wrapped, count[0]


def test_a_group_of_one_is_not_wrapped(tmp_path):
    assert kit.spawn(1, _prepared, False, out=tmp_path / "out") == [("MULTI_CPU", False, 0)]


def test_mutant_a_wrapped_group_of_one_reduces_every_micro_batch(tmp_path):
    [(kind, wrapped, count)] = kit.spawn(1, _prepared, True, out=tmp_path / "out")
    assert (kind, wrapped, count) == ("MULTI_CPU", True, 4)


def test_a_group_of_two_reduces_once_a_window(tmp_path):
    assert kit.spawn(2, _prepared, False, out=tmp_path / "out") == [("MULTI_CPU", True, 1)] * 2


# ---- every path has an end --------------------------------------------------------------------------------------------


def test_a_failure_on_one_rank_ends_all_at_once_with_its_traceback(files, tmp_path, monkeypatch):
    import train

    def gradient(strategy, module, window, *rest, original=train.compute_gradient):
        if strategy.accelerator.process_index == 1 and window[0][0].step == 1:
            raise RuntimeError("a cosmic ray")
        return original(strategy, module, window, *rest)

    monkeypatch.setattr(train, "compute_gradient", gradient)
    folder = tmp_path / "here"
    folder.mkdir()
    started = time.monotonic()
    codes, outputs = kit.run_command(
        "train.py", *recipe(files, output_dir="run", ddp_timeout=600), folder=folder, world=2
    )
    assert codes == [1, 1]
    assert time.monotonic() - started < 30  # not the 600 seconds that a collective may wait
    assert outputs[1].rstrip().endswith("RuntimeError: a cosmic ray")
    assert "rank 1 failed:\nTraceback" in outputs[1]
    assert (
        "Traceback" not in outputs[0]
    )  # what rank 0 lost is no news; tests/distributed/test_rank_failure.py has the rest


def test_two_ranks_see_the_fault_of_the_main_process(files, tmp_path):
    said = refused(files, tmp_path / "here", {}, world=2, resume="nowhere")
    assert "resume: nowhere is neither a checkpoint nor a run with one" in said
