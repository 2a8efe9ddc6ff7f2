"""Language models: what a row's targets are, that packed documents do not see each other, and that the numbers are right."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from src.config.errors import UsageError
from src.models import losses
from src.models.text_sample import prompt_ids
from src.runtime import run_status
from src.tasks import causal_lm
from tests.helpers import kit
from tests.models.test_losses import memory

EOS = "<|endoftext|>"
GPT2 = kit.GPT2 | {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}  # computes in float64 throughout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Ragged texts, some with characters of several bytes, with a tokenizer and models that fit them."""
    folder = tmp_path_factory.mktemp("lm")
    generator = np.random.default_rng(0)
    words = ["def", "return", "self", "für", "x", "漢字", "import", "naïve", "if", "🙂", "else", "(a, b)"]

    def texts(count):
        sizes = 2 + (30 * generator.random(count) ** 2).astype(int)
        return [{"text": " ".join(["row", *generator.choice(words, n)])} for n in sizes]

    kit.write_jsonl(folder / "train.jsonl", texts(90))
    kit.write_jsonl(folder / "validation.jsonl", texts(41))
    kit.tiny_tokenizer(folder / "tokenizer", ["def return self import if else row"] * 3, chat_template=kit.CHATML)
    for name, config in (("gpt2", GPT2), ("llama", kit.LLAMA), ("dropout", kit.GPT2)):
        kit.write_yaml(folder / f"{name}.yaml", {k: v for k, v in config.items() if k != "vocab_size"})
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder / "tokenizer")


def open_data(folder, train="train.jsonl", model="gpt2.yaml", **fields):
    fields = {"model_config": folder / model, "tokenizer_name": folder / "tokenizer", "max_length": 128} | fields
    return kit.open_data(train_file=folder / train, cache_dir=folder / "cache", **fields)


def everything(split):
    return split.rows(np.arange(len(split)))


def target_rows(batch):
    return [[t for t in row if t != -100] for row in batch.inputs["targets"].tolist()]


def flat(lists):
    """Return all items of the lists, sorted: packing changes the order of documents."""
    return sorted(itertools.chain.from_iterable(lists))


# ---- packed documents do not see each other --------------------------------------------------------------------------


def alone(model, documents):
    """Return (summed loss, gradients) of the documents, each in a forward pass of its own: the reference."""
    total = sum(F.cross_entropy(model(input_ids=d[None]).logits[0, :-1], d[1:], reduction="sum") for d in documents)
    return total.item(), torch.autograd.grad(total, list(model.parameters()))


def deviation(one, other):
    """Return the largest relative difference of two (loss, gradients)."""
    largest = max(g.abs().max() for g in other[1])
    gradients = max((a - b).abs().max() / largest for a, b in zip(one[1], other[1], strict=True))
    return max(abs(one[0] - other[0]) / other[0], gradients.item())


def packed_and_alone(folder, model, attention, packing, change=None):
    """Return the deviation of the task's loss and gradients from the documents alone; `change` edits the model's input."""
    task, splits = open_data(folder, model=model, dtype="float64", attn_implementation=attention, packing=packing)
    rows = everything(splits["train"])
    network = task.build().train()
    documents = []
    for row in rows:
        ends = np.cumsum(row.get("documents", [len(row["input_ids"])]))
        documents += [torch.tensor(d).long() for d in np.split(row["input_ids"], ends[:-1])]
    assert len(documents) == 90
    assert (len(rows) < 60) == packing
    reference = alone(network, documents)
    if change is not None:
        forward = network.base_model.forward
        network.base_model.forward = lambda **inputs: forward(**inputs | change(inputs))
    total, gradients = 0.0, None
    for start in range(0, len(rows), 2):
        batch = task.collate(rows[start : start + 2])
        loss = task.loss(network, batch.inputs)["loss"]
        total += loss.item()
        more = torch.autograd.grad(loss, list(network.parameters()))
        gradients = more if gradients is None else [a + b for a, b in zip(gradients, more, strict=True)]
    return deviation((total, gradients), reference)


# Llama's RMSNorm and rotary embedding compute in float32 whatever the weights are, GPT-2 computes in float64.
@pytest.mark.parametrize("model, tolerance", [("gpt2.yaml", 1e-10), ("llama.yaml", 1e-6)])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("packing", [True, False])
def test_rows_equal_each_document_alone(folder, model, tolerance, attention, packing):
    assert packed_and_alone(folder, model, attention, packing) <= tolerance


OFF_SWITCHES = {
    "a cache": lambda inputs: {"use_cache": True},
    "a mask of ones": lambda inputs: {"attention_mask": torch.ones_like(inputs["input_ids"])},
    "no positions": lambda inputs: {"position_ids": None},
}


@pytest.mark.parametrize("switch", OFF_SWITCHES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_mutant_what_silently_lets_documents_see_each_other_is_caught(folder, attention, switch):
    assert packed_and_alone(folder, "llama.yaml", attention, True, OFF_SWITCHES[switch]) > 1e-3


def test_packed_rows_are_full(folder):
    _, splits = open_data(folder, packing=True)
    assert splits["train"].lengths.sum() / (128 * len(splits["train"])) > 0.95


def test_a_long_document_is_packed_in_parts_and_nothing_is_lost(folder, tokenizer):
    kit.write_jsonl(folder / "long.jsonl", [{"text": "def " * 150}, {"text": "return self"}])
    task, splits = open_data(folder, "long.jsonl", packing=True, max_length=64)
    length = len(tokenizer("def " * 150)["input_ids"]) + 1
    assert splits["train"].stats["tokens_cut"] == 0
    assert splits["train"].stats["tokens"] == length + len(tokenizer("return self")["input_ids"]) + 1
    sizes = sorted(n for row in everything(splits["train"]) for n in row["documents"].tolist())
    assert sizes == sorted([64] * (length // 64) + [length % 64, len(tokenizer("return self")["input_ids"]) + 1])
    assert task.collate(everything(splits["train"])).weight == sum(n - 1 for n in sizes)


# ---- targets ---------------------------------------------------------------------------------------------------------


def test_text(folder, tokenizer):
    rows = [{"text": "def f"}, {"text": ""}, {"text": f"return {EOS}"}, {"text": "x"}]
    kit.write_jsonl(folder / "text.jsonl", rows)
    eos = tokenizer.eos_token_id
    encoded = [tokenizer(row["text"])["input_ids"] for row in rows]
    for append in (True, False):
        task, splits = open_data(folder, "text.jsonl", append_eos=append)
        expected = [ids + [eos] * (append and ids[-1:] != [eos]) for ids in encoded]
        got = everything(splits["train"])
        assert [row["input_ids"].tolist() for row in got] == expected
        batch = task.collate(got)
        assert target_rows(batch) == [ids[1:] for ids in expected]
        assert batch.weight == splits["train"].stats["targets"] == sum(max(0, len(ids) - 1) for ids in expected)
        assert batch.tokens == sum(map(len, expected))
        assert batch.padded_tokens == 4 * max(map(len, expected))


def test_another_text_column(folder, tokenizer):
    kit.write_jsonl(folder / "code.jsonl", [{"code": "def f", "text": "no"}])
    _, splits = open_data(folder, "code.jsonl", text_column="code", append_eos=False)
    assert everything(splits["train"])[0]["input_ids"].tolist() == tokenizer("def f")["input_ids"]


CHATS = [
    [("system", "be"), ("user", "hi"), ("assistant", "self für"), ("user", "def"), ("assistant", "return")],
    [("assistant", "import"), ("user", "self")],
    [("user", "def")],
]


def chat_by_hand(tokenizer, chat):
    """Return (ids, labels): each turn tokenised by itself, its header and other people's turns ignored."""
    ids, labels = [], []
    for role, content in chat:
        head = tokenizer(f"<|{role}|>")["input_ids"]
        body = tokenizer(f"{content}{EOS}\n")["input_ids"]
        ids += head + body
        labels += [-100] * len(head) + (body if role == "assistant" else [-100] * len(body))
    return ids, labels


@pytest.mark.parametrize("packing", [True, False])
def test_messages_train_on_the_assistants_turns(folder, tokenizer, packing):
    kit.write_jsonl(
        folder / "chats.jsonl", [{"messages": [{"role": r, "content": c} for r, c in chat]} for chat in CHATS]
    )
    task, splits = open_data(folder, "chats.jsonl", packing=packing)
    by_hand = [chat_by_hand(tokenizer, chat) for chat in CHATS]
    expected = sorted(([t for t in labels[1:] if t != -100] for _, labels in by_hand), key=len)
    rows, batch = everything(splits["train"]), task.collate(everything(splits["train"]))
    assert flat(row["input_ids"].tolist() for row in rows) == flat(ids for ids, _ in by_hand)
    assert flat(target_rows(batch)) == flat(expected)
    assert batch.weight == splits["train"].stats["targets"] == sum(map(len, expected)) > 0
    if not packing:
        assert sorted(target_rows(batch), key=len) == expected
        for row, (_, labels) in zip(batch.inputs["targets"].tolist(), by_hand, strict=True):
            assert row[: len(labels) - 1] == labels[1:]  # at the right places too
    spoken = sum(len(f"{c}{EOS}\n".encode()) for chat in CHATS for role, c in chat if role == "assistant")
    assert batch.sums["bytes"] == spoken  # a chat's first token is a header's


def test_a_template_that_marks_the_assistants_words_is_taken_at_its_word(folder, tokenizer):
    """With {% generation %}, earlier turns may even change as the chat grows."""
    marked = (
        "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
        "{% endgeneration %}{{ '!' if loop.last }}{% else %}{{ m['content'] }}{% endif %}\n{% endfor %}"
    )
    (folder / "marked.jinja").write_text(marked)
    chat = [("user", "return"), ("assistant", "self import"), ("user", "if"), ("assistant", "else row")]
    kit.write_jsonl(folder / "marked.jsonl", [{"messages": [{"role": r, "content": c} for r, c in chat]}])
    task, splits = open_data(folder, "marked.jsonl", chat_template=folder / "marked.jinja")
    batch = task.collate(everything(splits["train"]))
    targets = [t for t in batch.inputs["targets"][0].tolist() if t != -100]
    assert tokenizer.decode(targets) == "self importelse row"
    assert batch.weight == splits["train"].stats["targets"] == len(targets)


def test_chat_template_from_a_file(folder, tokenizer):
    (folder / "template.jinja").write_text("{% for m in messages %}{{ m['content'] }} {% endfor %}")
    kit.write_jsonl(folder / "chat.jsonl", [{"messages": [{"role": r, "content": c} for r, c in CHATS[0]]}])
    _, splits = open_data(folder, "chat.jsonl", chat_template=folder / "template.jinja")
    text = " ".join(content for _, content in CHATS[0]) + " "
    assert everything(splits["train"])[0]["input_ids"].tolist() == tokenizer(text)["input_ids"]


def test_prompt_and_completion_train_on_the_completion(folder, tokenizer):
    rows = [
        {"prompt": "def f", "completion": "return für"},
        {"prompt": "", "completion": "x 漢"},
        {"prompt": "if", "completion": ""},
    ]
    kit.write_jsonl(folder / "pairs.jsonl", rows)
    task, splits = open_data(folder, "pairs.jsonl")
    heads = [tokenizer(row["prompt"])["input_ids"] for row in rows]
    tails = [[*tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id] for row in rows]
    got = everything(splits["train"])
    assert [row["input_ids"].tolist() for row in got] == [h + t for h, t in zip(heads, tails, strict=True)]
    batch = task.collate(got)
    expected = [
        t if h else t[1:] for h, t in zip(heads, tails, strict=True)
    ]  # without a prompt nothing predicts the first
    assert target_rows(batch) == expected
    assert batch.weight == splits["train"].stats["targets"] == sum(map(len, expected))
    assert batch.sums["bytes"] == len("return für".encode()) + len(" 漢".encode())


@pytest.mark.parametrize("packing", [True, False])
def test_input_ids_are_used_as_they_are(folder, packing):
    rows = [
        {"input_ids": [5, 6, 7, 8], "labels": [5, -100, 70, 8]},
        {"input_ids": [9, 10], "labels": None},
        {"input_ids": [11, 12, 13], "labels": [-100, -100, -100]},
    ]
    kit.write_jsonl(folder / "ids.jsonl", rows)
    task, splits = open_data(folder, "ids.jsonl", packing=packing)
    batch = task.collate(everything(splits["train"]))
    if packing:
        assert batch.inputs["input_ids"].tolist() == [[5, 6, 7, 8, 11, 12, 13, 9, 10]]
        assert batch.inputs["targets"].tolist() == [[-100, 70, 8, -100, -100, -100, -100, 10, -100]]
        assert batch.inputs["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 1]]
    else:
        assert batch.inputs["input_ids"].tolist() == [[5, 6, 7, 8], [9, 10, 0, 0], [11, 12, 13, 0]]
        assert batch.inputs["targets"].tolist() == [[-100, 70, 8, -100], [10, -100, -100, -100], [-100] * 4]
        assert splits["train"].stats["without_target"] == 1
    assert batch.weight == splits["train"].stats["targets"] == 3
    assert "bytes" not in batch.sums or batch.sums["bytes"] == 0  # unknown: there is no text


def test_mutant_counting_before_the_shift_is_caught(folder):
    """Rows of two and three tokens have one and two targets; the naive count would divide by 50 % too much."""
    kit.write_jsonl(folder / "short.jsonl", [{"input_ids": [i, i + 1, i + 2][: 2 + i % 2]} for i in range(1, 9)])
    task, splits = open_data(folder, "short.jsonl", dtype="float64")
    rows, model = everything(splits["train"]), task.build().train()
    batch = task.collate(rows)
    targets = [F.cross_entropy(model(input_ids=ids[None]).logits[0, :-1], ids[1:], reduction="none")
               for ids in (torch.tensor(row["input_ids"]).long() for row in rows)]  # fmt: skip
    mean = torch.cat(targets).mean().item()
    loss = task.loss(model, batch.inputs)["loss"].item()

    def check(weight):
        return abs(loss / weight - mean) < 1e-10

    assert check(batch.weight)
    assert not check(sum(len(row["input_ids"]) for row in rows))  # the mutant


PADDED = [
    {"input_ids": [7, 8, 9, 0, 0], "attention_mask": [1, 1, 1, 0, 0]},
    {"input_ids": [499, 499, 4, 5, 6], "attention_mask": [0, 0, 1, 1, 1], "labels": [-100, -100, -100, 5, 6]},
    {"input_ids": [600, 11, 12, 600], "attention_mask": [0, 1, 1, 0]},  # padding outside the vocabulary
    {"input_ids": [13, 14], "attention_mask": None},
    {"input_ids": [0, 0], "attention_mask": [0, 0]},
]


@pytest.mark.parametrize("mode", ["rows", "packing", "stream"])
def test_padding_of_given_rows_is_not_trained_on(folder, mode):
    kit.write_jsonl(folder / "padded.jsonl", PADDED)
    fields = {"rows": {}, "packing": {"packing": True}, "stream": {"streaming": True, "max_steps": 1}}[mode]
    task, splits = open_data(folder, "padded.jsonl", **fields)
    split = splits["train"]
    if mode == "stream":
        rows = [row for table in split.blocks(0) for _, row, _ in split.prepared(table, 0, 0, 0)]
    else:
        rows = everything(split)
    assert flat(row["input_ids"].tolist() for row in rows) == sorted([7, 8, 9, 4, 5, 6, 11, 12, 13, 14])
    assert flat(target_rows(task.collate(rows))) == [5, 6, 8, 9, 12, 14]


@pytest.mark.parametrize(
    "mask, said",
    [([1, 0, 1], "zeros among its ones"), ([1, 1], "2 values for 3"), ([1, 2, 2], "0 and 1"), ("111", "0 and 1")],
)
def test_a_mask_that_is_no_padding_is_refused(folder, mask, said):
    good = {"input_ids": [1, 2, 3], "attention_mask": "1" if mask == "111" else [1, 1, 1]}
    kit.write_jsonl(folder / "mask.jsonl", [good | {"attention_mask": mask}])
    for fields in ({}, {"streaming": True, "max_steps": 1}):
        with pytest.raises(UsageError) as caught:
            open_data(folder, "mask.jsonl", **fields)
        assert "mask.jsonl, " in str(caught.value)
        assert "`attention_mask`" in str(caught.value)
        assert said in str(caught.value)


def test_columns_that_look_meaningful_are_named_once(folder, capfd):
    row = {"input_ids": [1, 2, 3], "loss_mask": [0, 0, 1], "position_ids": [0, 1, 0], "other": 1}
    kit.write_jsonl(folder / "masked.jsonl", [row])
    open_data(folder, "masked.jsonl")
    open_data(folder, "masked.jsonl", streaming=True, max_steps=1)
    assert capfd.readouterr().err.count("the columns loss_mask, position_ids are not used: only input_ids") == 1


def test_rows_without_any_target(folder):
    rows = [
        {"input_ids": [3]},
        {"input_ids": [4, 5, 6], "labels": [4, -100, -100]},
        {"input_ids": [1, 2], "labels": [1, 2]},
    ]
    kit.write_jsonl(folder / "masked.jsonl", rows)
    task, splits = open_data(folder, "masked.jsonl")
    assert splits["train"].stats["without_target"] == 2
    model = task.build()
    for chosen, weight in ((rows[:2], 0), (rows, 1)):
        got = splits["train"].rows(np.arange(len(chosen)))
        batch = task.collate(got)
        assert batch.weight == weight
        model.train()
        loss = task.loss(model, batch.inputs)["loss"]
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        assert any((g != 0).any() for g in gradients) == bool(weight) == (loss.item() > 0)
        model.eval()
        out = task.loss(model, batch.inputs)
        assert out["loss"].item() == pytest.approx(loss.item(), rel=1e-5)


def test_a_window_without_any_target_changes_nothing(folder, tmp_path):
    """Every second global batch is one masked row: the update is skipped, counted, and no number is broken by it."""
    rows = [{"input_ids": [i, i + 1, i + 2], "labels": [i] + [-100 if i % 2 else i] * 2} for i in range(1, 9)]
    kit.write_jsonl(folder / "half.jsonl", rows)
    run = kit.run_training(
        1,
        tmp_path / "run",
        *kit.flags(model_config=folder / "gpt2.yaml", tokenizer_name=folder / "tokenizer", max_length=64),
        *kit.flags(train_file=folder / "half.jsonl", global_batch_size=1, per_device_batch_size=1, logging_steps=1),
    )
    lines = run.kind("train")
    assert sorted(line["weight"] for line in lines) == [0] * 4 + [2] * 4
    assert [line["loss"] is None for line in lines] == [line["weight"] == 0 for line in lines]
    assert lines[-1]["skipped"] == 4
    assert all(weight.isfinite().all() for weight in run.weights.values())


def test_what_is_cut_is_counted(folder, tokenizer):
    lengths = [len(tokenizer(row)["input_ids"]) + 1 for row in ("def " * 30, "x", "self " * 20)]
    kit.write_jsonl(folder / "cut.jsonl", [{"text": row} for row in ("def " * 30, "x", "self " * 20)])
    task, splits = open_data(folder, "cut.jsonl", max_length=8)
    stats = splits["train"].stats
    assert stats["rows_cut"] == 2
    assert stats["tokens_cut"] == sum(max(0, n - 8) for n in lengths)
    assert stats["tokens"] == sum(min(n, 8) for n in lengths) == task.collate(everything(splits["train"])).tokens


def test_no_usable_column_is_refused(folder):
    kit.write_jsonl(folder / "other.jsonl", [{"body": "text"}])
    with pytest.raises(UsageError, match=r"no usable column among body.*text_column"):
        open_data(folder, "other.jsonl")


# ---- evaluation ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """A short run of a model with untied embeddings and one with tied ones, from the command to final/."""
    out = tmp_path_factory.mktemp("trained")
    recipe = kit.flags(
        tokenizer_name=folder / "tokenizer",
        train_file=folder / "train.jsonl",
        validation_file=folder / "validation.jsonl",
        dtype="float64",
        max_length=128,
        packing=True,
        global_batch_size=8,
        max_steps=6,
        learning_rate=1e-2,
        sample_prompt="def",
        sample_tokens=12,
    )
    return {
        name: kit.run_training(1, out / name, *kit.flags(model_config=folder / f"{model}.yaml"), *recipe)
        for name, model in (("untied", "llama"), ("tied", "dropout"))
    }


def loop(model, tokenizer, texts, max_length):
    """Return (summed loss, targets, right ones, their bytes) from a plain loop over single rows."""
    total = [0.0, 0, 0, 0]
    for text in texts:
        encoded = tokenizer(text, return_offsets_mapping=True)
        ids = torch.tensor([*encoded["input_ids"], tokenizer.eos_token_id])[:max_length]
        logits = model(input_ids=ids[None]).logits[0, :-1].double()
        total[0] += F.cross_entropy(logits, ids[1:], reduction="sum").item()
        total[1] += len(ids) - 1
        total[2] += (logits.argmax(-1) == ids[1:]).sum().item()
        ends = [end for _, end in encoded["offset_mapping"][:max_length]]
        total[3] += len(text[ends[0] : ends[-1]].encode())  # all that follows the first token, whole characters
    return total


@pytest.mark.parametrize("max_length, packing", [(128, True), (128, False), (12, False)])
@torch.no_grad()
def test_numbers_equal_a_plain_loop_over_single_rows(folder, tokenizer, trained, tmp_path, max_length, packing):
    texts = [json.loads(line)["text"] for line in (folder / "validation.jsonl").read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(trained["tied"].folder / "final", dtype=torch.float64).eval()
    loss, targets, right, size = loop(model, tokenizer, texts, max_length)
    fields = kit.flags(
        checkpoint=trained["tied"].folder, max_length=max_length, packing=packing, per_device_eval_batch_size=3
    )
    line = kit.run_evaluation(1, tmp_path / "eval", *fields)
    assert line["weight"] == targets
    assert line["loss"] == pytest.approx(loss / targets, rel=1e-12)
    assert line["perplexity"] == pytest.approx(math.exp(loss / targets), rel=1e-12)
    assert line["accuracy"] == right / targets
    assert line["bits_per_byte"] == pytest.approx(loss / math.log(2) / size, rel=1e-12)


# ---- heads -----------------------------------------------------------------------------------------------------------

SMALL = {"vocab_size": 500, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
HEADS = {
    "capped": SMALL | {"model_type": "gemma2", "head_dim": 8, "final_logit_softcapping": 2.0},
    "scaled up": SMALL | {"model_type": "cohere", "logit_scale": 3.0},
    "scaled down": SMALL | {"model_type": "granite", "logits_scaling": 8.0},
}


def head_deviation(task, model, batch):
    """Return the largest relative difference of the task's losses, in training and evaluation, from the model's logits."""
    logits = model.eval()(input_ids=batch.inputs["input_ids"]).logits.flatten(0, 1)
    expected = F.cross_entropy(logits, batch.inputs["targets"].flatten(), reduction="sum").item()
    scored = task.loss(model, batch.inputs)["loss"].item()
    trained = task.loss(model.train(), batch.inputs)["loss"].item()
    return max(abs(scored - expected), abs(trained - expected)) / expected


@pytest.mark.parametrize("name", HEADS)
def test_logits_that_are_scaled_or_capped_are_seen(folder, files, name):
    path = kit.write_yaml(folder / f"{name}.yaml", HEADS[name])
    task, splits = kit.open_data(
        model_config=path, train_file=files / "train.jsonl", cache_dir=folder / "cache", max_length=64
    )
    model = task.build()
    assert not task.plain_head
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(40)  # logits as large as those of a trained model
        batch = task.collate(splits["train"].rows(np.arange(8)))
        assert head_deviation(task, model, batch) <= 1e-5
        task.plain_head = True  # the mutant
        assert head_deviation(task, model, batch) > 1e-2


@pytest.mark.parametrize("cap", [30.0, None])
def test_a_cap_is_seen_before_any_logit_reaches_it(folder, files, cap):
    """The logits of random weights are near zero, where a capped head looks like a plain one."""
    path = kit.write_yaml(
        folder / "cap.yaml", SMALL | {"model_type": "gemma2", "head_dim": 8, "final_logit_softcapping": cap}
    )
    task, _ = kit.open_data(
        model_config=path, train_file=files / "train.jsonl", cache_dir=folder / "cache", max_length=64
    )
    model = task.build()
    assert task.plain_head == (cap is None)
    ids = torch.arange(4)[None]
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)  # nothing of the look is left behind
    assert not model.get_output_embeddings()._forward_hooks


@pytest.mark.parametrize("kind", ["bert", "electra"])
def test_a_head_behind_a_transform_is_seen(folder, files, kind):
    """Between the last hidden state and the output embedding stands one more layer, which may change the width."""
    values = {k: v for k, v in SMALL.items() if k != "num_key_value_heads"} | {
        "model_type": kind,
        "hidden_dropout_prob": 0.0,
    }
    values |= {"attention_probs_dropout_prob": 0.0} | ({"embedding_size": 16} if kind == "electra" else {})
    path = kit.write_yaml(folder / f"{kind}.yaml", values)
    fields = {"train_file": files / "train.jsonl", "cache_dir": folder / "cache", "max_length": 64}
    task, splits = kit.open_data(model_config=path, **fields)
    model = task.build()
    assert not task.plain_head
    assert head_deviation(task, model, task.collate(splits["train"].rows(np.arange(8)))) <= 1e-5


@pytest.mark.parametrize("model", ["gpt2.yaml", "llama.yaml", "dropout.yaml"])
def test_plain_heads_are_seen(folder, model):
    task, _ = open_data(folder, model=model)
    assert task.build().training
    assert task.plain_head


def test_no_logits_of_all_positions_are_ever_held(folder, monkeypatch):
    """Neither in training nor in evaluation; the model is so small that its logits would be the largest tensor by far."""
    monkeypatch.setitem(losses.CHUNK_ELEMENTS, "cpu", 1)  # chunks of 16 rows
    config = SMALL | {"model_type": "llama", "vocab_size": 8192, "hidden_size": 8, "intermediate_size": 8}
    path = kit.write_yaml(folder / "wide.yaml", config)
    kit.write_jsonl(folder / "wide.jsonl", [{"input_ids": [i] * 64} for i in range(16)])
    task, splits = kit.open_data(
        model_config=path, train_file=folder / "wide.jsonl", cache_dir=folder / "cache", max_length=64
    )
    model = task.build()
    inputs = task.collate(everything(splits["train"])).inputs
    logits = inputs["targets"].numel() * config["vocab_size"] * 4

    def largest():
        training = memory(lambda: task.loss(model.train(), inputs)["loss"].backward())[0]
        with torch.no_grad():
            return max(training, memory(lambda: task.loss(model.eval(), inputs))[0])

    assert largest() < logits / 20
    task.plain_head = False  # the mutant
    assert largest() >= logits


# ---- what training leaves --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["untied", "tied"])
def test_final_loads_with_transformers(trained, name):
    final = trained[name].folder / "final"
    model, info = AutoModelForCausalLM.from_pretrained(final, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.dtype == torch.float64
    tied = model.get_input_embeddings().weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()
    assert tied == (name == "tied") == ("lm_head.weight" not in trained[name].weights)
    text = pipeline("text-generation", model=str(final))("def", max_new_tokens=5, do_sample=False)[0]["generated_text"]
    assert text.startswith("def")
    assert len(text) > 3


def test_the_sample_is_printed_and_is_the_final_models(folder, trained):
    """With dropout in the configuration: a sample is drawn without."""
    run = trained["tied"]
    printed = run.folder.with_suffix(".out").joinpath("rank0.txt").read_text()
    task, _ = open_data(folder, model="dropout.yaml", sample_prompt="def", sample_tokens=12, dtype="float64")
    model = task.build(str(run.folder / "final"))
    sample = task.sample(model.eval())
    assert sample.startswith("def")
    assert len(sample) > 3
    assert sample in printed
    assert task.sample(model.train()) == sample


def test_without_a_prompt_there_is_no_sample(folder):
    task, _ = open_data(folder)
    assert task.sample(task.build()) is None


@pytest.mark.parametrize("kind, isolates", [("llama", True), ("gpt2", True), ("opt", False), ("bloom", False)])
def test_packing_is_refused_where_documents_would_see_each_other(kind, isolates):
    from transformers import AutoConfig

    from src.models.model_checks import check_packing

    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 100}
    more = (
        {"intermediate_size": 64}
        if kind == "llama"
        else {"ffn_dim": 64, "word_embed_proj_dim": 32}
        if kind == "opt"
        else {}
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **more))
    if isolates:
        check_packing(model)
        assert model.training
    else:
        with pytest.raises(UsageError, match="see each other"):
            check_packing(model)


@pytest.mark.parametrize("prompt, tokens", [("a" * 500, 120), (" ".join("xyz" * 60), 3), ("ab", 500)])
def test_sample_of_a_prompt_longer_than_the_context(folder, prompt, tokens, capsys):
    fields = {"sample_prompt": prompt, "sample_tokens": tokens, "max_length": 16}
    task, _ = open_data(folder, **fields)
    sample = task.sample(task.build())
    assert len(task.tokenizer(sample)["input_ids"]) <= 64  # random weights may write bytes that are no text
    assert ("sample_prompt has" in capsys.readouterr().err) == (len(prompt) > 2)
    kept = prompt_ids(task.tokenizer, prompt, tokens, task.max_length)
    assert 1 <= len(kept) < 16
    assert task.tokenizer(prompt)["input_ids"][-len(kept) :] == kept


def test_sample_of_a_prompt_without_tokens(folder, monkeypatch, capsys):
    task, _ = open_data(folder, sample_prompt="def")
    end = task.tokenizer.eos_token_id
    monkeypatch.setattr(type(task.tokenizer), "__call__", lambda self, text: {"input_ids": []})
    assert prompt_ids(task.tokenizer, "def", 9, 16) == [end]
    monkeypatch.setattr(task.tokenizer, "_special_tokens_map", {})
    assert task.tokenizer.eos_token_id is None
    assert task.sample(torch.nn.Identity()) is None
    assert "sample_prompt" in capsys.readouterr().err


def test_failing_sample_does_not_fail_the_run(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(causal_lm.Task, "sample", lambda self, model: 1 / 0)
    fields = {"model_config": folder / "gpt2.yaml", "tokenizer_name": folder / "tokenizer", "max_length": 64}
    fields |= {"train_file": folder / "train.jsonl", "max_steps": 1, "output_dir": "run", "sample_prompt": "def"}
    (tmp_path / "here").mkdir()
    codes, texts = kit.run_command("train.py", *kit.flags(**fields), folder=tmp_path / "here")
    assert codes == [0], texts
    assert "warning: the sample failed" in texts[0]
    assert "ZeroDivisionError: division by zero" in texts[0]
    assert run_status.read_status(tmp_path / "here" / "run")["status"] == "complete"
