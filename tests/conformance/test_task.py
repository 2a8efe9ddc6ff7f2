"""What every task must keep, checked for each recipe of recipes.py."""

import shutil

import numpy as np
import pytest
import torch

from src.config import parsing
from src.data.dataset import prepare_datasets
from src.tasks import OPTIONS, make_task
from tests.conformance.recipes import RECIPES
from tests.helpers import kit

pytestmark = pytest.mark.conformance


@pytest.fixture(scope="module", params=RECIPES, ids=lambda recipe: recipe.__name__)
def flags(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param.__name__)
    return request.param(folder) + kit.flags(
        train_file=folder / "train.jsonl",
        validation_file=folder / "validation.jsonl",
        dtype="float64",
        global_batch_size=24,
        per_device_batch_size=24,
        per_device_eval_batch_size=4,
        max_steps=12,  # nine of them are the first epoch, and the ninth is its tail of eleven
        learning_rate=1e-3,
        logging_steps=1,
        save_steps=6,
    )


@pytest.fixture(scope="module")
def whole(flags, tmp_path_factory):
    """One process, each global batch in one forward pass."""
    return kit.run_training(1, tmp_path_factory.mktemp("whole") / "run", *flags)


def test_loss_is_a_sum_and_weight_its_divisor(flags):
    """The sums of a batch are those of its rows alone, added up. The mutant returns means."""
    cfg, options = parsing.parse(flags, OPTIONS)
    task = make_task(cfg, options)
    split = prepare_datasets(cfg, task)["train"]
    model = task.build().train()

    def sums(ids):
        batch = task.collate(split.rows(np.array(ids)), True)
        return torch.tensor([task.loss(model, batch.inputs)["loss"].item(), batch.weight], dtype=torch.float64)

    together, alone = sums(range(10)), [sums([i]) for i in range(10)]
    assert torch.allclose(together, sum(alone), rtol=1e-9)  # some layers of transformers compute in float32
    mean = together[0] / together[1]
    sum_of_means = sum(loss / weight for loss, weight in alone)
    assert not torch.isclose(mean, sum_of_means, rtol=1e-3)


def test_numbers_do_not_depend_on_the_split(flags, whole, tmp_path):
    run = kit.run_training(2, tmp_path / "run", *flags, "--per_device_batch_size", 5)
    assert kit.distance(whole.weights, run.weights) <= 1e-9
    assert max(abs(a - b) for a, b in zip(whole.losses(), run.losses(), strict=True)) <= 1e-9
    other = kit.run_training(2, tmp_path / "other", *flags, "--per_device_batch_size", 5, "--seed", 43)
    assert kit.distance(whole.weights, other.weights) > 1e-3


def test_evaluation_equals_that_of_training_on_any_number_of_processes(flags, whole, tmp_path):
    reported = whole.kind("eval")[-1]
    assert reported["examples"] == 31
    for world in (1, 3):
        assert kit.run_evaluation(world, tmp_path / f"{world}", "--checkpoint", whole.folder) == reported


def test_interrupted_run_resumes_bitwise(flags, whole, tmp_path):
    shutil.copytree(whole.folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "final")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000012")
    run = kit.run_training(1, tmp_path / "run", *flags)
    assert kit.same(run.weights, whole.weights)
    assert [line["step"] for line in run.lines] == [line["step"] for line in whole.lines]
