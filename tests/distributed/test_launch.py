"""The process group is the requested one, or the launch ends with exit code 2 and the reason; no path hangs."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from src.config.schema import RunConfig
from src.distributed.backends import make_backend
from src.distributed.init_accelerator import init_accelerator
from tests.helpers import kit

PLAIN_ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]


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


def test_launch_of_one_process_instead_of_two_is_refused(files, tmp_path):
    done = launch([*ACCELERATE, "--cpu", "--num_processes", "2"], files, tmp_path)
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
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, {"dtype": "float64"}, ("dtype", "float64", "bf16")),
    ],
)
def test_invalid_launcher_setting_is_refused(files, tmp_path, env, fields, parts):
    message = check_refused(files, tmp_path, env, **fields)
    for part in parts:
        assert part in message or part in message.lower()


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


def _timeout_of_group(ddp_timeout: int) -> float:
    cfg = RunConfig(output_dir="unused", ddp_timeout=ddp_timeout)
    backend = make_backend(init_accelerator(cfg), cfg)
    assert backend.accelerator.num_processes == 2
    return torch.distributed.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds()


@pytest.mark.parametrize("seconds", [600, 599])
def test_collective_waits_ddp_timeout(tmp_path, seconds):
    """accelerate drops 600, the default of ddp_timeout and its own default for NCCL; gloo would wait half an hour."""
    assert kit.spawn(2, _timeout_of_group, seconds, out=tmp_path / "out") == [seconds] * 2


def test_accumulation_in_the_environment_is_ignored(files, plain, tmp_path):
    run = kit.run_training(1, tmp_path / "run", *recipe(files), env={"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "8"})
    assert "gradient accumulation of 8" in (tmp_path / "run.out" / "rank0.txt").read_text()
    assert kit.same(run.weights, plain.weights)
