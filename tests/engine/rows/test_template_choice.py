"""Which template writes the chats of a run, which one is saved, and what of a chat is a target by the options of a run."""

import re
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

import train
from engine.config import parsing
from engine.config.errors import UsageError
from engine.find_tasks import OPTIONS
from engine.rows.chat_options import ChatFormat, ChatOptions
from engine.rows.choose_template import choose_template
from engine.rows.encode_chat import encode_chat
from engine.rows.encode_rows import make_chat_format
from engine.rows.render_chat import without_marks
from engine.rows.template_families import family_files
from engine.rows.tokenize_and_pack import IGNORED
from tests.helpers import kit

CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "bye"},
]
REASONED = [turn | {"reasoning_content": f"why {turn['content']}"} if i % 2 else turn for i, turn in enumerate(CHAT)]
# As a published template of Qwen 3: only the last turn has its block of reasoning, so earlier turns change.
STOCK = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and loop.last %}
        {{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
TEXTS = {name: file.read_text() for name, file in family_files().items()}
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
EMPTY = "<think>\n\n</think>\n\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return kit.tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), ["a def f(x)"] * 9)


def tokenizer_with(folder, template):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    return tokenizer


def targets(tokenizer, chat_format: ChatFormat, chat=CHAT, variables=None) -> tuple[str, list[str]]:
    """Return (text, the targets of each turn) of a chat."""
    [(ids, labels, _)] = encode_chat(tokenizer, chat, "row 3", None, chat_format=chat_format, variables=variables)
    parts = re.split(
        r"(?:\x00)+", "".join("\x00" if label == IGNORED else tokenizer.decode([label]) for label in labels)
    )
    return tokenizer.decode(ids), [part for part in parts if part]


# ---- the choice ------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "plain.jinja"
    path.write_text(PLAIN)
    return path


CHOICES = {  # tokenizer's own template, chat_template -> training_template, template of rows, saved template, reason
    "trains every turn": (TEXTS["qwen3"], None, "own", None, TEXTS["qwen3"], "which marks what is trained"),
    "marks, without a place for reasoning": (
        *(TEXTS["chatml"], None),
        *("chatml", TEXTS["chatml"], TEXTS["chatml"], "final/ keeps the tokenizer's own"),
    ),
    "changes earlier turns": (STOCK, None, "qwen3", TEXTS["qwen3"], STOCK, "final/ keeps the tokenizer's own"),
    "unknown": (PLAIN, None, "own", None, PLAIN, "are refused"),
    "none": (None, None, None, None, None, ""),
    "none, name": (None, "qwen3", "qwen3", TEXTS["qwen3"], without_marks(TEXTS["qwen3"]), "final/ has it, too"),
    "name of its family": (STOCK, "qwen3", "qwen3", TEXTS["qwen3"], STOCK, "final/ keeps the tokenizer's own"),
    "other name": (STOCK, "llama3", "llama3", TEXTS["llama3"], without_marks(TEXTS["llama3"]), "final/ has it, too"),
    "file": (STOCK, "FILE", "own", None, PLAIN, "final/ has it, too"),
}


def choose(folder, file, case: str) -> tuple:
    own, given, *_ = CHOICES[case]
    tokenizer = tokenizer_with(folder, own)
    options = ChatOptions(chat_template=str(file) if given == "FILE" else given)
    chosen = make_chat_format(tokenizer, options)
    return options.training_template, chosen.template, tokenizer.chat_template, chosen.choice


@pytest.mark.parametrize("case", CHOICES)
def test_choice_is_made_by_tokenizer_and_options(folder, file, case, monkeypatch):
    """The mutant saves the template of the rows; another one chooses by the rank."""
    *_, name, template, saved, reason = CHOICES[case]
    chosen = choose(folder, file, case)
    assert chosen[:3] == (name, template, saved)
    assert reason in chosen[3]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert choose(folder, file, case) == chosen


def test_a_byte_order_mark_of_a_file_is_no_part_of_the_template(folder, tmp_path):
    (tmp_path / "chat.jinja").write_text(TEXTS["chatml"], encoding="utf-8-sig")
    tokenizer = tokenizer_with(folder, None)
    make_chat_format(tokenizer, ChatOptions(chat_template=str(tmp_path / "chat.jinja")))
    assert tokenizer.chat_template == TEXTS["chatml"]


def test_mutant_that_saves_the_template_of_the_rows_is_caught():
    assert [case for case, (*_, rows, saved, _) in CHOICES.items() if rows not in (None, saved)] != []


@pytest.mark.parametrize("name", TEXTS)
def test_saved_template_writes_what_the_rows_have(folder, name):
    tokenizer = tokenizer_with(folder, None)
    chosen = choose_template(tokenizer, ChatOptions(chat_template=name))
    saved = tokenizer_with(folder, tokenizer.chat_template)
    assert "generation %}" not in saved.chat_template
    for options in ({}, {"add_generation_prompt": True}):
        chat = CHAT[:3] if options else CHAT
        texts = [
            each.apply_chat_template(chat, tokenize=False, chat_template=template, **options)
            for each, template in ((tokenizer, chosen.template), (saved, None))
        ]
        assert texts[0] == texts[1]
        assert "hello" in texts[0]


@pytest.mark.parametrize(
    "own, options, words",
    [
        (STOCK, {"chat_template": "quen3"}, r"chat_template: quen3 is neither.*chatml.*did you mean qwen3"),
        (STOCK, {"chat_template": "no.jinja"}, r"chat_template: no.jinja cannot be read"),
        (STOCK, {"chat_template": "BROKEN"}, r"chat_template: .*broken.jinja is not a Jinja template"),
        (STOCK, {"training_template": "trl"}, r"training_template: trl is none of own"),
        (
            STOCK,
            {"training_template": "quen3"},
            r"training_template: quen3 is none of own, chatml, .*did you mean qwen3",
        ),
        (
            *(STOCK, {"training_template": "own", "chat_template": "qwen3"}),
            r"training_template is own, but chat_template qwen3 makes it qwen3: give --training_template qwen3",
        ),
        (
            *(STOCK, {"chat_template_kwargs": {"enable_thinkin": False}}),
            r"chat_template_kwargs: enable_thinkin is not read.*\(qwen3\).*did you mean enable_thinking",
        ),
        (PLAIN, {"chat_template_kwargs": {"messages": []}}, r"messages is not read.*\(own\).*it has no variables"),
        (PLAIN, {"chat_template_kwargs": {"tools": []}}, r"chat_template_kwargs: tools is not read"),
    ],
)
def test_bad_options_are_refused_in_one_sentence(folder, tmp_path, own, options, words):
    if options.get("chat_template") == "BROKEN":
        options = {"chat_template": str(tmp_path / "broken.jinja")}
        (tmp_path / "broken.jinja").write_text("{% for m in messages %}")
    with pytest.raises(UsageError, match=words):
        make_chat_format(tokenizer_with(folder, own), ChatOptions(**options))


def test_options_of_chats_need_a_tokenizer():
    with pytest.raises(UsageError, match="need a tokenizer"):
        make_chat_format(None, ChatOptions(chat_template_kwargs={"a": 1}))
    assert make_chat_format(None, ChatOptions()) == ChatFormat()


def test_key_of_prepared_data_has_each_setting(folder):
    """At the defaults it is the template alone. The mutants forget one setting."""
    tokenizer = tokenizer_with(folder, STOCK)
    plain = ChatFormat()
    assert plain.settings(tokenizer) == (STOCK,)
    others = [
        {"template": TEXTS["qwen3"]},
        {"variables": {"enable_thinking": False}},
        {"train_turns": "last"},
        {"train_turns": "each"},
    ]
    assert len({repr(replace(plain, **other).settings(tokenizer)) for other in [{}, *others]}) == 5


def test_a_resumed_run_may_not_change_what_is_trained():
    kept = {
        name for name in vars(ChatOptions()) if not parsing.declared_options(ChatOptions)[name].may_change_on_resume
    }
    assert kept == {"chat_template", "chat_template_kwargs", "train_turns"}
    tasks = [task for task in ("causal_lm", "distillation", "preference") if task in OPTIONS]
    assert all(issubclass(OPTIONS[task](), ChatOptions) for task in tasks)


# ---- what is a target ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [None, "qwen3"])
@pytest.mark.parametrize("which", ["last", "each"])
def test_one_turn_a_sequence_has_the_history_of_inference(folder, name, which):
    """Whatever template trains, the prompt is that of the tokenizer's own. The mutant has the history of `all`."""
    tokenizer = tokenizer_with(folder, STOCK)
    chosen = make_chat_format(tokenizer, ChatOptions(chat_template=name, train_turns=which))
    assert chosen.template == TEXTS["qwen3"]
    for chat in (CHAT, REASONED):
        sequences = encode_chat(tokenizer, chat, "row 3", None, chat_format=chosen)
        answers = [1, 3] if which == "each" else [3]
        assert len(sequences) == len(answers)
        for i, (ids, labels, _) in zip(answers, sequences, strict=True):
            prompt = tokenizer.apply_chat_template(chat[:i], tokenize=False, add_generation_prompt=True)
            first = next(k for k, label in enumerate(labels) if label != IGNORED)
            assert ids[:first] == tokenizer(prompt)["input_ids"]
            reasoning = chat[i].get("reasoning_content", "")
            words = f"<think>\n{reasoning}\n</think>\n\n{chat[i]['content']}<|im_end|>\n"
            assert tokenizer.decode(labels[first:]) == words
    mutant = replace(make_chat_format(tokenizer, ChatOptions()), one_sequence=True)
    assert "why hello" in targets(tokenizer, mutant, REASONED)[0]
    # A turn that a row excludes stays excluded, and so is a chat without the assistant.
    assert targets(tokenizer, chosen, [*REASONED[:3], REASONED[3] | {"train": False}])[1][1:] == []
    assert targets(tokenizer, chosen, CHAT[:1])[1] == []


def test_reasoning_after_the_last_question_stays(folder):
    """Between calls of tools a model goes on thinking, at inference too."""
    call = {"role": "assistant", "content": "", "reasoning_content": "look", "tool_calls": [{"function": CALL}]}
    chat = [CHAT[0], call, {"role": "tool", "content": "5"}, REASONED[3]]
    tokenizer = tokenizer_with(folder, None)
    chosen = make_chat_format(tokenizer, ChatOptions(chat_template="qwen3", train_turns="last"))
    text, spoken = targets(tokenizer, chosen, chat)
    assert "<think>\nlook" in text
    assert spoken == ["<think>\nwhy bye\n</think>\n\nbye<|im_end|>\n"]


CALL = {"name": "f", "arguments": {"x": 1}}


# ---- variables -------------------------------------------------------------------------------------------------------

VARIABLE = "{% if tone is defined %}<{{ tone }}>{% endif %}" + PLAIN


@pytest.mark.parametrize(
    "of_run, of_row, written",
    [
        ({}, None, ""),
        ({"tone": "dry"}, None, "<dry>"),
        ({"tone": "dry"}, {"tone": "warm"}, "<warm>"),  # the row takes precedence
        ({"tone": "dry"}, {"tone": None}, "<dry>"),  # in Parquet, a key that other rows have
        ({}, '{"tone": "warm"}', "<warm>"),
    ],
)
def test_variables_of_run_and_row(folder, of_run, of_row, written):
    tokenizer = tokenizer_with(folder, VARIABLE)
    chosen = make_chat_format(tokenizer, ChatOptions(chat_template_kwargs=of_run))
    assert (
        targets(tokenizer, chosen, CHAT, of_row)[0]
        == f"{written}user: hi\nassistant: hello\nuser: and?\nassistant: bye\n"
    )


@pytest.mark.parametrize("file_type", ["jsonl", "parquet"])
def test_variables_in_a_column_of_the_data(tmp_path, file_type):
    """In Parquet every row has every key, and null where it gave none; a .jsonl file may have another type in each row."""
    given = [{"tone": "warm"}, None, {"tone": 5} if file_type == "jsonl" else {"tone": "sharp"}, {"other": "x"}]
    rows = [{"messages": CHAT, "chat_template_kwargs": variables} for variables in given]
    file = tmp_path / f"rows.{file_type}"
    if file_type == "jsonl":
        kit.write_jsonl(file, rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), file)
    fields = {"train_file": file, "cache_dir": tmp_path / "cache", "chat_template_kwargs": '{"tone": "dry"}'}
    fields["tokenizer_name"] = kit.tiny_tokenizer(tmp_path / "tokenizer", ["hello"], chat_template=VARIABLE)
    config = {name: value for name, value in kit.LLAMA.items() if name != "vocab_size"}
    fields["model_config"] = kit.write_yaml(tmp_path / "llama.yaml", config)
    task, splits = kit.open_data(**fields)
    texts = [task.tokenizer.decode(row["input_ids"]) for row in kit.all_rows(splits["train"])]
    third = "5" if file_type == "jsonl" else "sharp"
    assert [text.partition("user")[0] for text in texts] == ["<warm>", "<dry>", f"<{third}>", "<dry>"]


def test_variables_of_a_row_that_are_not_read_are_warned_of(folder, capsys):
    tokenizer = tokenizer_with(folder, VARIABLE)
    assert targets(tokenizer, ChatFormat(), CHAT, {"enable_thinking": False, "messages": []})[0].startswith("user: hi")
    warnings = capsys.readouterr().err
    assert "does not read enable_thinking" in warnings
    assert "does not read messages" in warnings
    for bad, words in (("{", "not JSON"), ([1], "is list")):
        with pytest.raises(UsageError, match=f"row 3: .*chat_template_kwargs.*{words}"):
            targets(tokenizer, ChatFormat(), CHAT, bad)


def test_rows_have_a_fixed_date_or_that_of_the_run(folder):
    """The mutant writes that of today, so rows of another day differ."""
    template = "{% if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}{{ date_string }}"
    for given, written in (({}, "05 Aug 2025"), ({"date_string": "1 May"}, "1 May")):
        tokenizer = tokenizer_with(folder, template + kit.CHATML)
        chosen = make_chat_format(tokenizer, ChatOptions(chat_template_kwargs=given))
        assert targets(tokenizer, chosen)[0].startswith(written)


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two steps on chats of several turns, which the tokenizer's own template cannot train, on two processes."""
    folder = tmp_path_factory.mktemp("run")
    rows = [{"messages": [turn | {"content": f"{turn['content']} {i}"} for turn in CHAT]} for i in range(24)]
    fields = {"train_file": kit.write_jsonl(folder / "train.jsonl", rows)}
    fields |= {"validation_file": kit.write_jsonl(folder / "validation.jsonl", rows[:5])}
    fields["tokenizer_name"] = kit.tiny_tokenizer(folder / "tokenizer", ["hello bye"], chat_template=STOCK)
    config = {name: value for name, value in kit.LLAMA.items() if name != "vocab_size"}
    fields["model_config"] = kit.write_yaml(folder / "llama.yaml", config)
    fields |= {"cache_dir": folder / "cache", "max_steps": 2, "eval_steps": 2, "dtype": "float64"}
    fields |= {"global_batch_size": 8, "per_device_batch_size": 4}
    return kit.run_training(2, folder / "run", *kit.flags(**fields)), fields


def test_a_run_saves_the_tokenizers_own_template(run):
    """In final/ and in checkpoints; the mutant saves the one that stood in for it."""
    trained, _ = run
    saved = list(trained.folder.rglob("chat_template.jinja"))
    assert {file.parent.name for file in saved} == {"final", "step_00000002"}
    assert [file.read_text() for file in saved] == [STOCK] * 2
    assert "training_template: qwen3" in (trained.folder / "config.yaml").read_text()


def test_plan_names_the_template(run, tmp_path, capsys):
    """For chats only, also if the rows are prepared already. The model card says how answers are prompted, too."""
    trained, fields = run
    card = (trained.folder / "final" / "README.md").read_text()
    assert r"answers follow `<|im_start|>assistant\n`" in card
    assert re.search(r"^48 answers have no reasoning", card, re.M)
    out = ("--dry_run", "--output_dir", str(tmp_path / "run"))
    train.main([*kit.flags(**fields), *out])
    assert re.search(r"^  chat template +qwen3: .*final/ keeps the tokenizer's own$", capsys.readouterr().out, re.M)
    text = kit.write_jsonl(tmp_path / "text.jsonl", [{"text": "hello"}] * 9)
    train.main([*kit.flags(**fields | {"train_file": text, "validation_file": text, "train_turns": "last"}), *out])
    printed = capsys.readouterr()
    assert "chat template" not in printed.out
    assert "train_turns of the run file have no effect" in printed.err
    assert not (tmp_path / "run").exists()


def test_evaluation_reads_chats_as_the_run_did(run, tmp_path):
    """Of final/, whose tokenizer has its own template. The mutant reads them with another one."""
    trained, _ = run
    expected = trained.kind("eval")[-1]["loss"]
    flags = ["--checkpoint", trained.folder / "final"]
    same, mutant = (
        kit.run_evaluation(1, tmp_path / f"eval{len(more)}", *flags, *more)["loss"]
        for more in ([], ["--training_template", "chatml"])
    )
    assert same == pytest.approx(expected, rel=1e-12)
    assert mutant != pytest.approx(expected, rel=1e-4)


def test_a_resume_with_another_template_is_refused(run, monkeypatch):
    """It would train other rows; the template is named as the reason."""
    trained, fields = run
    flags = kit.flags(**fields | {"max_steps": 3, "training_template": "chatml"})
    codes, [output] = kit.run_command("train.py", *flags, "--output_dir", trained.folder, folder=trained.folder.parent)
    assert codes == [2], output
    assert "holds another run" in output
    assert "training_template: qwen3 → chatml" in output
