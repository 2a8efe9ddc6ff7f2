"""The run file: precedence, refusal of everything that is not meant, all faults at once, and back to YAML without loss."""

import dataclasses

import pytest
import yaml

from src.config import parsing, paths, validation
from src.config.errors import UsageError
from src.config.schema import RunConfig
from src.tasks import OPTIONS
from tests.helpers import kit

MODEL = ["--model_config", "llama.yaml", "--train_file", "a.jsonl"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def parsed(*argv, **values):
    """Return (run, options) from a run file of `values` and the flags `argv`."""
    if values:
        argv = ("--config", str(kit.write_yaml("run.yaml", values)), *argv)
    return parsing.parse([str(word) for word in argv], OPTIONS)


def faults(*argv, **values) -> str:
    with pytest.raises(UsageError) as caught:
        validation.check(*parsed(*argv, **values))
    return str(caught.value)


def test_defaults_then_yaml_then_flags(here):
    run, options = parsed()
    assert (run.seed, run.learning_rate, options.packing) == (42, 5e-5, False)
    run, options = parsed(seed=1, learning_rate=1e-3, packing=True)
    assert (run.seed, run.learning_rate, options.packing) == (1, 1e-3, True)
    run, options = parsed("--seed", 2, "--packing", "false", seed=1, learning_rate=1e-3, packing=True)
    assert (run.seed, run.learning_rate, options.packing) == (2, 1e-3, False)


def test_a_base_lies_below_the_run_file(here):
    path = kit.write_yaml("run.yaml", {"seed": 2})
    run, _ = parsing.parse(["--config", str(path)], OPTIONS, base={"seed": 1, "max_steps": 7, "output_dir": "x"})
    assert (run.seed, run.max_steps, run.output_dir) == (2, 7, "x")


@pytest.mark.parametrize(
    "words",
    [["--learning_rate", "3e-4"], ["--learning_rate=3e-4"], ["--learning-rate", "3e-4"], ["--learning-rate=0.0003"]],
)
def test_ways_to_write_a_flag(here, words):
    assert parsed(*words)[0].learning_rate == 3e-4


@pytest.mark.parametrize("text", ["3e-4", "3.0e-4", "0.0003", "'3e-4'"])
def test_ways_to_write_a_number_in_yaml(here, text):
    (here / "run.yaml").write_text(f"learning_rate: {text}\n")
    run, _ = parsing.parse(["--config", "run.yaml"], OPTIONS)
    assert run.learning_rate == 3e-4  # YAML itself reads 3e-4 as text
    assert isinstance(run.learning_rate, float)


def test_types_are_those_of_the_fields(here):
    run, options = parsed(num_train_epochs=3, max_steps=5, lr_scheduler_kwargs={"min_lr": 1e-6}, append_eos=False)
    assert (run.num_train_epochs, type(run.num_train_epochs), run.max_steps) == (3.0, float, 5)
    assert run.lr_scheduler_kwargs == {"min_lr": 1e-6}
    assert options.append_eos is False
    assert parsed("--lr_scheduler_kwargs", '{"num_cycles": 2}')[0].lr_scheduler_kwargs == {"num_cycles": 2}


@pytest.mark.parametrize("word, value", [("true", True), ("false", False), (None, True)])
def test_bools(here, word, value):
    assert parsed("--packing", *([word] if word else []))[1].packing is value
    assert parsed("--packing", *([word] if word else []), "--seed", 1)[1].packing is value
    assert parsed(packing=value)[1].packing is value


def test_lists(here):
    assert parsed("--train_file", "a.jsonl", "b.jsonl", "--seed", 1)[0].train_file == ["a.jsonl", "b.jsonl"]
    assert parsed(train_file=["a.jsonl", "b.jsonl"])[0].train_file == ["a.jsonl", "b.jsonl"]
    assert parsed(train_file="a.jsonl")[0].train_file == ["a.jsonl"]
    assert parsed("--train_file", "c.jsonl", train_file=["a.jsonl", "b.jsonl"])[0].train_file == ["c.jsonl"]
    one, other = parsed()[0], parsed()[0]
    one.train_file.append("x")
    assert other.train_file == []  # a default is nobody's to share


def test_an_empty_prompt_means_no_sample(here):
    assert not parsed(sample_prompt="")[1].sample_prompt
    assert not parsed("--sample_prompt", "", sample_prompt="def")[1].sample_prompt
    assert "nothing is given" in faults("--output_dir", "")


def test_null_means_the_default(here):
    (here / "run.yaml").write_text("seed: null\nmax_steps:\nlearning_rate: ~\n")
    run, _ = parsing.parse(["--config", "run.yaml"], OPTIONS)
    assert (run.seed, run.max_steps, run.learning_rate) == (42, None, 5e-5)


def test_a_key_given_twice_is_refused(here):
    (here / "run.yaml").write_text("seed: 1\nlearning_rate: 1\nseed: 2\n")
    message = faults("--config", "run.yaml")
    assert "'seed' is given twice" in message
    assert "run.yaml" in message


def test_all_unknown_and_mistyped_fields_at_once(here):
    message = faults("--sede", 1, "--max_steps", "ten", learning_rat=1, warmup_steps="few")
    assert message.startswith("4 faults")
    for part in ("did you mean seed?", "--max_steps: ", "run.yaml: learning_rat: ", "run.yaml: warmup_steps: "):
        assert part in message


def test_all_values_out_of_range_at_once(here):
    message = faults(*MODEL, "--learning_rate", "nan", "--max_length", 1, seed=-1, adam_beta1=1, eval_steps=0)
    assert message.startswith("5 faults")
    for name in ("learning_rate is nan", "seed is -1", "adam_beta1 is 1.0", "eval_steps is 0", "max_length is 1"):
        assert name in message


@pytest.mark.parametrize(
    "wrong, right", [("learningrate", "learning_rate"), ("global_batch", "global_batch_size"), ("pack", "packing")]
)
def test_the_nearest_right_name(here, wrong, right):
    assert f"did you mean {right}?" in faults(f"--{wrong}", 1)
    assert f"did you mean {right}?" in faults(**{wrong: 1})


def test_a_name_is_not_abbreviated(here):
    assert "did you mean learning_rate?" in faults("--learning_rat", 1)  # argparse by itself would take it


def test_a_name_like_no_other_gets_no_advice(here):
    assert faults("--xyzzy", 1) == "--xyzzy: unknown field"


def test_fields_of_another_task(here):
    assert parsed(task="text_classification", label_column="kind")[1].label_column == "kind"
    assert "it belongs to task causal_lm, this is text_classification" in faults(
        "--packing", task="text_classification"
    )
    assert "it belongs to task text_classification, this is causal_lm" in faults(label_column="kind")
    assert "did you mean text_classification?" in faults("--task", "text_clasification")


def test_a_flag_chooses_the_task_of_a_run_file(here):
    _, options = parsed("--task", "text_classification", task="causal_lm", max_length=12)
    assert type(options) is OPTIONS["text_classification"]()
    assert options.max_length == 12


@pytest.mark.parametrize("task", OPTIONS)
def test_help_shows_every_field_in_its_group(capsys, task):
    with pytest.raises(SystemExit) as stop:
        parsing.parse(["--help", "--task", task], OPTIONS)
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    before, run, own = shown.partition("the run:")[0], *shown.partition("the run:")[2].split(f"task {task}:")
    assert "Precedence" in before
    for kind, part in ((RunConfig, run), (OPTIONS[task](), own)):
        for field in dataclasses.fields(kind):
            assert f"--{field.name} " in part
            assert " ".join(field.metadata["help"].split()[:3]) in " ".join(part.split())


@pytest.mark.parametrize("task", OPTIONS)
def test_the_config_of_a_run_is_a_run_file_of_the_same_values(here, task):
    given = {
        "task": task,
        "seed": 2**40,
        "learning_rate": 1.2345678901234567e-7,
        "adam_epsilon": 1e-300,
        "train_file": ["a b.jsonl", "{c}.jsonl"],
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr": 1e-6},
        "max_length": 7,
        "text_column": "null",  # text that YAML would take for something else
        "tokenizer_name": "1e3",
        "report_to": ["tensorboard"],
        "output_dir": "ünï: #1",
    }
    first = parsed(**given)
    (here / "again.yaml").write_text(parsing.to_yaml(*first))
    assert parsing.parse(["--config", "again.yaml"], OPTIONS) == first
    assert "dry_run" not in yaml.safe_load((here / "again.yaml").read_text())


def test_the_config_of_a_run_holds_whole_paths_of_what_it_read(here):
    for name in ("llama.yaml", "a.jsonl"):
        (here / name).write_text("x")
    run, options = parsed(*MODEL, "--tokenizer_name", "org/name")
    values = yaml.safe_load(parsing.to_yaml(run, options))
    assert values["model_config"] == str(here / "llama.yaml")
    assert values["train_file"] == [str(here / "a.jsonl")]
    assert values["tokenizer_name"] == "org/name"


def test_files_are_looked_up_here_and_then_in_the_repository(here):
    name = "configs/stdlib_lm.yaml"
    assert paths.locate(name) == str(kit.REPOSITORY / name)
    assert parsing.parse(["--config", name], OPTIONS)[0].dataset_name == "stdlib_code"
    (here / "configs").mkdir()
    kit.write_yaml(name, {"seed": 7})
    assert paths.locate(name) == str(here / name)
    run, _ = parsing.parse(["--config", name], OPTIONS)
    assert (run.seed, run.dataset_name) == (7, None)
    assert paths.locate("org/model") == "org/model"


def test_a_run_is_named_after_its_file(here):
    assert parsed(seed=1)[0].output_dir == "runs/run"
    assert parsed("--output_dir", "elsewhere", seed=1)[0].output_dir == "elsewhere"


@pytest.mark.parametrize(
    "name", ["configs/stdlib_lm.yaml", "configs/stdlib_classification.yaml", "configs/finetune_hub.yaml"]
)
def test_the_shipped_run_files_are_valid_and_begin_with_their_command(name):
    validation.check(*parsing.parse(["--config", name], OPTIONS))
    first = (kit.REPOSITORY / name).read_text().splitlines()[0]
    assert first.startswith("# accelerate launch --config_file accelerate_configs/")
    assert first.endswith(f"train.py --config {name}")


@pytest.mark.parametrize(
    "words, used",
    [
        ([], True),
        (["--max_steps", "20", "--output_dir=x"], True),
        (["--config", "run.yaml"], False),
        (["--model-config=llama.yaml"], False),
        (["--train_file", "a.jsonl"], False),
        (["--task", "text_classification"], False),
        (["--help"], False),
    ],
)
def test_the_sample_is_trained_where_nothing_is_named(words, used, capsys):
    assert parsing.or_sample(words) == (["--config", parsing.SAMPLE, *words] if used else words)
    assert (parsing.SAMPLE in capsys.readouterr().out) == used
    if used:
        run, _ = parsing.parse(parsing.or_sample(words), OPTIONS)
        assert run.max_steps == (20 if words else 600)
        assert run.output_dir == ("x" if words else "runs/stdlib_lm")


@pytest.mark.parametrize(
    "wrong, right",
    [("lr", "learning_rate"), ("per_device_train_batch_size", "per_device_batch_size"), ("bf16", "mixed_precision")],
)
def test_names_of_other_programs(here, wrong, right):
    message = faults(f"--{wrong}", 1)
    assert message.startswith(f"--{wrong}: ")
    assert right in message


@pytest.mark.parametrize("words", [["configs/stdlib_lm.yaml"], ["-config", "configs/stdlib_lm.yaml"]])
def test_a_run_file_without_its_flag(here, words):
    assert parsing.or_sample(words) == words
    assert "--config configs/stdlib_lm.yaml" in faults(*words)


@pytest.mark.parametrize(
    "words, meant",
    [
        (["-max_steps", "6"], "--max_steps 6?"),
        (["\u2014max_step", "6"], "--max_steps 6?"),
        (["max_steps=6"], "--max_steps 6?"),
        (["stdlib"], ""),
    ],
)
def test_words_where_a_flag_was_expected(here, words, meant):
    """One remark for all of them, with what was probably meant."""
    message = faults(*words)
    assert message.startswith(f"{words[0]!r}: a flag was expected")
    assert message.endswith(meant)
    assert ("did you mean" in message) == bool(meant)


def test_both_sources_of_data_are_named(here):
    path = kit.write_yaml("mine.yaml", {"model_config": "llama.yaml", "dataset_name": "stdlib_code"})
    with pytest.raises(UsageError, match=r"dataset_name \(stdlib_code\) and train_file \(mine.jsonl\)"):
        validation.check(*parsing.parse(["--config", str(path), "--train_file", "mine.jsonl"], OPTIONS))


def test_a_run_file_with_a_wrong_name(here):
    assert "did you mean configs/stdlib_lm.yaml?" in faults("--config", "configs/stdlib_llm.yaml")
    kit.write_yaml("mine.yaml", {"seed": 1})
    assert "did you mean mine.yaml?" in faults("--config", "mine.yml")


@pytest.mark.parametrize("name, value", [("max_steps", "1e3"), ("max_steps", "10.5"), ("learning_rate", "3e-4,")])
def test_a_number_that_is_none(here, name, value):
    message = faults(f"--{name}", value)
    assert message.startswith(f"--{name}: '{value}' is no ")
