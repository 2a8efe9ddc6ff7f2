"""The process group is the requested one, or the launch ends with exit code 2 and the reason; no path hangs."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import train
from tests.helpers import kit

PLAIN_ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
ACCUMULATE_8 = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "8"}
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
WITHOUT_DEEPSPEED = pytest.mark.skipif(HAS_DEEPSPEED, reason="DeepSpeed is installed, so nothing is to be refused")
MULTI_CPU = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_CPU", "use_cpu": True}


def recipe(files, **fields) -> list[str]:
    values = {"model_config": files / "llama.yaml", "train_file": files / "train.jsonl", "max_steps": 3}
    values |= {"global_batch_size": 8, "per_device_batch_size": 2, "logging_steps": 1, "optim": "sgd"}
    return kit.flags(**values | fields)


@pytest.fixture(scope="module")
def plain(files, tmp_path_factory):
    return kit.run_training(1, tmp_path_factory.mktemp("launch") / "plain", *recipe(files))


def launch(launcher: list, files, folder: Path, env: dict | None = None) -> subprocess.CompletedProcess:
    """Launch train.py with no variable of accelerate in the environment but those of `env`."""
    command = [*launcher, str(kit.REPOSITORY / "train.py"), *recipe(files, output_dir=folder / "run")]
    options = {
        "env": PLAIN_ENVIRONMENT | (env or {}),
        "capture_output": True,
        "text": True,
        "timeout": 300,
        "check": False,
    }
    return subprocess.run(command, cwd=folder, **options)


def check_refused(files, folder: Path, env: dict, world: int = 1, **fields) -> str:
    """Assert that every rank ends with exit code 2 and that nothing is written; return the last line."""
    flags = recipe(files, output_dir="run", **fields)
    codes, outputs = kit.run_command("train.py", *flags, folder=folder, env=env, world=world)
    assert codes == [2] * world, outputs
    assert not (folder / "run").exists()
    return outputs[0].rstrip().splitlines()[-1]


# ---- launchers: some silently start one process, or two that do not know each other ------------------------------------


@pytest.mark.parametrize("how", ["--cpu", "MULTI_CPU"])
def test_launch_of_one_process_instead_of_two_is_refused(files, tmp_path, how):
    multi_cpu = ["--config_file", str(kit.write_yaml(tmp_path / "multi_cpu.yaml", MULTI_CPU | {"num_processes": 2}))]
    flags = ["--cpu"] if how == "--cpu" else multi_cpu
    done = launch([*ACCELERATE, *flags, "--num_processes", "2"], files, tmp_path)
    assert done.returncode != 0
    assert "accelerate_configs/cpu_ddp.yaml" in done.stderr
    assert not (tmp_path / "run").exists()


def test_launch_of_two_processes(files, plain, tmp_path):
    """By accelerate; torchrun: test_stop_signals.py."""
    config = kit.REPOSITORY / "accelerate_configs" / "cpu_ddp.yaml"
    done = launch([*ACCELERATE, "--config_file", str(config)], files, tmp_path)
    assert done.returncode == 0, done.stderr
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert (environment["world_size"], environment["strategy"]) == (2, "DDP over gloo")
    assert "2 ranks × 2 accumulated" in environment["global_batch"]
    assert {path.name for path in (tmp_path / "run" / "logs").iterdir()} == {"rank_0.log", "rank_1.log", "run.lock"}
    # Two separate replicas would each see all the data, which doubles the weight of a step.
    run = kit.Run(tmp_path / "run")
    assert [line["weight"] for line in run.kind("train")] == [line["weight"] for line in plain.kind("train")]
    assert kit.distance(run.weights, plain.weights) < 1e-6


@pytest.mark.cluster
def test_launch_of_fsdp2_on_cpus(files, plain, tmp_path):
    """The run of one process is sharded over two, if ACCELERATE_USE_CPU=true asks for it; else it is refused."""
    config = kit.REPOSITORY / "accelerate_configs" / "fsdp2.yaml"
    flags = ["--config_file", str(config), "--mixed_precision", "no"]
    refused = launch([*ACCELERATE, *flags], files, tmp_path)
    assert refused.returncode != 0
    assert "ACCELERATE_USE_CPU=true" in refused.stderr
    done = launch([*ACCELERATE, *flags], files, tmp_path, env={"ACCELERATE_USE_CPU": "true"})
    assert done.returncode == 0, done.stderr
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert (environment["world_size"], environment["strategy"]) == (2, "FSDP2")
    run = kit.Run(tmp_path / "run")
    assert [line["weight"] for line in run.kind("train")] == [line["weight"] for line in plain.kind("train")]
    assert kit.distance(run.weights, plain.weights) < 2e-5


# ---- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "env, fields, parts",
    [
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, {}, ("mixed_precision", "fp16", "bf16")),  # silently float32 on a CPU
        ({"ACCELERATE_MIXED_PRECISION": "fp12"}, {}, ("mixed_precision", "'fp12'", "no, bf16, fp16, fp8")),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, {"dtype": "float64"}, ("dtype", "float64", "bf16")),
        ({"WORLD_SIZE": "two"}, {}, ("WORLD_SIZE", "'two'")),
        ({"ACCELERATE_USE_FSDP": "true"}, {}, ("fsdp_version",)),
        pytest.param({"ACCELERATE_USE_DEEPSPEED": "true"}, {}, ("deepspeed",), marks=WITHOUT_DEEPSPEED),
    ],
)
def test_invalid_launcher_setting_is_refused(files, tmp_path, env, fields, parts):
    message = check_refused(files, tmp_path, env, **fields)
    for part in parts:
        assert part in message or part in message.lower()


def test_bf16_on_a_cpu(files, tmp_path):
    run = kit.run_training(1, tmp_path / "run", *recipe(files), env={"ACCELERATE_MIXED_PRECISION": "bf16"})
    assert {tensor.dtype for tensor in run.weights.values()} == {torch.float32}
    assert "bf16" in json.loads((run.folder / "environment.json").read_text())["precision"]


@pytest.mark.cluster
@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_float8_trains_every_weight(files, tmp_path):
    """accelerate's default for torchao would give each float8 layer a weight that the optimizer does not have."""
    float8 = {"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_BACKEND": "AO"}
    options = {"optim": "adamw", "learning_rate": 1e-2}
    start = kit.run_training(1, tmp_path / "start", *recipe(files, max_steps=1, learning_rate=0.0))
    plain = kit.run_training(1, tmp_path / "plain", *recipe(files, **options))
    run = kit.run_training(1, tmp_path / "run", *recipe(files, **options), env=float8)
    assert run.losses() == pytest.approx(plain.losses(), rel=5e-2)
    assert run.losses() != plain.losses()  # it was not silently float32
    for name, weight in run.weights.items():
        assert (weight - start.weights[name]).norm() > 0.5 * (plain.weights[name] - start.weights[name]).norm(), name


@pytest.mark.parametrize("mutant", [False, True])
def test_accumulation_in_the_environment_is_ignored(files, plain, tmp_path, monkeypatch, mutant):
    def init_accelerator(cfg, original=train.init_accelerator):
        accelerator = original(cfg)
        accelerator.gradient_accumulation_steps = 8  # accelerate's own value, from the environment
        return accelerator

    if mutant:
        monkeypatch.setattr(train, "init_accelerator", init_accelerator)
    run = kit.run_training(1, tmp_path / "run", *recipe(files), env=ACCUMULATE_8)
    assert "gradient accumulation of 8" in (tmp_path / "run.out" / "rank0.txt").read_text()
    assert kit.same(run.weights, plain.weights) != mutant
    assert (run.losses() == plain.losses()) != mutant


# ---- reductions --------------------------------------------------------------------------------------------------------


def _count_reductions(mutant: bool) -> tuple[bool, int]:
    """Return whether the module is wrapped by DDP, and its reductions in a window of four micro-batches."""
    from src.config.schema import RunConfig
    from src.distributed.init_accelerator import init_accelerator
    from src.distributed.strategies import make_strategy

    cfg = RunConfig(output_dir="unused")
    accelerator = init_accelerator(cfg)
    assert accelerator.distributed_type.value == "MULTI_CPU"
    prepare = accelerator.prepare if mutant else make_strategy(accelerator, cfg).prepare
    model, count = torch.nn.Linear(3, 1), 0
    module, _ = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    is_wrapped = isinstance(module, torch.nn.parallel.DistributedDataParallel)

    def hook(state, bucket):
        nonlocal count
        count += 1
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    if is_wrapped:
        module.register_comm_hook(None, hook)
    for i in range(4):
        with accelerator.no_sync(module) if i < 3 else torch.enable_grad():
            accelerator.backward(module(torch.ones(2, 3)).sum())
    return is_wrapped, count


@pytest.mark.parametrize(
    "world, mutant, is_wrapped, count",
    [(1, False, False, 0), (2, False, True, 1), (1, True, True, 4)],  # accelerate wraps one process and ignores no_sync
)
def test_gradients_are_reduced_once_a_window(tmp_path, world, mutant, is_wrapped, count):
    results = kit.spawn(world, _count_reductions, mutant, out=tmp_path / "out")
    assert results == [(is_wrapped, count)] * world
