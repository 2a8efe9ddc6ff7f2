"""The README: its commands run (shortened), its links exist, its length."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine.config import parsing, validation
from engine.config.errors import UsageError
from engine.find_tasks import OPTIONS
from tests.helpers import kit

README = (kit.REPOSITORY / "README.md").read_text()
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", README, re.S) for line in block.strip().splitlines()]
PAGES = [*kit.REPOSITORY.glob("*.md"), *kit.REPOSITORY.glob("docs/**/*.md")]
TASKS_PAGE = (kit.REPOSITORY / "docs" / "tasks.md").read_text()
HUB = "finetune_hub.yaml"  # needs the network: only its run file is checked here


def shell(command: str) -> str:
    """Run a command in the repository, with this interpreter first in the path; return its output."""
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    env.pop("ACCELERATE_DEBUG_MODE", None)
    done = subprocess.run(command, shell=True, cwd=kit.REPOSITORY, capture_output=True, text=True, timeout=900, env=env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.cluster
def test_make_eval_prints_the_numbers_of_make_train(tmp_path):
    """Two processes train four steps on a file of one's own and evaluate 40 rows; one process evaluates them again."""
    assert COMMANDS[:3] == ["make train", "make test", "make eval"]
    assert "make train NPROC=2 ARGS='--train_file data/mine.jsonl --validation_file data/held_out.jsonl'" in COMMANDS
    mine = tmp_path / "mine.jsonl"
    kit.write_jsonl(mine, [{"text": f"def f{n}(x):\n    return x + {n}\n" * 20} for n in range(300)])
    short = f"--max_steps 4 --warmup_steps 1 --max_eval_examples 40 --sample_tokens 5 --resume never --output_dir {tmp_path}/run"
    text = shell(f"make train NPROC=2 ARGS='--train_file {mine} --validation_file {mine} {short}'")
    assert "def " in text.split("A sample of the trained model")[1]
    assert str(tmp_path / "run" / "final") in text
    reported = kit.Run(tmp_path / "run").kind("eval")[-1]
    assert str(reported["loss"]) in text
    assert {"perplexity", "bits_per_byte", "accuracy"} <= set(reported)
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["world_size"] == 2
    evaluated = shell(f"make eval RUN={tmp_path}/run")
    assert str(reported["loss"]) in evaluated
    assert json.loads((tmp_path / "run" / "eval.json").read_text()) == reported


@pytest.mark.cluster
@pytest.mark.parametrize("command", [c for c in COMMANDS if "train.py" in c and HUB not in c])
def test_commands_of_train_py(command):
    """Run each command of the README with --dry_run."""
    command = command if "--dry_run" in command else f"{command} --dry_run"
    assert "learning rate" in shell(command)


RUN_FILES = sorted((kit.REPOSITORY / "configs").glob("*.yaml"))
WITH_ADAPTER = [path for path in RUN_FILES if re.search(r"^peft:", path.read_text(), re.M)]


def check_run_file(path):
    """The run file is valid, and begins with its command."""
    try:
        validation.check(*parsing.parse(["--config", str(path)], OPTIONS))
    except UsageError as error:
        if not re.search(r"the add-on \S+; \S+ is not here|is an add-on that is not here", str(error)):
            raise
    if f"`{path.name}`" in TASKS_PAGE:  # else a run file of one's own
        first, _, rest = path.read_text().partition("\n")
        assert first.startswith("# accelerate launch --config_file accelerate_configs/")
        assert first.endswith(f"train.py --config configs/{path.name}")
        assert "# yaml-language-server: $schema=schema.json\n" in rest


def test_run_files_are_valid_and_begin_with_their_command():
    assert any(HUB in command for command in COMMANDS)
    for path in RUN_FILES:
        if path not in WITH_ADAPTER:
            check_run_file(path)


@pytest.mark.cluster
@pytest.mark.parametrize("path", WITH_ADAPTER, ids=lambda path: path.stem)
def test_run_files_of_adapters_are_valid(path):
    pytest.importorskip("peft", reason="peft is not installed: pip install -r requirements-extra.txt")
    if "load_in_" in path.read_text():
        pytest.importorskip(
            "bitsandbytes", reason="bitsandbytes is not installed: pip install -r requirements-extra.txt"
        )
    check_run_file(path)


def test_pages_name_what_exists():
    """Targets of make, files, and the flags of train.py and eval.py, in code of every page; folders in AGENTS.md."""
    agents = (kit.REPOSITORY / "AGENTS.md").read_text()
    assert (kit.REPOSITORY / "CLAUDE.md").read_text() == agents
    assert len(README.replace("|", " ").split()) <= 900
    assert len(agents.splitlines()) <= 120
    pages = [*PAGES, kit.REPOSITORY / "benchmarks" / "README.md"]
    code = "\n".join(part for page in pages for part in re.findall(r"`+([^`]+)`+", page.read_text()))
    targets = re.findall(r"^  ([a-z-]+)", shell("make"), re.M)
    assert set(re.findall(r"\bmake ([a-z-]+)", code)) <= set(targets)

    paths = re.findall(r"(?:accelerate_configs|configs|benchmarks|cluster/slurm)/[\w/]+\.(?:yaml|py|sbatch)", code)
    assert len(paths) > 20
    paths += re.findall(r"`((?:engine|src|addons|tests|accelerate_configs|configs|benchmarks)/[\w/.]*)`", agents)
    has_addons = (kit.REPOSITORY / "addons").exists()
    own = re.compile("NAME|yours|/[xX].yaml" if has_addons else "NAME|yours|/[xX].yaml|addons")
    assert [path for path in paths if not own.search(path) and not (kit.REPOSITORY / path).exists()] == []

    schema = json.loads((kit.REPOSITORY / "configs" / "schema.json").read_text())
    fields = {*schema["properties"], *schema["x-add-ons"], "config", "checkpoint", "help", "schema"}
    flags = {flag for line in re.findall(r"(?:train|eval)\.py (--.*)", code) for flag in re.findall(r"--(\w+)", line)}
    assert len(flags) > 5
    assert flags <= fields


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """Return the links of a page to a file or heading that does not exist."""
    broken = []
    for path, anchor in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]+))?\)", page.read_text()):
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(f"{path}#{anchor}" if anchor else path)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(kit.REPOSITORY)))
def test_links_between_documents(page):
    assert broken_links(page) == []


def test_mutant_broken_links_are_caught(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A `b` c\n[1](#a-b-c) [2](page.md#a-b-c) [3](#gone) [4](gone.md) [5](https://gone.org)\n")
    assert broken_links(page) == ["#gone", "gone.md"]


def test_index_of_docs_links_to_every_page():
    folder = kit.REPOSITORY / "docs"
    links = re.findall(r"\]\(([\w/]+\.md)", (folder / "README.md").read_text())
    pages = {str(page.relative_to(folder)) for page in folder.rglob("*.md")}
    assert {*links} == pages - {"README.md"}
