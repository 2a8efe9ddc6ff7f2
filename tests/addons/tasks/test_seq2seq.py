"""Encoder-decoder models: the loss of transformers, the same generated texts on any number of processes, metrics."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from addons.tasks import seq2seq
from engine.config.errors import UsageError
from src.training import evaluation
from tests.addons.tasks.recipes import BART
from tests.helpers import kit

T5 = {"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
MODELS = {"t5": T5, "t5 v1.1": T5 | {"tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"}, "bart": BART}
MODELS["nllb"] = BART | {"model_type": "m2m_100", "attention_dropout": 0.0}  # it shifts labels itself
NUMBERS = {"one": 1, "two": 2, "five": 5}


def write_rows(folder) -> dict:
    """Write rows with a cat in the target for each unit of the number in their source; return the fields that name them."""
    generator = np.random.default_rng(0)
    fields = {}
    for split, count in (("train", 400), ("validation", 31)):
        rows = []
        for _ in range(count):
            number = str(generator.choice(list(NUMBERS)))
            words = [number, *generator.choice(["red", "fox", "the"], generator.integers(0, 9))]
            generator.shuffle(words)
            rows.append({"source": " ".join(words), "target": " ".join(["cat"] * NUMBERS[number])})
        fields[f"{split}_file"] = kit.write_jsonl(folder / f"{split}.jsonl", rows)
    texts = ["one two five red fox the cat cat"] * 9
    return fields | {"tokenizer_name": kit.tiny_tokenizer(folder / "tokenizer", texts), "task": "seq2seq"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A T5 with generated texts that end after different numbers of tokens."""
    folder = tmp_path_factory.mktemp("trained")
    return kit.run_training(
        1,
        folder / "run",
        *kit.flags(
            **data,
            model_config=kit.write_yaml(folder / "t5.yaml", T5 | {"num_layers": 1}),
            max_target_length=12,
            global_batch_size=32,
            per_device_batch_size=32,
            per_device_eval_batch_size=5,
            max_steps=120,
            learning_rate=1e-2,
            sample_prompt="the five",
        ),
    )


# ---- loss ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plain_head", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_loss_is_that_of_transformers_times_tokens(data, tmp_path, name, plain_head):
    """In a batch of rows of different lengths. The mutant does not mask the padding of the sources."""
    model_config = kit.write_yaml(tmp_path / "model.yaml", MODELS[name])
    task, splits = kit.open_data(**data, model_config=model_config, dtype="float64")
    model = task.build().train()
    assert task.plain_head == (name != "nllb")
    task.plain_head &= plain_head
    batch = task.collate(rows := splits["train"].rows(np.arange(6)), True)
    expected = 0.0
    for row in rows:
        ids, labels = (torch.tensor(row[key])[None].long() for key in ("input_ids", "labels"))
        expected += model(input_ids=ids, labels=labels).loss * labels.numel()
    assert batch.weight == sum(len(row["labels"]) for row in rows)
    assert task.loss(model, batch.inputs)["loss"].item() == pytest.approx(expected.item(), rel=1e-10)
    assert not batch.inputs["attention_mask"].all()
    assert len(batch.inputs["target_positions"]) == batch.weight < batch.inputs["labels"].numel()
    nothing = {"target_positions": torch.empty(0, dtype=torch.long)}
    assert task.loss(model, batch.inputs | nothing)["loss"] == 0  # logits are computed at these positions alone
    unmasked = batch.inputs | {"attention_mask": torch.ones_like(batch.inputs["attention_mask"])}
    assert task.loss(model, unmasked)["loss"].item() != pytest.approx(expected.item(), rel=1e-6)


def test_head_with_a_bias_of_its_own_is_not_plain(data, tmp_path):
    """Marian models have trained biases of the logits."""
    task, _ = kit.open_data(**data, model_config=kit.write_yaml(tmp_path / "model.yaml", BART))
    model = task.build()
    model.final_logits_bias += 0.5
    assert not seq2seq.has_plain_decoder_head(model, 300)


def test_targets_end_and_long_texts_are_counted(data, tmp_path):
    file = kit.write_jsonl(tmp_path / "train.jsonl", [{"in": "", "out": "a"}, {"in": "red fox", "out": "cat " * 9}])
    fields = data | {"train_file": file, "model_config": kit.write_yaml(tmp_path / "model.yaml", T5)}
    fields = {k: v for k, v in fields.items() if k != "validation_file"} | {"max_target_length": 4}
    task, splits = kit.open_data(**fields, columns={"source": "in", "target": "out"}, source_prefix="the ")
    first, second = splits["train"].rows(np.arange(2))
    end, prefix = task.tokenizer.eos_token_id, task.tokenizer("the ")["input_ids"]
    assert first["input_ids"].tolist() == prefix
    assert first["labels"].tolist() == [*task.tokenizer("a")["input_ids"], end]
    assert second["labels"][3:].tolist() == [end]
    assert splits["train"].stats["rows_cut"] == 1
    for tokens in (3, 4, 5, 9):  # with the end, more than three are too many
        made = task.encode({"source": ["x"], "target": ["a" * tokens]}, ["here"])
        assert len(task.tokenizer("a" * tokens)["input_ids"]) == tokens
        assert (made["targets"], made["cut"]) == ([4], [tokens - 3])
    assert task.encode({"source": ["the "], "target": ["x"]}, ["here"])["input_ids"][0][-1] != end
    task.options.source_prefix = ""
    assert task.encode({"source": [""], "target": ["x"]}, ["here"])["input_ids"] == [[end]]
    task.end = (ids := task.tokenizer("the cat")["input_ids"])[-2]  # as of MBart, which then names the language
    assert task.encode({"source": ["x"], "target": ["the cat"]}, ["here"])["labels"] == [ids]
    with pytest.raises(UsageError, match=r"no column `source`.*--columns"):
        kit.open_data(**fields)


# ---- generation ------------------------------------------------------------------------------------------------------


def evaluate_and_keep_texts(monkeypatch, world, folder, *flags, env=None):
    """Return (eval.json, the tokens of all rows) of an evaluation."""
    metrics = seq2seq.Task.row_metrics

    def keep(task, rows):
        np.save(folder.with_suffix(".npy"), rows["generated"])
        return metrics(task, rows)

    monkeypatch.setattr(seq2seq.Task, "row_metrics", keep)
    numbers = kit.run_evaluation(world, folder, *flags, env=env)
    return numbers, np.load(folder.with_suffix(".npy"))


def generated_by_hand(trained) -> tuple[list[list[int]], float]:
    """Return the tokens that final/ generates for each row alone, by transformers itself, and their exact match."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    final, file = trained.folder / "final", yaml.safe_load((trained.folder / "config.yaml").read_text())
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(final), AutoTokenizer.from_pretrained(final)
    rows = [json.loads(line) for line in Path(file["validation_file"][0]).read_text().splitlines()]
    made = []
    for row in rows:
        ids = tokenizer(row["source"], return_tensors="pt")["input_ids"]
        made.append(model.generate(ids, max_new_tokens=12)[0, 1:].tolist())
    texts = tokenizer.batch_decode(made, skip_special_tokens=True)
    return made, np.mean([text.strip() == row["target"] for text, row in zip(texts, rows, strict=True)])


def test_generated_once_for_each_row_on_any_number_of_processes(trained, tmp_path, monkeypatch):
    """31 rows in micro-batches of five, on one and three processes; generation of each row alone gives the same."""
    reported = trained.kind("eval")[-1]
    made, exact_match = generated_by_hand(trained)
    assert len({len(ids) for ids in made}) > 2
    assert 0.2 < reported["exact_match"] == exact_match
    for world in (1, 3):
        flags = ["--checkpoint", trained.folder]
        numbers, tokens = evaluate_and_keep_texts(monkeypatch, world, tmp_path / f"{world}", *flags)
        assert numbers == reported
        for row, ids in zip(tokens, made, strict=True):
            assert row[: len(ids)].tolist() == ids
            assert set(row[len(ids) :].tolist()) <= {1, -100}
    assert "=> cat cat" in trained.folder.with_suffix(".out").joinpath("rank0.txt").read_text()


@pytest.mark.cluster
def test_generated_once_for_each_row_of_a_sharded_model(trained, data, tmp_path, monkeypatch):
    """FSDP2 on two processes with seven micro-batches; a generation_config.json that only rank 0 reads applies too."""
    model = tmp_path / "model"
    shutil.copytree(trained.folder / "final", model)
    config = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps(config | {"no_repeat_ngram_size": 2}))
    fields = data | {"model_name_or_path": model, "max_target_length": 12, "per_device_eval_batch_size": 5}
    flags = kit.flags(**{name: value for name, value in fields.items() if name != "train_file"})
    numbers, tokens = evaluate_and_keep_texts(monkeypatch, 1, tmp_path / "alone", *flags)
    assert numbers["exact_match"] < trained.kind("eval")[-1]["exact_match"]
    env = kit.where("fsdp2", 2, mixed_precision="no")
    sharded, sharded_tokens = evaluate_and_keep_texts(monkeypatch, 2, tmp_path / "sharded", *flags, env=env)
    assert sharded == numbers
    assert (sharded_tokens == tokens).all()


def test_mutant_padded_share_of_rows_is_caught(trained, tmp_path, monkeypatch):
    """As DistributedSampler does it: ranks with fewer micro-batches repeat some."""

    make_plan = evaluation.make_plan

    def padded_plan(*args):
        plan = make_plan(*args)
        return plan._replace(micro_batches=[*plan.micro_batches, plan.micro_batches[0]])

    monkeypatch.setattr(evaluation, "make_plan", padded_plan)
    with pytest.raises(kit.RankFailed, match="exactly once"):
        kit.run_evaluation(2, tmp_path / "two", "--checkpoint", trained.folder)


def test_generation_follows_the_options_and_never_samples_unasked(trained, data):
    """The generation_config.json of a Hub model may sample; its other rules apply."""
    fields = data | {"model_name_or_path": trained.folder / "final", "max_target_length": 12}
    task, splits = kit.open_data(**fields)
    model = task.build().eval()
    inputs = task.collate(splits["validation"].rows(np.arange(8)), False).inputs

    def generated(**config):
        task.generation_config.update(**config)
        torch.manual_seed(0)
        return task.loss(model, inputs)["generated"]

    greedy = generated()
    assert greedy.shape == (8, 12)
    assert torch.equal(generated(do_sample=True, temperature=9.0), greedy)
    task.options.do_sample = True
    sampled = generated()
    assert not torch.equal(sampled, greedy)
    assert torch.equal(generated(), sampled)
    task.options.do_sample, task.options.max_new_tokens, task.options.num_beams = False, 3, 2
    assert generated().shape == (8, 3)
    task.metric_names = []
    assert set(task.loss(model, inputs)) == {"loss", "correct"}
