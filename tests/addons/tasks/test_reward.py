"""Reward models: the last token that is read, the loss against a plain computation, a model that transformers loads."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from engine.config.errors import UsageError
from tests.addons.tasks import recipes
from tests.conformance.test_task import make_flags
from tests.helpers import kit

WORDS = recipes.SENTENCE.split()
ROWS = [
    {"prompt": "the cat", "chosen": " " + " ".join(WORDS[:n]), "rejected": " " + " ".join(WORDS[n : 2 * n + 1])}
    for n in range(1, 7)
]


@pytest.fixture(scope="module")
def fields(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward")
    return {
        "task": "reward",
        "model_config": kit.write_yaml(folder / "gpt2.yaml", kit.EXACT),
        "tokenizer_name": kit.tiny_tokenizer(folder / "tokenizer", [recipes.SENTENCE] * 3, chat_template=kit.CHATML),
        "cache_dir": folder / "cache",
        "dtype": "float64",
    }


def opened(fields, folder, rows, **more):
    task, splits = kit.open_data(**fields | more, train_file=kit.write_jsonl(folder / "rows.jsonl", rows))
    return task, splits["train"].rows(np.arange(len(rows)))


def reward_by_hand(model, ids, pad_token_id) -> torch.Tensor:
    """Return the reward of one unpadded sequence: the head on the last token that is not the padding token."""
    ids = torch.tensor(np.array(ids), dtype=torch.long)
    hidden = model.base_model(input_ids=ids[None]).last_hidden_state[0]
    last = max(i for i, token in enumerate(ids.tolist()) if token != pad_token_id)
    return hidden[last] @ model.score.weight[0]


@pytest.mark.parametrize("coefficient", [0.0, 0.2])
def test_loss_and_gradient_by_hand(fields, tmp_path, coefficient):
    """Padded together; each sequence alone gives the same rewards."""
    task, rows = opened(fields, tmp_path, ROWS, center_rewards_coefficient=coefficient)
    model = task.build().train()
    batch = task.collate(rows, True)
    assert batch.inputs["input_ids"].shape[0] == 2 * len(rows)
    sums = task.loss(model, batch.inputs)
    total, margins = 0.0, []
    for row in rows:
        chosen, rejected = (
            reward_by_hand(model, row[f"{s}_ids"], model.config.pad_token_id) for s in ("chosen", "rejected")
        )
        margins.append((chosen - rejected).item())
        total = total - torch.sigmoid(chosen - rejected).log() + coefficient * (chosen + rejected) ** 2
    results = [[loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))] for loss in (sums["loss"], total)]
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-10)
    assert sums["reward_margin"].item() == pytest.approx(sum(margins), rel=1e-10)
    assert sums["reward_accuracy"].item() == sum(margin > 0 for margin in margins)


def test_mutant_last_position_of_the_batch_is_padding(fields, tmp_path):
    """A head that reads the last column reads padding in all rows but the longest."""
    task, rows = opened(fields, tmp_path, ROWS)
    model = task.build().eval()
    inputs = task.collate(rows, False).inputs
    hidden = model.base_model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).last_hidden_state
    wrong = (hidden[:, -1] @ model.score.weight[0]).chunk(2)
    loss = -F.logsigmoid(wrong[0] - wrong[1]).sum()
    assert abs(loss - task.loss(model, inputs)["loss"]) > 1e-6  # the test above allows 1e-10


def test_equal_and_truncated_pairs_have_no_weight(fields, tmp_path):
    rows = [
        {"prompt": "the cat", "chosen": " sat", "rejected": " sat"},
        {"prompt": "the cat " * 40, "chosen": " sat", "rejected": " ran"},
        {"prompt": "the cat", "chosen": " sat", "rejected": " ran"},
    ]
    task, rows = opened(fields, tmp_path, rows, max_length=20)
    batch, alone = task.collate(rows, True), task.collate(rows[2:], True)
    assert (batch.weight, batch.inputs["counted"].tolist()) == (1, [0, 0, 1])
    model = task.build()
    sums = [task.loss(model, b.inputs)["loss"].item() for b in (batch, alone)]
    assert sums[0] == pytest.approx(sums[1], rel=1e-12)


def test_chats_are_rendered(fields, tmp_path):
    user = {"role": "user", "content": "the cat"}
    row = {
        side: [user, {"role": "assistant", "content": text}] for side, text in (("chosen", "sat"), ("rejected", "ran"))
    }
    task, [encoded] = opened(fields, tmp_path, [row])
    text = task.tokenizer.decode(encoded["chosen_ids"])
    assert text == "<|user|>the cat<|endoftext|>\n<|assistant|>sat<|endoftext|>\n"


def test_bert_reads_both_ways(fields, tmp_path):
    """Its head reads the first token, which must see the others."""
    bert = kit.write_yaml(tmp_path / "bert.yaml", recipes.BERT)
    task, rows = opened(fields, tmp_path, ROWS, model_config=bert)
    model = task.build().eval()
    sums = task.loss(model, task.collate(rows, False).inputs)
    assert abs(sums["reward_margin"].item()) > 1e-9
    assert not task.config.is_decoder


def test_rows_without_a_rejected_answer_are_refused(fields, tmp_path):
    with pytest.raises(UsageError, match="rejected not among the columns"):
        opened(fields, tmp_path, [{"prompt": "the cat", "chosen": " sat"}])


def test_tokenizer_is_required(fields, tmp_path):
    without = {name: value for name, value in fields.items() if name != "tokenizer_name"}
    with pytest.raises(UsageError, match="reward needs --tokenizer_name"):
        kit.open_data(**without, train_file=kit.write_jsonl(tmp_path / "rows.jsonl", ROWS))


def test_transformers_gives_the_rewards_of_the_run(tmp_path):
    """final/ holds the head, the padding token and one label; a padded batch and single texts get the same numbers."""
    flags = make_flags(recipes.reward, tmp_path) + kit.flags(max_steps=6, learning_rate=1e-2)
    run = kit.run_training(1, tmp_path / "run", *flags)
    final = run.folder / "final"
    model = AutoModelForSequenceClassification.from_pretrained(final, dtype=torch.float64).eval()
    tokenizer = AutoTokenizer.from_pretrained(final)
    assert model.config.num_labels == 1
    _, splits = kit.open_data(
        task="reward",
        model_config=tmp_path / "model.yaml",
        tokenizer_name=tmp_path / "tokenizer",
        train_file=tmp_path / "validation.jsonl",
        cache_dir=tmp_path / "cache",
        dtype="float64",
    )
    rows = splits["train"].rows(np.arange(31))
    rows = [row for row in rows if not np.array_equal(row["chosen_ids"], row["rejected_ids"])]
    rewards = []
    for side in ("chosen", "rejected"):
        ids = [row[f"{side}_ids"].tolist() for row in rows]
        with torch.no_grad():
            padded = model(**tokenizer.pad({"input_ids": ids}, return_tensors="pt")).logits[:, 0]
            alone = [model(input_ids=torch.tensor([each])).logits[0, 0] for each in ids]
        assert torch.allclose(padded, torch.stack(alone), rtol=0, atol=1e-10)
        rewards.append(padded)
    line = run.kind("eval")[-1]
    assert line["chosen_reward"] == pytest.approx(rewards[0].mean().item(), rel=1e-9)
    assert line["rejected_reward"] == pytest.approx(rewards[1].mean().item(), rel=1e-9)
    assert line["reward_accuracy"] == pytest.approx((rewards[0] > rewards[1]).double().mean().item())
    assert line["weight"] == len(rows)
    judge, text = pipeline("text-classification", str(final), dtype=torch.float64), recipes.SENTENCE
    with torch.no_grad():
        reward = model(**tokenizer(text, return_tensors="pt")).logits.item()
    assert judge(text)[0]["score"] == pytest.approx(reward, rel=1e-6)  # and not its sigmoid
