"""Every technique, however a step is split, resumed and sharded; losses and tasks under other backends.

A technique's test file has `fields(folder)`, its run, and `plain_weights(values)`, an independent loop over the whole batch.
tests/addons/tasks/test_conformance.py checks tasks in the same way."""

import json
from contextlib import nullcontext
from itertools import count
from pathlib import Path

import pytest

import train
from addons.techniques._chain import TechniqueChain
from tests.addons.tasks import recipes
from tests.conformance import checks
from tests.helpers import kit, technique_runs

SPLITS = [  # (module of its test, options of its `fields`, whether a further run has dropout)
    ("optimizers.test_muon", {}, False),
    ("techniques.test_adaptive_clipping", {}, False),
    ("techniques.test_clip_by_value", {}, False),
    ("techniques.test_cycle_momentum", {}, False),
    ("techniques.test_gradient_noise", {}, False),
    ("techniques.test_hard_examples", {}, True),
    ("techniques.test_progressive_resizing", {}, False),
    ("techniques.test_sam", {"name": "sam"}, True),
    ("techniques.test_sam", {"name": "asam"}, False),
    ("techniques.test_sam", {"name": "gradient_norm_penalty"}, False),
    ("techniques.test_schedule_free", {}, False),
    ("techniques.test_unfreeze", {}, False),
]
FSDP2 = [  # (module, options, further fields): other optimizers than SPLITS where rounding would grow
    *((module, options, {}) for module, options, _ in SPLITS[1:] if "cycle" not in module and "free" not in module),
    ("optimizers.test_muon", {}, {"adam_epsilon": 1e-8}),
    ("techniques.test_channels_last", {"techniques": '{"channels_last": null}'}, {}),
    ("techniques.test_cycle_momentum", {}, {"optim": "adamw", "learning_rate": 1e-2}),
    ("techniques.test_neftune", {}, {}),
    # An evaluation after each step gathers other weights than those of the next forward pass.
    ("techniques.test_schedule_free", {}, {"eval_steps": 1}),
]


@pytest.mark.parametrize(("test", "options", "dropout"), SPLITS)
def test_technique_is_exact_for_every_split(tmp_path, test, options, dropout):
    """The weights of a plain loop on 1, 2 and 4 processes, and resumed bitwise."""
    module = pytest.importorskip(f"tests.addons.{test}")  # a fork may have removed it
    values = module.fields(tmp_path, **options)
    noisy = technique_runs.with_dropout(tmp_path, values) if dropout else None
    technique_runs.check_splits(tmp_path, values, module.plain_weights(values), dropout=noisy)


def check_exact_sums(folder: Path, values: dict) -> None:
    """Assert the same bits of weights, moments and lines on one and three processes, in float32."""
    values = values | {"exact_sums": True, "dtype": "float32", "max_grad_norm": 1.0, "max_steps": 5}
    one, three = (technique_runs.train(folder / str(world), values, world, micro=3) for world in (1, 3))
    assert kit.timeless(one.folder) == kit.timeless(three.folder)
    saved = sorted(path.relative_to(one.folder) for path in one.folder.rglob("*.safetensors"))
    assert len(saved) >= 3
    for name in saved:
        assert (one.folder / name).read_bytes() == (three.folder / name).read_bytes(), name


@pytest.mark.parametrize(("test", "options", "dropout"), SPLITS)
def test_technique_with_exact_sums(tmp_path, test, options, dropout):
    module = pytest.importorskip(f"tests.addons.{test}")
    values = module.fields(tmp_path, **options)
    check_exact_sums(tmp_path, technique_runs.with_dropout(tmp_path, values) if dropout else values)


@pytest.mark.cluster
@pytest.mark.parametrize(("test", "options", "more"), FSDP2)
def test_technique_under_fsdp2(tmp_path, test, options, more):
    """The weights of one process, and resumed."""
    module = pytest.importorskip(f"tests.addons.{test}")
    technique_runs.check_fsdp2(tmp_path, module.fields(tmp_path, **options) | more)


WATCHED = {
    "gradient_norm_penalty": None,
    "hard_examples": None,  # inside: four passes in a step
    "neftune": None,
    "gradient_statistics": {"values": ["grad_norm", "weight_norm", "update_ratio"]},
    "spike_watch": {"warmup": 1, "window": 2},
    "lawa": {"k": 2, "every": 1},
    **dict.fromkeys(("gradient_noise", "adaptive_clipping", "clip_by_value", "lookahead", "ema", "swa")),
}


def _watching(original):
    """Return a function that forbids the host to wait for the device, but in its first call."""
    calls = count()

    def watched(*args):
        with checks.NoWaiting() if next(calls) else nullcontext():
            return original(*args)

    return watched


def _watched(argv):
    """Train on this rank; the host may wait for the device in the first step only."""
    wrap = TechniqueChain.wrap_gradient
    TechniqueChain.wrap_gradient = lambda self, compute: _watching(wrap(self, compute))
    for owner, name in (
        *((TechniqueChain, name) for name in ("change_gradient", "after_update")),
        (train, "optimizer_step"),
    ):
        setattr(owner, name, _watching(getattr(owner, name)))
    train.main([str(word) for word in argv])


def test_no_technique_waits_for_the_device(tmp_path):
    values = technique_runs.files(tmp_path) | {"dtype": "float32", "logging_steps": 100, "max_steps": 4}
    values |= {"techniques": json.dumps(WATCHED), "per_device_batch_size": 4, "output_dir": tmp_path / "run"}
    kit.spawn(1, _watched, kit.flags(**values), out=tmp_path / "out", env={"ACCELERATE_DEBUG_MODE": "false"})


# ---- techniques together, losses and tasks under other backends --------------------------------------------------------

EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.2}
MIXTRAL = kit.LLAMA | EXPERTS | {"model_type": "mixtral", "num_local_experts": 4}
DROPOUT = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}
LOSSES = {"label_smoothing_factor": 0.1, "z_loss": 0.01, "focal_gamma": 1.5}
UNFREEZE = {"unfreeze": {"steps": {"*.wte.*": 3, "*.mlp.*": 4}}}  # wte is tied to the head
EMA = {"ema": {"decay": 0.6, "final": True}}
AVERAGES = EMA | {"lookahead": {"k": 2}, "swa": {"start": 0.4}, "lawa": {"k": 2, "every": 1}}
LORA = {"peft": {"type": "lora", "r": 4, "target_modules": ["c_attn"], "lora_dropout": 0.1}}
TWICE = {"techniques": {"sam": None, "hard_examples": {"start_step": 2}}}  # at the weights that SAM has moved
EXACT, CLOSE, ZERO = 1e-10, 2e-5, 1e-4
WORLD = {"fsdp2": 2, "hsdp": 4, "fsdp2_tp": 4, "zero2": 2, "zero3": 2}
RUNS = [  # (recipe of a task, or None: causal_lm on the rows of technique_runs; model; fields; backend; tolerance)
    (None, kit.LLAMA, TWICE | {"pad_to_multiple_of": 16}, "fsdp2_tp", CLOSE),
    (None, kit.LLAMA, TWICE, "hsdp", CLOSE),
    (None, kit.EXACT, TWICE | {"gradient_checkpointing": True}, "fsdp2", EXACT),
    (None, kit.LLAMA, TWICE | {"compile": True, "pad_to_multiple_of": 16}, "fsdp2", CLOSE),
    (None, kit.LLAMA, {"techniques": AVERAGES}, "hsdp", CLOSE),
    (None, None, {"techniques": AVERAGES | UNFREEZE, "freeze": ["*.wpe.*", "*.ln_f.*"]}, "fsdp2", EXACT),
    (None, None, {"techniques": {"schedule_free": None, "sam": None} | UNFREEZE, "adam_beta1": 0.0}, "fsdp2", EXACT),
    (None, None, {"techniques": UNFREEZE, "optim": "muon"}, "fsdp2", EXACT),
    (None, MIXTRAL, {}, "fsdp2", CLOSE),
    (None, MIXTRAL, {}, "zero2", ZERO),
    (None, MIXTRAL, {}, "zero3", ZERO),
    ("causal_lm", kit.EXACT, LOSSES, "fsdp2", EXACT),
    ("text_classification", recipes.BERT | DROPOUT, LOSSES | {"r_drop_alpha": 2.0, "class_weights": "balanced"}, "fsdp2", EXACT),
    # With mixup and cutmix; weights before a batch norm have a gradient along them that is zero except for rounding.
    ("image_classification", None, {"r_drop_alpha": 1.0, "techniques": {"sam": None}, "adam_epsilon": 1e-4}, "fsdp2", EXACT),
    ("token_classification", None, {}, "fsdp2", EXACT),
    ("masked_lm", None, {}, "fsdp2", EXACT),
    ("segmentation", None, {}, "fsdp2", EXACT),
    *((name, None, {}, "fsdp2", EXACT) for name in ("seq2seq", "embeddings", "preference", "reward")),
    ("preference", None, {"preference_loss": "orpo"}, "fsdp2", EXACT),
    *((name, None, {}, place, ZERO) for name in ("preference", "distillation", "embeddings") for place in ("zero2", "zero3")),
]  # fmt: skip


def flags(folder: Path, name: str | None, model: dict | None, more: dict) -> list[str]:
    """Return the flags of a short run; later ones win."""
    values, words = technique_runs.files(folder) | {"eval_steps": 5, "per_device_batch_size": 2}, []
    if name:
        kit.need_task(name)
        del values["model_config"]  # the recipe has its own, or none
        values |= {"max_grad_norm": 1.0, "weight_decay": 0.01}
        words = getattr(recipes, name)(folder)
    if model:
        words += kit.flags(model_config=kit.write_yaml(folder / "other.yaml", model))
    more = {key: json.dumps(value) if key == "techniques" else value for key, value in more.items()}
    return kit.flags(**values) + words + kit.flags(**more)


def run(folder: Path, argv: list[str], world: int = 1, env: dict | None = None) -> kit.Run:
    argv, here = [*argv, "--output_dir", folder], folder.with_suffix(".cwd")
    codes, texts = kit.run_command("train.py", *argv, folder=here, world=world, env=env, timeout=300)
    assert codes == [0] * world, texts
    return kit.Run(folder)


WATCHING = {"gradient_statistics": None, "spike_watch": {"warmup": 1, "window": 2, "factor": 1.01}, "neftune": None}


@pytest.mark.parametrize(("model", "more"), [(MIXTRAL, {}), (None, LORA), (None, {"techniques": AVERAGES | WATCHING})])
def test_router_loss_adapters_and_averages_with_exact_sums(tmp_path, model, more):
    values = technique_runs.files(tmp_path) | {name: json.dumps(value) for name, value in more.items()}
    if "peft" in more:
        pytest.importorskip("peft")
    if model:
        values["model_config"] = kit.write_yaml(tmp_path / "other.yaml", model)
    check_exact_sums(tmp_path, values)


@pytest.mark.cluster
@pytest.mark.parametrize(("name", "model", "more", "place", "bar"), RUNS)
def test_numbers_of_one_process_under(tmp_path, name, model, more, place, bar):
    """The weights of one process, a bitwise resume from step 2, and the number of eval.py."""
    if place.startswith("zero"):
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install -r requirements-extra.txt")
    world, env = WORLD[place], kit.where(place, WORLD[place], mixed_precision="no")
    argv = flags(tmp_path, name, model, more)
    if bar != EXACT:
        argv += kit.flags(dtype="float32", adam_epsilon=1e-4)
    one, other = run(tmp_path / "one", argv), run(tmp_path / "other", argv, world, env)
    assert kit.distance(other.weights, one.weights) <= bar
    again = kit.rewind(other.folder, 2, tmp_path / "again")
    assert kit.same(run(again, argv, world, env).weights, other.weights)
    assert kit.timeless(again) == kit.timeless(other.folder)
    found = kit.run_evaluation(world, tmp_path / "eval", "--checkpoint", other.folder, env=env)
    [line] = [line for line in other.kind("eval") if line["step"] == found["step"]]
    assert found["loss"] == line["ema/loss" if "ema" in more.get("techniques", {}) else "loss"]
