"""Preference pairs: their tokens, the loss against full logits, and a reference that never moves."""

import json

import numpy as np
import pytest
import torch

from addons.tasks import preference
from engine.config.errors import UsageError
from src.losses import chunked_cross_entropy
from tests.addons.tasks import recipes
from tests.helpers import kit

CHATML_USER = {"role": "user", "content": "the cat"}


@pytest.fixture(scope="module")
def fields(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preference")
    texts = [recipes.SENTENCE] * 3
    return {
        "task": "preference",
        "model_config": kit.write_yaml(folder / "gpt2.yaml", kit.EXACT),
        "tokenizer_name": kit.tiny_tokenizer(folder / "tokenizer", texts, chat_template=kit.CHATML),
        "cache_dir": folder / "cache",
        "dtype": "float64",
    }


def opened(fields, folder, rows, **more):
    task, splits = kit.open_data(**fields | more, train_file=kit.write_jsonl(folder / "rows.jsonl", rows))
    return task, splits["train"].rows(np.arange(len(rows)))


def decoded(task, row, side) -> tuple[str, str]:
    """Return (all tokens as text, the targets as text) of one side of a pair."""
    ids, labels = row[f"{side}_ids"], row[f"{side}_labels"]
    assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))
    return task.tokenizer.decode(ids), task.tokenizer.decode([label for label in labels if label != -100])


def test_text_pairs(fields, tmp_path):
    rows = [{"prompt": "the cat", "chosen": " sat on", "rejected": " ran"}]
    task, [row] = opened(fields, tmp_path, rows)
    assert decoded(task, row, "chosen") == ("the cat sat on<|endoftext|>", " sat on<|endoftext|>")
    assert decoded(task, row, "rejected") == ("the cat ran<|endoftext|>", " ran<|endoftext|>")


CHAT = [{"role": "assistant", "content": "sat"}, {"role": "assistant", "content": "ran over"}]


@pytest.mark.parametrize(
    "prompt, before",
    [
        ("the cat", []),
        ([CHATML_USER], []),
        (None, [CHATML_USER]),
        ("the cat", [CHATML_USER]),
        ([CHATML_USER], [CHATML_USER]),
    ],
)
def test_chat_pairs(fields, tmp_path, prompt, before):
    """The prompt may be text, turns, or the beginning of both chats; targets are the answers."""
    row = {"chosen": [*before, CHAT[0]], "rejected": [*before, CHAT[1]]} | ({"prompt": prompt} if prompt else {})
    task, [row] = opened(fields, tmp_path, [row])
    assert decoded(task, row, "chosen") == (
        "<|user|>the cat<|endoftext|>\n<|assistant|>sat<|endoftext|>\n",
        "sat<|endoftext|>\n",
    )
    assert decoded(task, row, "rejected")[1] == "ran over<|endoftext|>\n"


def test_pairs_without_difference_have_no_weight(fields, tmp_path):
    """Equal completions, and prompts that fill max_length."""
    rows = [
        {"prompt": "the cat", "chosen": " sat", "rejected": " sat"},
        {"prompt": "the cat " * 40, "chosen": " sat", "rejected": " ran"},
        {"prompt": "the cat", "chosen": " sat", "rejected": " ran"},
    ]
    task, rows = opened(fields, tmp_path, rows, max_length=20)
    batch = task.collate(rows, True)
    assert (batch.weight, batch.inputs["counted"].tolist()) == (1, [0, 0, 1])
    alone = task.collate(rows[2:], True)
    model = task.build()
    sums = [task.loss(model, b.inputs)["loss"].item() for b in (batch, alone)]
    assert sums == pytest.approx([np.log(2)] * 2)


# ---- the loss ----------------------------------------------------------------------------------------------------------


def full_loss(task, model, rows):
    """Return the sum of the losses of DPO or IPO from full logits, one unpadded sequence at a time, as in the papers."""
    o = task.options

    def log_prob(lm, row, side):
        ids, labels = (torch.tensor(np.array(row[f"{side}_{part}"]), dtype=torch.long) for part in ("ids", "labels"))
        log_p = lm(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        first = int((labels != -100).nonzero()[0])
        return sum(log_p[i - 1, ids[i]] for i in range(first, len(ids)))

    total = 0.0
    for row in rows:
        policy, reference = (
            [log_prob(lm, row, side) for side in preference.SIDES] for lm in (model.student, model.teacher)
        )
        h = (policy[0] - reference[0]) - (policy[1] - reference[1])
        if o.preference_loss == "ipo":
            total = total + (h - 1 / (2 * o.beta)) ** 2
        else:
            wins = torch.sigmoid(o.beta * h)
            total = total - (1 - o.label_smoothing) * wins.log() - o.label_smoothing * (1 - wins).log()
    return total


@pytest.mark.parametrize("plain_head", [True, False])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"preference_loss": "ipo"}])
def test_loss_and_gradient_equal_those_of_full_logits(fields, tmp_path, monkeypatch, options, plain_head):
    """In chunks of 16 rows."""
    monkeypatch.setitem(chunked_cross_entropy.CHUNK_ELEMENTS, "cpu", 1)
    words = recipes.SENTENCE.split()
    rows = [
        {"prompt": "the cat", "chosen": " " + " ".join(words[:n]), "rejected": " " + " ".join(words[n : 2 * n + 1])}
        for n in range(1, 7)
    ]
    task, rows = opened(fields, tmp_path, rows, beta=0.3, **options)
    model = task.build().train()
    task.plain_head = plain_head
    with torch.no_grad():
        for parameter in model.student.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    results = []
    for loss in (task.loss(model, task.collate(rows, True).inputs)["loss"], full_loss(task, model, rows)):
        results.append([loss.detach(), *torch.autograd.grad(loss, list(model.student.parameters()))])
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-10)
    assert not any(parameter.requires_grad for parameter in model.teacher.parameters())


# ---- the reference -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(flags, a run of eight steps that begins with pretrained weights, with dropout)."""
    folder = tmp_path_factory.mktemp("reference")
    flags = recipes.preference(folder)
    model = kit.save_model(folder / "pretrained", kit.GPT2)
    at = flags.index("--model_config")
    flags[at : at + 2] = ["--model_name_or_path", str(model)]
    files = {f"{split}_file": folder / f"{split}.jsonl" for split in ("train", "validation")}
    flags += kit.flags(**files, dtype="float64", max_steps=8, save_steps=4, learning_rate=1e-2, global_batch_size=16)
    return flags, kit.run_training(1, folder / "run", *flags)


@pytest.mark.parametrize("mutant", [False, True])
def test_resumed_run_keeps_its_reference(run, tmp_path, monkeypatch, mutant):
    """The mutant takes the weights it resumes from as the reference."""
    flags, whole = run
    if mutant:
        build = preference.Task.build

        def naive(self, weights=None, empty=False):
            model = build(self, weights, empty)
            model.teacher.load_state_dict(model.student.state_dict())
            return model

        monkeypatch.setattr(preference.Task, "build", naive)
    resumed = kit.run_training(1, kit.rewind(whole.folder, 4, tmp_path / "run"), *flags)
    assert kit.same(resumed.weights, whole.weights) != mutant


def test_run_records_its_reference_and_saves_only_the_model(run):
    flags, whole = run
    state = json.loads((whole.folder / "checkpoints" / "step_00000008" / "state.json").read_text())
    assert state["config"]["reference_name_or_path"] == flags[flags.index("--model_name_or_path") + 1]
    assert state["config"]["reference_revision"].startswith("xxh3:")
    assert not [name for name in whole.weights if "teacher" in name or "student" in name]
    assert whole.kind("eval")[-1]["reward_accuracy"] > 0.5


def test_other_reference_is_refused(run, tmp_path):
    flags, whole = run
    other = kit.save_model(tmp_path / "other", kit.GPT2, seed=8)
    codes, texts = kit.run_command(
        "train.py", *flags, *kit.flags(reference_name_or_path=other, output_dir=whole.folder), folder=tmp_path / "here"
    )
    assert codes == [2]
    assert "reference_revision: xxh3:" in texts[0]
    codes, texts = kit.run_command(
        "eval.py",
        *kit.flags(checkpoint=whole.folder, reference_name_or_path=other, output_dir=tmp_path / "eval"),
        folder=tmp_path / "here",
    )
    assert codes == [2]
    assert "reference_revision is xxh3:" in texts[0]


def test_prompt_stands_after_the_system_turn_and_tools_are_written(fields, tmp_path):
    system = {"role": "system", "content": "sat"}
    row = {"prompt": "the cat", "chosen": [system, CHAT[0]], "rejected": [system, CHAT[1]]}
    task, [encoded] = opened(fields, tmp_path, [row])
    assert decoded(task, encoded, "chosen")[0].startswith("<|system|>sat<|endoftext|>\n<|user|>the cat<|endoftext|>")
    with pytest.raises(UsageError, match="does not write the `tools`"):
        opened(fields, tmp_path, [row | {"tools": [{"type": "function", "function": {"name": "f"}}]}])


@pytest.mark.parametrize("turn", [{"content": "sat"}, None])
def test_pairs_with_a_turn_without_a_role_are_refused(fields, tmp_path, turn):
    with pytest.raises(UsageError, match=r"line 1.*(has no role|not a list of turns)"):
        opened(fields, tmp_path, [{"prompt": "the cat", "chosen": [turn], "rejected": [turn]}])
