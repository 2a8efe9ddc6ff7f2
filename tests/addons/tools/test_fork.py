"""`make fork`: the copy has the tasks that are kept, nothing of the others, and passes its own tests."""

import os
import subprocess
import sys

import pytest

from src.config import fork
from src.config.errors import UsageError
from src.tasks import OPTIONS
from tests.helpers import kit

pytestmark = pytest.mark.skipif(not (kit.REPOSITORY / ".git").exists(), reason="the copy is made of tracked files")

OTHERS = [task for task in OPTIONS if task not in fork.ALWAYS_KEPT]


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A fork that keeps one more task than the core needs."""
    folder = tmp_path_factory.mktemp("fork") / "crane"
    fork.main([str(folder), "--tasks", *OTHERS[:1], "--name", "crane"])
    return folder


def test_copy_holds_the_named_tasks_and_nothing_of_the_others(copy):
    files = subprocess.run(["git", "ls-files"], cwd=copy, capture_output=True, text=True).stdout.splitlines()
    assert {"train.py", "src/tasks/causal_lm.py", "src/tasks/text_classification.py"} < set(files)
    assert not set(fork.RESULTS) & set(files)
    assert (copy / "README.md").read_text().startswith("# crane\n")
    assert {f"src/tasks/{task}.py" for task in OTHERS[:1]} <= set(files)
    for task in OTHERS[1:]:
        assert not [file for file in files if file.endswith((f"/{task}.py", f"/test_{task}.py"))]
        for file in (fork.REGISTRY, fork.RECIPES, "docs/architecture.md"):
            assert f"{task}.py" not in (copy / file).read_text()
            assert f'"{task}"' not in (copy / file).read_text()
    for path in copy.glob("tests/**/*.py"):  # a test of the core that runs these tasks, too, skips them
        text = path.read_text()
        assert "need_task" in text or not [task for task in OTHERS[1:] if f'"{task}"' in text], path


def test_tests_of_the_copy_pass(copy):
    """The map, links and run files of the documents, and the checks of the kept tasks that need no training."""
    words = ["tests/test_rooms.py", "tests/reporting/test_readme.py", "tests/conformance/test_task.py"]
    chosen = "rooms or run_files or links or eight or (text_classification and rows)"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-k", chosen, *words],
        cwd=copy,
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_folder_with_files_and_unknown_task_are_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=str(tmp_path)):
        fork.fork(tmp_path, [], "x")
    with pytest.raises(UsageError, match="did you mean causal_lm"):
        fork.fork(tmp_path / "new", ["casual_lm"], "x")
    assert not (tmp_path / "new").exists()


def test_documents_lose_what_names_a_removed_file():
    page = (
        "# T\n\nKept, with `src/tasks/a.py`. See\n`b.py`.\n\nSee `src/tasks/b.py`.\n\n"
        "| file |\n|---|\n| `tasks/a.py` |\n| `tasks/b.py` |\n\n* one\n* `tests/tasks/test_b.py`\n"
    )
    assert fork.without_mentions(page, {"src/tasks/b.py", "tests/tasks/test_b.py"}) == (
        "# T\n\nKept, with `src/tasks/a.py`.\n\n| file |\n|---|\n| `tasks/a.py` |\n\n* one\n"
    )
