"""Answers of evaluations: to sample_prompts, and to the prompts of validation rows, on any number of processes the same."""

import json
import os
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.config.run_config import RunConfig
from engine.distributed.backends import Backend
from engine.distributed.choose_backend import make_backend
from engine.distributed.init_accelerator import init_accelerator
from engine.distributed.stop_signals import StopSignals
from engine.models.generation import Generation
from engine.plan import batch_plan
from engine.rows.prompts import Prompt
from engine.run.answers import generate_answers
from engine.run.model_with_loss import ModelWithLoss
from src.tasks import causal_lm
from tests.helpers import kit

NUMBERS = {"one": 1, "two": 2, "five": 5}
SAMPLES = ["one red", [{"role": "user", "content": "five fox"}], [{"role": "user", "content": "two the fox red"}]]


def chats(count: int, seed: int) -> list[dict]:
    """Return rows with a cat in the answer for each unit of the number in the question, and an earlier turn in every third."""
    generator = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        number = str(generator.choice(list(NUMBERS)))
        words = [number, *generator.choice(["red", "fox", "the"], generator.integers(0, 9))]
        generator.shuffle(words)
        turns = [{"role": "user", "content": " ".join(words)}]
        turns.append({"role": "assistant", "content": " ".join(["cat"] * NUMBERS[number])})
        before = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "cat"}]
        rows.append({"messages": (before if i % 3 == 0 else []) + turns})
    return rows


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> dict:
    """Fields of a run on chats, whose evaluations generate; in float64, so that no answer hangs on a last bit."""
    folder = tmp_path_factory.mktemp("data")
    model = {name: value for name, value in kit.EXACT.items() if name != "vocab_size"}
    return {
        "train_file": kit.write_jsonl(folder / "train.jsonl", chats(400, 0)),
        "validation_file": kit.write_jsonl(folder / "validation.jsonl", chats(31, 1)),
        "tokenizer_name": kit.tiny_tokenizer(
            folder / "tokenizer", ["one two five red fox the cat cat user assistant"] * 9, chat_template=kit.CHATML
        ),
        "model_config": kit.write_yaml(folder / "gpt2.yaml", model | {"n_layer": 1}),
        "cache_dir": folder / "cache",
        "dtype": "float64",
        "max_length": 64,
        "global_batch_size": 32,
        "per_device_batch_size": 32,
        "per_device_eval_batch_size": 5,
        "learning_rate": 1e-2,
        "max_steps": 100,
        "eval_steps": 80,
        "save_steps": 80,
        "predict_with_generate": True,
        "sample_max_new_tokens": 8,
    }


@pytest.fixture(scope="module")
def trained(recipe, tmp_path_factory):
    """A run with evaluations at steps 80 and 100, the flags that began it, and its folder."""
    folder = tmp_path_factory.mktemp("trained")
    report_to = ["tensorboard"] if find_spec("tensorboard") else []
    prompts = kit.write_yaml(folder / "prompts.yaml", {"sample_prompts": SAMPLES, "report_to": report_to})
    argv = ["--config", prompts, *kit.flags(**recipe)]
    run = kit.run_training(1, folder / "run", *argv)
    run.argv = argv
    return run


def answers_by_hand(trained, recipe) -> list[str]:
    """Return what final/ answers to each validation row alone, by transformers itself."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    final = trained.folder / "final"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(final), AutoTokenizer.from_pretrained(final)
    texts = []
    for line in recipe["validation_file"].read_text().splitlines():
        turns = json.loads(line)["messages"][:-1]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        made = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=1)[0, ids.shape[1] :]
        texts.append(tokenizer.decode(made, skip_special_tokens=True).strip())
    return texts


def expected_answers(recipe) -> list[str]:
    return [json.loads(line)["messages"][-1]["content"] for line in recipe["validation_file"].read_text().splitlines()]


def evaluate_and_keep(monkeypatch, world: int, folder: Path, *flags, env=None) -> tuple[dict, list[str], set]:
    """Return (eval.json, the answers to all rows, which rows were padded together) of an evaluation."""
    metrics, inputs = causal_lm.Task.answer_metrics, Generation.inputs
    notes = folder.with_suffix(".notes")
    notes.mkdir()

    def keep_texts(task, answers, references):
        (notes / "answers.json").write_text(json.dumps([answers, references]))
        return metrics(task, answers, references)

    def keep_batches(generation, prompts):
        prompts = list(prompts)
        with (notes / f"batches_{os.environ['RANK']}.jsonl").open("a") as file:
            file.write(json.dumps([prompt.ids for prompt in prompts]) + "\n")
        return inputs(generation, prompts)

    with monkeypatch.context() as patch:
        patch.setattr(causal_lm.Task, "answer_metrics", keep_texts)
        patch.setattr(Generation, "inputs", keep_batches)
        numbers = kit.run_evaluation(world, folder, *flags, env=env)
    answers, references = json.loads((notes / "answers.json").read_text())
    assert len(answers) == len(references) == numbers["generated_examples"]
    batches = {line for file in notes.glob("batches_*") for line in file.read_text().splitlines()}
    return numbers, answers, batches


def padded_on_the_right(generation, prompts):
    """The mutant: rows are padded as for a loss, so a short prompt is continued after its padding."""
    made = Generation.padded_on_the_left(generation, prompts)
    lengths = made["attention_mask"].sum(1).tolist()
    for name, values in made.items():
        made[name] = torch.stack([values[i].roll(n) for i, n in enumerate(lengths)])
    return made


# ---- predict_with_generate -------------------------------------------------------------------------------------------


def test_each_validation_row_is_answered_once_on_one_two_three_processes(trained, recipe, tmp_path, monkeypatch):
    """31 rows in micro-batches of five. Mutants: padding on the right; batches that depend on the number of processes."""
    reported = trained.kind("eval")[-1]
    by_hand, expected = answers_by_hand(trained, recipe), expected_answers(recipe)
    assert len({*by_hand}) > 2
    matches = [answer == reference for answer, reference in zip(by_hand, expected, strict=True)]
    assert 0.2 < reported["exact_match"] == sum(matches) / 31
    flags = ["--checkpoint", trained.folder]
    kept = {
        world: evaluate_and_keep(monkeypatch, world, tmp_path / f"{world}", *flags, "--max_new_tokens", 6)
        for world in (1, 2, 3)
    }
    for numbers, answers, batches in kept.values():
        assert numbers == reported
        assert answers == by_hand
        assert batches == kept[1][2]
        assert len(batches) == 7

    monkeypatch.setattr(Generation, "padded_on_the_left", Generation.inputs, raising=False)
    monkeypatch.setattr(Generation, "inputs", padded_on_the_right)
    numbers, answers, _ = evaluate_and_keep(monkeypatch, 2, tmp_path / "right", *flags, "--max_new_tokens", 6)
    assert answers != by_hand
    monkeypatch.undo()

    def order_of_rank(cfg, *more):
        rows = cfg.per_device_eval_batch_size - int(os.environ["WORLD_SIZE"])
        return batch_plan.evaluation_order(replace(cfg, per_device_eval_batch_size=rows), *more)

    monkeypatch.setattr("engine.run.answers.evaluation_order", order_of_rank)
    *_, batches = evaluate_and_keep(monkeypatch, 2, tmp_path / "local", *flags)
    assert batches != kept[1][2]


def test_mutant_padded_share_of_prompts_is_caught(trained, tmp_path, monkeypatch):
    """As DistributedSampler does it: ranks with fewer micro-batches repeat some."""
    calls = []

    def padded_share(backend, micro_batches, rounds):
        calls.append(rounds)
        if len(calls) == 2:  # of the answers, after that of the loss
            micro_batches = [*micro_batches, *micro_batches][: rounds * backend.data_world_size]
        return micro_batches[backend.data_rank :: backend.data_world_size]

    monkeypatch.setattr(Backend, "share_of_rank", padded_share)
    with pytest.raises(kit.RankFailed, match="not every prompt was answered exactly once"):
        kit.run_evaluation(2, tmp_path / "two", "--checkpoint", trained.folder)


def test_first_rows_documents_of_packed_rows_and_beams(trained, recipe, tmp_path, monkeypatch):
    """The first seven rows; the documents of packed rows, each answered from what stands before it alone."""
    flags = ["--checkpoint", trained.folder]
    _, answers, _ = evaluate_and_keep(monkeypatch, 1, tmp_path / "all", *flags)
    numbers, first, _ = evaluate_and_keep(
        monkeypatch, 2, tmp_path / "first", *flags, "--max_eval_generate_examples", 7, "--max_new_tokens", 6
    )
    assert numbers["generated_examples"] == 7
    assert numbers["examples"] == 31
    assert first == answers[:7]
    packed, answers_of_packed, _ = evaluate_and_keep(monkeypatch, 1, tmp_path / "packed", *flags, "--packing", "true")
    assert packed["examples"] < 31 == packed["generated_examples"]
    assert sorted(answers_of_packed) == sorted(answers)
    assert packed["exact_match"] == trained.kind("eval")[-1]["exact_match"]
    codes, texts = kit.run_command(
        "eval.py", *flags, "--packing", "true", "--max_length", "20", folder=tmp_path / "long"
    )
    assert codes == [2]
    assert "packing" in texts[0]
    assert "max_length 20" in texts[0]


@pytest.mark.cluster
def test_sharded_models_answer_the_same(trained, recipe, tmp_path, monkeypatch):
    """FSDP2 on two processes with seven micro-batches, and answers that end after different numbers of tokens."""
    alone = trained.kind("eval")[-1]
    env = kit.where("fsdp2", 2, mixed_precision="no")
    numbers, *_ = evaluate_and_keep(monkeypatch, 2, tmp_path / "eval", "--checkpoint", trained.folder, env=env)
    assert numbers == alone
    run = kit.run_training(2, tmp_path / "run", *trained.argv, "--max_steps", "4", "--eval_steps", "2", env=env)
    other = kit.run_training(1, tmp_path / "one", *trained.argv, "--max_steps", "4", "--eval_steps", "2")
    assert len(run.kind("sample")) == 6
    assert run.kind("sample") == other.kind("sample")


# ---- sample_prompts --------------------------------------------------------------------------------------------------


def test_samples_are_in_metrics_console_and_tensorboard(trained):
    lines = trained.kind("sample")
    assert [line["step"] for line in lines] == [80] * 3 + [100] * 3
    assert [line["prompt"] for line in lines] == SAMPLES * 2
    assert lines[-2]["answer"].startswith("cat")
    printed = trained.folder.with_suffix(".out").joinpath("rank0.txt").read_text()
    assert "samples at step 100:\n  > one red\n" in printed
    assert f"  > user: five fox\n    {lines[-2]['answer']}\n" in printed
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    [folder] = (trained.folder / "trackers").iterdir()
    events = event_accumulator.EventAccumulator(str(folder))
    events.Reload()
    values = events.Tensors("sample/1/text_summary")
    assert [event.step for event in values] == [80, 100]
    assert lines[-2]["answer"] in values[-1].tensor_proto.string_val[0].decode()


def test_resumed_run_has_the_samples_of_an_undisturbed_one(trained, tmp_path):
    folder = kit.rewind(trained.folder, 80, tmp_path / "again")
    kit.run_training(1, folder, *trained.argv)
    assert kit.timeless(folder) == kit.timeless(trained.folder)


class OneBatch(StopSignals):
    """A stop request that comes while the first micro-batch is generated."""

    looks = 0

    def look(self, step=None):
        self.looks += 1
        self.reason = "a test" if self.looks > 1 else None


def test_stop_request_ends_generation_between_micro_batches(trained, recipe):
    fields = {name: recipe[name] for name in ("validation_file", "train_file", "cache_dir")}
    task, splits = kit.open_data(model_name_or_path=trained.folder / "final", predict_with_generate=True, **fields)
    cfg = RunConfig(output_dir=str(trained.folder), per_device_eval_batch_size=5)
    backend = make_backend(init_accelerator(cfg), cfg)
    module = ModelWithLoss(task.build(), task)
    answered = []
    answer = task.answer
    task.answer = lambda *args, **settings: answered.append(1) or answer(*args, **settings)
    prompts = task.generation.of_rows
    settings = {"max_new_tokens": 3}
    signals = OneBatch(0, cfg)
    assert generate_answers(backend, module, task, prompts, settings, cfg, signals) is None
    assert len(answered) == 1
    tokens = generate_answers(backend, module, task, prompts, settings, cfg)
    assert tokens.shape == (31, 3)
    assert module.answer is None  # the next call computes the loss
    assert len(splits) == 2


# ---- what is refused ---------------------------------------------------------------------------------------------------

USER = {"role": "user", "content": "one"}
ASSISTANT = {"role": "assistant", "content": "cat"}


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"sample_prompts": [[USER, ASSISTANT]]}, "sample_prompts: prompt 0.*ends with assistant"),
        ({"sample_prompts": ["a", {"role": "system", "content": "be kind"}]}, "sample_prompts: prompt 1.*system"),
        ({"sample_prompts": [[{"role": "gpt", "content": "one"}]]}, "sample_prompts: prompt 0.*gpt"),
        ({"sample_prompts": ["one " * 300]}, "sample_prompts: prompt 0 has .* tokens.*256 positions"),
        ({"predict_with_generate": True, "validation_file": None}, "predict_with_generate.*validation_file"),
        ({"predict_with_generate": True, "validation_file": "texts"}, "predict_with_generate: no validation row"),
        ({"predict_with_generate": True, "metrics": ["unknown"]}, "metrics.*unknown"),
        ({"sample_prompts": [3.5, [1]]}, "sample_prompts"),
    ],
)
def test_prompts_that_cannot_be_answered_are_refused_at_the_start(recipe, tmp_path, fields, words):
    names = ("train_file", "validation_file", "tokenizer_name", "model_config", "cache_dir")
    values = {name: str(recipe[name]) for name in names} | fields
    if values["validation_file"] == "texts":
        values["validation_file"] = str(kit.write_jsonl(tmp_path / "texts.jsonl", [{"text": "one two"}] * 3))
    values = {name: value for name, value in values.items() if value is not None}
    file = kit.write_yaml(tmp_path / "run.yaml", values)
    codes, texts = kit.run_command("train.py", "--config", file, "--dry_run", folder=tmp_path / "here")
    assert codes == [2]
    assert "Traceback" not in texts[0]
    assert re.search(words, " ".join(texts[0].split())), texts[0]


def test_sample_prompts_without_evaluation_data_are_warned_of(recipe, capsys):
    """So the run files that have them also train on a train_file alone."""
    fields = {name: value for name, value in recipe.items() if name != "validation_file"}
    kit.open_data(**fields | {"predict_with_generate": False, "sample_prompts": "one"})
    assert re.search("warning: sample_prompts.*validation_file", capsys.readouterr().err)


def test_rows_without_a_whole_answer_are_left_out_and_counted(recipe, tmp_path):
    """A row that was cut to max_length has lost its answer, or the end of it."""
    cut = {"messages": [{"role": "user", "content": "red fox " * 40}, ASSISTANT]}
    rows = [*chats(3, 0), cut, {"messages": [USER]}]
    file = kit.write_jsonl(tmp_path / "rows.jsonl", rows)
    names = ("train_file", "tokenizer_name", "model_config", "cache_dir")
    fields = {name: recipe[name] for name in names} | {"predict_with_generate": True, "max_length": 64}
    task, _ = kit.open_data(**fields, validation_file=file)
    assert len(task.generation.of_rows) == 3
    last = task.generation.of_rows[-1]
    assert isinstance(last, Prompt)
    assert task.generation.texts([np.array(last.reference)]) == [rows[2]["messages"][-1]["content"]]
    assert task.generation.max_new_tokens == max(len(prompt.reference) for prompt in task.generation.of_rows)


def test_options_of_answers_that_are_not_asked_for_are_warned_of(recipe, capsys):
    fields = recipe | {"predict_with_generate": False, "metrics": "rouge", "max_new_tokens": 5}
    kit.open_data(**fields)
    printed = capsys.readouterr().err
    for name in ("metrics", "max_new_tokens"):
        assert f"{name} is not used without predict_with_generate" in printed
    kit.open_data(**recipe | {"predict_with_generate": False, "metrics": "exact_match"})
    assert "is not used" not in capsys.readouterr().err


# ---- what is saved -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, named", [("messages", True), ("text", False)])
def test_saved_model_names_the_token_that_ends_a_turn(recipe, tmp_path, kind, named):
    """Else a base model that learned chats would not stop elsewhere. The second run finds the rows prepared."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(recipe["tokenizer_name"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    rows = chats(32, 0) if kind == "messages" else [{"text": "one cat"}] * 32
    files = {"tokenizer_name": tmp_path / "tokenizer", "train_file": kit.write_jsonl(tmp_path / "rows.jsonl", rows)}
    flags = kit.flags(**recipe | files | {"chat_template": "chatml", "max_steps": 1, "cache_dir": tmp_path / "cache"})
    for name in ("first", "second"):
        run = kit.run_training(1, tmp_path / name, *flags)
        saved = json.loads((run.folder / "final" / "generation_config.json").read_text())["eos_token_id"]
        eos, end_of_turn = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
        assert (saved == [eos, end_of_turn]) == named
        assert named or saved == eos
