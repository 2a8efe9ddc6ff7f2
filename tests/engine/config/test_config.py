"""The run file: precedence, types, all errors at once, suggestions, --help, and back to YAML without loss."""

import dataclasses
import json
import re

import pytest
import yaml

from engine.config import parsing, paths, validation
from engine.config.errors import UsageError
from engine.config.option import declared_options
from engine.config.run_config import RunConfig
from engine.find_tasks import OPTIONS
from tests.helpers import kit

MODEL = {"model_config": "llama.yaml", "train_file": "a.jsonl"}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def parsed(*argv, **values):
    """Return (cfg, options) from a run file of `values` and the flags `argv`."""
    if values:
        argv = ("--config", str(kit.write_yaml("run.yaml", values)), *argv)
    return parsing.parse([str(word) for word in argv], OPTIONS)


def errors(*argv, training=True, **values) -> str:
    with pytest.raises(UsageError) as caught:
        validation.check(*parsed(*argv, **values), training=training)
    return str(caught.value)


# ---- values ----------------------------------------------------------------------------------------------------------


def test_precedence_defaults_base_yaml_flags(here):
    base = {"seed": 7, "learning_rate": 0.5, "max_steps": 3}
    path = str(kit.write_yaml("run.yaml", {"seed": 1, "learning_rate": 1e-3, "packing": True}))
    argv = ["--config", path, "--seed", "2", "--packing", "false"]
    cfg, options = parsing.parse(argv, OPTIONS, base)
    assert (cfg.seed, cfg.learning_rate, cfg.max_steps, cfg.save_steps, options.packing) == (2, 1e-3, 3, 500, False)


@pytest.mark.parametrize(
    "given, name, value",
    [
        (["--learning-rate=3e-4"], "learning_rate", 3e-4),
        (["--optim_args", '{"x": 1e5}'], "optim_args", {"x": 1e5}),  # a number in JSON, but text in YAML 1.1
        (["--packing", "--seed", "1"], "packing", True),
        (["--no_append_eos"], "append_eos", False),
        (["--sample_prompt", ""], "sample_prompt", ""),
        ("learning_rate: 3e-4", "learning_rate", 3e-4),  # YAML itself reads 3e-4 as text
        ("lr_scheduler_kwargs: {min_lr: 1e-6}", "lr_scheduler_kwargs", {"min_lr": 1e-6}),
        ("num_train_epochs: 3", "num_train_epochs", 3.0),
        ("tokenizer_name: 2024-01-01", "tokenizer_name", "2024-01-01"),  # a date in YAML
        ("train_file: a.jsonl", "train_file", ["a.jsonl"]),
        ("seed: null\nlocal_sgd_steps: null", "seed", 42),  # of an older config.yaml: it was removed, and off
    ],
)
def test_values_of_flags_and_of_the_run_file(here, given, name, value):
    if isinstance(given, str):
        (here / "run.yaml").write_text(given + "\n")
        given = ["--config", "run.yaml"]
    cfg, options = parsed(*given)
    found = (vars(cfg) | vars(options))[name]
    assert found == value
    assert type(found) is type(value)


USER = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    "name, words, value",
    [
        ("add_tokens", ['["<|call|>", "<|end|>"]'], ["<|call|>", "<|end|>"]),
        ("add_tokens", ["[<|call|>, <|end|>]"], ["<|call|>", "<|end|>"]),
        ("add_tokens", ['["[INST]"]'], ["[INST]"]),
        ("add_tokens", ["[]"], []),
        ("profile_steps", ["[2, 3]"], [2, 3]),
        ("train_file", ["[a.jsonl, b.jsonl]"], ["a.jsonl", "b.jsonl"]),
        ("sample_prompts", ["[[{role: user, content: x}]]"], [USER]),
        ("sample_prompts", ["[{'role': 'user', 'content': 'x'}]"], [USER]),
        ("sample_prompts", ["{role: user, content: x}"], [USER]),
        ("sample_prompts", ['["a b", [{"role": "user", "content": "x"}]]'], ["a b", USER]),
        ("sample_prompts", ["{role: user, content: x}", "a, b", str(USER)], [USER, "a, b", USER]),
        ("add_tokens", ["[INST]"], ["INST"]),
        ("metrics", ["[none]"], ["none"]),
        # texts, as they are
        ("add_tokens", ["{a: b}", "a", "[INST] b [/INST]"], ["{a: b}", "a", "[INST] b [/INST]"]),
        ("train_file", ["[ab].jsonl"], ["[ab].jsonl"]),
        ("sample_prompts", ["[a] b"], ["[a] b"]),
        ("sample_prompts", ["def f(x): return [x]"], ["def f(x): return [x]"]),
    ],
)
def test_list_of_one_word_in_yaml_or_json(here, name, words, value):
    cfg, options = parsed(f"--{name}", *words)
    assert (vars(cfg) | vars(options))[name] == value


def test_none_on_the_command_line_clears_a_field(here):
    """Without this, no flag trains for epochs where the run file gives steps; `none` replaces no data."""
    cfg, _ = parsed("--max_steps", "none", "--dataset_name=null", max_steps=3, train_file="a.jsonl")
    assert (cfg.max_steps, cfg.dataset_name, cfg.train_file) == (None, None, ["a.jsonl"])
    cfg, _ = parsing.parse(["--max_eval_examples", "none"], OPTIONS, {"max_eval_examples": 8})
    assert cfg.max_eval_examples is None
    cfg, _ = parsed("--validation_file", "none", validation_file="b.jsonl", train_file="a.jsonl")
    assert (cfg.validation_file, cfg.train_file) == ([], ["a.jsonl"])
    given = {"add_tokens": ["<a>"], "profile_steps": [2, 3], "freeze": ["a"], "report_to": ["wandb"], "output_dir": "a"}
    cfg, options = parsed(*(word for name in given for word in (f"--{name}", "None")), **given)
    assert {name: vars(cfg)[name] for name in given} == {name: [] for name in given} | {"output_dir": "runs/run"}
    assert options.metrics != parsed("--metrics", "none")[1].metrics == ["none"]  # its default is not empty
    assert "--seed: 'none'" in errors("--seed", "none")


@pytest.mark.parametrize("name", ["add_tokens", "train_file", "freeze", "sample_prompts", "profile_steps"])
@pytest.mark.parametrize("words", [['["<a>", ""]'], ['["<a>", null]'], ["[[[a]], b]"], ["[a, b]", "c"]])
def test_wrong_list_of_a_flag_is_refused(here, name, words):
    """As in a run file, and never read as one text."""
    assert f"--{name}: " in errors(f"--{name}", *words)
    assert f"run.yaml: {name}: " in errors(**{name: ["<a>", [["a"]]]})


@pytest.mark.parametrize("old", ["dataset_name", "train_file", "mixture"])
@pytest.mark.parametrize("new", ["dataset_name", "train_file", "mixture"])
def test_data_of_a_flag_replaces_data_of_the_run_file(here, old, new):
    in_file = {"dataset_name": "a", "train_file": ["a.jsonl"], "mixture": {"a": {"train_file": ["a.jsonl"]}}}
    by_flag = {"dataset_name": "b", "train_file": "b.jsonl", "mixture": "{b: {train_file: b.jsonl}}"}
    cfg, _ = parsed(f"--{new}", by_flag[new], **{old: in_file[old]}, validation_file=["v.jsonl"])
    assert {name for name in in_file if getattr(cfg, name)} == {new}
    assert "b" in str(getattr(cfg, new))
    assert cfg.validation_file == ["v.jsonl"]


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_all_errors_of_names_types_and_ranges_at_once(here):
    message = errors("--sede", 1, "--max_steps", "ten", learning_rat=1, warmup_steps="few", adam_beta1=1, max_length=1)
    assert message.startswith("6 errors")
    for part in ("--sede: ", "--max_steps: 'ten'", "run.yaml: learning_rat: ", "run.yaml: warmup_steps: 'few'"):
        assert part in message
    assert "run.yaml: adam_beta1: 1: " in message
    assert "run.yaml: max_length: 1: " in message


@pytest.mark.parametrize(
    "given, parts",
    [
        (["--learning_rate"], ["--learning_rate: expected one value, found none", "peak"]),
        (["--seed", "1", "2"], ["--seed: expected one value, found 1 2"]),
        (["--profile_steps", "[2, x]"], ["--profile_steps: 1: 'x'"]),
        (
            ["--train_file", "[https://user:pass@host/a.jsonl, b]"],
            ["--train_file: a URL must not name a user or password"],
        ),
        (["--learning_rate", "nan"], ["--learning_rate: 'nan'"]),
        (["--lr_scheduler_type", "cosin"], ["--lr_scheduler_type: 'cosin'", "did you mean cosine?"]),
        (["--optim_args", '{"a": {}, "a": {"b": 1}}'], ["the key 'a' is given twice"]),
        (["--parameter_groups", "{x: {lr_facto: 2}}"], ["x: lr_facto: unknown field; did you mean lr_factor?"]),
        (
            ["--gradient_checkpointing", "{every_n_layer: 2}"],
            ["every_n_layer: unknown field; did you mean every_n_layers?"],
        ),
        (["--gradient_checkpointing", "{every_n_layers: 0}"], ["--gradient_checkpointing: every_n_layers: 0: ", "1 ("]),
        (b"gradient_checkpointing: {offload: 3}", ["run.yaml: gradient_checkpointing: offload: 3: "]),
        (["--gradient_checkpointing", "some"], ["--gradient_checkpointing: 'some': ", "boolean", "{NAME: VALUE, …}"]),
        (["--task", "casual_lm"], ["task: ", "'casual_lm'; did you mean causal_lm?"]),
        (["--norm", "true"], ["--norm: ", "plain", "causal_lm"]),
        (["--config", "configs/stdlib_llm.yaml"], ["no such file", "did you mean configs/stdlib_lm.yaml?"]),
        (["configs/stdlib_lm.yaml"], ["'configs/stdlib_lm.yaml': ", "--config configs/stdlib_lm.yaml"]),
        (b"", ["run.yaml: ", "`name: value`"]),
        (b"\x00\xff\xfe\x80abc", ["run.yaml: not readable as YAML"]),
        (b"seed: 1\nlearning_rate: 1\nseed: 2\n", ["run.yaml: ", "'seed' is given twice", "line 3, column 1"]),
        (b"learning_rate: yes", ["run.yaml: learning_rate: True", "number"]),
    ],
)
@pytest.mark.usefixtures("plain")  # a fork's task, with other fields
def test_errors_of_the_command_line_and_the_run_file(here, given, parts):
    if isinstance(given, bytes):
        (here / "run.yaml").write_bytes(given)
        given = ["--config", "run.yaml"]
    message = errors(*given)
    for part in parts:
        assert part in message
    assert "\n" not in message


def test_list_that_is_given_twice_is_warned_about(here, capsys):
    """Other trainers add the values; here the last flag counts, as of every field."""
    cfg, _ = parsed(*kit.flags(**MODEL), "--train_file", "b.jsonl")
    assert cfg.train_file == ["b.jsonl"]
    assert "warning: --train_file is given twice, and only the last one counts" in capsys.readouterr().err


@pytest.mark.parametrize(
    "values, parts",
    [
        ({"per_device_batch_size": 9, "global_batch_size": 8}, ["per_device_batch_size is 9", "which is 8"]),
        ({"model_config": None}, ["no model: give --model_name_or_path"]),
        ({"dataset_name": "stdlib_code"}, ["dataset_name and train_file are both given"]),
        ({"dataset_revision": "v1"}, ["dataset_revision is given without dataset_name"]),
        ({"profile_steps": [5]}, ["profile_steps is [5]"]),
        ({"profile_steps": [13, 10]}, ["profile_steps is [13, 10]"]),
        ({"output_dir": "file"}, ["output_dir: file cannot be created", "is not a writable folder"]),
        ({"cache_dir": "s3://bucket/run"}, ["cache_dir: s3", "is a URL"]),
    ],
)
def test_rules_between_fields(here, values, parts):
    (here / "file").touch()
    message = errors(**MODEL | values)
    for part in parts:
        assert part in message
    assert "\n" not in message


def test_rules_of_an_evaluation(here):
    """A run file of train.py gives random weights: their loss would overwrite eval.json of the run."""
    given = MODEL | {"validation_file": "a.jsonl", "output_dir": "scores"}
    message = errors(training=False, **given)
    assert "model_config is llama.yaml" in message
    assert "--checkpoint scores" in message


# ---- files -----------------------------------------------------------------------------------------------------------


def test_saved_config_is_a_run_file_of_the_same_values(here):
    first = parsed(
        seed=2**40,
        learning_rate=1.2345678901234567e-7,
        adam_epsilon=1e-300,
        train_file=["a b.jsonl", "{c}.jsonl"],
        lr_scheduler_kwargs={"min_lr": 1e-6},
        packing=True,
        columns={"text": "null", "label": "1"},  # text that YAML would take for something else
        tokenizer_name="1e3",
        output_dir="ünï: #1",
    )
    (here / "again.yaml").write_text(parsing.to_yaml(*first))
    assert parsing.parse(["--config", "again.yaml"], OPTIONS) == first
    assert "dry_run" not in yaml.safe_load((here / "again.yaml").read_text())


def test_saved_config_holds_absolute_paths(here):
    for name in ("llama.yaml", "a.jsonl"):
        (here / name).write_text("x")
    cfg, options = parsed(**MODEL, tokenizer_name="org/name")
    mixture = {"one": {"train_file": ["a.jsonl"], "dataset_name": "org/data"}}
    values = yaml.safe_load(parsing.to_yaml(dataclasses.replace(cfg, mixture=mixture), options))
    assert values["model_config"] == str(here / "llama.yaml")
    assert values["train_file"] == values["mixture"]["one"]["train_file"] == [str(here / "a.jsonl")]
    assert (values["tokenizer_name"], values["mixture"]["one"]["dataset_name"]) == ("org/name", "org/data")


def test_files_are_looked_up_here_then_in_the_repository(here):
    name = "configs/stdlib_lm.yaml"
    assert parsed("--config", name)[0].dataset_name == "stdlib_code"
    (here / "configs").mkdir()
    kit.write_yaml(name, {"seed": 7})
    assert parsed("--config", name)[0].seed == 7
    assert paths.locate("org/model") == "org/model"


@pytest.mark.parametrize("name", parsing.NAMES_ELSEWHERE)
def test_names_of_other_trainers_lead_to_fields_that_exist(here, name):
    hint = parsing.NAMES_ELSEWHERE[name]
    assert f"{name}: unknown field; {hint}" in errors(f"--{name}", "1", **MODEL)
    known = {*declared_options(RunConfig), *declared_options(OPTIONS["causal_lm"]())}
    known |= json.loads(paths.SCHEMA_FILE.read_text())["properties"].keys()  # those of a deleted add-on, too
    assert set(re.findall(r"(?:give|or|by) ([a-z]+_\w+)", hint)) <= known


@pytest.mark.parametrize(
    "name, is_lower",
    [
        *((name, True) for name in ("wer", "eval_cer", "mse", "perplexity", "bits_per_byte", "code/perplexity")),
        *((name, True) for name in ("word_error_rate", "absolute_error", "wer_clean", "loss_per_row", "ema/mae")),
        *((name, False) for name in ("loss", "eval_loss", "code/loss", "balance_loss", "accuracy", "error/accuracy")),
        *((name, False) for name in ("f1", "mean_iou", "maester", "interval_score")),
    ],
)
def test_metric_whose_name_says_lower_is_better_needs_a_direction(here, name, is_lower):
    if is_lower:
        text = errors(**MODEL, metric_for_best_model=name)
        assert f"metric_for_best_model is {name.removeprefix('eval_')}, and the GREATEST" in text
        assert "greater_is_better" in text
    for given in ({"greater_is_better": False}, {"greater_is_better": True}) if is_lower else ({},):
        validation.check(*parsed(**MODEL, **given, metric_for_best_model=name))


@pytest.mark.parametrize(
    "values, words",
    [
        ({"warmup_steps": 3, "lr_scheduler_type": "constant"}, "warmup_steps 3 is ignored"),
        ({"model_revision": "v2"}, "model_revision v2 is ignored"),
        ({"ddp_comm_hook": "fp16"}, "ddp_comm_hook fp16 is ignored"),
        ({"exact_sums": True, "sync_each_batch": True}, "sync_each_batch is ignored"),
        ({"early_stopping_patience": 2}, "early_stopping_patience has no effect"),
        ({"early_stopping_patience": 2, "eval_steps": 5}, "final/ is the last step"),
        ({"early_stopping_patience": 2, "eval_steps": 5, "metric_for_best_model": "loss"}, ""),
        ({"greater_is_better": True}, "greater_is_better is ignored"),
        ({"model_revision": "v2", "model_name_or_path": "org/model"}, ""),
    ],
)
def test_requests_without_effect_are_warned_of(values, words):
    warnings = list(validation.ignored_requests(RunConfig(**values)))
    assert len(warnings) == bool(words)
    assert words in "".join(warnings)


def test_evaluation_data_of_a_mixture_is_not_ignored(here, capsys):
    """A run file's validation_file stays where --mixture replaces its training data."""
    for source, words in (
        ({"train_file": ["a.jsonl"], "validation_file": ["v.jsonl"]}, None),
        ({"dataset_name": "org/a"}, "validation_file is evaluated, not a validation split of a"),
        ({"train_file": ["a.jsonl"]}, ""),
    ):
        mixture = json.dumps({"a": source, "b": {"train_file": ["b.jsonl"]}})
        fields = MODEL | {"train_file": "old.jsonl", "validation_file": "old_validation.jsonl", "output_dir": "runs/a"}
        cfg, options = parsed("--mixture", mixture, **fields)
        if words is None:
            with pytest.raises(UsageError, match=r"old_validation.jsonl, and mixture: a has one of its own.*none"):
                validation.check(cfg, options)
            continue
        validation.check(cfg, options)
        printed = capsys.readouterr().err
        assert words in printed
        assert bool(words) == ("validation" in printed)
        cfg, options = parsed("--mixture", mixture, "--validation_file", "none", **fields)
        validation.check(cfg, options)
        assert "validation" not in capsys.readouterr().err
