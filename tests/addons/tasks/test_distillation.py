"""Distillation: the loss against full logits, a teacher without dropout, and a teacher that does not fit."""

import numpy as np
import pytest
import torch

from engine.config.errors import UsageError
from src.losses import chunked_cross_entropy
from tests.addons.tasks import recipes
from tests.helpers import kit


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distillation")
    recipes.distillation(folder)
    return folder


def opened(folder, teacher=None, **fields):
    defaults = {"model_config": folder / "model.yaml", "train_file": folder / "train.jsonl", "dtype": "float64"}
    return kit.open_data(
        **defaults | {"task": "distillation", "teacher_name_or_path": teacher or folder / "teacher"} | fields
    )


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("heads", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("alpha, temperature", [(0.0, 1.0), (0.7, 2.0), (1.0, 5.0)])
def test_loss_and_gradient_equal_those_of_full_logits(folder, monkeypatch, alpha, temperature, heads, packing):
    """In chunks of 16 rows; without a plain head, a model gives logits instead of hidden states."""
    monkeypatch.setitem(chunked_cross_entropy.CHUNK_ELEMENTS, "cpu", 1)
    fields = {"distillation_alpha": alpha, "distillation_temperature": temperature, "packing": packing}
    student_config = kit.write_yaml(folder / "gpt2.yaml", kit.EXACT)
    task, splits = opened(folder, model_config=student_config, max_length=64, **fields)
    model = task.build().train()
    assert task.plain_head
    assert task.frozen_plain_head
    task.plain_head, task.frozen_plain_head = heads
    inputs = task.collate(splits["train"].rows(np.arange(7)), True).inputs
    positions = {"position_ids": inputs["position_ids"]} if packing else {}
    s, t = (
        lm(input_ids=inputs["input_ids"], use_cache=False, **positions).logits for lm in (model.student, model.teacher)
    )
    total = 0.0
    for row, column in (inputs["targets"] != -100).nonzero().tolist():
        p, q = ((logits[row, column] / temperature).softmax(-1) for logits in (t.detach(), s))
        hard = -s[row, column].log_softmax(-1)[inputs["targets"][row, column]]
        total = total + alpha * temperature**2 * (p * (p.log() - q.log())).sum() + (1 - alpha) * hard
    results = []
    for loss in (task.loss(model, inputs)["loss"], total):
        results.append([loss.detach(), *torch.autograd.grad(loss, list(model.student.parameters()))])
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-10)


def test_teacher_has_no_dropout(folder):
    """In training mode too; the mutant is the student."""
    teacher = kit.save_model(folder / "dropout", kit.GPT2)
    task, splits = opened(folder, teacher, model_config=kit.write_yaml(folder / "own.yaml", kit.GPT2))
    model = task.build().train()
    inputs = task.collate(splits["train"].rows(np.arange(3)), True).inputs["input_ids"]
    for lm, same in ((model.teacher, True), (model.student, False)):
        assert torch.equal(*(lm(input_ids=inputs).logits for _ in range(2))) == same
    assert (model.student.training, model.teacher.training) == (True, False)


def test_teacher_that_does_not_fit_is_refused(folder, tmp_path):
    with pytest.raises(UsageError, match="teacher_name_or_path is missing"):
        kit.open_data(task="distillation", model_config=folder / "model.yaml", train_file=folder / "train.jsonl")
    with pytest.raises(UsageError, match=r"teacher_name_or_path: .* holds no model"):
        opened(folder, tmp_path)
    adapter = tmp_path / "run" / "final"  # as a run with merge: false leaves it
    adapter.mkdir(parents=True)
    (adapter / "model_config.json").write_text("{}")
    for given in (adapter, adapter.parent):
        with pytest.raises(
            UsageError, match="holds an adapter without its model: start that run again with --merge true"
        ):
            opened(folder, given)
    other = kit.save_model(tmp_path / "other", kit.GPT2 | {"vocab_size": 77})
    with pytest.raises(UsageError, match="a vocabulary of 77 tokens, but the trained model has 500"):
        opened(folder, other)
    with pytest.raises(UsageError, match=r"teacher_revision is xxh3:0, but the weights in .* are xxh3:"):
        opened(folder, teacher_revision="xxh3:0")


def test_tokenizer_of_the_teacher_must_be_that_of_the_student(folder, tmp_path):
    tokenizers = [
        kit.tiny_tokenizer(tmp_path / name, [text] * 3) for name, text in (("a", "the cat sat"), ("b", "dog ran"))
    ]
    teacher = kit.save_model(tmp_path / "teacher", kit.GPT2)
    kit.tiny_tokenizer(teacher, ["the cat sat"] * 3)
    kit.write_jsonl(tmp_path / "text.jsonl", [{"text": "the cat"}])
    fields = {"train_file": tmp_path / "text.jsonl", "max_length": 16}
    opened(folder, teacher, tokenizer_name=tokenizers[0], **fields)
    with pytest.raises(UsageError, match=r"the tokenizer of .* gives other ids"):
        opened(folder, teacher, tokenizer_name=tokenizers[1], **fields)
