"""Evaluation is one number: exact, every example once, the same to the last bit on any number of processes."""

import json
import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch

import eval as evaluation
from engine.config.run_config import RunConfig
from engine.distributed.init_accelerator import init_accelerator
from engine.run import model_with_loss
from engine.task import Batch
from src.tasks import causal_lm
from src.training import evaluation as results
from tests.helpers import kit


@pytest.fixture(scope="module")
def trained(files, tmp_path_factory):
    """A short float64 run with an evaluation at its end, both without the rows of more than 40 tokens."""
    folder = tmp_path_factory.mktemp("trained")
    values = {"model_config": files / "exact.yaml", "dtype": "float64", "max_steps": 15, "learning_rate": 1e-2}
    values |= {f"{split}_file": files / f"{split}.jsonl" for split in ("train", "validation")}
    values |= {"long_rows": "drop", "max_length": 40}
    return kit.run_training(1, folder / "run", *kit.flags(**values, per_device_eval_batch_size=7))


@pytest.fixture(scope="module")
def rows(trained, files):
    """(sum of losses, targets, right answers) of each row, by transformers alone."""
    from transformers import AutoModelForCausalLM

    model, rows = AutoModelForCausalLM.from_pretrained(trained.folder / "final").eval(), []
    for line in (files / "validation.jsonl").read_text().splitlines():
        ids = torch.tensor([json.loads(line)["input_ids"]])
        if ids.shape[1] > 40:
            continue
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
        rows.append((loss, ids.shape[1] - 1, (logits.argmax(-1) == ids[0, 1:]).sum().item()))
    return rows


@pytest.mark.parametrize("batch", [1, 7])
def test_exact_and_bitwise_the_same_on_one_two_three_processes(trained, rows, tmp_path, batch):
    loss, targets, correct = map(sum, zip(*rows, strict=True))
    flags = kit.flags(checkpoint=trained.folder, per_device_eval_batch_size=batch)
    lines = [kit.run_evaluation(world, tmp_path / f"{world}", *flags) for world in (1, 2, 3)]
    assert lines[0] == lines[1] == lines[2]  # every number, to the last bit
    line = lines[0]
    assert abs(line["loss"] - loss / targets) <= 1e-12
    assert len(rows) < 103  # of the file
    assert (line["weight"], line["examples"]) == (targets, len(rows))
    assert line["accuracy"] == correct / targets
    assert line["perplexity"] == pytest.approx(math.exp(loss / targets), rel=1e-12)


def test_mutants_mean_of_means_and_repeated_rows_are_caught(rows):
    """What most loops report: the mean of the batches' means, and samples repeated to fill up the last round."""

    def mean(rows):
        return sum(loss for loss, *_ in rows) / sum(targets for _, targets, _ in rows)

    mean_of_means = sum(mean([row]) for row in rows) / len(rows)
    assert abs(mean_of_means - mean(rows)) > 1e-4
    assert abs(mean([*rows, *rows[:5]]) - mean(rows)) > 1e-6


def test_what_training_reports_evaluation_recomputes_to_the_last_digit(trained, tmp_path):
    """With the kernels that training chooses: on a CPU, TF32 is ignored with a warning, in eval.py, too."""
    flags = kit.flags(checkpoint=trained.folder / "checkpoints" / "step_00000015", tf32=True)
    assert kit.run_evaluation(1, tmp_path / "scores", *flags) == trained.kind("eval")[-1]
    assert "tf32 is ignored" in (tmp_path / "scores.out" / "rank0.txt").read_text()


def test_fewer_examples_than_ranks(trained, files, tmp_path):
    few = tmp_path / "few.jsonl"
    few.write_text((files / "validation.jsonl").read_text().splitlines(True)[0])
    flags = ["--checkpoint", trained.folder, "--validation_file", few]
    one, three = (kit.run_evaluation(world, tmp_path / f"{world}", *flags) for world in (1, 3))
    assert one == three
    assert one["examples"] == 1


def test_results_do_not_keep_the_batches():
    """Else each batch of a dataloader worker would hold a file open until the end: a process may have 1,024 of them."""
    label = torch.arange(3)
    kept = results._on_host(Batch({"label": label}, 3, 3, 3), {"label": label})["label"]
    assert kept.tolist() == [0, 1, 2]
    assert not np.shares_memory(kept, label.numpy())


def _threads_of_forwards(*argv) -> set[int]:
    """Evaluate in a process with two threads; return the threads that each forward pass had."""
    torch.set_num_threads(2)
    seen, forward = set(), model_with_loss.ModelWithLoss.forward

    def watched(self, inputs):
        seen.add(torch.get_num_threads())
        return forward(self, inputs)

    model_with_loss.ModelWithLoss.forward = watched
    evaluation.main([str(word) for word in argv])
    return seen


def test_last_bits_do_not_depend_on_the_number_of_threads(trained, tmp_path, monkeypatch):
    """The last bit of a matrix product depends on the threads that share it, and one process has more than three have."""
    argv = kit.flags(checkpoint=trained.folder, output_dir=tmp_path / "eval")
    assert kit.spawn(1, _threads_of_forwards, *argv, out=tmp_path / "out") == [{1}]
    assert json.loads((tmp_path / "eval" / "eval.json").read_text()) == trained.kind("eval")[-1]
    monkeypatch.setattr("engine.distributed.backends.one_thread", nullcontext)  # the mutant
    assert kit.spawn(1, _threads_of_forwards, *argv, out=tmp_path / "out") == [{2}]


@pytest.mark.parametrize("name", ["long", "spread"])
def test_other_names_or_widths_of_some_rows_are_refused_on_all_ranks(trained, tmp_path, monkeypatch, name):
    """Otherwise a sum would be dropped, ranks that begin with other rows would add up tables of other columns, and numpy
    would repeat a vector of length 1."""
    loss = causal_lm.Task.loss

    def sometimes(self, model, inputs):
        sums, (rows, width) = loss(self, model, inputs), inputs["input_ids"].shape
        if name == "spread":
            return sums | {"spread": torch.zeros(rows, 3 if width > 20 else 1)}
        return sums | {"long": sums["loss"]} if width > 20 else sums

    monkeypatch.setattr(causal_lm.Task, "loss", sometimes)
    flags = kit.flags(checkpoint=trained.folder, per_device_eval_batch_size=50, output_dir=tmp_path / "eval")
    codes, texts = kit.run_command("eval.py", *flags, folder=tmp_path / "here", world=2)
    assert codes == [2, 2]
    assert "for some micro-batches of an evaluation, but" in "".join(texts)


def test_ranks_that_found_different_weights_refuse(tmp_path):
    def compare(names):
        accelerator = init_accelerator(RunConfig(output_dir="unused"))
        evaluation.check_same_weights(accelerator, names[accelerator.process_index])

    with pytest.raises(kit.RankFailed, match="step_10 and step_20") as error:
        kit.spawn(2, compare, ["step_10", "step_20"], out=tmp_path)
    assert error.value.codes == [1, 1]
