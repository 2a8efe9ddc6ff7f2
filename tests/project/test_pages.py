"""What lists the code: scaling.md, tracking.md, support.md, configs/schema.json, the recipes of tasks."""

import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from engine.checkpointing.tensor_files import weights_sha256
from engine.config.find_addons import missing_addon
from engine.config.paths import SCHEMA_FILE
from engine.find_tasks import OPTIONS
from tests.conformance import test_task
from tests.engine.config.test_schema import PROPERTIES
from tests.helpers import kit

DOCS = kit.REPOSITORY / "docs"
HAS_ALL_ADDONS = set(PROPERTIES["task"]["enum"]) <= OPTIONS.keys() and not any(map(missing_addon, PROPERTIES))


@pytest.mark.skipif(not HAS_ALL_ADDONS, reason="configs/schema.json also has the fields of add-ons that are not here")
def test_schema_is_what_the_fields_declare():
    """If this fails, run `make schema`."""
    command = [sys.executable, "train.py", "--schema"]
    done = subprocess.run(command, cwd=kit.REPOSITORY, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout == SCHEMA_FILE.read_text()


def test_page_of_support_is_that_of_the_lists():
    """Without some add-ons, it has fewer lines."""
    kit.need_addon("techniques")
    from benchmarks import support

    missing = {*support.page().splitlines()} - {*support.PAGE.read_text().splitlines()}
    assert not missing, "run benchmarks/support.py"


def test_version_heads_the_changelog():
    _, *sections = (kit.REPOSITORY / "CHANGELOG.md").read_text().split("\n## ")
    assert sections[0].split("\n")[0] == (kit.REPOSITORY / "engine/VERSION").read_text().strip()
    for section in sections:
        assert {"**New**", "**To do**", "**Numbers**", "**Data**"} <= {*re.findall(r"\*\*\w[\w ]*\*\*", section)}, (
            section
        )


def marks_of_a_merge(text: str) -> list[str]:
    """Return the lines that git leaves where two sides have changed the same lines."""
    return re.findall(r"^(?:<{7}|>{7}|\|{7}) .*", text, re.M)


def test_no_page_holds_marks_of_a_merge():
    """Python files with some do not even run; pages and settings do not say it."""
    folders = ("addons", "configs", "accelerate_configs", "docs", "engine", "samples", "src", "tests")
    pages = [*kit.REPOSITORY.glob("*.*"), *(path for name in folders for path in (kit.REPOSITORY / name).rglob("*.*"))]
    pages = [path for path in pages if path.suffix in (".md", ".yaml", ".json", ".toml", ".txt", ".mk", ".jinja")]
    assert len(pages) > 50
    assert {path.name: found for path in pages if (found := marks_of_a_merge(path.read_text()))} == {}
    assert marks_of_a_merge("a\n<<<<<<< HEAD\nb\n=======\nc\n>>>>>>> 1234567 (d)\n")


def test_every_task_has_a_recipe():
    assert test_task.tasks_without_recipe() == set(), "add a function, and its name to RECIPES"
    kit.need_addon("tasks")
    from tests.addons.tasks import test_conformance

    assert test_conformance.tasks_without_recipe() == set(), "add a function, and its name to RECIPES"


def test_guide_names_every_accelerate_file():
    names = {path.stem for path in (kit.REPOSITORY / "accelerate_configs").glob("*.yaml")}
    assert set(re.findall(r"`(\w+)\.yaml`", (DOCS / "scaling.md").read_text())) == names


def test_keys_of_train_lines_are_documented(tiny, tmp_path):
    run = kit.run_training(1, tmp_path / "run", *kit.flags(**tiny, max_steps=1, logging_steps=1))
    page = (DOCS / "tracking.md").read_text()
    documented = {key for row in re.findall(r"^\| (`.*?) \|", page, re.M) for key in re.findall(r"`(\w+)`", row)}
    of_devices = {"graphs", "tflops", "mfu", "gpu_memory_gib"}
    assert run.kind("train")[0].keys() - {"kind", "step"} == documented - of_devices


def test_hash_of_weights_as_the_page_computes_it(tmp_path):
    """In any number of files, for any type."""
    names: dict = {}
    exec(re.search(r"```python\n(def weights_sha256.*?)```", (DOCS / "tracking.md").read_text(), re.S)[1], names)
    tensors = {
        f"{i}.weight": torch.full((i, 3), 1 / 3, dtype=dtype) for i, dtype in enumerate((torch.bfloat16, torch.float64))
    }
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    save_file(tensors, tmp_path / "one" / "adapter_model.safetensors")
    for i, (name, value) in enumerate(tensors.items(), 1):
        save_file({name: value}, tmp_path / "two" / f"model-0000{i}-of-00002.safetensors")
    found = {
        function(tmp_path / name) for name in ("one", "two") for function in (weights_sha256, names["weights_sha256"])
    }
    assert len(found) == 1
