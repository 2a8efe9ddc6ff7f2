"""The reference of a model with an adapter: the model without it, bitwise that of a second model, in memory once."""

import numpy as np
import pytest
import torch

from engine.config.errors import UsageError
from engine.process import private_apis
from tests.addons.tasks import recipes
from tests.conformance.test_task import make_flags
from tests.helpers import kit

pytest.importorskip("peft", reason="peft is not installed: pip install -r requirements-extra.txt")
kit.need_addon("adapters/peft")
pytestmark = pytest.mark.cluster  # needs an extra package

LORA = "{type: lora, r: 4, target: [c_attn, c_fc], lora_dropout: 0.0}"


@pytest.fixture(scope="module")
def fields(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    rows = [
        {"prompt": "the cat", "chosen": f" sat on {word}", "rejected": f" ran {word} over"}
        for word in recipes.SENTENCE.split()
    ]
    return {
        "task": "preference",
        "model_name_or_path": kit.save_model(folder / "model", kit.GPT2),
        "tokenizer_name": kit.tiny_tokenizer(folder / "tokenizer", [recipes.SENTENCE] * 3),
        "train_file": kit.write_jsonl(folder / "rows.jsonl", rows),
        "cache_dir": folder / "cache",
        "dtype": "float64",
        "peft": LORA,
    }


def opened(fields):
    task, splits = kit.open_data(**fields)
    return task, task.build_model(), splits["train"].rows(np.arange(8))


def move_adapter(task, model) -> None:
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in task.saved(model).parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)


def test_same_numbers_as_a_second_model_in_half_the_memory(fields):
    """With dropout in the model: a reference has none, and the trained model draws the same masks."""
    results, sizes = [], []
    for reference in (None, fields["model_name_or_path"]):
        task, model, rows = opened(fields | ({"reference_name_or_path": reference} if reference else {}))
        move_adapter(task, model)
        model.train()
        torch.manual_seed(5)
        sums = task.loss(model, task.collate(rows, True).inputs)
        trained = [p for p in task.saved(model).parameters() if p.requires_grad]
        results.append([sums["loss"].detach(), *torch.autograd.grad(sums["loss"], trained)])
        assert abs(sums["reward_margin"].item()) > 1e-3
        assert all(module.training for module in task.saved(model).modules())
        sizes.append(sum(p.numel() for p in model.parameters()))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    assert sizes[0] < 0.6 * sizes[1]


def test_mutant_reference_with_the_adapter_on_has_no_margin(fields, monkeypatch):
    """It is the trained model itself."""
    from contextlib import nullcontext

    monkeypatch.setattr(private_apis, "without_adapters", lambda model: nullcontext())
    task, model, rows = opened(fields)
    move_adapter(task, model)
    sums = task.loss(model.eval(), task.collate(rows, False).inputs)
    assert abs(sums["reward_margin"].item()) < 1e-12


@pytest.mark.parametrize(
    "more, is_base",
    [({}, True), ({"peft": "{type: lora, r: 4, bias: all}"}, False), ({"peft": "{type: ia3}"}, True)],
)
def test_the_base_is_the_reference_unless_its_biases_are_trained(fields, more, is_base):
    task, _ = kit.open_data(**fields | more)
    assert (task.options.reference_name_or_path == "(this model without its adapter)") == is_base
    assert (task.options.reference_revision is None) == is_base


def test_base_as_reference_needs_an_adapter(fields):
    without = {name: value for name, value in fields.items() if name != "peft"}
    with pytest.raises(UsageError, match="there is no adapter"):
        kit.open_data(**without, reference_name_or_path="(this model without its adapter)")


def test_run_on_two_processes_resumed_and_evaluated(tmp_path):
    """The checkpoint records the reference; eval.py and a resumed run have it again."""
    flags = make_flags(recipes.preference, tmp_path)
    model = kit.save_model(tmp_path / "pretrained", kit.EXACT)
    at = flags.index("--model_config")
    flags[at : at + 2] = ["--model_name_or_path", str(model)]
    flags += kit.flags(peft=LORA, max_steps=4, save_steps=2, learning_rate=1e-2)
    one = kit.run_training(1, tmp_path / "one", *flags)
    two = kit.run_training(2, tmp_path / "two", *flags, "--per_device_batch_size", 5)
    for kind in ("train", "eval"):
        for line, other in zip(one.kind(kind), two.kind(kind), strict=True):
            assert other["reward_margin"] == pytest.approx(line["reward_margin"], rel=1e-8, abs=1e-12)
    assert abs(one.kind("eval")[-1]["reward_margin"]) > 1e-4
    separate = kit.run_training(1, tmp_path / "separate", *flags, "--reference_name_or_path", model)
    assert [line["loss"] for line in separate.kind("train")] == [line["loss"] for line in one.kind("train")]
    assert kit.run_evaluation(1, tmp_path / "eval", "--checkpoint", one.folder) == one.kind("eval")[-1]
    resumed = kit.run_training(1, kit.rewind(one.folder, 2, tmp_path / "resumed"), *flags)
    assert kit.timeless(resumed.folder) == kit.timeless(one.folder)
