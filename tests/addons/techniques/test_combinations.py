"""Techniques, losses and tasks under strategies that their own tests do not run: the numbers of one process, bitwise resumed."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.addons.tasks import recipes
from tests.helpers import kit, technique_runs

pytestmark = pytest.mark.cluster
FSDP2 = [  # (module of its test, options of its `fields`, further fields)
    ("optimizers.test_muon", {}, {"adam_epsilon": 1e-8}),
    ("techniques.test_adaptive_clipping", {}, {"optim": "sgd"}),
    ("techniques.test_channels_last", {"techniques": '{"channels_last": null}'}, {}),
    ("techniques.test_clip_by_value", {}, {}),
    ("techniques.test_cycle_momentum", {}, {"optim": "adamw", "learning_rate": 1e-2}),
    ("techniques.test_gradient_noise", {}, {}),
    ("techniques.test_hard_examples", {}, {}),
    ("techniques.test_neftune", {}, {}),
    ("techniques.test_progressive_resizing", {}, {}),
    ("techniques.test_sam", {"name": "sam"}, {}),
    ("techniques.test_sam", {"name": "asam"}, {}),
    ("techniques.test_sam", {"name": "gradient_norm_penalty"}, {}),
    # An evaluation after each step gathers other weights than those of the next forward pass.
    ("techniques.test_schedule_free", {}, {"eval_steps": 1}),
    ("techniques.test_unfreeze", {}, {}),
]
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.2}
MIXTRAL = kit.LLAMA | EXPERTS | {"model_type": "mixtral", "num_local_experts": 4}
DROPOUT = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}
LOSSES = {"label_smoothing_factor": 0.1, "z_loss": 0.01, "focal_gamma": 1.5}
UNFREEZE = {"unfreeze": {"steps": {"*.wte.*": 3, "*.mlp.*": 4}}}  # wte is tied to the head
AVERAGES = {
    "lookahead": {"k": 2},
    "ema": {"decay": 0.6, "final": True},
    "swa": {"start": 0.4},
    "lawa": {"k": 2, "every": 1},
}


def own(folder, model: dict | None = None, **more) -> dict:
    """Return the fields of technique_runs, with another model if given."""
    values = technique_runs.files(folder) | {"eval_steps": 5}
    if model:
        values["model_config"] = kit.write_yaml(folder / "other.yaml", model)
    return values | more


def of_recipe(folder, name: str, **more) -> dict:
    """Return the fields of a recipe of the conformance suite, for a short run."""
    kit.need_task(name)
    values: dict = {"eval_steps": 5, "save_steps": 2, "save_total_limit": 10, "max_steps": 5, "logging_steps": 1}
    values |= {"global_batch_size": 16, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "dtype": "float64"}
    for split in ("train", "validation"):
        values[f"{split}_file"] = folder / f"{split}.jsonl"
    words = [str(word) for word in getattr(recipes, name)(folder)]
    names = [i for i, word in enumerate(words) if word.startswith("--")]
    for start, end in zip(names, [*names[1:], len(words)], strict=True):
        found = words[start + 1 : end]
        values[words[start][2:]] = found if len(found) > 1 else found[0]
    return values | more


def run(folder: Path, values: dict, world: int = 1, env: dict | None = None) -> kit.Run:
    argv = kit.flags(**{"per_device_batch_size": 2} | values, output_dir=folder)
    codes, texts = kit.run_command(
        "train.py", *argv, folder=folder.with_suffix(".cwd"), world=world, env=env, timeout=300
    )
    assert codes == [0] * world, texts
    return kit.Run(folder)


def check(
    folder: Path, values: dict, world: int, env: dict | None, bar: float, at: int = 2, metric: str = "loss"
) -> kit.Run:
    """Assert the weights of one process within `bar`, a bitwise resume from step `at`, and the number of eval.py."""
    if bar > 1e-9:
        values = values | {"dtype": "float32", "adam_epsilon": 1e-4}
    one, other = run(folder / "one", values), run(folder / "other", values, world, env)
    assert kit.distance(other.weights, one.weights) <= bar
    again = shutil.copytree(other.folder, folder / "again")
    shutil.rmtree(again / "final")
    for path in (again / "checkpoints").iterdir():
        if int(path.name.removeprefix("step_")) > at:
            shutil.rmtree(path)
    assert kit.same(run(again, values, world, env).weights, other.weights)
    assert kit.timeless(again) == kit.timeless(other.folder)
    found = kit.run_evaluation(world, folder / "eval", "--checkpoint", other.folder, env=env)
    [line] = [line for line in other.kind("eval") if line["step"] == found["step"]]
    assert found["loss"] == line[metric]
    return other


@pytest.mark.parametrize(("test", "options", "more"), FSDP2)
def test_technique_under_fsdp2(tmp_path, test, options, more):
    """The weights of one process, and resumed."""
    module = pytest.importorskip(f"tests.addons.{test}")  # a fork may have removed it
    technique_runs.check_fsdp2(tmp_path, module.fields(tmp_path, **options) | more)


@pytest.mark.parametrize(
    "place, world, more, bar",
    [
        ("fsdp2_tp", 4, {"pad_to_multiple_of": 16}, 2e-5),
        ("hsdp", 4, {}, 2e-5),
        ("fsdp2", 2, {"gradient_checkpointing": True}, 1e-10),
        ("fsdp2", 2, {"compile": True, "pad_to_multiple_of": 16}, 2e-5),
    ],
)
def test_two_passes(tmp_path, place, world, more, bar):
    """Hard examples at the weights that SAM has moved."""
    model = kit.LLAMA if bar > 1e-9 else kit.EXACT
    values = own(tmp_path, model, techniques=json.dumps({"sam": None, "hard_examples": {"start_step": 2}}), **more)
    check(tmp_path, values, world, kit.where(place, world, mixed_precision="no"), bar)


@pytest.mark.parametrize(
    "name, more",
    [
        ("causal_lm", LOSSES),
        ("text_classification", LOSSES | {"r_drop_alpha": 2.0, "class_weights": "balanced"}),
        ("image_classification", {"r_drop_alpha": 1.0, "techniques": '{"sam": null}'}),  # with mixup and cutmix
        ("token_classification", {}),
        ("masked_lm", {}),
        ("segmentation", {}),
    ],
)
def test_tasks_and_losses_under_fsdp2(tmp_path, name, more):
    values = of_recipe(tmp_path, name, **more)
    if name == "causal_lm":  # Llama's norms compute in float32
        values["model_config"] = kit.write_yaml(tmp_path / "gpt2.yaml", kit.EXACT)
    if name == "text_classification":
        values["model_config"] = kit.write_yaml(tmp_path / "dropout.yaml", recipes.BERT | DROPOUT)
    if name == "image_classification":
        values["adam_epsilon"] = (
            1e-4  # weights before a batch norm have a gradient along them that is zero but for rounding
        )
    check(tmp_path, values, 2, kit.where("fsdp2", 2, mixed_precision="no"), 1e-10)


@pytest.mark.parametrize("place", ["zero2", "zero3"])
@pytest.mark.parametrize("name", ["experts", "preference", "distillation", "embeddings"])
def test_tasks_under_zero(tmp_path, name, place):
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install -r requirements-extra.txt")
    values = own(tmp_path, MIXTRAL) if name == "experts" else of_recipe(tmp_path, name)
    check(tmp_path, values, 2, kit.where(place, 2, mixed_precision="no"), 1e-4)


@pytest.mark.parametrize("place, world, bar", [("ddp", 2, 1e-10), ("fsdp2", 2, 1e-10), ("zero3", 2, 1e-4)])
def test_loss_in_chunks(tmp_path, place, world, bar):
    """8 rows of 300 tokens × 4,096 words are three chunks of logits on a CPU; 2 rows are one."""
    if place == "zero3":
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install -r requirements-extra.txt")
    generator = np.random.default_rng(0)
    rows = [{"input_ids": generator.integers(0, 4096, 300).tolist()} for _ in range(16)]
    files = {f"{split}_file": kit.write_jsonl(tmp_path / f"{split}.jsonl", rows) for split in ("train", "validation")}
    model = kit.EXACT | {"vocab_size": 4096, "n_positions": 300}
    values = own(tmp_path, model, **files, max_steps=3, per_device_batch_size=8)
    env = kit.where(place, world, mixed_precision="no") if place != "ddp" else None
    chunked = check(tmp_path, values, world, env, bar, at=2)
    whole = run(tmp_path / "whole", values | {"per_device_batch_size": 2})
    assert bar > 1e-9 or kit.distance(chunked.weights, whole.weights) <= bar


def test_experts_under_fsdp2(tmp_path):
    check(tmp_path, own(tmp_path, MIXTRAL), 2, kit.where("fsdp2", 2, mixed_precision="no"), 2e-5)


@pytest.mark.parametrize(
    "more, techniques",
    [
        ({"freeze": ["*.wpe.*", "*.ln_f.*"]}, AVERAGES | UNFREEZE),
        ({"adam_beta1": 0.0}, {"schedule_free": None, "sam": None} | UNFREEZE),
        ({"optim": "muon"}, UNFREEZE),
    ],
)
def test_averages_and_optimizers_with_frozen_weights(tmp_path, more, techniques):
    values = own(tmp_path, techniques=json.dumps(techniques), **more)
    metric = "ema/loss" if "ema" in techniques else "loss"
    check(tmp_path, values, 2, kit.where("fsdp2", 2, mixed_precision="no"), 1e-10, metric=metric)
