"""What a library raises before training is one sentence, with its traceback in logs/; an error of the code shows it."""

import os
import subprocess
import sys
import urllib.request

import pytest
import torch
from safetensors.torch import load_file, save_file

import train
from engine.process.library_errors import describe
from src.tasks import causal_lm
from tests.helpers import kit


def cut_weights(folder):
    save_file({"a": torch.zeros(9)}, folder / "a.safetensors")
    os.truncate(folder / "a.safetensors", 20)
    load_file(folder / "a.safetensors")


def full_disk(_):
    with open("/dev/full", "w") as file:
        file.write("a")


@pytest.mark.parametrize(
    "call, can_fix, parts",
    [
        (cut_weights, True, ["SafetensorError: ", "a.safetensors"]),
        (full_disk, True, ["No space left"]),
        (lambda folder: (folder / "none" / "a").write_text("a"), True, ["No such file", "none/a"]),
        (lambda folder: (folder / "a").write_bytes(b"\xff") and (folder / "a").read_text("utf-8"), True, ["UTF-8"]),
        (lambda _: urllib.request.urlopen("http://127.0.0.1:9"), False, ["refused"]),
        (lambda _: __import__("peft_of_another_name"), True, ["No module named 'peft_of_another_name'"]),
        (lambda _: __import__("src.nowhere"), None, []),
        (lambda _: torch.zeros(2) @ torch.zeros(3), None, []),
        (lambda _: int("a"), None, []),
        (lambda _: None.name, None, []),
    ],
)
def test_errors_of_libraries_and_of_code(tmp_path, call, can_fix, parts):
    with pytest.raises(Exception) as caught:
        call(tmp_path)
    described = describe(caught.value)
    assert (described and described[0]) == can_fix
    assert all(part in described[1] for part in parts)


def recipe(files, folder, **fields) -> list[str]:
    flags = {"model_config": files / "llama.yaml", "train_file": files / "train.jsonl", "max_steps": 2}
    return kit.flags(
        **flags | {"global_batch_size": 2, "per_device_batch_size": 2, "output_dir": folder / "run"} | fields
    )


@pytest.mark.parametrize(
    "variable, value, said",
    [
        ("ACCELERATE_DEBUG_MODE", "perhaps", "ACCELERATE_DEBUG_MODE"),  # accelerate raises a ValueError
        ("ACCELERATE_USE_CPU", "of course", "ACCELERATE_USE_CPU"),
        ("ACCELERATE_DYNAMO_BACKEND", "nonsense", "ACCELERATE_DYNAMO_BACKEND"),
        ("ACCELERATE_TORCH_DEVICE", "nonsense", "ACCELERATE_TORCH_DEVICE"),  # torch, a RuntimeError
        ("PARALLELISM_CONFIG_TP_SIZE", "two", "PARALLELISM_CONFIG_TP_SIZE"),  # raised in the engine
        ("ACCELERATE_USE_MEGATRON_LM", "true", "Megatron is not installed"),
    ],
)
def test_left_over_variable_is_one_sentence(files, tmp_path, variable, value, said):
    codes, texts = kit.run_command("train.py", *recipe(files, tmp_path), folder=tmp_path, env={variable: value})
    assert codes == [2], texts
    [line] = [line for line in texts[0].splitlines() if line.startswith("error: ")]
    assert "init accelerator" in line
    assert said in line
    assert "Traceback" not in texts[0]
    log = tmp_path / "run" / "logs" / "rank_0.log"
    assert str(log) in line
    assert "Traceback" in log.read_text()


@pytest.mark.cluster
@pytest.mark.parametrize("name", ["ACCELERATE_USE_FSDP", "HTTPS_PROXY", "TORCH_LOGS"])
def test_variable_without_a_launcher_and_of_imports(files, tmp_path, name):
    """Without a launcher, no variable shards the model; the last two are read by imports, and by the first download."""
    value = {"HTTPS_PROXY": "foo://localhost:9", "TORCH_LOGS": "nonsense"}.get(name, "true")
    flags = recipe(files, tmp_path, tokenizer_name="org/name")
    env = kit.PLAIN_ENVIRONMENT | {name: value, "HF_HUB_OFFLINE": "0", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, kit.REPOSITORY / "train.py", *map(str, flags)]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2, done.stderr
    assert name in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "holder, name, error",
    [
        (causal_lm.Task, "build_model", AttributeError("a typing error")),
        (causal_lm.Task, "build_model", AssertionError("a typing error")),
        (causal_lm.Task, "build_model", ValueError("a typing error")),
        (train, "optimizer_step", FileNotFoundError("during training")),
    ],
)
def test_error_of_the_code_or_during_training_shows_its_traceback(files, tmp_path, monkeypatch, holder, name, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(holder, name, fail)
    codes, texts = kit.run_command("train.py", *recipe(files, tmp_path), folder=tmp_path)
    assert codes == [1], texts
    assert "rank 0 failed:\nTraceback" in texts[0]
    assert str(error) in texts[0]
    assert "in fail" in texts[0]
