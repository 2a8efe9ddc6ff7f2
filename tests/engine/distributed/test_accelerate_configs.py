"""The accelerate files, read by accelerate's own launcher as intended."""

import os

import pytest

from engine.config.errors import UsageError
from engine.config.run_config import RunConfig
from engine.distributed import init_accelerator
from tests.helpers import kit

FOLDER = kit.REPOSITORY / "accelerate_configs"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_the_launcher_knows_every_key(name):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(FOLDER / f"{name}.yaml"))  # raises for others
    kinds = {"cpu": "NO", "gpu": "NO", "gpu_fp16": "NO", "gpu_fp8": "NO", "hsdp": "FSDP"}
    kinds |= dict.fromkeys((each for each in NAMES if each.startswith("fsdp2")), "FSDP")
    kinds |= dict.fromkeys((each for each in NAMES if each.startswith("zero")), "DEEPSPEED")
    kinds |= dict.fromkeys(("cpu_ddp", "ddp", "multi_node"), "MULTI_GPU")
    assert config.distributed_type.value == kinds.get(name, config.distributed_type.value)  # another one is the copy's
    if config.distributed_type.value == "FSDP":
        made = kit.where(name, 4)
        assert (made["FSDP_VERSION"], made["FSDP_AUTO_WRAP_POLICY"]) == ("2", "TRANSFORMER_BASED_WRAP")
        assert made["FSDP_CPU_RAM_EFFICIENT_LOADING"] == str(name != "fsdp2_tp").lower()
        assert made["FSDP_OFFLOAD_PARAMS"] == str(name == "fsdp2_offload").lower()


def test_two_copies_of_two_tensor_parallel_groups_leave_a_shard_size(monkeypatch):
    sizes = {"DP_REPLICATE": "2", "DP_SHARD": "1", "TP": "2"}
    for name, size in sizes.items():
        monkeypatch.setenv(f"PARALLELISM_CONFIG_{name}_SIZE", size)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    init_accelerator.complete_mesh(12)
    assert os.environ["PARALLELISM_CONFIG_DP_SHARD_SIZE"] == "3"


@pytest.mark.parametrize(
    "variables, said",
    [
        ({"FSDP_IGNORED_MODULES": ".*mlp", "FSDP_VERSION": "2"}, "fsdp_ignored_modules"),  # their gradients stay apart
        ({"FSDP_VERSION": "1"}, "fsdp_version is 1"),
        ({}, "fsdp_version is 1"),  # accelerate's default
    ],
)
def test_files_of_others_are_refused_in_one_sentence(monkeypatch, variables, said):
    for name, value in ({"ACCELERATE_USE_FSDP": "true", "WORLD_SIZE": "2"} | variables).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=said):
        init_accelerator.init_accelerator(RunConfig(output_dir="unused"))
