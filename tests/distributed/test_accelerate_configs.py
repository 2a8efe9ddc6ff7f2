"""The accelerate files, read by accelerate's own launcher as intended."""

import os
import re

import pytest

from src.config.errors import UsageError
from src.distributed import init_accelerator
from tests.helpers import kit

FILES = sorted((kit.REPOSITORY / "accelerate_configs").glob("*.yaml"))
KINDS = {
    "cpu": "NO",
    "cpu_ddp": "MULTI_GPU",
    "gpu": "NO",
    "gpu_fp16": "NO",
    "gpu_fp8": "NO",
    "ddp": "MULTI_GPU",
    "multi_node": "MULTI_GPU",
    "fsdp2": "FSDP",
    "fsdp2_offload": "FSDP",
    "hsdp": "FSDP",
    "fsdp2_tp": "FSDP",
    "zero2": "DEEPSPEED",
    "zero3": "DEEPSPEED",
    "zero3_offload": "DEEPSPEED",
}


def test_every_file_has_a_known_type():
    assert {path.stem for path in FILES} == set(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_the_launcher_reads_type_and_flags(name):
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    file = str(kit.REPOSITORY / "accelerate_configs" / f"{name}.yaml")
    config = load_config_from_file(file)  # raises for keys that it does not know at the top
    assert config.distributed_type.value == KINDS[name]
    words = ["--config_file", file, "--num_processes", "6", "--main_process_port", "1234", "train.py"]
    args, *_ = _validate_launch_command(launch_command_parser().parse_args(words))
    assert (args.num_processes, args.main_process_port) == (6, 1234)  # flags win
    assert args.mixed_precision == config.mixed_precision
    assert bool(args.use_fsdp) == (KINDS[name] == "FSDP")
    assert bool(args.use_deepspeed) == (KINDS[name] == "DEEPSPEED")


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind == "FSDP"])
def test_fsdp_is_version_2_with_one_unit_a_layer(name):
    made = kit.where(name, 4)
    assert made["ACCELERATE_USE_FSDP"] == "true"
    assert made["FSDP_VERSION"] == "2"
    assert made["FSDP_AUTO_WRAP_POLICY"] == "TRANSFORMER_BASED_WRAP"
    assert made["FSDP_CPU_RAM_EFFICIENT_LOADING"] == str(name != "fsdp2_tp").lower()
    assert made["FSDP_OFFLOAD_PARAMS"] == str(name == "fsdp2_offload").lower()
    assert made.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1") == ("2" if name == "hsdp" else "1")
    assert made.get("PARALLELISM_CONFIG_TP_SIZE", "1") == ("2" if name == "fsdp2_tp" else "1")


def test_docs_name_every_file_and_no_other():
    pages = [kit.REPOSITORY / "README.md", *(kit.REPOSITORY / "docs").glob("*.md")]
    named = {name for page in pages for name in re.findall(r"accelerate_configs/(\w+)\.yaml", page.read_text())}
    guide = (kit.REPOSITORY / "docs" / "scaling.md").read_text()
    assert named <= set(KINDS)
    assert set(re.findall(r"`(\w+)\.yaml`", guide)) == set(KINDS)


# ---- sizes of a mesh ---------------------------------------------------------------------------------------------------


def _completed(monkeypatch, world: int, **sizes) -> str:
    for name in ("DP_REPLICATE", "DP_SHARD", "TP"):
        monkeypatch.setenv(f"PARALLELISM_CONFIG_{name}_SIZE", str(sizes.get(name.lower(), 1)))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    init_accelerator.complete_mesh(world)
    return os.environ["PARALLELISM_CONFIG_DP_SHARD_SIZE"]


@pytest.mark.parametrize(
    "world, sizes, shards",
    [(4, {"dp_replicate": 2}, "2"), (12, {"dp_replicate": 2, "tp": 2}, "3"), (4, {"dp_shard": 4}, "4"), (3, {}, "1")],
)
def test_shard_size_is_completed(monkeypatch, world, sizes, shards):
    assert _completed(monkeypatch, world, **sizes) == shards


@pytest.mark.parametrize(
    "world, sizes, said",
    [
        (4, {"dp_shard": 3}, "does not divide 4 processes"),
        (4, {"dp_replicate": 4}, "does not divide 4 processes"),
    ],
)
def test_mesh_sizes_that_do_not_fit_are_refused(monkeypatch, world, sizes, said):
    with pytest.raises(UsageError, match=said):
        _completed(monkeypatch, world, **sizes)
