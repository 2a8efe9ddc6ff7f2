"""Preference pairs: their tokens, the loss against full logits, and a reference that never moves."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer

from addons.tasks import preference
from addons.tasks.preference.pair_losses import odds_ratio
from addons.tasks.preference.preference_pairs import PairEncoder
from engine.config.errors import UsageError
from engine.config.run_config import RunConfig
from engine.config.validation import training_errors
from engine.find_tasks import OPTIONS
from engine.rows.chat_options import ChatFormat
from engine.rows.encode_rows import Encoder
from engine.rows.examples import DatasetExamples
from engine.rows.sources import Source
from src.losses import chunked_cross_entropy
from tests.addons.tasks import recipes
from tests.conformance.test_task import make_flags
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


def test_pairs_that_are_all_equal_are_named(fields, tmp_path):
    with pytest.raises(UsageError, match=r"none of the 2 rows of .* `chosen` and `rejected` are equal"):
        opened(fields, tmp_path, [{"chosen": CHAT[:1], "rejected": CHAT[:1]}] * 2)


@pytest.mark.parametrize(
    "loss, rejected",
    [("sigmoid", CHAT[1]), ("simpo", CHAT[1]), ("apo_zero", CHAT[1]), ("orpo", CHAT[1]), ("orpo", CHAT[0])],
)
def test_turns_that_both_chats_begin_with_are_the_prompt(fields, tmp_path, loss, rejected):
    """As in TRL: answers of the history are no part of a completion, neither of its likelihood nor of its length."""
    before = [CHATML_USER, {"role": "assistant", "content": "on"}, CHATML_USER]
    whole = {"chosen": [*before, CHAT[0]], "rejected": [*before, rejected]}
    split = {"prompt": before, "chosen": [CHAT[0]], "rejected": [rejected]}
    _, [row] = opened(fields, tmp_path, [whole], preference_loss=loss)
    _, [expected] = opened(fields, tmp_path, [split], preference_loss=loss)
    assert all(np.array_equal(row[name], expected[name]) for name in row)


@pytest.mark.parametrize(
    "row, more, warning",
    [
        ({"chosen": CHAT[:1], "rejected": CHAT[1:]}, {}, ""),
        (
            {"chosen": CHAT[:1], "rejected": CHAT[1:]},
            {"system": "sat"},
            "columns system are not used: only prompt, chosen,",
        ),
        (
            {"chosen": " sat", "rejected": " ran"},
            {"system": "on", "tools": "[]"},
            "columns system, tools are not used:",
        ),
    ],
)
def test_only_columns_that_are_ignored_are_warned_of(fields, tmp_path, capsys, row, more, warning):
    opened(fields, tmp_path, [{"prompt": "the cat"} | row | more])
    printed = capsys.readouterr().err
    assert warning in printed
    assert ("are not used" in printed) == bool(warning)


FIRST = [CHATML_USER, {"role": "assistant", "content": "sat"}]
LAST = {"role": "user", "content": "on"}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [*FIRST, LAST], "chosen": "sat", "rejected": "ran over"},
        {"prompt": [*FIRST, LAST], "chosen": CHAT[0], "rejected": CHAT[1]},
        {"prompt": [*FIRST, LAST], "chosen": [*FIRST, LAST, CHAT[0]], "rejected": [*FIRST, LAST, CHAT[1]]},
        {"prompt": "on", "chosen": [*FIRST, LAST, CHAT[0]], "rejected": [*FIRST, LAST, CHAT[1]]},
        {
            "prompt": [{"from": "human", "value": "the cat"}, {"from": "gpt", "value": "sat"}, LAST],
            "chosen": [{"from": "gpt", "value": "sat"}],
            "rejected": "ran over",
        },
        {  # as LLaMA-Factory has pairs
            "conversations": [
                {"from": "human", "value": "the cat"},
                {"from": "gpt", "value": "sat"},
                {"from": "human", "value": "on"},
            ],
            "chosen": {"from": "gpt", "value": "sat"},
            "rejected": {"from": "gpt", "value": "ran over"},
        },
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_chats_as_prompts(fields, tmp_path, row, kind):
    """Their answers are text, turns, or the whole chats; the prompt's answer of the assistant is no target."""
    if kind == "jsonl":
        path = kit.write_jsonl(tmp_path / "rows.jsonl", [row])
    else:
        path = tmp_path / "rows.parquet"
        pq.write_table(pa.Table.from_pylist([row]), path)
    task, splits = kit.open_data(**fields, train_file=path)
    [encoded] = splits["train"].rows(np.arange(1))
    before = "<|user|>the cat<|endoftext|>\n<|assistant|>sat<|endoftext|>\n<|user|>on<|endoftext|>\n<|assistant|>"
    assert decoded(task, encoded, "chosen") == (f"{before}sat<|endoftext|>\n", "sat<|endoftext|>\n")
    assert decoded(task, encoded, "rejected") == (f"{before}ran over<|endoftext|>\n", "ran over<|endoftext|>\n")


@pytest.mark.parametrize("said, warned", [("on", True), ("the cat", False)])
def test_whole_chats_with_other_questions_are_warned_of(fields, tmp_path, capsys, said, warned):
    row = {"chosen": [CHATML_USER, CHAT[0]], "rejected": [{"role": "user", "content": said}, CHAT[1]]}
    opened(fields, tmp_path, [row, row])
    assert capsys.readouterr().err.count("they answer other questions") == warned


def test_system_and_tools_beside_conversations(fields, tmp_path):
    """As LLaMA-Factory has pairs; tools without their wrapper are those that a template takes."""
    tool = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
    said = {"conversations": [{"from": "human", "value": "the cat"}], "system": "on", "tools": json.dumps([tool])}
    row = said | {"chosen": {"from": "gpt", "value": "sat"}, "rejected": {"from": "gpt", "value": "ran"}}
    same = {"chosen": [{"role": "system", "content": "on"}, CHATML_USER, CHAT[0]]}
    same["rejected"] = [*same["chosen"][:2], {"role": "assistant", "content": "ran"}]
    same["tools"] = json.dumps([{"type": "function", "function": tool}])
    template = "{{ tools | tojson }}" + kit.CHATML
    (tmp_path / "with_tools.jinja").write_text(template)
    texts = []
    for name, each in (("one", row), ("other", same)):
        path = kit.write_jsonl(tmp_path / f"{name}.jsonl", [each])
        given = fields | {"chat_template": tmp_path / "with_tools.jinja", "train_file": path}
        task, splits = kit.open_data(**given)
        [encoded] = splits["train"].rows(np.arange(1))
        texts.append(decoded(task, encoded, "chosen"))
    assert texts[0] == texts[1]
    assert "on<|endoftext|>" in texts[0][0]
    assert '"type": "function"' in texts[0][0]


@pytest.mark.parametrize(
    "row, words",
    [
        (
            {"prompt": "on", "chosen": [*FIRST], "rejected": [*FIRST]},
            "`prompt` is text that no turn of the user in `chosen`",
        ),
        ({"prompt": FIRST, "chosen": [CHAT[0]], "rejected": [CHAT[1]]}, "`prompt` ends with a turn of the assistant"),
        ({"prompt": [LAST], "chosen": "sat", "rejected": None}, "`rejected` holds nothing"),
        ({"chosen": [*FIRST], "rejected": []}, "`rejected` has no turn"),
    ],
)
def test_prompts_that_do_not_fit_their_answers_are_refused(fields, tmp_path, row, words):
    good = {"prompt": [LAST], "chosen": "sat", "rejected": "ran"} if row["chosen"] == "sat" else None
    good = good or {"chosen": [*FIRST], "rejected": [*FIRST]} | ({"prompt": row["prompt"]} if "prompt" in row else {})
    if isinstance(good.get("prompt"), str):
        good["prompt"] = "the cat"
    elif good.get("prompt") == FIRST:
        good["chosen"] = good["rejected"] = [LAST, CHAT[0]]
    with pytest.raises(UsageError, match=f"line 2: train data: {words}"):
        opened(fields, tmp_path, [good, row])


def test_options_of_chats_are_those_of_causal_lm(fields, tmp_path):
    """Variables of the template by run and row, and only the last turn as a target."""
    template = tmp_path / "tone.jinja"
    template.write_text("{% if tone is defined %}({{ tone }}){% endif %}" + kit.CHATML)
    more = {"chat_template": template, "chat_template_kwargs": '{"tone": "dry"}', "train_turns": "last"}
    before = [CHATML_USER, CHAT[0], CHATML_USER]
    rows = [{"chosen": [*before, CHAT[0]], "rejected": [CHATML_USER, CHAT[1], CHATML_USER, CHAT[1]]}] * 2
    rows = [row | {"chat_template_kwargs": given} for row, given in zip(rows, [None, {"tone": "warm"}], strict=True)]
    task, pairs = opened(fields, tmp_path, rows, **more)
    texts = [decoded(task, pair, "rejected") for pair in pairs]
    assert [text.partition("<|user|>")[0] for text, _ in texts] == ["(dry)", "(warm)"]
    assert [targets for _, targets in texts] == ["ran over<|endoftext|>\n"] * 2  # all: that of turn 1, too


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


def log_probs_of_completion(lm, row, side, all_tokens) -> list[torch.Tensor]:
    """Return the log-probability of each target of one unpadded sequence, from full logits."""
    ids, labels = (torch.tensor(np.array(row[f"{side}_{part}"]), dtype=torch.long) for part in ("ids", "labels"))
    log_p = lm(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
    first = int((labels != -100).nonzero()[0])
    if all_tokens:
        assert row["prompt_length"] == first
    return [log_p[i - 1, ids[i]] for i in range(first, len(ids))]


def full_loss(task, model, rows):
    """Return the sum of the losses of pairs from full logits, one unpadded sequence at a time, as in the papers."""
    o, name = task.options, task.options.preference_loss
    beta, total = o.beta, 0.0
    models = (model.student, model.teacher) if name not in ("orpo", "simpo", "cpo") else (model,)
    for row in rows:
        policy, *reference = (
            [log_probs_of_completion(lm, row, side, "prompt_length" in row) for side in preference.SIDES]
            for lm in models
        )
        logs, means = ([f(tokens) for tokens in policy] for f in (sum, lambda tokens: sum(tokens) / len(tokens)))
        of_reference = [sum(tokens) for tokens in reference[0]] if reference else [0.0, 0.0]
        chosen, rejected = (log - other for log, other in zip(logs, of_reference, strict=True))
        wins = torch.sigmoid(beta * (chosen - rejected))
        smoothed = -(1 - o.label_smoothing) * wins.log() - o.label_smoothing * (1 - wins).log()
        if name in ("sigmoid", "cpo"):
            loss = smoothed
        elif name == "ipo":
            loss = (chosen - rejected - 1 / (2 * beta)) ** 2
        elif name == "hinge":
            loss = (1 - beta * (chosen - rejected)).clamp(min=0)
        elif name == "robust":  # Chowdhury et al. 2024, equation 12
            losses = [-torch.sigmoid(sign * beta * (chosen - rejected)).log() for sign in (1, -1)]
            loss = ((1 - o.label_smoothing) * losses[0] - o.label_smoothing * losses[1]) / (1 - 2 * o.label_smoothing)
        elif name == "sigmoid_norm":
            lengths = [len(tokens) for tokens in policy]
            loss = -torch.sigmoid(beta * (chosen / lengths[0] - rejected / lengths[1])).log()
        elif name == "apo_zero":  # D'Oosterlinck et al. 2024, equation 7
            loss = 1 - torch.sigmoid(beta * chosen) + torch.sigmoid(beta * rejected)
        elif name == "simpo":  # Meng et al. 2024, equation 6
            loss = -torch.sigmoid(beta * means[0] - beta * means[1] - o.simpo_gamma).log()
        elif name == "orpo":  # Hong et al. 2024, equations 3 to 7
            odds = [mean.exp() / (1 - mean.exp()) for mean in means]
            loss = -beta * torch.sigmoid((odds[0] / odds[1]).log()).log()
        nll_weight = o.nll_weight
        if nll_weight is None:
            nll_weight = 1.0 if name in ("orpo", "cpo") else 0.0
        total = total + loss - nll_weight * means[0]
    return total


LOSSES = [
    {},
    {"label_smoothing": 0.1},
    {"preference_loss": "ipo"},
    {"preference_loss": "hinge"},
    {"preference_loss": "robust", "label_smoothing": 0.2},
    {"preference_loss": "sigmoid_norm"},
    {"preference_loss": "apo_zero"},
    {"nll_weight": 0.7},
    {"preference_loss": "cpo"},
    {"preference_loss": "simpo", "simpo_gamma": 0.8},
    {"preference_loss": "orpo"},
]


def pairs_of_words(begin="") -> list[dict]:
    """Return six pairs of completions of different lengths, which begin alike if `begin` is not empty."""
    words = recipes.SENTENCE.split()
    rows = []
    for n in range(1, 7):
        chosen, rejected = " ".join(words[:n]), " ".join(words[n : 2 * n + 1])
        rows.append({"prompt": "the cat", "chosen": f"{begin} {chosen}", "rejected": f"{begin} {rejected}"})
    return rows


def moved_model(task) -> torch.nn.Module:
    """Return the model in training mode, after a step away from its reference."""
    model = task.build().train()
    with torch.no_grad():
        for parameter in task.saved(model).parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def loss_and_gradients(loss, task, model) -> list[torch.Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, list(task.saved(model).parameters()))]


@pytest.mark.parametrize("plain_head", [True, False])
@pytest.mark.parametrize("options", LOSSES, ids=str)
def test_loss_and_gradient_equal_those_of_full_logits(fields, tmp_path, monkeypatch, options, plain_head):
    """In chunks of 16 rows. The completions begin alike, which some losses leave out and others do not."""
    monkeypatch.setitem(chunked_cross_entropy.CHUNK_ELEMENTS, "cpu", 1)
    task, rows = opened(fields, tmp_path, pairs_of_words(" red fox"), beta=0.3, **options)
    if task.options.needs_all_tokens:
        rows = [row | {"prompt_length": len(task.tokenizer("the cat")["input_ids"])} for row in rows]
    model = moved_model(task)
    task.plain_head = plain_head
    ours = loss_and_gradients(task.loss(model, task.collate(rows, True).inputs)["loss"], task, model)
    for one, other in zip(ours, loss_and_gradients(full_loss(task, model, rows), task, model), strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-10)
    if task.options.loss_of_pairs.has_reference:
        assert not any(parameter.requires_grad for parameter in model.teacher.parameters())
    else:
        assert not hasattr(model, "teacher"), "a model without a reference is in memory once"


def test_without_a_reference_a_pair_counts_if_both_completions_have_tokens(fields, tmp_path):
    """ORPO learns the likelihood of a chosen completion that equals the rejected one."""
    rows = [
        {"prompt": "the cat", "chosen": " sat", "rejected": " sat"},
        {"prompt": "the cat " * 40, "chosen": " sat", "rejected": " ran"},
        {"prompt": "the cat", "chosen": " sat", "rejected": " ran"},
    ]
    task, rows = opened(fields, tmp_path, rows, max_length=20, preference_loss="orpo")
    batch = task.collate(rows, True)
    assert (batch.weight, batch.inputs["counted"].tolist()) == (2, [1, 0, 1])
    model = task.build()
    parts = [task.loss(model, task.collate([row], True).inputs)["loss"].item() for row in (rows[0], rows[2])]
    assert task.loss(model, batch.inputs)["loss"].item() == pytest.approx(sum(parts), rel=1e-10)


def test_odds_of_a_certain_completion_have_a_finite_gradient():
    certain = torch.zeros(1, dtype=torch.float64, requires_grad=True)  # log-probability 0
    other = torch.full((1,), -1.0, dtype=torch.float64)
    for pair in ((certain, other), (other, certain)):
        loss = odds_ratio(*pair, SimpleNamespace(beta=0.1))
        assert torch.isfinite(torch.autograd.grad(loss.sum(), certain)[0]).all()
        assert torch.isfinite(loss).all()


@pytest.mark.parametrize("mutant", [False, True])
def test_losses_are_sums_over_any_split(fields, tmp_path, mutant):
    """The mutant is the mean of the mean of each micro-batch's likelihood by token, as TRL has it."""
    task, rows = opened(fields, tmp_path, pairs_of_words(), preference_loss="orpo", beta=0.3)
    model = moved_model(task)

    def mean_loss(parts) -> float:
        batches = [task.collate(part, True) for part in parts]
        sums = [task.loss(model, batch.inputs) for batch in batches]
        if not mutant:
            return sum(each["loss"] for each in sums).item() / sum(batch.weight for batch in batches)
        means = []
        for batch, each in zip(batches, sums, strict=True):
            odds = each["loss"] - each["chosen_nll"]
            tokens = (batch.inputs["targets"][: len(batch.inputs["targets"]) // 2] != -100).sum(1)
            log_probs, _ = task._scores(model, batch.inputs)
            means.append(odds / batch.weight - log_probs.chunk(2)[0].sum() / tokens.sum())
        return sum(means).item() / len(means)

    whole, split = mean_loss([rows]), mean_loss([rows[:3], rows[3:]])
    assert (abs(whole - split) < 1e-10) != mutant


@pytest.mark.filterwarnings("ignore::UserWarning")  # TRL says that these trainers are experimental
@pytest.mark.parametrize("name", ["orpo", "simpo", "cpo"])
def test_losses_of_trl(fields, name):
    """The formulas of TRL 1.16.0 on given log-probabilities; it computes ORPO in float32."""
    pytest.importorskip("trl", reason="TRL is not installed")
    from trl.experimental.cpo.cpo_trainer import CPOTrainer
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    o = preference.Options(beta=0.3, preference_loss=name)
    scores = -3 * torch.rand(2, 5, dtype=torch.float64) - 0.01
    ours = o.loss_of_pairs.of_scores(*scores, o)
    values = {"beta": o.beta, "label_smoothing": 0.0, "simpo_gamma": o.simpo_gamma, "alpha": 0.0}
    kind = "sigmoid" if name == "cpo" else name
    trainer = SimpleNamespace(accelerator=SimpleNamespace(device="cpu"), loss_type=kind, **values)
    if name == "orpo":
        theirs = -ORPOTrainer.odds_ratio_loss(trainer, *scores)[0]  # TRL subtracts it
    else:
        theirs = CPOTrainer.cpo_loss(trainer, *scores)[0]
    assert torch.allclose(ours, theirs.double(), rtol=1e-6 if name == "orpo" else 1e-12)


def test_orpo_on_two_processes_and_with_accumulation(tmp_path):
    """The recipe of the conformance suite has a reference, this run has none."""
    flags = make_flags(recipes.preference, tmp_path) + kit.flags(preference_loss="orpo", max_steps=4, save_steps=4)
    one = kit.run_training(1, tmp_path / "one", *flags)
    two = kit.run_training(2, tmp_path / "two", *flags, "--per_device_batch_size", 5)
    assert kit.distance(one.weights, two.weights) <= 1e-10
    for line, other in zip(one.kind("train"), two.kind("train"), strict=True):
        for name in ("loss", "weight", "chosen_nll", "reward_margin"):
            assert other[name] == pytest.approx(line[name], rel=1e-9), f"{name} of step {line['step']}"
    names = {"chosen_nll", "reward_accuracy", "reward_margin", "chosen_reward", "rejected_reward"}
    assert names <= one.kind("eval")[-1].keys()
    assert kit.run_evaluation(2, tmp_path / "eval", "--checkpoint", one.folder) == one.kind("eval")[-1]
    assert not [name for name in one.weights if "teacher" in name or "student" in name]


@pytest.mark.parametrize("name", ["kto", "preference"])
def test_run_without_a_model_is_refused(name):
    kit.need_task(name)
    cfg = RunConfig(train_file=["rows.jsonl"])
    [error] = training_errors(cfg, OPTIONS[name]()())
    assert error.startswith("no model: give --model_name_or_path")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"preference_loss": "orpo", "label_smoothing": 0.1}, "label_smoothing is 0.1.*orpo"),
        ({"preference_loss": "orpo", "reference_name_or_path": "x"}, "reference_name_or_path is x.*no reference"),
        ({"simpo_gamma": 1.0}, "simpo_gamma is 1.0.*sigmoid"),
    ],
)
def test_options_that_a_loss_ignores_are_refused(options, message):
    [error] = preference.Options(**options).check()
    assert re.search(message, error)


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
    card = (whole.folder / "final" / "README.md").read_text()
    assert f"| beta | {state['config']['beta']} |" in card
    assert f"| preference_loss | {state['config']['preference_loss']} |" in card


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


def test_reference_begins_with_the_same_rows_of_new_tokens(fields, tmp_path):
    """In a padded vocabulary; also when the tokenizer is that of a checkpoint, as under eval.py."""
    tokenizer = AutoTokenizer.from_pretrained(fields["tokenizer_name"])
    tokens = ["<|call|>", "<|end|>"]
    name = kit.save_model(tmp_path / "padded", kit.EXACT | {"vocab_size": len(tokenizer) + 8})
    given = {key: value for key, value in fields.items() if key not in ("model_config", "tokenizer_name")}
    given |= {"model_name_or_path": name, "add_tokens": tokens}
    rows = [{"prompt": "the <|call|>", "chosen": " sat <|end|>", "rejected": f" ran {word}"} for word in ("a", "over")]
    with pytest.raises(UsageError, match="has no tokenizer that tells which tokens of add_tokens it has"):
        opened(given, tmp_path, rows, tokenizer_name=fields["tokenizer_name"])
    tokenizer.save_pretrained(name)
    task, prepared = opened(given, tmp_path, rows)
    model = task.build_model()
    loss = task.loss(model, task.collate(prepared, True).inputs)["loss"]
    assert loss.item() / len(rows) == pytest.approx(np.log(2), abs=1e-12)
    task.saved(model).save_pretrained(tmp_path / "final")
    task.tokenizer.save_pretrained(tmp_path / "final")
    of_run = {"model_name_or_path": tmp_path / "final", "reference_name_or_path": name}
    of_eval, _ = opened(given | of_run, tmp_path, rows)
    again = of_eval.build_model().teacher.state_dict()
    assert all(torch.equal(value, again[key]) for key, value in model.teacher.state_dict().items())


def test_sides_of_several_answers_stay_one_pair():
    """Under a template that leaves blocks out of the history. The mutant makes sequences of turns, and pairs them across rows."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
        "{% if loop.last %}<think></think>{% endif %}{{ m.content }}<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}"
        "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    families = pytest.importorskip("engine.rows.template_families", reason="this copy has removed chats")
    tokenizer = pytest.importorskip("tests.helpers.chat_oracle").tokenizer_of(template)
    chosen = ChatFormat(families.family_files()["qwen3"].read_text())  # has a block in each turn
    encoder = Encoder(tokenizer, len(tokenizer), 512, False, True, chat_format=chosen)
    prompt = [{"role": "user", "content": "q"}]
    answer = [{"role": "assistant", "content": "a"}, *prompt, {"role": "assistant", "content": "b"}]
    rows = {"prompt": [prompt] * 2, "chosen": [answer] * 2, "rejected": [answer[:1]] * 2}
    examples = DatasetExamples(Source("dataset_name", "train", name="pairs"), Dataset.from_dict(rows), ())
    pairs = PairEncoder(encoder, examples, "train")
    assert len(pairs.encode_batch(rows, ["a", "b"])["chosen_ids"]) == 2


def test_pair_is_dropped_if_one_of_its_answers_is_too_long(fields, tmp_path):
    rows = [{"prompt": "the", "chosen": a, "rejected": b} for a in (" cat", " cat" * 20) for b in (" sat", " sat" * 20)]
    _, splits = kit.open_data(
        **fields, max_length=12, long_rows="drop", train_file=kit.write_jsonl(tmp_path / "rows.jsonl", rows)
    )
    assert (len(splits["train"]), splits["train"].stats["rows_dropped"]) == (1, 3)
