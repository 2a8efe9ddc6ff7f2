"""--dry_run refuses what the run refuses before its first step, with the same sentence, and accepts all techniques."""

import json
import re
import shutil

import pytest

from src.config.errors import UsageError
from tests.helpers import kit, plain_task

CASES = {  # fields -> what the sentence names
    "unfreeze": ({"techniques": {"unfreeze": {"steps": {"nope": 2}}}}, "nope matches no parameter"),
    "unfreeze too late": ({"techniques": {"unfreeze": {"steps": {"*": 99}}}}, "no parameter would be trained"),
    "adaptive_clipping": ({"techniques": {"adaptive_clipping": {"exclude": ["nope"]}}}, "exclude: nope"),
    "gradient_statistics": ({"techniques": {"gradient_statistics": {"groups": {"a": "nope"}}}}, "groups: a: nope"),
    "cycle_momentum": ({"techniques": {"cycle_momentum": None}}, "one_cycle"),
    "cycle_momentum without momentum": (
        {"techniques": {"cycle_momentum": None}, "lr_scheduler_type": "one_cycle", "optim": "adagrad"},
        "neither betas nor momentum",
    ),
    "schedule_free": ({"techniques": {"schedule_free": None}}, "--adam_beta1 0"),
    "channels_last": ({"techniques": {"channels_last": None}}, "no convolution"),
    "neftune": ({"techniques": {"neftune": None}}, "get_input_embeddings"),
    "progressive_resizing": ({"techniques": {"progressive_resizing": None}}, "pixel_values"),
    "hard_examples": ({"techniques": {"hard_examples": None}}, "losses of single rows"),
    "freeze": ({"freeze": ["nope"]}, "freeze: nope"),
    "nothing is trained": ({"freeze": ["*"]}, "no parameter of the model is trainable"),
    "parameter_groups": ({"parameter_groups": {"nope": {"lr_factor": 2}}}, "parameter_groups: nope"),
    "optimizer refuses": ({"optim": "rprop", "optim_args": {"etas": [1.2, 0.5]}, "weight_decay": 0}, "refuses its arg"),
    "muon refuses": ({"optim": "muon", "optim_args": {"adjust_lr_fn": "foo"}}, "Muon refuses its arguments"),
    "negative rate": (
        {"lr_scheduler_type": "flat_cos", "lr_scheduler_kwargs": {"min_lr_rate": -1}},
        "would be negative",
    ),
    "plateau": (
        {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": "x"}, "eval_steps": 4},
        "lr_scheduler_kwargs: .'patience': 'x'",
    ),
    "plateau without waiting": (
        {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"cooldown": None}, "eval_steps": 4},
        "lr_scheduler_kwargs: .'cooldown': None",
    ),
    "share above 1": ({"lr_scheduler_type": "flat_cos", "lr_scheduler_kwargs": {"flat": 1.5}}, "flat is 1.5"),
    "no groups": ({"techniques": {"gradient_statistics": {"groups": {}}}}, "groups: give at least one"),
    "recompute": ({"gradient_checkpointing": True}, "does not support it"),
    "metric": ({"metric_for_best_model": "acuracy"}, "did you mean accuracy?"),
    "metric of an average": (
        {"metric_for_best_model": "ema/f1", "techniques": {"ema": None}},
        "'ema/f1'; .*ema/accuracy",
    ),
    "tracker": ({"report_to": ["wand"]}, "did you mean wandb?"),
    "init_from": ({"init_from": "nowhere"}, "nowhere"),
}
LAUNCHES = {  # accelerate file and mixed precision (none: no), fields -> what the sentence names
    "float64 under bf16": ("ddp bf16", {"dtype": "float64"}, "dtype is float64, but mixed_precision is bf16"),
    "bfloat16 under FSDP2": ("fsdp2 bf16", {"dtype": "bfloat16"}, "FSDP2 keeps float32 weights"),
    "auto under FSDP2": ("fsdp2", {"per_device_batch_size": "auto"}, "auto, but under FSDP2"),
    "auto under ZeRO": ("zero3", {"per_device_batch_size": "auto"}, "auto, but under DeepSpeed ZeRO-3"),
    "sam under ZeRO": ("zero2", {"techniques": {"sam": None}}, "sam does not support DeepSpeed ZeRO-2"),
    "muon under ZeRO": ("zero3", {"optim": "muon", "dtype": "float32"}, "optim is muon, but DeepSpeed"),
    "unused under ZeRO": ("zero2", {"ddp_find_unused_parameters": True}, "ddp_find_unused_parameters is true"),
}


def environment(launch: str) -> dict[str, str]:
    name, _, precision = launch.partition(" ")
    return kit.where(name, 2, mixed_precision=precision or "no")


def given(plain: dict, **fields) -> list:
    """Return the flags of a run of the plain task."""
    return plain_task.flags(plain, **{n: json.dumps(v) if isinstance(v, dict) else v for n, v in fields.items()})


def refusal(flags: list) -> str:
    """Return the sentence with which train.py refuses these flags in this process, or an empty text."""
    from accelerate.state import AcceleratorState

    import train

    try:
        train.main([str(word) for word in flags])
    except UsageError as error:
        return str(error)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    return ""


def refusals(all_flags: list[list]) -> list[list[str]]:
    """Return the sentences of (the dry run, the run) for each list of flags."""
    return [[refusal([*flags, "--dry_run", dry]) for dry in ("true", "false")] for flags in all_flags]


def test_dry_run_refuses_what_the_run_refuses(plain, tmp_path):
    """All cases in one process: a run that is refused has trained nothing."""
    flags = [
        given(plain, output_dir=tmp_path / f"run{number}", **fields)
        for number, (fields, _) in enumerate(CASES.values())
    ]
    [found] = kit.spawn(1, refusals, flags, out=tmp_path / "out")
    for (name, (_, expected)), (dry, run) in zip(CASES.items(), found, strict=True):
        assert dry == run, name
        assert re.search(expected, run), (name, run)


@pytest.mark.parametrize("name", LAUNCHES)
def test_dry_run_knows_the_launch(plain, monkeypatch, tmp_path, name):
    launch, fields, expected = LAUNCHES[name]
    for key, value in (environment(launch) | {"WORLD_SIZE": "2"}).items():
        monkeypatch.setenv(key, value)
    flags = {"dtype": "float32", "dry_run": True, "output_dir": tmp_path / "run"} | fields
    assert re.search(expected, refusal(given(plain, **flags)))


@pytest.mark.cluster
@pytest.mark.parametrize("name", LAUNCHES)
def test_run_refuses_the_same(plain, tmp_path, name):
    launch, fields, _ = LAUNCHES[name]
    if launch.startswith("zero"):
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install -r requirements-extra.txt")
    env = environment(launch)
    flags = given(plain, **{"dtype": "float32", "output_dir": tmp_path / "run"} | fields)
    [[dry, run], _] = kit.spawn(2, _both, flags, out=tmp_path / "out", env=env)
    assert dry
    assert dry == run


def _both(flags: list) -> list[str]:
    return refusals([flags])[0]


def test_large_model_has_no_weights_in_a_dry_run(plain, monkeypatch, tmp_path, capsys):
    """A dry run of billions of parameters needs no memory for them: `build` is asked for an empty model only."""
    asked, build = [], plain_task.Task.build
    monkeypatch.setattr("src.reporting.dry_run.BUILT", 100)
    monkeypatch.setattr(
        plain_task.Task, "build", lambda task, weights=None, empty=False: asked.append(empty) or build(task, None, True)
    )
    assert refusal(given(plain, output_dir=tmp_path, metric_for_best_model="f1", dry_run=True)) == ""
    assert asked == [True]
    assert "too many for a dry run" in capsys.readouterr().err


def test_task_whose_build_cannot_be_empty_has_a_dry_run(plain, monkeypatch, tmp_path):
    build = plain_task.Task.build
    monkeypatch.setattr(plain_task.Task, "build", lambda task, weights=None: build(task, weights))
    assert refusal(given(plain, output_dir=tmp_path, dry_run=True)) == ""


def test_dry_run_of_a_run_to_resume_does_not_need_its_init_from(plain, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    kit.run_training(1, one, *given(plain, max_steps=2))
    kit.run_training(1, two, *given(plain, max_steps=2, init_from=one))
    shutil.rmtree(one)
    flags = given(plain, max_steps=2, init_from=one, output_dir=two)
    assert kit.spawn(1, refusals, [flags], out=tmp_path / "out") == [[["", ""]]]
