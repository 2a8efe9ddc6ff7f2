"""The check before step 1: what cannot be computed is refused in one sentence, rows that depend on others are named."""

import pytest
import torch

from src.config.errors import UsageError
from src.config.schema import RunConfig
from src.training.trial_loss import check_trial_loss, has_micro_batch_of_one_row
from tests.helpers import kit, plain_task


@pytest.fixture
def opened(plain):
    return kit.open_data(task=plain_task.NAME, dtype="float64", max_steps=1, **plain)


def check(opened, change=None, **attributes):
    """Check a task with one method replaced by `change(original)`."""
    task, splits = opened
    for name, replacement in attributes.items():
        setattr(task, name, replacement(getattr(task, name)))
    check_trial_loss(task.build(), task, splits["train"])


def test_working_task_is_not_changed(opened, capsys):
    task, splits = opened
    model = task.build().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    check_trial_loss(model, task, splits["train"])
    assert kit.same(model.state_dict(), before)
    assert all(module.training for module in model.modules())
    assert capsys.readouterr().err == ""


def test_loss_that_fails_is_refused_with_its_line(opened):
    def loss(original):
        return lambda model, inputs: original(model, {"x": inputs["x"][:, :3], "y": inputs["y"]})

    with pytest.raises(UsageError, match=r"task plain: .*cannot be computed by Net: RuntimeError: .*, in "):
        check(opened, loss=loss)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"other": torch.zeros(())}, "`loss` returned other"),
        ({"loss": 1.0}, "loss is a float"),
        ({"loss": torch.zeros(2)}, r"loss is a tensor of shape \[2\]"),
        ({"loss": torch.zeros(()), "vectors": torch.zeros(9, 4)}, r"vectors is a tensor of shape \[9, 4\]"),
    ],
)
def test_values_that_are_no_sums_are_refused(opened, values, message):
    with pytest.raises(UsageError, match=message):
        check(opened, loss=lambda original: lambda model, inputs: values)


def test_rows_that_depend_on_each_other_are_named(opened, capsys):
    """The mutant is a mean: it differs from the sum of means."""

    def loss(original):
        return lambda model, inputs: {"loss": original(model, inputs)["loss"] / len(inputs["x"])}

    check(opened, loss=loss)
    assert "will depend on per_device_batch_size" in capsys.readouterr().err


@pytest.mark.parametrize(
    "batch, micro, steps, expected",
    [(8, 2, 24, True), (8, 4, 11, True), (8, 4, 10, False), (9, 4, 1, True), (8, 1, 1, True), (83, 7, 9, False)],
)
def test_micro_batch_of_one_row_is_known_before(batch, micro, steps, expected):
    cfg = RunConfig(global_batch_size=batch, per_device_batch_size=micro, max_steps=steps)
    assert has_micro_batch_of_one_row(cfg, 81) is expected


def test_batch_norm_with_one_row_is_refused(plain):
    """83 rows: the last step of an epoch has three: two micro-batches of two leave one."""
    task, splits = kit.open_data(
        task=plain_task.NAME, norm=True, global_batch_size=8, per_device_batch_size=2, max_steps=24, **plain
    )
    model = task.build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UsageError, match=r"per_device_batch_size: .*batch norm"):
        check_trial_loss(model, task, splits["train"])
    assert kit.same(model.state_dict(), before)


@pytest.mark.parametrize("strategy", [None, pytest.param("fsdp2", marks=pytest.mark.cluster)])
def test_all_ranks_are_refused(files, tmp_path, strategy):
    """A model with sizes that do not fit; under FSDP2 only rank 0 has the weights, and tries them."""
    values = {"model_type": "bart", "d_model": 32, "vocab_size": 320, "max_position_embeddings": 64}
    for side in ("encoder", "decoder"):
        values |= {f"{side}_layers": 1, f"{side}_ffn_dim": 32, f"{side}_attention_heads": 2}
    rows = [{"text": text, "label": label} for text, label in (("a cat", 0), ("a dog", 1))] * 8
    flags = kit.flags(
        task="text_classification",
        model_config=kit.write_yaml(tmp_path / "bart.yaml", values),
        tokenizer_name=kit.tiny_tokenizer(tmp_path / "tokenizer"),  # adds no end of text, which BART needs
        train_file=kit.write_jsonl(tmp_path / "train.jsonl", rows),
        max_steps=1,
        output_dir="run",
    )
    env = kit.where(strategy, 2, mixed_precision="no") if strategy else None
    codes, texts = kit.run_command("train.py", *flags, folder=tmp_path / "here", world=2 if strategy else 1, env=env)
    assert set(codes) == {2}, texts
    assert "at least one <eos> token" in "".join(texts)
    assert "Traceback" not in "".join(texts)
