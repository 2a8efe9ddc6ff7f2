"""Whether a checkpoint is of the same run: each field, the contents of data and model, precision, length."""

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from engine.checkpointing import locate_weights, run_identity
from engine.config.errors import UsageError
from engine.config.option import declared_options
from engine.config.parsing import to_yaml
from engine.config.run_config import RunConfig, changeable_fields
from engine.find_tasks import OPTIONS
from src.training.schedules import has_same_rates
from tests.engine.checkpointing import recipe
from tests.engine.checkpointing.recipe import identity_of
from tests.helpers import kit
from tests.helpers.backend_runs import at_step

VALIDATION = {"validation.examples": 83, "validation.rows": "one"}
KNOWN = {"data.examples": 83, "data.rows": "one", "mixed_precision": "no", "processes": 1, "model.n_embd": 16}


def check(
    folder: Path, cfg: RunConfig, options=None, was=None, was_options=None, known=KNOWN, then=KNOWN, evaluated=0
) -> list[str]:
    """Return the remarks on a run that resumes from step 8 of one with the configuration `was` and the identity `then`."""
    options = options or OPTIONS[cfg.task]()()
    config = yaml.safe_load(to_yaml(was or cfg, was_options or options))
    checkpoint = folder / "run" / "checkpoints" / "step_00000008"
    checkpoint.mkdir(parents=True, exist_ok=True)
    progress = {"updates": 8, "evaluated": evaluated}
    state = {"engine": run_identity.VERSION, "config": config, "identity": then, "progress": progress}
    (checkpoint / "state.json").write_text(json.dumps(state))
    return run_identity.check_same_run(checkpoint, cfg, options, known, has_same_rates)


def refusal(*args, **keys) -> str:
    with pytest.raises(UsageError) as refused:
        check(*args, **keys)
    return str(refused.value)


# ---- fields ------------------------------------------------------------------------------------------------------------

BY_CONTENT = {"max_steps", "techniques"}  # the schedule, and each technique, are compared below


def another(field: dataclasses.Field, value):
    """Return another value for a field."""
    if choices := field.metadata["option"].choices:
        return next(choice for choice in choices if choice != value)
    if field.name == "mixture":
        return {"a": {"train_file": ["/a.jsonl"]}}
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return ["other"] if isinstance(value, list) else "other"


def wrongly_treated(folder: Path, task: str) -> list[str]:
    """Return the fields of a task, for causal_lm also those of the run, that are not treated as the schema declares."""
    cfg = RunConfig(task=task, output_dir="run", max_steps=12, dataset_name="data")
    options, wrong = OPTIONS[task]()(), []
    may_change = changeable_fields(RunConfig, type(options))
    for holder in (cfg, options) if task == "causal_lm" else (options,):
        for field in dataclasses.fields(holder):
            if field.name in BY_CONTENT or "option" not in field.metadata:
                continue
            value = another(field, getattr(holder, field.name))
            changed = dataclasses.replace(holder, **{field.name: value})
            new_cfg, new_options = (changed, options) if holder is cfg else (cfg, changed)
            try:
                remarks = check(folder, new_cfg, new_options, cfg, options)
                said = any(f"changed since step_00000008: {field.name}: " in remark for remark in remarks)
                silent = field.name in ("output_dir", "resume", "dry_run")
                is_right = field.name in may_change and said != silent
            except UsageError as error:
                refused = f"holds another run ({field.name}: " in str(error) and str(value) in str(error)
                is_right = field.name not in may_change and refused
            wrong += [field.name] * (not is_right)
    return wrong


@pytest.mark.parametrize("task", OPTIONS)
def test_changed_field_is_refused_unless_it_may_change(tmp_path, task):
    assert wrongly_treated(tmp_path, task) == []


def test_mutant_that_allows_every_change_is_caught(tmp_path, monkeypatch):
    every = {name for kind in (RunConfig, OPTIONS["causal_lm"]()) for name in declared_options(kind)}
    declared = changeable_fields(RunConfig, OPTIONS["causal_lm"]())
    monkeypatch.setattr(run_identity, "changeable_fields", lambda *kinds: every)
    assert set(wrongly_treated(tmp_path, "causal_lm")) == every - declared - BY_CONTENT


def test_runs_end_with_their_major_version(tmp_path):
    """Version 1 did not record its own. A run without --output_dir gets another folder."""
    cfg = RunConfig(output_dir=str(tmp_path / "run"), max_steps=12, dataset_name="data", dry_run=True)
    options = OPTIONS[cfg.task]()()
    check(tmp_path, cfg)
    file = tmp_path / "run" / "checkpoints" / "step_00000008" / "state.json"
    state = json.loads(file.read_text())
    major = int(state.pop("engine").split(".")[0])

    def resume_of(engine: dict) -> list[str]:
        file.write_text(json.dumps(state | engine))
        return run_identity.check_same_run(file.parent, cfg, options, KNOWN, has_same_rates)

    assert resume_of({"engine": f"{major}.99.0"}) == []
    assert run_identity.choose_folder([], cfg, options, has_same_rates) == cfg
    for engine, named in (({}, "1.x"), ({"engine": f"{major + 1}.0.0"}, f"{major + 1}.0.0")):
        with pytest.raises(UsageError, match=f"another version .engine: {named} → .*--init_from"):
            resume_of(engine)
        assert run_identity.choose_folder([], cfg, options, has_same_rates).output_dir == f"{cfg.output_dir}_2"


GROUPS = {"*.bias": {"lr_factor": 2.0}, "*": {"lr_factor": 3.0}}
CONSTANT = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2}


@pytest.mark.parametrize(
    "was, now, text",
    [
        # The first pattern that matches a parameter decides.
        ({"parameter_groups": GROUPS}, {"parameter_groups": dict(reversed(GROUPS.items()))}, "(parameter_groups: "),
        # A length that would have changed past rates.
        ({}, {"max_steps": 1000}, "(max_steps: 12 → 1000)"),
        ({"lr_scheduler_type": "cosine"}, {"max_steps": 10}, "(max_steps: 12 → 10)"),
        (CONSTANT, {"max_steps": 1000}, "max_steps: 12 → 1000"),
        # A model folder may be moved.
        ({"model_name_or_path": "/a"}, {"model_name_or_path": "/b"}, "model_name_or_path: /a → /b"),
        ({"model_name_or_path": "/a"}, {"model_name_or_path": "org/a"}, "(model_name_or_path: /a → org/a)"),
    ],
)
def test_values_that_decide_whether_a_field_may_change(tmp_path, was, now, text):
    """A refusal has the change in parentheses."""
    before = RunConfig(**{"output_dir": "run", "max_steps": 12, "global_batch_size": 8, "dataset_name": "data"} | was)
    assert check(tmp_path, before, was=before) == []
    after = dataclasses.replace(before, **now)
    if text.startswith("("):
        assert text in refusal(tmp_path, after, was=before)
    else:
        assert check(tmp_path, after, was=before) == [f"changed since step_00000008: {text}"]


def test_extended_run_equals_one_of_that_length(tiny, tmp_path):
    flags = recipe.flags(tiny, **CONSTANT)
    kit.run_training(1, tmp_path / "run", *flags, "--max_steps", 6)
    run = kit.run_training(1, tmp_path / "run", *flags)
    whole = kit.run_training(1, tmp_path / "whole", *flags)
    assert kit.same(run.weights, whole.weights)
    assert run.losses() == whole.losses()
    assert (tmp_path / "run" / "old_final.old1").is_dir()


# ---- contents, as recorded ---------------------------------------------------------------------------------------------

STREAM = {"data.examples": None, "data.rows": "stream", "data.sample": "one", "data.tokenizer_files": "x"}


def test_other_contents_are_refused_with_all_that_differs(tmp_path):
    cfg, then = RunConfig(output_dir="run", max_steps=12), KNOWN | VALIDATION | {"data.labels": ["a", "b"]}
    now = {"mixed_precision": "bf16", "model.n_embd": 32, "model.n_inner": 8, "data.rows": "two"}
    now |= {"validation.examples": 7, "validation.rows": "seven", "data.labels": ["b", "a"]}
    said = refusal(tmp_path, cfg, known=then | now, then=then)
    assert all(f"{name}: {then.get(name)} → {value}" in said for name, value in now.items())
    for name, value in (("data.rows", "seven"), ("data.sample", "two"), ("data.tokenizer_files", "y")):
        keys = {"known": KNOWN | STREAM | {name: value}, "then": KNOWN | STREAM}
        assert f"{name}: {STREAM[name]} → {value})" in refusal(tmp_path, cfg, **keys)
    splits = {"train": SimpleNamespace(stats={"labels": ["a", "b"]})}
    assert run_identity.identity("no", 1, cfg, splits)["data.labels"] == ["a", "b"]


def test_harmless_contents_are_remarked(tmp_path):
    then = KNOWN | VALIDATION | {"data.tokenizer_files": "x", "model.commit": "a"}
    now = KNOWN | {"data.tokenizer_files": "y", "model.commit": "b", "processes": 3}
    remarks = "; ".join(check(tmp_path, RunConfig(output_dir="run", max_steps=12), known=now, then=then))
    for text in ("validation.rows: one → None", "tokenizer_files: x → y", "model.commit: a → b", "processes: 1 → 3"):
        assert text in remarks


# ---- contents, as read -------------------------------------------------------------------------------------------------


def test_data_and_model_are_known_by_content(tiny, tmp_path):
    """The same contents under other names are the same run; the mutant compares names and sizes."""
    base = identity_of(tiny)
    moved = {
        "train_file": Path(shutil.copy(tiny["train_file"], tmp_path / "rows.jsonl")),
        "validation_file": Path(shutil.copy(tiny["validation_file"], tmp_path / "more.jsonl")),
        "model_config": kit.write_yaml(tmp_path / "m.yaml", dict(reversed(kit.TINY.items()))),  # other order of lines
    }
    assert identity_of(tiny | moved) == base
    first, second, *rows = moved["train_file"].read_text().splitlines(keepends=True)
    moved["train_file"].write_text("".join([second, first, *rows]))
    assert moved["train_file"].stat().st_size == tiny["train_file"].stat().st_size  # what the mutant compares
    assert identity_of(tiny | moved)["data.rows"] != base["data.rows"]


def test_pretrained_model_is_known_by_config_and_code(tiny, tmp_path):
    folder = kit.save_model(tmp_path / "model", kit.TINY)
    pretrained = {"model_config": None, "model_name_or_path": folder}
    base, path = identity_of(tiny, **pretrained), folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attn_pdrop": 0.9, "transformers_version": "99.0"}))
    changed = identity_of(tiny, **pretrained)
    assert {name for name in base if base[name] != changed[name]} == {"model.attn_pdrop"}
    (folder / "modeling.py").write_text("x = 1")
    assert identity_of(tiny, **pretrained) == changed  # nothing runs it
    assert "model.modeling.py" in identity_of(tiny, **pretrained, trust_remote_code=True)


@pytest.mark.parametrize("repeat", [1, 400], ids=["small", "sampled"])
def test_stream_is_known_by_a_sample_of_its_files(tiny, tmp_path, repeat):
    """The files keep name and size; of a large one, some places are read."""
    kit.need_addon("streaming")
    path = tmp_path / "train.jsonl"
    text = tiny["train_file"].read_text() * repeat
    assert (repeat > 1) == (len(text) > 1 << 20)
    known = []
    for add in (0, 0, 1):
        path.write_text(text[:-5] + text[-5:].replace(text[-4], str((int(text[-4]) + add) % 10)))
        known.append(identity_of(tiny, train_file=path, streaming=True))
    assert known[0] == known[1]
    assert {name for name in known[1] if known[1][name] != known[2][name]} == {"data.sample"}


# ---- whole commands ----------------------------------------------------------------------------------------------------


def test_evaluation_in_the_same_precision_does_not_warn(straight, capsys):
    for folder in (straight[1].folder / "final", at_step(straight[1], 12)):
        cfg = RunConfig(model_name_or_path=str(folder))
        for precision in ("no", "bf16"):
            locate_weights.warn_of_precision(cfg, precision)
            assert ("evaluated with" in capsys.readouterr().err) == (precision == "bf16")
