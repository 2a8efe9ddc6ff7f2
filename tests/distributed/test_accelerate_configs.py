"""The accelerate files: short, commented, and read by accelerate's own launcher as intended."""

import os
import re

import pytest
import yaml

from src.config.errors import UsageError
from src.distributed import strategy_checks
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
NO_COMMENT = ("compute_environment", "distributed_type")
WHAT = ("gradient_accumulation_steps", "gradient_clipping", "optimizer", "scheduler", "deepspeed_config_file")


def broken_rules(text: str) -> list[str]:
    """Return which rules of these files a text breaks."""
    lines, found = text.splitlines(), []
    values = yaml.safe_load(text)
    inside = {part: value for part, value in values.items() if isinstance(value, dict)}
    if len(lines) > 15:
        found.append("more than 15 lines")
    if not re.fullmatch(r"# [A-Z].*\.", lines[0]):
        found.append("the first line does not say when to use it")
    for line in lines[1:]:
        key = line.partition(":")[0].strip()
        if "# " not in line and key not in (*NO_COMMENT, *inside):
            found.append(f"{key} has no comment")
    keys = [*values, *(key for part in inside.values() for key in part)]
    found += [f"{key} says what is trained" for key in keys if key in WHAT]
    if values["num_processes"] > 4:
        found.append("the number of processes is above 4")
    return found + [f"{key} is unknown to accelerate" for key in unknown(inside)]


def unknown(parts: dict[str, dict]) -> list[str]:
    """Return the keys inside parts that accelerate's launcher accepts and never reads."""
    from accelerate.commands.launch import launch_command_parser

    known = vars(launch_command_parser().parse_args(["train.py"]))
    prefix = {"fp8_config": "fp8_"}
    return [key for part, values in parts.items() for key in values if prefix.get(part, "") + key not in known]


def test_every_file_has_a_known_type():
    assert {path.stem for path in FILES} == set(KINDS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_is_short_and_commented(path):
    assert broken_rules(path.read_text()) == []


@pytest.mark.parametrize(
    "old, new, fault",
    [
        ("# A model", "A_model: # x", "the first line does not say when to use it"),
        ("num_processes: 2 ", "num_processes: 8 ", "the number of processes is above 4"),
        ("fsdp_reshard_after_forward", "fsdp_reshard_after_forwards", "unknown to accelerate"),
        ("num_machines: 1     ", "num_machines: 1\n#", "num_machines has no comment"),
        ("mixed_precision: bf16", "gradient_accumulation_steps: 4  # x\nmixed_precision: bf16", "what is trained"),
        ("fsdp_config:", "# a\n# b\n# c\nfsdp_config:", "more than 15 lines"),
    ],
)
def test_mutant_that_breaks_a_rule_is_caught(old, new, fault):
    text = (kit.REPOSITORY / "accelerate_configs" / "fsdp2.yaml").read_text()
    assert old in text
    assert fault in " ".join(broken_rules(text.replace(old, new, 1)))


@pytest.mark.parametrize("name", KINDS)
def test_the_launcher_reads_type_and_flags(name):
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    file = str(kit.REPOSITORY / "accelerate_configs" / f"{name}.yaml")
    found = load_config_from_file(file)  # raises for keys that it does not know at the top
    assert found.distributed_type.value == KINDS[name]
    words = ["--config_file", file, "--num_processes", "6", "--main_process_port", "1234", "train.py"]
    args, *_ = _validate_launch_command(launch_command_parser().parse_args(words))
    assert (args.num_processes, args.main_process_port) == (6, 1234)  # flags win
    assert args.mixed_precision == found.mixed_precision
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


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind == "DEEPSPEED"])
def test_deepspeed_files_say_where_not_what(name):
    made = kit.where(name, 4)
    assert made["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert made["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == name[4]
    assert (
        "ACCELERATE_GRADIENT_CLIPPING" not in made
    )  # accelerate's "auto", which addons/backends/deepspeed.py replaces
    assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS" not in made
    assert made.get("ACCELERATE_DEEPSPEED_ZERO3_INIT", "false") == "false"
    offload = "cpu" if name.endswith("offload") else None
    assert made.get("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE") == offload
    assert made.get("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE") == offload


def test_fp8_uses_torchao_or_the_launcher_refuses():
    from accelerate.utils import is_torchao_available

    if is_torchao_available():
        assert kit.where("gpu_fp8", 1)["ACCELERATE_FP8_BACKEND"] == "AO"
    else:
        with pytest.raises(RuntimeError, match="FP8 is not available"):
            kit.where("gpu_fp8", 1)


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
    strategy_checks.complete_mesh(world)
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
        (4, {"dp_replicate": "two"}, "parallelism_config_dp_replicate_size is 'two': give a whole number"),
        (4, {"dp_shard": 0}, "parallelism_config_dp_shard_size is '0'"),
        (4, {"dp_shard": 3}, "parallelism_config_dp_shard_size 3 does not divide 4 processes"),
        (4, {"dp_replicate": 4}, "does not divide 4 processes"),
        (2, {"tp": 2}, "does not divide 2 processes"),
    ],
)
def test_mesh_sizes_that_do_not_fit_are_refused(monkeypatch, world, sizes, said):
    with pytest.raises(UsageError, match=said):
        _completed(monkeypatch, world, **sizes)
