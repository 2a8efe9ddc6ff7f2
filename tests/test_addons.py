"""The core knows no add-on by name, and trains, evaluates and passes its tests without addons/ and tests/addons/."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import kit

# Each lists a folder, and imports the files that a run file names.
LISTS = {"src/config/addons.py", "src/storage/cache_folder.py"}


# ---- no import by name ---------------------------------------------------------------------------------------------------


def named_in(source: str) -> list[str]:
    """Return the modules of addons/ and samples/ that a file imports, or names in a string."""
    return re.findall(r"^ *(?:from|import) (?:addons|samples)\b|[\"'](?:addons\.\w+|samples)\.\w+[\"']", source, re.M)


def test_core_names_no_addon_and_only_the_lists_import_what_they_find():
    for path in (kit.REPOSITORY / "train.py", kit.REPOSITORY / "eval.py", *(kit.REPOSITORY / "src").rglob("*.py")):
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


# ---- without addons/ -----------------------------------------------------------------------------------------------------

SHORT = kit.flags(max_steps=3, warmup_steps=1, max_length=64, max_eval_examples=8, eval_steps=2, sample_tokens=1)
# Fast tests of the core, which also look at documents, run files, fields and the plan.
SELECTION = ["tests/test_rooms.py", "tests/config/test_schema.py", "tests/data/test_batch_plan.py"]
SELECTION += ["tests/reporting/test_readme.py::test_run_files_are_valid_and_begin_with_their_command"]
SELECTION += ["tests/reporting/test_readme.py::test_links_between_documents"]


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


def test_core_alone_trains_and_evaluates_to_the_same_digits(core, tmp_path):
    """Without arguments, the sample of the README's first command; eval.py takes the newest run."""
    flags = [*SHORT, "--cache_dir", str(tmp_path / "cache")]
    assert "configs/stdlib_lm.yaml" in python(core, "train.py", *flags).splitlines()[0]
    assert not (core / "data").exists()  # the sample is not written into the clone
    alone, full = core / "runs" / "stdlib_lm", tmp_path / "full"
    assert "runs/stdlib_lm" in python(core, "eval.py", "--cache_dir", tmp_path / "cache").splitlines()[0]
    python(kit.REPOSITORY, "train.py", *flags, "--output_dir", full)
    assert kit.timeless(alone) == kit.timeless(full)
    assert kit.same(kit.Run(alone).weights, kit.Run(full).weights)
    assert json.loads((alone / "eval.json").read_text())["loss"] == kit.Run(full).kind("eval")[-1]["loss"]


@pytest.mark.cluster
def test_core_alone_passes_its_fast_tests(core):
    assert " passed" in python(core, "-m", "pytest", "-x", "-q", *SELECTION)


def test_all_tests_of_the_core_are_collected(core):
    assert "error" not in python(core, "-m", "pytest", "--collect-only", "-q", "tests").splitlines()[-1]


def test_missing_addon_is_one_sentence_and_exit_code_2(core):
    flags = kit.flags(config="configs/stdlib_lm.yaml", peft="{type: lora, r: 4}", dry_run=True)
    [line] = python(core, "train.py", *flags, code=2).strip().splitlines()
    if list((kit.REPOSITORY / "addons").glob("adapters/peft*")):
        assert "addons/adapters/peft" in line
