"""Evaluation is one number: exact, every example once, the same to the last bit on any number of processes."""

import json
import math
from contextlib import nullcontext

import pytest
import torch

from src.config.errors import UsageError
from src.tasks import causal_lm
from src.training import model_with_loss
from tests.helpers import kit


@pytest.fixture(scope="module")
def trained(files, tmp_path_factory):
    """A short float64 run with an evaluation at its end."""
    folder = tmp_path_factory.mktemp("trained")
    values = {"model_config": files / "exact.yaml", "dtype": "float64", "max_steps": 15, "learning_rate": 1e-2}
    values |= {f"{split}_file": files / f"{split}.jsonl" for split in ("train", "validation")}
    return kit.run_training(1, folder / "run", *kit.flags(**values, per_device_eval_batch_size=7))


@pytest.fixture(scope="module")
def independent(trained, files):
    """(sum of losses, targets, right answers) by transformers alone, one row at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(trained.folder / "final").eval()
    assert model.dtype == torch.float64
    loss = targets = correct = 0
    for line in (files / "validation.jsonl").read_text().splitlines():
        ids = torch.tensor([json.loads(line)["input_ids"]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1]
        loss += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
        correct += (logits.argmax(-1) == ids[0, 1:]).sum().item()
        targets += ids.shape[1] - 1
    return loss, targets, correct


@pytest.mark.parametrize("batch", [1, 7])
def test_exact_and_bitwise_the_same_on_one_two_three_processes(trained, independent, tmp_path, batch):
    loss, targets, correct = independent
    flags = kit.flags(checkpoint=trained.folder, per_device_eval_batch_size=batch)
    lines = [kit.run_evaluation(world, tmp_path / f"{world}", *flags) for world in (1, 2, 3)]
    assert lines[0] == lines[1] == lines[2]  # every number, to the last bit
    line = lines[0]
    assert abs(line["loss"] - loss / targets) <= 1e-12
    assert (line["weight"], line["examples"]) == (targets, 103)
    assert line["accuracy"] == correct / targets
    assert line["perplexity"] == pytest.approx(math.exp(loss / targets), rel=1e-12)


def test_what_training_reports_evaluation_recomputes_to_the_last_digit(trained, tmp_path):
    reported = trained.kind("eval")[-1]
    newest = trained.folder / "checkpoints" / "step_00000015"
    assert kit.run_evaluation(1, tmp_path / "checkpoint", "--checkpoint", newest) == reported


def _threads_of_forwards(*argv) -> tuple[dict, set[int]]:
    """Evaluate in a process with two threads; return eval.json and the threads that each forward pass had."""
    torch.set_num_threads(2)
    seen, forward = set(), model_with_loss.ModelWithLoss.forward

    def watched(self, inputs):
        seen.add(torch.get_num_threads())
        return forward(self, inputs)

    model_with_loss.ModelWithLoss.forward = watched
    return kit.evaluate_here(argv), seen


def test_float32_too_with_another_number_of_threads(files, tmp_path, monkeypatch):
    """The last bit of a matrix product depends on the threads that share it, and one process has more than three have."""
    model = kit.write_yaml(tmp_path / "wide.yaml", kit.LLAMA | {"hidden_size": 128, "vocab_size": 1000})
    flags = ["--model_config", model, "--train_file", files / "train.jsonl"]
    flags += ["--validation_file", files / "validation.jsonl", "--per_device_eval_batch_size", 16]
    run = kit.run_training(1, tmp_path / "run", *flags, "--max_steps", 2)
    argv = ["--checkpoint", run.folder, "--output_dir"]
    guarded = kit.spawn(1, _threads_of_forwards, *argv, tmp_path / "guarded", out=tmp_path / "out")
    assert guarded == [(run.kind("eval")[-1], {1})]
    monkeypatch.setattr("src.training.evaluation._one_thread", lambda device: nullcontext())  # the mutant
    [(_, threads)] = kit.spawn(1, _threads_of_forwards, *argv, tmp_path / "mutant", out=tmp_path / "out")
    assert threads == {2}


@pytest.mark.parametrize("rows, world", [(1, 3), (5, 4)])
def test_fewer_examples_than_ranks_and_other_uneven_shares(trained, files, tmp_path, rows, world):
    few = tmp_path / "few.jsonl"
    few.write_text("".join((files / "validation.jsonl").read_text().splitlines(True)[:rows]))
    flags = ["--checkpoint", trained.folder, "--validation_file", few, "--per_device_eval_batch_size", 1]
    one, many = (kit.run_evaluation(w, tmp_path / f"{w}", *flags) for w in (1, world))
    assert one == many
    assert one["examples"] == rows


def test_mutants_mean_of_means_and_repeated_rows_are_caught(trained, independent, files):
    """What most loops report: the mean of the batches' means, and samples repeated to fill up the last round."""
    from transformers import AutoModelForCausalLM

    loss, targets, _ = independent
    model = AutoModelForCausalLM.from_pretrained(trained.folder / "final").eval()
    rows = [json.loads(line)["input_ids"] for line in (files / "validation.jsonl").read_text().splitlines()]

    def sums(ids):
        ids = torch.tensor([ids])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1]
        return torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item(), ids.shape[1] - 1

    each = [sums(row) for row in rows]
    mean_of_means = sum(s / n for s, n in each) / len(each)
    repeated = [*each, *each[:5]]
    with_repeats = sum(s for s, _ in repeated) / sum(n for _, n in repeated)
    assert abs(mean_of_means - loss / targets) > 1e-4
    assert abs(with_repeats - loss / targets) > 1e-6


@pytest.mark.parametrize("world, name", [(1, "long"), (2, "spread")])
def test_other_names_or_widths_of_some_rows_are_refused_on_all_ranks(trained, tmp_path, monkeypatch, world, name):
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
    codes, texts = kit.run_command("eval.py", *flags, folder=tmp_path / "here", world=world)
    assert codes == [2] * world
    assert "for some micro-batches of an evaluation, but" in "".join(texts)
    assert f'"{name}": ' in "".join(texts)


def _same_weights(*names) -> str:
    import eval as evaluation
    from src.config.schema import RunConfig
    from src.distributed.init_accelerator import init_accelerator

    accelerator = init_accelerator(RunConfig(output_dir="unused"))
    try:
        evaluation.same_weights(accelerator, names[accelerator.process_index])
    except UsageError as error:
        return str(error)
    return ""


def test_ranks_that_found_different_weights_refuse(tmp_path):
    assert kit.spawn(2, _same_weights, "runs/a/final", "runs/a/final", out=tmp_path / "one") == ["", ""]
    one, other = kit.spawn(2, _same_weights, "step_10", "step_20", out=tmp_path / "two")
    assert one == other
    assert "step_10 and step_20" in one
