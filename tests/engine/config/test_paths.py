"""~ and $NAME in every name of a file or folder; names that are too long. No folder named ~ or $NAME appears."""

import dataclasses
import os
import re

import pytest

from engine.config import addresses, find_addons, parsing, paths
from engine.config.errors import UsageError
from engine.config.find_addons import addons_with_fields
from engine.config.option import AS_GIVEN, declared_options, option, read_values, value_of_words
from engine.config.run_config import RunConfig
from engine.find_tasks import OPTIONS
from tests.helpers import kit

NO_PATHS = {"cache_per_node", "project", "run_name", "hub_model_id", "teacher_revision", "reference_revision", "optim"}
TOO_LONG = "c" * 300


def declared() -> list[tuple[type, str, object]]:
    """Return (dataclass, field, its rules) of the run file: of the core, of add-ons, of tasks."""
    kinds = [RunConfig, *addons_with_fields(), *(kind() for kind in OPTIONS.values())]
    return [(kind, name, rules) for kind in kinds for name, rules in declared_options(kind).items()]


def read_value(kind: type, name: str, value: object) -> object:
    values, errors = read_values({name: value}, declared_options(kind))
    assert errors == {}
    return values[name]


FIELDS = {name: kind for kind, name, rules in declared() if rules.is_path}


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The home folder, with a working directory beside it."""
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.delenv("NOT_SET", raising=False)
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home"


def test_every_field_about_files_is_declared_as_a_path():
    of_files = {name for _, name, rules in declared() if re.search(r"\b(folder|file|path|script)s?\b", rules.help)}
    assert len(FIELDS) >= 10
    assert of_files - NO_PATHS <= FIELDS.keys()


@pytest.mark.parametrize("name", FIELDS)
def test_home_and_variables_are_expanded_in_every_field(home, name):
    options = declared_options(FIELDS[name])
    is_list = str(options[name].type).startswith("list")
    for given, meant in (("~/x/*.y", f"{home}/x/*.y"), ("$HOME/x", f"{home}/x"), ("${HOME}x", f"{home}x")):
        assert read_value(FIELDS[name], name, given) == ([meant] if is_list else meant)
        assert value_of_words(options[name].type, [given]) == given
    for wrong, word in (("$NOT_SET/x", "NOT_SET"), ("~no_such_user/x", "~"), (TOO_LONG, "300")):
        _, errors = read_values({name: wrong}, options)
        assert word in errors[name]


def test_options_of_an_addon_are_expanded_where_they_are_declared_as_paths(home):
    @dataclasses.dataclass
    class Options:
        file: str = option("a file", is_path=AS_GIVEN)
        text: str = option("a text")

    assert read_value(Options, "file", "~/x") == f"{home}/x"
    assert read_value(Options, "text", "~/x") == "~/x"  # such as a prompt


def test_paths_of_a_run_file_of_a_mixture_and_of_flags(home):
    sources = {"a": {"train_file": "~/a.jsonl", "validation_file": ["$SCRATCH/v.jsonl"]}, "b": {"dataset_name": "~/b"}}
    values = {"mixture": sources, "cache_dir": "$SCRATCH/cache", "model_config": "~/model.yaml"}
    file = kit.write_yaml(home / "run.yaml", values)
    for argv in (["--config=~/run.yaml"], ["--config", str(file)]):
        cfg, options = parsing.parse([*argv, "--output_dir=~/run", "--chat_template=~/a.jinja"], OPTIONS)
        scratch = home.parent / "scratch"
        assert cfg.mixture["a"] == {"train_file": [f"{home}/a.jsonl"], "validation_file": [f"{scratch}/v.jsonl"]}
        assert cfg.mixture["b"] == {"dataset_name": f"{home}/b"}
        assert (cfg.output_dir, cfg.cache_dir, cfg.model_config) == (
            f"{home}/run",
            f"{scratch}/cache",
            f"{home}/model.yaml",
        )
        assert options.chat_template == f"{home}/a.jinja"
    (home / "again.yaml").write_text(saved := parsing.to_yaml(cfg, options))
    assert "~" not in saved
    assert parsing.parse(["--config", "~/again.yaml"], OPTIONS) == (cfg, options)


@pytest.mark.parametrize(
    "name", ["org/model", "runs/x", "../x~", "a$5.csv", "https://host/$HOME/~/a.jsonl", "hf://datasets/$HOME/a.jsonl"]
)
def test_other_names_stay_what_they_are(home, name):
    assert read_value(RunConfig, "train_file", name) == [name]


def test_file_whose_name_holds_a_dollar_or_a_tilde_is_found(home):
    (home.parent / "work" / "a$NOT_SET.jsonl").touch()
    (home.parent / "work" / "~x").mkdir()
    (home.parent / "work" / "~x" / "b.jsonl").touch()
    for name in ("a$NOT_SET.jsonl", f"{os.getcwd()}/a$NOT_SET.jsonl", "~x/b.jsonl", "~x/*.jsonl"):
        assert read_value(RunConfig, "train_file", name) == [name]


@pytest.mark.parametrize("name", ["$LOCAL_RANK/x", "~/$RANK", "x/~/y", "./~", "${NOT_SET:-x}/y", "$EMPTY/x", "a\0b"])
def test_names_that_stand_for_no_one_folder_are_refused(home, monkeypatch, name):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("EMPTY", "")
    with pytest.raises(UsageError, match="output_dir: ") as caught:
        parsing.parse(["--output_dir", name], OPTIONS)
    assert len(str(caught.value).splitlines()) == 1


def test_names_from_a_checkpoint_are_not_expanded(home):
    """Anyone may have written them, and a variable may hold a secret."""
    cfg, _ = parsing.parse([], OPTIONS, base={"dataset_name": "org/$SCRATCH", "train_file": ["~/a.jsonl"]})
    assert (cfg.dataset_name, cfg.train_file) == ("org/$SCRATCH", ["~/a.jsonl"])


@pytest.mark.parametrize("length, is_allowed", [(255, True), (256, False)])
@pytest.mark.parametrize("folder", ["", "runs/not/there/yet/", "[lr=1]*/"])
def test_name_longer_than_the_file_system_allows(home, folder, length, is_allowed):
    name = folder + "é" * (length // 2) + "x" * (length % 2)  # in bytes
    if is_allowed:
        assert paths.check_length(name) == name
        return
    with pytest.raises(UsageError, match=f"output_dir: .*{length} bytes.* 255"):
        parsing.parse(["--output_dir", name], OPTIONS)


def test_path_longer_than_the_file_system_allows(home):
    """Files within a run folder need room, too."""
    with pytest.raises(UsageError, match=r"cache_dir: .* bytes"):
        parsing.parse(["--cache_dir", "x/" * 1950], OPTIONS)


@pytest.mark.parametrize("flag", ["--config", "--checkpoint"])
def test_flags_that_are_no_fields(home, flag):
    (home / "x.yaml").write_text("{}")
    assert addresses.path_of_flag("~/x.yaml", flag) == str(home / "x.yaml")
    for name in ("$NOT_SET/x", TOO_LONG):
        codes, [output] = kit.run_command("eval.py", flag, name, folder=home)
        assert codes == [2], output
        assert f"error: {flag}: {name}: " in output


def test_address_where_the_add_on_is_not_here(tmp_path, monkeypatch):
    monkeypatch.setattr(find_addons, "ADDONS", tmp_path)
    with pytest.raises(UsageError, match=r"RUN: s3://bucket/run .* addons/stores/"):
        addresses.path_of_flag("s3://bucket/run", "RUN")
    assert addresses.path_of_flag("runs/a", "RUN") == "runs/a"


def test_tools_train_in_a_local_folder():
    """The mutant, a path made of the address, would be a folder named s3:."""
    assert addresses.local_folder("s3://bucket/runs/a") == addresses.local_folder("runs/a") == "runs/a"
