"""`make update`: the engine of an edited copy becomes that of the template, and what the copy owns stays to the byte."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.config.errors import UsageError
from engine.tools import manifest, update
from tests.helpers import kit

NAMES = [
    "train.py",
    "eval.py",
    "src",
    "engine",
    "configs",
    "requirements.txt",
    "pyproject.toml",
    "tests/helpers",
    "tests/src",
]
NEWS = "# Changes\n\n## 1.2.0\n\nAll data again.\n\n## 1.1.0\n\nA new name.\n\n## 1.0.0\n\nThe first one.\n"
ADDONS_PAGE = """| add-on | what | cost | tests |
|---|---|---|---|
| `tools/kept` | x | x | `tests/addons/tools/test_kept.py` |
| `tools/other` | x | x | `tests/addons/tools/test_other.py` |
| `schedules/far` | x | x | `tests/addons/schedules/test_far.py` |
"""
MERGED, CLASHING, GONE = "engine/loop/meter.py", "engine/models/router_loss.py", "engine/storage/gone.py"


def git(folder: Path, *words: str) -> str:
    author = ("-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *author, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout


def commit(folder: Path, tag: str | None = None) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "x")
    if tag:
        git(folder, "tag", tag)


def put(folder: Path, texts: dict[str, str | None]) -> None:
    """Write files; delete those whose text is None."""
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text) if text is not None else (folder / name).unlink()


def change(folder: Path, name: str, old: str, new: str) -> None:
    text = (folder / name).read_text()
    assert old in text, (name, old)
    (folder / name).write_text(text.replace(old, new, 1))


def first_line(folder: Path, name: str) -> str:
    return (folder / name).read_text().split("\n")[0]


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    """A template with the tags v1.0.0 and v1.2.0: this engine, and small add-ons."""
    folder = tmp_path_factory.mktemp("update") / "template"
    for name in NAMES:
        source, target = kit.REPOSITORY / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    (folder / "addons").mkdir()
    old = {f"addons/{name}.py": f'"""{name}."""\n' for name in ("tools/kept", "tools/other", "schedules/far")}
    old |= {f"tests/addons/tools/test_{name}.py": "" for name in ("kept", "other")}
    old |= {"addons/README.md": ADDONS_PAGE, GONE: '"""Old."""\n', "engine/storage/gone_too.py": '"""Old."""\n'}
    old |= {"engine/VERSION": "1.0.0\n", "CHANGELOG.md": NEWS.partition("## 1.2.0")[0], ".gitignore": "__pycache__/\n"}
    put(folder, old)
    manifest.write_manifest(folder)
    git(folder, "init", "-q", "-b", "main")
    commit(folder, "v1.0.0")

    new = {f"{name}.py": f'"""{name}, new."""\n' for name in ("addons/tools/kept", "addons/tools/other")}
    new |= {"addons/schedules/far.py": '"""New."""\n', "tests/addons/schedules/test_far.py": "", GONE: None}
    new |= {"engine/storage/gone_too.py": None, "engine/loop/fresh.py": '"""Fresh."""\n'}
    new |= {"tests/addons/tools/test_kept.py": "# new\n", "engine/VERSION": "1.2.0\n", "CHANGELOG.md": NEWS}
    put(folder, new)
    for name in (MERGED, "train.py", "eval.py", "src/tasks/causal_lm.py"):
        (folder / name).write_text((folder / name).read_text() + "\n\nNEW_CONSTANT = 1\n")
    change(folder, CLASHING, first_line(folder, CLASHING), first_line(folder, CLASHING) + " The template's words.")
    change(folder, "engine/startup.py", "\n", "\n# A comment of the new version.\n")
    change(folder, "pyproject.toml", "filelock>=", "filelock>=9")
    change(folder, "requirements.txt", "torch==", "torch==9.")
    change(folder, "requirements.txt", "filelock==", "newly_needed==1.0\nfilelock==")
    manifest.write_manifest(folder)
    commit(folder, "v1.2.0")
    return folder


@pytest.fixture
def delivered(template, tmp_path) -> Path:
    """A copy of v1.0.0 with a history of its own, without the add-ons tools/other and schedules/far."""
    copy = tmp_path / "copy"
    git(tmp_path, "clone", "-q", "-b", "v1.0.0", str(template), str(copy))
    shutil.rmtree(copy / ".git")
    shutil.rmtree(copy / "addons" / "schedules")
    put(copy, {"addons/tools/other.py": None, "tests/addons/tools/test_other.py": None})
    git(copy, "init", "-q", "-b", "main")
    commit(copy)
    return copy


@pytest.fixture
def copy(delivered) -> Path:
    """It has edited train.py, a task, pins and three files of the engine, and has files of its own."""
    (delivered / "train.py").write_text((delivered / "train.py").read_text() + "\n# mine\n")
    change(delivered, "src/tasks/causal_lm.py", first_line(delivered, "src/tasks/causal_lm.py"), '"""My task."""')
    change(delivered, MERGED, first_line(delivered, MERGED), '"""My words."""')
    change(delivered, CLASHING, first_line(delivered, CLASHING), '"""My words."""')
    change(delivered, "pyproject.toml", 'name = "', 'name = "my-')
    change(delivered, "requirements.txt", "filelock==", "mine==2.0\nfilelock==")
    own = {"src/tasks/mine.py": "from src.tasks.causal_lm import Options, Task\n", "engine/mine.py": "MINE = 1\n"}
    own |= {"addons/tools/mine.py": "", "notes.md": "mine\n", "engine/storage/gone_too.py": '"""Mine."""\n'}
    put(delivered, own)
    commit(delivered)
    return delivered


def untouched(folder: Path) -> dict[str, bytes]:
    """Return the texts of all files that an update shall leave alone."""
    names = git(folder, "ls-files").splitlines()
    ours = [
        name for name in names if not name.startswith(("engine/", "tests/engine", "addons/tools/kept", "tests/addons"))
    ]
    ours += ["engine/mine.py", "engine/storage/gone_too.py"]
    return {name: (folder / name).read_bytes() for name in ours if not name.startswith(("requirements", "pyproject"))}


def check_own_work_stays(folder: Path, before: dict[str, bytes]) -> None:
    assert untouched(folder) == before
    assert first_line(folder, MERGED) == '"""My words."""'
    assert '"""My words."""' in (folder / CLASHING).read_text()


# ---- an edited copy ----------------------------------------------------------------------------------------------------


def test_engine_is_new_and_own_files_stay_to_the_byte(copy, template, capsys):
    before = untouched(copy)
    changes = update.update(copy, str(template), "v1.2.0")
    check_own_work_stays(copy, before)
    update.report(changes)
    shown = capsys.readouterr().out
    assert "Engine 1.0.0 -> 1.2.0" in shown
    assert "All data again." in shown
    assert "A new name." in shown
    assert "The first one." not in shown

    assert (copy / "engine/VERSION").read_text() == "1.2.0\n"
    assert (copy / "engine/startup.py").read_bytes() == (template / "engine/startup.py").read_bytes()
    assert (copy / "engine/loop/fresh.py").exists()
    assert changes.deleted == [GONE]
    assert not (copy / GONE).exists()
    assert (copy / MERGED).read_text().endswith("NEW_CONSTANT = 1\n")
    assert changes.merged == [MERGED, CLASHING, "pyproject.toml"]
    project = (copy / "pyproject.toml").read_text()
    assert 'name = "my-' in project
    assert "filelock>=9" in project
    assert changes.own == ["engine/mine.py"]
    assert first_line(copy, "addons/tools/kept.py") == '"""addons/tools/kept, new."""'
    assert not list(copy.glob("addons/schedules/*")) + list(copy.glob("addons/tools/other.py"))
    assert not (copy / "tests/addons/schedules").exists()
    assert "engine/mine.py" in shown


def test_conflicts_are_named_and_marked_as_git_does(copy, template, capsys):
    changes = update.update(copy, str(template), "v1.2.0")
    first, second = changes.conflicts
    assert first.startswith(f"{CLASHING}: both of you")
    assert second.startswith("engine/storage/gone_too.py: you have edited it, the new version has deleted it")
    update.report(changes)
    shown = capsys.readouterr().out
    assert all(f"CONFLICT {sentence}" in shown for sentence in changes.conflicts)
    text = (copy / CLASHING).read_text()
    assert text.startswith('<<<<<<< this copy\n"""My words."""\n')
    assert "The template's words." in text
    assert git(copy, "log", "--oneline").count("\n") == 2


def test_mutant_update_that_overwrites_is_caught(copy, template):
    """As after `make manifest` in a copy: each edit counts as text that was delivered."""
    before = untouched(copy)
    manifest.write_manifest(copy)
    commit(copy)
    update.update(copy, str(template), "v1.2.0")
    with pytest.raises((AssertionError, FileNotFoundError)):
        check_own_work_stays(copy, before)


def test_second_update_has_nothing_to_do(copy, template):
    update.update(copy, str(template), "v1.2.0")
    commit(copy)
    changes = update.update(copy, str(template), "v1.2.0")
    assert git(copy, "status", "--porcelain") == ""
    assert changes.conflicts == changes.merged == changes.deleted == []


def test_pins_of_the_copy_stay_and_new_ones_come(copy, template):
    changes = update.update(copy, str(template), "v1.2.0")
    text = (copy / "requirements.txt").read_text()
    assert "mine==2.0\n" in text
    assert "newly_needed==1.0\n" in text
    assert "torch==9." in text
    assert [line.split()[1] for line in changes.pins] == ["torch", "newly_needed"]


def test_pins_that_a_copy_changed_or_removed_stay_so():
    base, ours = "a==1  # why\nb==1\nc==1\nd==1\n", "a==1  # why\nb==2\nd==1.5\ne==3"
    text, lines, conflicts = update.merge_pins(ours, "a==2  # why\nb==1\nc==2\nd==2\n", base)
    assert text == "a==2  # why\nb==2\nd==1.5\ne==3"
    assert lines == ["a 1 -> 2"]
    assert conflicts == ["your d==1.5 stays, the new version has 2"]
    assert update.merge_pins("a==1\nb==1\n", "a==1\n", "a==1\nb==1\n")[0] == "a==1\n"
    text, lines, conflicts = update.merge_pins("a==1\nmine==1", "a==2\nb==1  # why\n", None)
    assert text == "a==2\nmine==1\nb==1  # why\n"
    assert lines == ["a 1 -> 2", "b new -> 1"]
    assert conflicts == []


def test_files_that_the_copy_deleted_stay_away(delivered, template, capsys):
    put(delivered, {"engine/startup.py": None, "engine/text/chat.py": None})
    commit(delivered)
    changes = update.update(delivered, str(template), "v1.2.0")
    assert changes.away == ["engine/startup.py"]  # the other one is the same in both versions
    assert not (delivered / "engine/startup.py").exists()
    assert not (delivered / "engine/text/chat.py").exists()
    update.report(changes)
    assert "deleted, left away: engine/startup.py\n" in capsys.readouterr().out


def test_lock_of_a_copy_with_packages_of_its_own_stays(delivered, template, tmp_path):
    newer = shutil.copytree(template, tmp_path / "newer")
    (newer / "uv.lock").write_text("new\n")
    (delivered / "uv.lock").write_text("mine\n")
    commit(delivered)
    [sentence] = [each for each in update.update(delivered, str(newer), None).conflicts if "uv.lock" in each]
    assert "make lock" in sentence
    assert (delivered / "uv.lock").read_text() == "mine\n"


def test_addons_that_make_fork_left_out_stay_away(delivered, template):
    """Its MANIFEST does not list them; those of a copy by "Use this template" it does."""
    names = {"addons/tools/other.py", "addons/schedules/far.py", "tests/addons/schedules/test_far.py"}
    for written_by_fork in (False, True):
        copy = shutil.copytree(delivered, delivered.parent / str(written_by_fork))
        if written_by_fork:
            manifest.write_manifest(copy)
            commit(copy)
        changes = update.update(copy, str(template), "v1.2.0")
        assert changes.conflicts == changes.away == []
        assert not [name for name in names if (copy / name).exists()]
        assert first_line(copy, "addons/tools/kept.py") == '"""addons/tools/kept, new."""'


def test_pins_are_listed_where_requirements_are_unedited(delivered, template):
    changes = update.update(delivered, str(template), "v1.2.0")
    assert [line.split()[1] for line in changes.pins] == ["torch", "newly_needed"]
    assert (delivered / "requirements.txt").read_bytes() == (template / "requirements.txt").read_bytes()


def test_addons_that_from_lacks_stay(delivered, template, tmp_path, capsys):
    """FROM is another copy, by make fork: its MANIFEST lists neither these add-ons nor what they share in their room."""
    shared, kept = "addons/tools/_shared.py", "addons/tools/kept.py"
    put(delivered, {shared: "", "tests/addons/tools/helper.py": ""})
    manifest.write_manifest(delivered)
    commit(delivered)
    other = shutil.copytree(template, tmp_path / "other", ignore=shutil.ignore_patterns(".git", "addons"))
    manifest.write_manifest(other)
    changes = update.update(delivered, str(other), None)
    assert changes.addons == ["tools/kept"]
    assert changes.conflicts == []
    stay = [shared, kept, "tests/addons/tools/helper.py", "addons/README.md"]
    assert all((delivered / name).exists() for name in stay)
    update.report(changes)
    assert "Add-ons that FROM lacks, left alone" in capsys.readouterr().out

    commit(delivered)
    update.update(delivered, str(template), "v1.2.0")  # which knows their texts as delivered
    assert first_line(delivered, kept) == '"""addons/tools/kept, new."""'


def test_line_endings_are_no_edit(delivered, template):
    for name in ("engine/startup.py", MERGED):
        text = (delivered / name).read_bytes()
        (delivered / name).write_bytes(text.replace(b"\n", b"\r\n"))
    change(delivered, MERGED, first_line(delivered, MERGED), '"""My words."""')
    commit(delivered)
    changes = update.update(delivered, str(template), "v1.2.0")
    assert changes.merged == [MERGED]
    assert changes.conflicts == []
    assert (delivered / "engine/startup.py").read_bytes() == (template / "engine/startup.py").read_bytes()


def test_binary_and_added_files_have_their_own_reasons(delivered, template, tmp_path):
    picture = "engine/picture.bin"
    (delivered / picture).write_bytes(b"\0\r\n1")
    manifest.write_manifest(delivered)
    put(delivered, {"engine/loop/fresh.py": "MINE = 1\n"})
    commit(delivered)
    (delivered / picture).write_bytes(b"\0\r\n2")
    commit(delivered)
    newer = shutil.copytree(template, tmp_path / "newer", ignore=shutil.ignore_patterns(".git"))
    (newer / picture).write_bytes(b"\0\r\n3")
    (newer / picture).chmod(0o755)
    (newer / "engine/run_me.sh").touch(0o755)
    added, binary = update.update(delivered, str(newer), None).conflicts
    assert "fresh.py: you have added it" in added
    assert "picture.bin: both" in binary
    assert "binary" in binary
    assert (delivered / f"{picture}.new").read_bytes() == b"\0\r\n3"
    assert (delivered / "engine/run_me.sh").stat().st_mode & 0o111

    commit(delivered)
    with pytest.raises(UsageError, match=r"fresh\.py\.new is an open conflict"):
        update.update(delivered, str(template), None)


# ---- where FROM is -----------------------------------------------------------------------------------------------------


def test_folder_without_git_and_texts_that_nobody_has(copy, template, tmp_path):
    """The text as delivered is in the copy's history; without it, the new file stands beside the copy's."""
    plain = shutil.copytree(template, tmp_path / "plain", ignore=shutil.ignore_patterns(".git"))
    shutil.rmtree(copy / ".git")
    git(copy, "init", "-q")
    commit(copy)
    before = untouched(copy)
    changes = update.update(copy, str(plain), None)
    check_own_work_stays(copy, before)
    assert changes.merged == []
    assert [sentence.split(":")[0] for sentence in changes.conflicts][:2] == [MERGED, CLASHING]
    assert (copy / f"{MERGED}.new").read_bytes() == (template / MERGED).read_bytes()


def test_history_of_the_template_has_the_text_as_delivered(copy, template):
    """The copy's history begins after its edit."""
    shutil.rmtree(copy / ".git")
    git(copy, "init", "-q")
    commit(copy)
    assert update.update(copy, f"file://{template}", "main").merged == [MERGED, CLASHING, "pyproject.toml"]


def test_folder_is_taken_as_it_stands(delivered, template, tmp_path):
    newer = shutil.copytree(template, tmp_path / "newer")
    put(newer, {"engine/loop/not_committed.py": ""})
    update.update(delivered, str(newer), None)
    assert (delivered / "engine/loop/not_committed.py").exists()


# ---- refused -----------------------------------------------------------------------------------------------------------


def test_uncommitted_work_and_wrong_sources_are_refused(copy, template, tmp_path):
    def refused(match: str, *words):
        before = untouched(copy)
        with pytest.raises(UsageError, match=match):
            update.update(copy, *words)
        assert untouched(copy) == before
        assert (copy / "engine/VERSION").read_text() == "1.0.0\n"

    refused("no tag, branch or commit v9.*tags: v1.2.0, v1.0.0", str(template), "v9")
    refused("is no folder, and git cannot clone it", str(tmp_path / "nowhere"), None)
    refused("FROM: .* is this copy", str(copy), None)
    (tmp_path / "old").mkdir()
    refused(r"FROM has no engine/VERSION.*docs/forking\.md", str(tmp_path / "old"), None)
    older = shutil.copytree(template, tmp_path / "older")
    (older / "engine/VERSION").write_text("0.9\n")
    refused("FROM has version 0.9, this copy 1.0.0", str(older), None)
    (older / "engine/VERSION").write_text("1.1\n")
    (older / "engine/link.py").symlink_to("/etc/passwd")
    refused("link.py is a link", str(older), None)

    (older / "engine/link.py").unlink()
    (older / "tests/helpers/kit.py").unlink()
    refused(r"FROM lacks files .*tests/helpers/kit\.py", str(older), None)
    (older / "engine/MANIFEST").unlink()
    refused("FROM has no engine/MANIFEST", str(older), None)
    linked = shutil.copytree(template, tmp_path / "linked")
    shutil.move(linked / "engine", tmp_path / "engine")
    (linked / "engine").symlink_to(tmp_path / "engine")
    refused("engine is a link", str(linked), None)

    (copy / "new.txt").touch()
    refused(r"uncommitted changes or new files \(new\.txt\)", str(template), None)
    (copy / "new.txt").unlink()
    (copy / "train.py").write_text("mine\n")
    refused(r"uncommitted changes or new files \(train\.py\)", str(template), None)
    shutil.rmtree(copy / ".git")
    with pytest.raises(UsageError, match="git does not track"):
        update.update(copy, str(template), None)


def test_folder_that_is_a_link_is_refused(copy, template, tmp_path):
    for name in ("tests/helpers", "tests"):
        shutil.move(copy / name, tmp_path / "elsewhere" / name)
        (copy / name).symlink_to(tmp_path / "elsewhere" / name)
        commit(copy)
        with pytest.raises(UsageError, match=f"{name} is a link"):
            update.update(copy, str(template), None)
        assert git(copy, "status", "--porcelain") == ""


def test_requirements_that_are_not_utf8(copy, template):
    (copy / "requirements.txt").write_bytes(b"# caf\xe9\n" + (copy / "requirements.txt").read_bytes())
    commit(copy)
    with pytest.raises(UsageError, match=r"requirements\.txt of this copy, line 1: byte 0xe9"):
        update.update(copy, str(template), None)


def test_failure_while_writing_is_taken_back(copy, template, tmp_path):
    """A file of the copy is where FROM has a folder; files before it in the alphabet were written by then."""
    newer = shutil.copytree(template, tmp_path / "newer")
    put(newer, {"engine/zone/new.py": "", "engine/data/new/new.py": ""})
    put(copy, {"engine/zone": "mine\n"})
    commit(copy)
    before = manifest.engine_files(copy)
    with pytest.raises(UsageError, match=r"engine/zone.*all files are as they were"):
        update.update(copy, str(newer), None)
    assert manifest.engine_files(copy) == before
    assert git(copy, "status", "--porcelain") == ""
    assert not (copy / "engine/data/new").exists()


def test_manifest_is_not_written_in_a_copy(copy):
    """Else the next update would take the copy's edits for the template's text."""
    done = subprocess.run([sys.executable, "-m", "engine.tools.manifest"], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 2
    assert "make manifest is for the template" in done.stderr
    assert git(copy, "status", "--porcelain") == ""


# ---- the whole way -----------------------------------------------------------------------------------------------------


def make_update(folder: Path, *words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "engine.tools.update", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.cluster
def test_updated_copy_trains_the_same_numbers(delivered, template, tmp_path):
    """The program runs in the copy; exit code 0; the new engine's schema has the fields of the copy's task."""
    put(delivered, {"src/tasks/mine.py": "from src.tasks.causal_lm import Options, Task\n"})
    commit(delivered)
    flags = kit.flags(task="mine", **kit.tiny_files(tmp_path), max_steps=2, logging_steps=1)

    def train(name: str) -> kit.Run:
        argv = [*flags, "--output_dir", str(tmp_path / name)]
        subprocess.run([sys.executable, "train.py", *argv], cwd=delivered, check=True, timeout=300)
        return kit.Run(tmp_path / name)

    before = train("before")
    done = make_update(delivered, str(template), "--ref", "v1.2.0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"mine"' in (delivered / "configs" / "schema.json").read_text()
    after = train("after")
    assert kit.same(before.weights, after.weights)
    assert kit.timeless(before.folder) == kit.timeless(after.folder)


def test_failing_schema_is_named_and_conflicts_end_with_1(copy, template):
    (copy / "train.py").write_text("raise ValueError('my words')\n")
    commit(copy)
    done = make_update(copy, str(template))
    assert done.returncode == 1
    assert "CONFLICT configs/schema.json: it is as it was, because train.py --schema fails" in done.stdout
    assert "my words" in done.stdout
    assert "Next: resolve the conflicts" in done.stdout.splitlines()[-1]
    assert make_update(copy, str(template)).returncode == 2  # not committed
