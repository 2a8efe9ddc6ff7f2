"""What every task must keep, checked for each recipe of recipes.py. checks.py has the checks that need no run.

tests/addons/tasks/test_conformance.py runs the same tests for the tasks of addons/."""

import numpy as np
import pytest
import torch
import yaml

from engine.config import parsing
from engine.find_tasks import MODULES, OPTIONS, make_task
from engine.plan.dataset import prepare_datasets
from tests.conformance import checks, recipes
from tests.conformance.smoke_checks import check_collate, check_loss, check_weight
from tests.helpers import kit

pytestmark = pytest.mark.conformance

MICRO_BATCH = 5  # rows; neither the global batch nor its tail is a multiple


def make_flags(recipe, folder) -> list[str]:
    """Return the suite's flags and then those of the recipe, which win. Data flags of the recipe replace the suite's."""
    own = recipe(folder)
    defaults = {
        "train_file": folder / "train.jsonl",
        "validation_file": folder / "validation.jsonl",
        "dtype": "float64",
        "global_batch_size": 24,
        "per_device_batch_size": 24,
        "per_device_eval_batch_size": 4,
        "max_steps": 12,  # with 203 rows, nine of them are the first epoch, and the ninth is its tail of eleven
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_steps": 6,
    }
    if {"--train_file", "--dataset_name"} & set(own):
        defaults = {name: value for name, value in defaults.items() if not name.endswith("_file")}
    return kit.flags(**defaults) + own


def open_task(flags):
    """Return (task, splits, model in float64) of these flags."""
    cfg, options = parsing.parse(flags, OPTIONS)
    task = make_task(cfg, options)
    splits = prepare_datasets(cfg, task)
    return task, splits, task.build()


@pytest.fixture(scope="module", params=recipes.RECIPES, ids=lambda recipe: recipe.__name__)
def flags(request, tmp_path_factory):
    return make_flags(request.param, tmp_path_factory.mktemp(request.param.__name__))


@pytest.fixture(scope="module")
def opened(flags):
    task, splits, model = open_task(flags)
    rows = splits["train"].rows(np.arange(checks.ROWS))
    return task, splits, model, rows


@pytest.fixture(scope="module")
def whole(flags, opened, tmp_path_factory):
    """One process, each global batch in one forward pass, unless its randomness belongs to the micro-batch."""
    task, _, _, rows = opened
    if checks.is_random(task, rows):  # another size of the micro-batch draws other numbers
        flags = [*flags, *kit.flags(per_device_batch_size=MICRO_BATCH)]
    return kit.run_training(1, tmp_path_factory.mktemp("whole") / "run", *flags)


def tasks_without_recipe() -> set[str]:
    tasks = {name for name, module in MODULES.items() if module.startswith("src.")}
    return tasks - {recipe.__name__ for recipe in recipes.RECIPES}


def test_every_task_has_a_recipe():
    """A copy may add a task first. In the template, tests/project/test_pages.py demands it."""
    if missing := tasks_without_recipe():
        pytest.skip(f"not checked, because tests/conformance/recipes.py has no recipe: {', '.join(sorted(missing))}")


def test_evaluation_is_a_function_of_the_rows(opened):
    task, _, _, rows = opened
    checks.check_evaluation_is_not_random(task, rows)


@pytest.mark.parametrize("training", [True, False])
def test_batches_repeat_and_sums_add_up(opened, training):
    """Generators have the seed of the micro-batch, and keep it; the mistakes that this finds: test_mistakes.py."""
    task, splits, model, rows = opened
    check_collate(task, rows, training)
    check_weight(task, splits["train"])
    check_loss(task, model, rows, training, checks.TOLERANCE, checks.ROUNDING)


def test_shortened_rows_have_fewer_tokens(opened):
    """For sequence_length_warmup_steps; a task without `can_shorten` refuses it."""
    kit.need_addon("data/size_warmups")
    task, _, _, rows = opened
    if getattr(task, "can_shorten", False):
        checks.check_shortened_rows(task, rows)


def test_loss_is_a_sum_over_independent_rows(opened):
    task, _, model, rows = opened
    for training in (False, True):
        checks.check_rows_are_independent(task, model, rows, training)


def test_numbers_do_not_depend_on_the_split(flags, whole, tmp_path):
    """On four ranks; one has no micro-batch in the tail of the epoch."""
    run = kit.run_training(4, tmp_path / "run", *flags, "--per_device_batch_size", MICRO_BATCH)
    assert kit.distance(whole.weights, run.weights) <= 1e-10
    for kind in ("train", "eval"):
        for one, other in zip(whole.kind(kind), run.kind(kind), strict=True):
            assert one["weight"] == other["weight"], f"step {one['step']}: the weight depends on the split"
            assert other["loss"] == pytest.approx(one["loss"], rel=1e-9), f"{kind} line of step {one['step']}"


def test_exact_sums_are_bitwise_the_same_on_any_number_of_processes(flags, tmp_path):
    """Weights, moments and all lines; tests/conformance/test_exact_sums.py has the mutants."""
    flags = [*flags, *kit.flags(exact_sums=True, dtype="float32", per_device_batch_size=MICRO_BATCH, max_steps=9)]
    runs = [kit.run_training(world, tmp_path / str(world), *flags) for world in (1, 2, 3)]
    for run in runs[1:]:
        assert kit.timeless(run.folder) == kit.timeless(runs[0].folder)
        assert kit.same(run.weights, runs[0].weights)
        moments = [kit.load_weights(each.folder / "checkpoints/step_00000009", "optimizer") for each in (run, runs[0])]
        assert kit.same(*moments)


def test_mutant_another_run_is_another(whole):
    """The comparison sees the update of six steps."""
    first, *_, last = sorted((whole.folder / "checkpoints").iterdir())
    assert kit.distance(kit.load_weights(first), kit.load_weights(last)) > 1e-4, "training does not move the weights"


def test_evaluation_on_three_processes_equals_that_of_training(opened, whole, tmp_path):
    reported = whole.kind("eval")[-1]
    assert reported["examples"] == len(opened[1]["validation"])
    assert kit.run_evaluation(3, tmp_path / "3", "--checkpoint", whole.folder) == reported


def test_interrupted_run_resumes_bitwise(flags, whole, tmp_path):
    config = yaml.safe_load((whole.folder / "config.yaml").read_text())
    flags = [*flags, *kit.flags(per_device_batch_size=config["per_device_batch_size"])]
    run = kit.run_training(1, kit.rewind(whole.folder, config["save_steps"], tmp_path / "run"), *flags)
    assert kit.same(run.weights, whole.weights)
    assert kit.timeless(run.folder) == kit.timeless(whole.folder)


# ---- mutants: naive tasks that the checks must catch -----------------------------------------------------------------


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mutants")
    task, splits, model = open_task(make_flags(recipes.causal_lm, folder))
    return task, model, splits["train"].rows(np.arange(checks.ROWS))


MUTANTS = {
    "it is a mean": lambda sums, inputs: {
        name: value / (inputs["targets"] != -100).sum() for name, value in sums.items()
    },
    "depends on the rows or the padding beside it": lambda sums, inputs: {
        name: value * inputs["input_ids"].shape[1] for name, value in sums.items()
    },
    "waits for the device.*test_task.py.*item": lambda sums, inputs: sums if inputs["targets"].max().item() else {},
    "waits for the device.*tolist": lambda sums, inputs: sums if inputs["targets"].tolist() else {},
    "waits for the device.*mask": lambda sums, inputs: sums | {"n": inputs["targets"][inputs["targets"] > 3].sum()},
}


@pytest.mark.parametrize("message", MUTANTS)
def test_mutant_loss_is_named(language_model, monkeypatch, message):
    task, model, rows = language_model
    loss = task.loss
    monkeypatch.setattr(task, "loss", lambda model, inputs: MUTANTS[message](loss(model, inputs), inputs))
    with pytest.raises(AssertionError, match=message):
        checks.check_rows_are_independent(task, model, rows, training=False)


@pytest.mark.parametrize("needs_training_batch", [False, True])
def test_mutant_loss_that_compares_rows_is_named_under_a_random_collate(
    language_model, monkeypatch, needs_training_batch
):
    """A multiple of the loss that is the same for every row twice, only in training."""
    task, model, rows = language_model
    loss, collate = task.loss, task.collate

    def masked(rows, training):
        batch = collate(rows, training)
        batch.inputs.pop("target_positions", None)  # then each tensor has the rows as its first dimension
        ids = batch.inputs["input_ids"]
        kept = {"kept": torch.rand(ids.shape) > 0.1} if training else {}
        return batch._replace(inputs=batch.inputs | kept | {"input_ids": ids * kept.get("kept", 1)})

    def compared(model, inputs):
        inputs = dict(inputs)
        factor = inputs["targets"].double().std(correction=0) if model.training else 1
        if needs_training_batch and model.training:
            factor = factor * inputs.pop("kept").any()
        return {name: value * factor for name, value in loss(model, inputs).items()}

    monkeypatch.setattr(task, "collate", masked)
    checks.check_rows_are_independent(task, model, rows, training=True)
    monkeypatch.setattr(task, "loss", compared)
    with pytest.raises(AssertionError, match="depends on the rows"):
        checks.check_rows_are_independent(task, model, rows, training=True)


def test_mutant_augmentation_in_evaluation_is_named(language_model, monkeypatch):
    task, _, rows = language_model
    collate = task.collate

    def augmented(rows, training):
        batch = collate(rows, training)
        noise = torch.randint(0, 9, batch.inputs["input_ids"].shape)
        return batch._replace(inputs=batch.inputs | {"input_ids": batch.inputs["input_ids"] + noise})

    checks.check_evaluation_is_not_random(task, rows)
    monkeypatch.setattr(task, "collate", augmented)
    with pytest.raises(AssertionError, match=r"training=False.*input_ids"):
        checks.check_evaluation_is_not_random(task, rows)
