"""The process group is the requested one, or the launch ends with exit code 2 and the reason; no path hangs."""

import importlib.util
import json
import subprocess
import sys

import pytest
import torch

from engine.config.run_config import RunConfig
from engine.distributed.choose_backend import make_backend
from engine.distributed.init_accelerator import init_accelerator
from tests.helpers import kit

FSDP2 = ["--config_file", str(kit.REPOSITORY / "accelerate_configs" / "fsdp2.yaml"), "--mixed_precision", "no"]
CPU_DDP = ["--config_file", str(kit.REPOSITORY / "accelerate_configs" / "cpu_ddp.yaml")]


def recipe(files, **fields) -> list[str]:
    values = {"model_config": files / "llama.yaml", "train_file": files / "train.jsonl", "max_steps": 3}
    values |= {"global_batch_size": 8, "per_device_batch_size": 2, "logging_steps": 1, "optim": "sgd"}
    return kit.flags(**values | fields)


@pytest.fixture(scope="module")
def plain(files, tmp_path_factory):
    return kit.run_training(1, tmp_path_factory.mktemp("launch") / "plain", *recipe(files))


def launch(files, folder, words: list, **env) -> subprocess.CompletedProcess:
    """Run `accelerate launch WORDS train.py` with no variable of accelerate but those of `env`."""
    command = [sys.executable, "-m", "accelerate.commands.launch", *words, str(kit.REPOSITORY / "train.py")]
    command += recipe(files, output_dir=folder / "run")
    options = {"capture_output": True, "text": True, "timeout": 300, "check": False}
    return subprocess.run(command, cwd=folder, env=kit.PLAIN_ENVIRONMENT | env, **options)


# ---- launchers: some silently start one process, or two that do not know each other ------------------------------------


@pytest.mark.cluster
@pytest.mark.parametrize(
    "words, said",
    [
        (["--cpu", "--num_processes", "2"], "accelerate_configs/cpu_ddp.yaml"),
        pytest.param(FSDP2, "ACCELERATE_USE_CPU=true", marks=pytest.mark.cluster),
    ],
)
def test_launch_of_one_process_instead_of_two_is_refused(files, tmp_path, words, said):
    """Or of two that are not sharded."""
    done = launch(files, tmp_path, words)
    assert done.returncode != 0
    assert said in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "words, env, strategy, bound",
    [
        (CPU_DDP, {}, "DDP over gloo", 1e-6),
        pytest.param(FSDP2, {"ACCELERATE_USE_CPU": "true"}, "FSDP2", 2e-5, marks=pytest.mark.cluster),
    ],
)
def test_launch_of_two_processes(files, plain, tmp_path, words, env, strategy, bound):
    """By accelerate; torchrun: test_stop_signals.py."""
    done = launch(files, tmp_path, words, **env)
    assert done.returncode == 0, done.stderr
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert (environment["world_size"], environment["strategy"]) == (2, strategy)
    # Two separate replicas would each see all the data, which doubles the weight of a step.
    run = kit.Run(tmp_path / "run")
    assert [line["weight"] for line in run.kind("train")] == [line["weight"] for line in plain.kind("train")]
    assert kit.distance(run.weights, plain.weights) < bound


# ---- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "precision, dtype, said",
    [
        ("fp16", "float32", "mixed_precision is fp16"),  # silently float32 on a CPU
        ("bf16", "float64", "dtype is float64, but mixed_precision is bf16"),
        ("BF16", "float32", "ACCELERATE_MIXED_PRECISION is BF16"),  # silently none
    ],
)
def test_invalid_launcher_setting_is_refused(files, tmp_path, precision, dtype, said):
    flags, env = recipe(files, output_dir="run", dtype=dtype), {"ACCELERATE_MIXED_PRECISION": precision}
    [code], [output] = kit.run_command("train.py", *flags, folder=tmp_path / "here", env=env)
    assert code == 2, output
    assert said in output.rstrip().splitlines()[-1]
    assert not (tmp_path / "here" / "run").exists()


@pytest.mark.parametrize(
    "backend, said",
    [
        (None, "mixed_precision is fp8 in the accelerate file, which needs the package torchao"),
        ("AO", "mixed_precision is fp8 in the accelerate file, which needs the package torchao"),
        ("MSAMP", "mixed_precision is fp8 with the backend MSAMP"),
    ],
)
def test_float8_without_its_package_is_refused(files, tmp_path, monkeypatch, backend, said):
    """Where it is installed, an import of torchao fails here as if it were not; MS-AMP ends in a traceback of accelerate."""
    monkeypatch.setitem(sys.modules, "torchao", None)
    env = {"ACCELERATE_MIXED_PRECISION": "fp8"} | ({"ACCELERATE_FP8_BACKEND": backend} if backend else {})
    flags = recipe(files, output_dir="run")
    [code], [output] = kit.run_command("train.py", *flags, folder=tmp_path / "here", env=env)
    assert code == 2, output
    assert output.rstrip().splitlines()[-1].startswith(f"error: {said}")
    assert not (tmp_path / "here" / "run").exists()


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
    make_backend(init_accelerator(cfg), cfg)
    return torch.distributed.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def test_collective_waits_ddp_timeout(tmp_path):
    """accelerate drops 600, the default of ddp_timeout and its own default for NCCL; gloo would wait half an hour."""
    assert kit.spawn(2, _timeout_of_group, 600, out=tmp_path / "out") == [600] * 2


def test_accumulation_in_the_environment_is_ignored(files, plain, tmp_path):
    run = kit.run_training(1, tmp_path / "run", *recipe(files), env={"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "8"})
    assert "gradient accumulation of 8" in (tmp_path / "run.out" / "rank0.txt").read_text()
    assert kit.same(run.weights, plain.weights)
