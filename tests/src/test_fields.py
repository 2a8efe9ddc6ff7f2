"""src/fields.py: a copy's own field of the run file is in --help and schema, typed, checked, saved, compared at resume."""

import os
import shutil
import subprocess
import sys
import types

import pytest
import yaml

from engine.checkpointing.locate_weights import evaluation_args
from engine.config import find_addons as addons
from engine.config import parsing, run_config
from engine.config.errors import UsageError
from engine.config.show_help import format_help, run_file_schema, show_schema
from engine.find_tasks import OPTIONS
from src.fields import RunConfig
from tests.helpers import kit

BEGIN = """from dataclasses import dataclass

from engine.config import run_config
from engine.config.option import option


@dataclass(frozen=True)
class RunConfig(run_config.RunConfig):
"""
FIELDS = """
    calm: float = option("weight of the entropy in the loss", 0.0, min=0)
    note: str | None = option("a remark", may_change_on_resume=True)
    few: int = option("a bound of the evaluation", 3, from_checkpoint=True)
    names: list[str] = option("several names", [])
"""


@pytest.fixture
def fields(monkeypatch):
    """Return a function that gives src/fields.py another class for this test."""

    def write(text: str) -> None:
        module = types.ModuleType("src.fields")
        monkeypatch.setitem(sys.modules, "src.fields", module)  # dataclasses look it up
        exec(BEGIN + text, module.__dict__)
        run_config.config_class.cache_clear()

    yield write
    run_config.config_class.cache_clear()


def test_a_run_has_the_class_of_src():
    assert run_config.config_class() is RunConfig
    assert type(parsing.parse([], OPTIONS)[0]) is RunConfig


def test_own_fields_are_in_schema_and_help(fields):
    fields(FIELDS)
    whole = run_file_schema(OPTIONS)
    assert whole["properties"]["calm"] == {
        "default": 0.0,
        "description": "weight of the entropy in the loss",
        "minimum": 0,
        "type": "number",
        "x-group": "your fields",
    }
    shown = format_help(whole, "causal_lm", "train.py", everything=False)
    assert shown.index("your fields:") < shown.index("--calm X") < shown.index("--few N")


def test_own_fields_are_typed_and_checked(fields, capsys):
    fields(FIELDS)
    words = ["--calm", "0.5", "--note", "none", "--names", "a", "b"]
    cfg, _ = parsing.parse(words, OPTIONS)
    assert (cfg.calm, cfg.note, cfg.few, cfg.names) == (0.5, None, 3, ["a", "b"])
    with pytest.raises(UsageError) as error:
        parsing.parse(["--calm=-1", "--few=1.5", "--calmer=1"], OPTIONS)
    assert [line.split(":")[0].split("--")[1] for line in str(error.value).splitlines() if "--" in line] == [
        "calm",
        "few",
        "calmer",
    ]
    parsing.parse(["--names", "a", "--names", "b"], OPTIONS)
    assert "--names is given twice" in capsys.readouterr().err


def test_own_fields_stand_beside_those_of_addons(fields):
    if "techniques" not in addons.addon_names(""):
        pytest.skip("no techniques here")
    fields(FIELDS)
    cfg, _ = parsing.parse(["--calm", "0.5", "--techniques", "{clip_by_value: {limit: 0.5}}"], OPTIONS)
    assert (cfg.calm, cfg.few, cfg.addons[0].techniques) == (0.5, 3, {"clip_by_value": {"limit": 0.5}})


MUTANTS = [  # what a copy writes by mistake
    ("    calm: float = 0.0\n", "src/fields.py: calm has no option"),
    ("    pass\n\n\nRunConfig = None\n", "src/fields.py: it has no class RunConfig"),
]


@pytest.mark.parametrize("text, sentence", MUTANTS)
def test_mutant_field_without_option_is_named(fields, text, sentence):
    fields(text)
    with pytest.raises(UsageError, match=sentence):
        parsing.parse([], OPTIONS)
    with pytest.raises(UsageError, match=sentence):
        show_schema(OPTIONS)


@pytest.mark.cluster
def test_own_fields_are_saved_and_compared_at_resume(fields, tmp_path):
    """In a copy of the repository. One that decides the numbers may not change; eval.py takes what a checkpoint may say."""
    ignored = shutil.ignore_patterns(".*", "runs", "__pycache__", "results")
    copy = shutil.copytree(kit.REPOSITORY, tmp_path / "copy", ignore=ignored, symlinks=True)
    (copy / "src" / "fields.py").write_text(BEGIN + FIELDS)
    run = tmp_path / "run"
    argv = kit.flags(**kit.tiny_files(tmp_path), max_steps=2, output_dir=run, few=7)
    env = os.environ | {"ACCELERATE_USE_CPU": "true"}

    def train(**values) -> tuple[int, str]:
        command = [sys.executable, "train.py", *argv, *kit.flags(**values)]
        done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, timeout=300)
        return done.returncode, done.stdout + done.stderr

    code, output = train(calm=0.5, note="first")
    assert code == 0, output
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert (saved["calm"], saved["few"], saved["note"]) == (0.5, 7, "first")
    code, output = train(calm=0.25)
    assert code == 2
    assert "calm: 0.5 → 0.25" in output
    code, output = train(calm=0.5, note="second")
    assert code == 0, output
    assert "note: first → second" in output
    fields(FIELDS)
    base = evaluation_args(["--checkpoint", str(run)])[1]
    assert base is not None
    assert (base["few"], base["calm"]) == (7, 0.5)
    assert "note" not in base
