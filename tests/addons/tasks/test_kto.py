"""KTO: rows, mismatched pairs, the loss and its gradient from full logits, and a baseline of the whole global batch."""

import numpy as np
import pytest
import torch

from addons.tasks import kto
from engine.config.errors import UsageError
from tests.addons.tasks import recipes
from tests.conformance.test_task import make_flags
from tests.helpers import kit

WORDS = recipes.SENTENCE.split()
ROWS = [
    {"prompt": "the cat", "completion": " " + " ".join(WORDS[n : 2 * n + 1]), "label": n % 3 != 0} for n in range(1, 8)
]


@pytest.fixture(scope="module")
def fields(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kto")
    return {
        "task": "kto",
        "model_config": kit.write_yaml(folder / "gpt2.yaml", kit.EXACT),
        "tokenizer_name": kit.tiny_tokenizer(folder / "tokenizer", [recipes.SENTENCE] * 3),
        "cache_dir": folder / "cache",
        "dtype": "float64",
    }


def opened(fields, folder, rows, **more):
    task, splits = kit.open_data(**fields | more, train_file=kit.write_jsonl(folder / "rows.jsonl", rows))
    return task, splits["train"].rows(np.arange(len(rows)))


def test_mismatched_completion_is_that_of_the_row_before(fields, tmp_path):
    task, rows = opened(fields, tmp_path, ROWS)
    for i, row in enumerate(rows):
        assert task.tokenizer.decode(row["input_ids"]) == "the cat" + ROWS[i]["completion"] + "<|endoftext|>"
        other = ROWS[i - 1]["completion"] + "<|endoftext|>"
        assert task.tokenizer.decode(row["mismatched_ids"]) == "the cat" + other
        assert task.tokenizer.decode([label for label in row["mismatched_labels"] if label != -100]) == other
        assert row["label"] == ROWS[i]["label"]


def turn(role, text) -> dict:
    return {"role": role, "content": text}


def user_first(question, answer) -> dict:
    """Return a row whose prompt ends with the assistant's turn."""
    return {
        "prompt": [turn("assistant", "the")],
        "completion": [turn("user", question), turn("assistant", answer)],
    }


QUESTION_AND_ANSWER = {
    "text and turns": lambda q, a: {"prompt": q, "completion": [turn("assistant", a)]},
    "turns and text": lambda q, a: {"prompt": [turn("user", q)], "completion": a},
    "repeated turns": lambda q, a: {"prompt": [turn("user", q)], "completion": [turn("user", q), turn("assistant", a)]},
    "text and chat": lambda q, a: {"prompt": q, "completion": [turn("user", q), turn("assistant", a)]},
    "system": lambda q, a: {"prompt": q, "completion": [turn("system", q), turn("assistant", a)]},
    "user first": user_first,
}


@pytest.mark.parametrize("kind", QUESTION_AND_ANSWER)
def test_mismatched_pair_of_chats_has_its_own_prompt_and_the_answer_before(fields, tmp_path, kind):
    """A completion may begin with the turns of its prompt."""
    texts = [("the cat", "sat"), ("red fox", "ran"), ("lazy dog", "jumps over")]
    rows = [QUESTION_AND_ANSWER[kind](*pair) | {"label": i > 0} for i, pair in enumerate(texts)]
    template = kit.tiny_tokenizer(tmp_path / "tokenizer", [recipes.SENTENCE] * 3, chat_template=kit.CHATML)
    task, rows = opened(fields | {"tokenizer_name": template}, tmp_path, rows)
    for i, row in enumerate(rows):
        own, mismatched = (task.tokenizer.decode(row[name]) for name in ("input_ids", "mismatched_ids"))
        (question, answer), other = texts[i], texts[i - 1][1]
        assert question in own
        assert own.endswith(f"<|assistant|>{answer}<|endoftext|>\n")
        assert mismatched == own.replace(f"<|assistant|>{answer}", f"<|assistant|>{other}")
        targets = [label for label in row["mismatched_labels"] if label != -100]
        assert task.tokenizer.decode(targets) == f"{other}<|endoftext|>\n"


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize(
    "column, value", [("messages", [turn("user", "red fox"), turn("assistant", "over")]), ("input_ids", [1, 2, 3])]
)
def test_columns_of_other_formats_are_not_read(fields, tmp_path, capsys, loss, column, value):
    """Another task would read them before prompt and completion. A warning names them."""
    task, rows = opened(fields, tmp_path, [row | {column: value, "system": "the"} for row in ROWS], kto_loss=loss)
    for raw, row in zip(ROWS, rows, strict=True):
        assert task.tokenizer.decode(row["input_ids"]) == "the cat" + raw["completion"] + "<|endoftext|>"
    ignored = f"the columns {column}, system are not used: only prompt, completion, label\n"
    assert ignored in capsys.readouterr().err


def test_length_is_that_of_the_longer_text(fields, tmp_path):
    """Else micro-batches of mismatched pairs would exceed per_device_batch_tokens."""
    _, splits = kit.open_data(**fields, train_file=kit.write_jsonl(tmp_path / "rows.jsonl", ROWS))
    rows = splits["train"].rows(np.arange(len(ROWS)))
    own, mismatched = ([len(row[f"{name}_ids"]) for row in rows] for name in ("input", "mismatched"))
    assert any(one < other for one, other in zip(own, mismatched, strict=True))
    assert splits["train"].lengths.tolist() == [*map(max, own, mismatched)]


def test_without_baseline_there_are_no_mismatched_pairs(fields, tmp_path):
    task, rows = opened(fields, tmp_path, ROWS, kto_loss="apo_zero_unpaired")
    assert not [name for name in rows[0] if name.startswith("mismatched")]
    assert not [name for name in task.collate(rows, True).inputs if name.startswith("mismatched")]


def test_row_alone_has_no_mismatched_pair(fields, tmp_path):
    task, rows = opened(fields, tmp_path, ROWS[:1])
    assert task.collate(rows, True).inputs["mismatched_counted"].tolist() == [0]


def log_ratios(model, rows, prefix) -> list[torch.Tensor]:
    """Return the log-ratio of each row from full logits, one unpadded sequence at a time."""
    values = []
    for row in rows:
        ids, labels = (torch.tensor(np.array(row[name]), dtype=torch.long) for name in kto.COLUMNS[prefix])
        first = int((labels != -100).nonzero()[0])
        logs = []
        for lm in (model.student, model.teacher):
            log_p = lm(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
            logs.append(sum(log_p[i - 1, ids[i]] for i in range(first, len(ids))))
        values.append(logs[0] - logs[1].detach())
    return values


def loss_by_hand(task, model, rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (sum of the losses of KTO, baseline), as in equations 7 and 8 of the paper."""
    o, baseline = task.options, torch.zeros((), dtype=torch.float64)
    if o.kto_loss == "kto":
        baseline = torch.stack(log_ratios(model, rows, "mismatched_")).mean().clamp(min=0).detach()
    total = 0.0
    for row, ratio in zip(rows, log_ratios(model, rows, ""), strict=True):
        if row["label"]:
            total = total + o.desirable_weight * (1 - torch.sigmoid(o.beta * (ratio - baseline)))
        else:
            total = total + o.undesirable_weight * (1 - torch.sigmoid(o.beta * (baseline - ratio)))
    return total, baseline


def moved_model(task, rows) -> torch.nn.Module:
    """Return the model in training mode, after steps that raise the likelihood of mismatched pairs."""
    model = task.build().train()
    optimizer = torch.optim.SGD(model.student.parameters(), 0.02)
    for _ in range(3):
        optimizer.zero_grad()
        (-torch.stack(log_ratios(model, rows, "mismatched_" if "mismatched_ids" in rows[0] else "")).mean()).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model


@pytest.mark.parametrize(
    "options", [{}, {"desirable_weight": 2.0, "undesirable_weight": 0.5}, {"kto_loss": "apo_zero_unpaired"}]
)
def test_loss_and_gradient_by_hand(fields, tmp_path, options):
    """In training with the baseline that is set before, in evaluation from the vectors of the rows."""
    task, rows = opened(fields, tmp_path, ROWS, beta=0.3, **options)
    model = moved_model(task, rows)
    expected, baseline = loss_by_hand(task, model, rows)
    assert (baseline > 0.01) == (task.has_baseline)
    inputs = task.collate(rows, True).inputs
    if task.has_baseline:
        alone = {name: value for name, value in inputs.items() if name.startswith("mismatched_")}
        sums = task.loss(model, alone)
        task.baseline = (sums["loss"] / sums["counted"]).detach()
        assert task.baseline.item() == pytest.approx(baseline.item(), rel=1e-10)
    loss = task.loss(model, inputs)["loss"]
    results = [
        [each.detach(), *torch.autograd.grad(each, list(model.student.parameters()))] for each in (loss, expected)
    ]
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        sums = task.batch_loss(task.loss(model.eval(), inputs), len(rows))
    assert sums["loss"].item() == pytest.approx(expected.item(), rel=1e-10)
    assert sums["kl"].item() == pytest.approx(len(rows) * baseline.item(), rel=1e-10)
    metrics = task.metrics({name: value.item() for name, value in sums.items()}, len(rows))
    rewards = {True: [], False: []}
    for row, ratio in zip(rows, log_ratios(model, rows, ""), strict=True):
        rewards[bool(row["label"])].append(0.3 * ratio.item())
    assert metrics["desirable_reward"] == pytest.approx(np.mean(rewards[True]), rel=1e-9)
    assert metrics["undesirable_reward"] == pytest.approx(np.mean(rewards[False]), rel=1e-9)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(flags, a run of one process with each global batch in one micro-batch)."""
    folder = tmp_path_factory.mktemp("whole")
    flags = make_flags(recipes.kto, folder) + kit.flags(max_steps=5, save_steps=5)
    return flags, kit.run_training(1, folder / "run", *flags)


def test_baseline_is_that_of_the_global_batch(whole, tmp_path):
    """On two processes with accumulation; the baseline is not 0, and the train line has it."""
    flags, one = whole
    two = kit.run_training(2, tmp_path / "run", *flags, "--per_device_batch_size", 5)
    assert kit.distance(one.weights, two.weights) <= 1e-10
    for line, other in zip(one.kind("train"), two.kind("train"), strict=True):
        assert other["kl"] == pytest.approx(line["kl"], rel=1e-8, abs=1e-12)
    assert one.kind("train")[-1]["kl"] > 1e-3
    assert one.kind("eval")[-1]["kl"] > 1e-3


def test_mutant_baseline_of_a_micro_batch_is_another(whole, tmp_path, monkeypatch):
    """The mutant takes the mean over the first micro-batch, as a rank alone would."""
    flags, one = whole
    of_batch = kto.baseline_of_batch
    monkeypatch.setattr(
        kto, "baseline_of_batch", lambda backend, module, batch: of_batch(backend, module, [*batch][:1])
    )
    mutant = kit.run_training(1, tmp_path / "run", *flags, "--per_device_batch_size", 5)
    assert kit.distance(one.weights, mutant.weights) > 1e-6


# ---- bad rows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows, message",
    [
        ([{"prompt": "the", "completion": " cat"}], "label not among the columns prompt, completion"),
        (
            [{"prompt": "the", "chosen": " cat", "rejected": " dog"}],
            "pairs of `chosen` and `rejected` are rows of --task",
        ),
        ([{"prompt": "the", "completion": " cat", "label": 1}], r"line 1: .*`label` is 1: give true"),
        ([{"prompt": "the", "completion": " cat", "label": "good"}], r"line 1: .*`label` is 'good': give true"),
        (
            [{"prompt": "the", "completion": " cat", "label": value} for value in (True, None)],
            r"rows.jsonl, line 2.*`label` is null: give true",
        ),
    ],
)
def test_bad_labels_are_refused(fields, tmp_path, rows, message):
    with pytest.raises(UsageError, match=message):
        opened(fields, tmp_path, rows)


def test_rows_of_one_label_are_warned_of(fields, tmp_path, capsys):
    good = [row | {"label": True} for row in ROWS]
    task, splits = kit.open_data(**fields, train_file=kit.write_jsonl(tmp_path / "rows.jsonl", good))
    task.on_train_data(splits["train"])
    assert "`label` is true in all rows" in capsys.readouterr().err
    task, splits = kit.open_data(**fields, train_file=kit.write_jsonl(tmp_path / "rows.jsonl", ROWS))
    task.on_train_data(splits["train"])
    assert "in all rows" not in capsys.readouterr().err
