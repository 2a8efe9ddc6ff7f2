"""The core knows no add-on by name, calls the methods of Addon, and trains, evaluates and passes its tests without addons/ and tests/addons/."""

import ast
import dataclasses
import importlib.util
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from engine.config.addon import Addon
from engine.config.errors import UsageError
from engine.config.find_addons import addon_classes, addon_names, addons_with_fields, run_config
from engine.config.run_config import RunConfig, field_values
from tests.helpers import kit

# Each lists a folder, and imports the files that a run file names.
LISTS = {"engine/config/find_addons.py", "engine/storage/cache_folder.py"}


# ---- no import by name ---------------------------------------------------------------------------------------------------


def named_in(source: str) -> list[str]:
    """Return the modules of addons/ and samples/ that a file imports, or names in a string."""
    return re.findall(r"^ *(?:from|import) (?:addons|samples)\b|[\"'](?:addons\.\w+|samples)\.\w+[\"']", source, re.M)


def test_core_names_no_addon_and_only_the_lists_import_what_they_find():
    for path in (
        kit.REPOSITORY / "train.py",
        kit.REPOSITORY / "eval.py",
        *(kit.REPOSITORY / "engine").rglob("*.py"),
        *(kit.REPOSITORY / "src").rglob("*.py"),
    ):
        assert named_in(path.read_text()) == [], path
        is_list = str(path.relative_to(kit.REPOSITORY)) in LISTS
        assert bool(re.search(r'import_module\(f?"(addons|samples)\b', path.read_text())) == is_list, path


@pytest.mark.parametrize(
    "mutant",
    [
        "import addons.tasks.seq2seq",
        "def lazy():\n    from addons.techniques import sam",
        "import_module('addons.techniques.sam')",
    ],
)
def test_mutant_import_is_caught(mutant):
    assert len(named_in(f'"""Docstrings may name addons.tasks.seq2seq."""\n{mutant}\n')) == 1


# ---- no name of an add-on, or of a field of one --------------------------------------------------------------------------

# Names that mean something else in the core: English words, files of a run, its own module of techniques.
OWN_WORDS = {"chat", "evaluate", "fork", "ledger", "merge", "predict", "preference", "preview", "same", "techniques"}
EXCEPTIONS = {
    ("engine/distributed/init_accelerator.py", "torchao"),  # the package that fp8 needs
    ("engine/config/parsing.py", "deepspeed"),  # a field of the HF Trainer
    ("engine/models/config_and_tokenizer.py", "peft"),  # the package whose files on the Hub are refused
}


def names_of_addons() -> set[str]:
    """Return the names of all add-ons and of the fields that they declare."""
    rooms = [path.name for path in (kit.REPOSITORY / "addons").glob("[!_.]*") if path.is_dir()]
    names = {name for room in rooms if room != "streaming" for name in addon_names(room)}
    fields = {field.name for kind in addons_with_fields() for field in dataclasses.fields(kind)}
    return names | fields


def names_in(source: str, names: set[str]) -> set[str]:
    """Return which of `names` a file has as identifiers, or as words of its strings that are no docstrings."""
    tree = ast.parse(source)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ""  # a docstring
        for _, value in ast.iter_fields(node):
            if isinstance(value, str):
                found |= names & set(re.findall(r"\w+", value))
    return found


def test_core_uses_no_name_of_an_addon():
    names = names_of_addons()
    for path in [*(kit.REPOSITORY / "engine").rglob("*.py"), *(kit.REPOSITORY / "src").rglob("*.py")]:
        file = str(path.relative_to(kit.REPOSITORY))
        allowed = OWN_WORDS | {name for where, name in EXCEPTIONS if where == file}
        assert names_in(path.read_text(), names) - allowed == set(), file


@pytest.mark.parametrize(
    "mutant",
    [
        'if getattr(cfg, "streaming", False):\n    pass',
        "streaming = cfg.streaming",
        'OFTEN = "peft streaming"',
        "text = f'give {name} or streaming: true'",
        "def read(streaming):\n    pass",
        "call(streaming=True)",
    ],
)
def test_mutant_name_of_an_addon_is_caught(mutant):
    assert names_in(f'"""A docstring may explain streaming."""\n{mutant}\n', {"streaming"}) == {"streaming"}


# ---- the class Addon ----------------------------------------------------------------------------------------------------

WITH_FIELDS = [
    "adapters/low_bit_base",
    "adapters/peft",
    "data/curriculum",
    "data/held_out",
    "data/row_weights",
    "data/size_warmups",
]
WITH_FIELDS += ["models/stochastic_depth", "techniques", "tools/hub_upload"]
PUBLIC = {name for name in vars(Addon) if not name.startswith("_")}


def test_every_method_of_addon_is_defined_and_called():
    for name in WITH_FIELDS:
        kit.need_addon(name)
    defined = set().union(*(vars(kind) for kind in addons_with_fields()))
    core = "".join(
        path.read_text() for house in ("engine", "src", "addons") for path in (kit.REPOSITORY / house).rglob("*.py")
    )
    assert PUBLIC - defined == set()
    assert {name for name in PUBLIC if not re.search(rf"\b(each|addon)\.{name}\b", core)} == set()


def test_addon_has_a_docstring_for_each_method():
    assert [name for name in PUBLIC if callable(getattr(Addon, name)) and not getattr(Addon, name).__doc__] == []


@pytest.mark.parametrize(
    ("name", "words"),
    [("chnge_config", "did you mean change_config"), ("Errors", "did you mean errors"), ("helper", "begins with _")],
)
def test_misspelled_method_is_refused(name, words, tmp_path):
    """With its file, its class and the name that is meant; functions found by a string would never be called."""
    [mine] = addon_classes(module_with("change_config", tmp_path))
    assert mine.__name__ == "Mine"
    with pytest.raises(UsageError, match=rf"mine: Mine has `{name}`.*{words}"):
        addon_classes(module_with(name, tmp_path))


def test_a_run_holds_the_addons_that_it_uses():
    """Each is made once, with its fields; one whose fields all have their defaults is not used."""
    kit.need_addon("data/held_out")
    kit.need_addon("streaming")
    cfg = run_config(validation_split=0.25, streaming=False, seed=3)
    [addon] = cfg.addons
    assert addon.validation_split == 0.25
    assert dataclasses.replace(cfg, seed=4).addons[0] is addon
    assert pickle.loads(pickle.dumps(cfg)) == cfg
    assert run_config(**field_values(cfg)) == cfg
    assert "streaming" not in field_values(cfg)
    with pytest.raises(TypeError, match="validation_splt"):
        run_config(validation_splt=0.25)


def module_with(name: str, folder: Path) -> ModuleType:
    """Return a module with an add-on that has the method `name`."""
    text = "from engine.config.addon import Addon\nfrom engine.config.option import option\n"
    text += "from dataclasses import dataclass\n\n\n@dataclass(frozen=True)\nclass Mine(Addon):\n"
    text += f'    mine: bool = option("", False)\n\n    def {name}(self, cfg, config):\n        "As Addon."\n'
    (folder / "mine.py").write_text(text)
    spec = importlib.util.spec_from_file_location("mine", folder / "mine.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["mine"] = module  # dataclasses look it up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules["mine"]
    return module


def test_replacing_methods_of_addon_leave_it_to_the_core():
    each, cfg = Addon(), RunConfig()
    assert [each.find_sources(cfg, "train"), each.fetch_source(1, cfg), each.open_source(cfg, 1, 1)] == [None] * 3
    assert [each.step_sizes(cfg, 1), each.make_techniques(cfg)] == [None] * 2
    assert (each.change_plan(1, cfg, 1, 1), each.change_rows(1, [], 1)) == (1, [])


# ---- without addons/ -----------------------------------------------------------------------------------------------------

SHORT = kit.flags(max_steps=3, warmup_steps=1, max_length=64, max_eval_examples=8, eval_steps=2, sample_tokens=1)
# Fast tests of the core, which also look at documents, run files, fields and the plan.
SELECTION = [
    "tests/project/test_rooms.py",
    "tests/engine/config/test_schema.py",
    *(f"tests/project/test_{name}.py" for name in ("techniques_page", "addon_rows", "addon_imports", "pages")),
    "tests/engine/plan/test_batch_plan.py",
]
SELECTION += ["tests/project/test_readme.py::test_run_files_are_valid_and_begin_with_their_command"]
SELECTION += ["tests/project/test_readme.py::test_links_between_documents"]


@pytest.fixture(scope="module")
def core(tmp_path_factory) -> Path:
    """A copy of the repository without addons/ and tests/addons/."""
    if not (kit.REPOSITORY / ".git").exists():
        pytest.skip("the copy is made of what git does not ignore")
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(words, cwd=kit.REPOSITORY, capture_output=True, text=True, check=True).stdout.splitlines()
    folder = tmp_path_factory.mktemp("core") / "copy"
    for name in names:
        if not name.startswith(("addons/", "tests/addons/")) and (kit.REPOSITORY / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(kit.REPOSITORY / name, folder / name)
    return folder


def python(folder: Path, *words, code: int = 0) -> str:
    """Run Python in `folder`; return what it prints, on stderr if it shall end with another exit code than 0."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=env, timeout=600, check=False)
    assert done.returncode == code, (done.stdout + done.stderr)[-4000:]
    return done.stderr if code else done.stdout


@pytest.mark.cluster
def test_core_alone_trains_and_evaluates_to_the_same_digits(core, tmp_path):
    """Without arguments, the sample of the README's first command; eval.py takes the newest run."""
    flags = [*SHORT, "--cache_dir", str(tmp_path / "cache")]
    assert "configs/stdlib_lm.yaml" in python(core, "train.py", *flags).splitlines()[1]
    assert not (core / "data").exists()  # the sample is not written into the clone
    alone, full = core / "runs" / "stdlib_lm", tmp_path / "full"
    assert "runs/stdlib_lm" in python(core, "eval.py", "--cache_dir", tmp_path / "cache").splitlines()[1]
    python(kit.REPOSITORY, "train.py", *flags, "--output_dir", full)
    assert kit.timeless(alone) == kit.timeless(full)
    assert kit.same(kit.Run(alone).weights, kit.Run(full).weights)
    assert json.loads((alone / "eval.json").read_text())["loss"] == kit.Run(full).kind("eval")[-1]["loss"]


@pytest.mark.cluster
def test_core_alone_passes_its_fast_tests(core):
    assert " passed" in python(core, "-m", "pytest", "-x", "-q", *SELECTION)


@pytest.mark.cluster
def test_all_tests_of_the_core_are_collected(core):
    assert "error" not in python(core, "-m", "pytest", "--collect-only", "-q", "tests").splitlines()[-1]


def test_missing_addon_is_one_sentence_and_exit_code_2(core):
    flags = kit.flags(config="configs/stdlib_lm.yaml", peft="{type: lora, r: 4}", dry_run=True)
    [line] = python(core, "train.py", *flags, code=2).strip().splitlines()
    if list((kit.REPOSITORY / "addons").glob("adapters/peft*")):
        assert "addons/adapters/peft" in line
