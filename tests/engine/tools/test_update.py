"""`make update`: the engine of an edited copy becomes that of the template, and what the copy owns stays to the byte."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.config.errors import UsageError
from engine.tools import update
from tests.helpers import kit

NAMES = ["train.py", "eval.py", "src", "engine", "configs", "requirements.txt", "pyproject.toml", "tests/helpers"]
NEWS = "# Changes\n\n## 1.2.0\n\nAll data again.\n\n## 1.1.0\n\nA new name.\n\n## 1.0.0\n\nThe first one.\n"
ADDONS_PAGE = """| add-on | what | cost | tests |
|---|---|---|---|
| `tools/kept` | x | x | `tests/addons/tools/test_kept.py`, `tests/addons/tools/test_more.py` |
| `tools/other` | x | x | `tests/addons/tools/test_other.py` |
| `schedules/far` | x | x | `tests/addons/schedules/test_far.py` |
"""
MERGED, CLASHING, GONE = "engine/run/meter.py", "engine/models/router_loss.py", "engine/storage/gone.py"
EDITED_AND_GONE, BINARY = "engine/storage/gone_too.py", "engine/picture.bin"
NEW_OF_KEPT = ["addons/tools/_shared.py", "addons/schedules/near.py", "tests/addons/tools/test_more.py"]


def git(folder: Path, *words: str) -> str:
    author = ("-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *author, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout


def commit(folder: Path, tag: str | None = None) -> str:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "--allow-empty", "-m", "x")
    if tag:
        git(folder, "tag", tag)
    return git(folder, "rev-parse", "HEAD").strip()


def put(folder: Path, texts: dict[str, str | bytes | None]) -> None:
    """Write files; delete those whose text is None."""
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())


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
    old = {f"addons/{name}.py": f'"""{name}."""\n' for name in ("tools/kept", "tools/other", "schedules/far")}
    old |= {f"tests/addons/tools/test_{name}.py": "" for name in ("kept", "other")}
    old |= {"addons/README.md": ADDONS_PAGE, GONE: '"""Old."""\nOLD = 1\n', EDITED_AND_GONE: '"""Old."""\n'}
    old |= {"engine/VERSION": "1.0.0\n", "CHANGELOG.md": NEWS.replace(NEWS[11 : NEWS.index("## 1.0.0")], "")}
    old |= {".gitignore": "__pycache__/\n", ".gitattributes": "* text=auto eol=lf\n*.bin -text\n", BINARY: b"\0\r\n1"}
    old |= {"tests/gpu/test_gpu.py": "", "tests/src/test_mine.py": "", "src/unused.py": ""}
    put(folder, old)
    git(folder, "init", "-q", "-b", "main")
    commit(folder, "v1.0.0")

    new = {"addons/tools/other.py": "# new\n", "tests/addons/tools/test_other.py": "# new\n", BINARY: b"\0\r\n2"}
    new |= {"addons/schedules/far.py": "# new\n", "tests/addons/schedules/test_far.py": ""}
    new |= {"addons/tools/kept.py": "# Needs addons/tools/_shared.py and addons/schedules/near.py\n"}
    new |= dict.fromkeys(NEW_OF_KEPT, "# new\n") | {"addons/tools/newest.py": "", "tests/gpu/test_new.py": ""}
    new |= {GONE: None, EDITED_AND_GONE: None, "engine/run/fresh.py": '"""Fresh."""\n', "engine/run_me.sh": ""}
    new |= {
        "engine/VERSION": "1.2.0\n",
        "CHANGELOG.md": NEWS,
        "tests/src/test_mine.py": "# new\n",
        "src/unused.py": "# new\n",
    }
    put(folder, new)
    (folder / "engine/run_me.sh").chmod(0o755)
    for name in (MERGED, "train.py", "src/tasks/causal_lm.py"):
        (folder / name).write_text((folder / name).read_text() + "\n\nNEW_CONSTANT = 1\n")
    change(folder, CLASHING, first_line(folder, CLASHING), first_line(folder, CLASHING) + " The template's words.")
    change(folder, "engine/startup.py", "\n", "\n# A comment of the new version.\n")
    change(folder, "pyproject.toml", "filelock>=", "filelock>=9")
    change(folder, "requirements.txt", "torch==", "torch==9.")
    change(folder, "requirements.txt", "filelock==", "newly_needed==1.0\nfilelock==")
    commit(folder, "v1.2.0")
    return folder


@pytest.fixture
def delivered(template, tmp_path) -> Path:
    """A copy of v1.0.0 with a history of its own, without the add-ons tools/other and schedules/far, and tests/gpu."""
    copy = tmp_path / "copy"
    git(tmp_path, "clone", "-q", "-b", "v1.0.0", str(template), str(copy))
    shutil.rmtree(copy / ".git")
    shutil.rmtree(copy / "addons" / "schedules")
    gone = ["addons/tools/other.py", "tests/addons/tools/test_other.py", "tests/gpu/test_gpu.py", "src/unused.py"]
    put(copy, dict.fromkeys(gone))
    put(copy, {update.RECORD: git(template, "rev-parse", "v1.0.0")})
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
    own |= {"addons/tools/mine.py": "", "notes.md": "mine\n", EDITED_AND_GONE: '"""Mine."""\n'}
    put(delivered, own)
    commit(delivered)
    return delivered


def own_files(folder: Path) -> dict[str, bytes]:
    """Return the texts of all files that an update shall leave alone."""
    names = [name for name in git(folder, "ls-files").splitlines() if not update.is_managed(name)]
    names += ["engine/mine.py", "addons/tools/mine.py", EDITED_AND_GONE]
    return {name: (folder / name).read_bytes() for name in names if name != update.RECORD}


def check_own_work_stays(folder: Path, before: dict[str, bytes]) -> None:
    assert own_files(folder) == before
    assert first_line(folder, MERGED) == '"""My words."""'
    assert '"""My words."""' in (folder / CLASHING).read_text()


def check_refused(copy: Path, match: str, *words: str) -> None:
    """The update ends with UsageError and has changed nothing."""
    before = git(copy, "status", "--porcelain", "--ignored")
    with pytest.raises(UsageError, match=match):
        update.update(copy, *words)
    assert git(copy, "status", "--porcelain", "--ignored") == before


# ---- an edited copy ----------------------------------------------------------------------------------------------------


def test_engine_is_new_and_own_files_stay_to_the_byte(copy, template, capsys):
    before = own_files(copy)
    clash, gone = sorted(update.update(copy, str(template), "v1.2.0"))
    check_own_work_stays(copy, before)
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("Engine 1.0.0 -> 1.2.0", "All data again.", "A new name."))
    assert "The first one." not in shown
    assert "-- src/tasks/causal_lm.py tests/src/test_mine.py train.py | git apply --3way\n" in shown

    assert (copy / "engine/VERSION").read_text() == "1.2.0\n"
    assert (copy / update.RECORD).read_text() == git(template, "rev-parse", "v1.2.0")
    for name in ("engine/startup.py", "addons/tools/kept.py", "engine/run/fresh.py", BINARY):
        assert (copy / name).read_bytes() == (template / name).read_bytes(), name
    assert (copy / "engine/run_me.sh").stat().st_mode & 0o111
    assert not (copy / GONE).exists()
    assert (copy / MERGED).read_text().endswith("NEW_CONSTANT = 1\n")
    project = (copy / "pyproject.toml").read_text()
    assert 'name = "my-' in project
    assert "filelock>=9" in project
    pins = (copy / "requirements.txt").read_text()
    assert all(line in pins for line in ("mine==2.0\n", "newly_needed==1.0\n", "torch==9."))

    assert clash.startswith(f"{CLASHING}: both of you")
    assert gone.startswith(f"{EDITED_AND_GONE}: you have edited it, the new version has deleted it")
    text = (copy / CLASHING).read_text()
    assert text.startswith('<<<<<<< ours\n"""My words."""\n')
    assert "The template's words." in text
    assert git(copy, "log", "--oneline").count("\n") == 2
    git(copy, "reset", "-q", "--hard")
    assert git(copy, "status", "--porcelain", "--ignored") == ""


def test_mutant_update_that_overwrites_is_caught(copy, template):
    before = own_files(copy)
    shutil.copytree(template / "engine", copy / "engine", dirs_exist_ok=True)
    with pytest.raises(AssertionError):
        check_own_work_stays(copy, before)


def test_second_update_has_nothing_to_do(delivered, template):
    assert update.update(delivered, str(template), "v1.2.0") == []
    commit(delivered)
    assert update.update(delivered, str(template), "v1.2.0") == []
    assert git(delivered, "status", "--porcelain") == ""


def test_next_update_begins_at_the_one_before(copy, template, tmp_path):
    """The conflict is resolved; the next version changes the line below it, and a file that comes back."""
    update.update(copy, str(template), "v1.2.0")
    put(copy, {CLASHING: (template / CLASHING).read_text().replace("The template's words.", "Mine.")})
    commit(copy)
    newer = tmp_path / "newer"
    git(tmp_path, "clone", "-q", str(template), str(newer))
    (newer / CLASHING).write_text((newer / CLASHING).read_text() + "\n\nNEWEST = 1\n")
    put(newer, {GONE: "BACK = 1\n"})
    commit(newer)
    assert update.update(copy, str(newer)) == []
    assert first_line(copy, CLASHING).endswith(" Mine.")
    assert (copy / CLASHING).read_text().endswith("NEWEST = 1\n")
    assert (copy / GONE).read_text() == "BACK = 1\n"


def test_files_that_the_copy_deleted_stay_away(delivered, template, capsys):
    put(delivered, {"engine/startup.py": None, "engine/rows/encode_chat.py": None})
    commit(delivered)
    assert update.update(delivered, str(template), "v1.2.0") == []
    assert not (delivered / "engine/startup.py").exists()
    assert not (delivered / "engine/rows/encode_chat.py").exists()
    assert "left out: engine/startup.py, tests/gpu/test_new.py\n" in capsys.readouterr().out


def test_new_files_of_kept_addons_come(delivered, template):
    """And the add-on that one of these needs now. No others do, nor new files in folders that the copy has deleted."""
    assert update.update(delivered, str(template), "v1.2.0") == []
    here = {str(path.relative_to(delivered)) for path in delivered.rglob("*.py")}
    assert {*NEW_OF_KEPT} < here
    away = ["addons/tools/other", "addons/tools/newest", "addons/schedules/far", "tests/addons/schedules/test_far"]
    assert not {f"{name}.py" for name in [*away, "tests/gpu/test_new"]} & here


def test_names_that_are_gone_are_named(delivered, template, capsys):
    """Imported, as an attribute of a module, and in a module that is gone; not what was missing before."""
    mine = "from engine.storage import gone\nfrom engine.storage.gone import OLD as NEW\nimport engine.run.meter as m\n"
    mine += (
        "from engine.config.errors import UsageError, nothing\nprint(gone.OLD, m.Meter, m.is_lost, UsageError.args)\n"
    )
    put(delivered, {"src/mine.py": mine, "engine/run/meter.py": (delivered / MERGED).read_text() + "\nis_lost = 1\n"})
    put(delivered, {"tests/src/broken.py": "def (\n"})
    commit(delivered)
    put(delivered, {"engine/run/meter.py": git(delivered, "show", f"HEAD~:{MERGED}")})
    commit(delivered)
    names = ["engine.storage.gone", "engine.storage.gone.OLD"]
    sentences = update.update(delivered, str(template), "v1.2.0")
    assert sentences == [f"src/mine.py: gone from the engine: {', '.join(names)}"]
    commit(delivered)
    [again] = update.update(delivered, str(template), "v1.2.0")  # still to do, and what was missing before
    assert again.startswith("src/mine.py: ")
    assert [name in again for name in (*names, "engine.run.meter.is_lost")] == [True] * 3
    assert "Up to date: engine 1.2.0 (" in capsys.readouterr().out


def test_pins_that_a_copy_changed_or_removed_stay_so(tmp_path):
    file = tmp_path / "requirements.txt"

    def merged(ours: str, old: str, new: str) -> tuple[str, list[str]]:
        file.write_text(ours)
        sentences = update.update_pins(file, old, new)
        return file.read_text(), sentences

    old, ours = "a==1  # why\nb==1\nc==1\nd==1\n", "a==1  # why\nb==2\nd==1.5\ne==3"
    text, [sentence] = merged(ours, old, "a==2  # new\nb==1\nc==2\nd==2\nf==1\n")
    assert text == "a==2  # new\nb==2\nd==1.5\ne==3\nf==1\n"
    assert sentence == "requirements.txt: your d==1.5 stays, the new version has 2"
    assert merged("a==1\nb==1\n", "a==1\nb==1\n", "a==1\n") == ("a==1\n", [])


def test_binary_and_added_files_are_conflicts_as_of_git(delivered, template):
    put(delivered, {"engine/run/fresh.py": "MINE = 1\n", BINARY: b"\0\r\n3"})
    commit(delivered)
    binary, added = sorted(update.update(delivered, str(template), "v1.2.0"))
    assert added.startswith("engine/run/fresh.py: ")
    assert binary.startswith(f"{BINARY}: ")
    assert (delivered / BINARY).read_bytes() == b"\0\r\n3"
    git(delivered, "checkout", "-q", "--theirs", BINARY)
    assert (delivered / BINARY).read_bytes() == b"\0\r\n2"
    assert "<<<<<<< ours\nMINE = 1\n" in (delivered / "engine/run/fresh.py").read_text()
    check_refused(delivered, "uncommitted changes", str(template))


def test_line_endings_are_no_edit(delivered, template):
    """On disk; in git they would make each line differ, which is refused."""
    for name in ("engine/startup.py", MERGED):
        text = (delivered / name).read_bytes()
        (delivered / name).write_bytes(text.replace(b"\n", b"\r\n"))
    change(delivered, MERGED, first_line(delivered, MERGED), '"""My words."""')
    commit(delivered)
    git(delivered, "-c", "core.autocrlf=true", "checkout", "-q", "-f", ".")
    assert update.update(delivered, str(template), "v1.2.0") == []
    assert (delivered / "engine/startup.py").read_bytes() == (template / "engine/startup.py").read_bytes()
    git(delivered, "reset", "-q", "--hard")
    put(delivered, {".gitattributes": None, MERGED: (template / MERGED).read_bytes().replace(b"\n", b"\r\n")})
    commit(delivered)
    check_refused(delivered, f"{MERGED}: .*gitattributes", str(template), "v1.2.0")


def test_copy_in_a_folder_of_a_larger_repository(copy, template, tmp_path):
    shutil.rmtree(copy / ".git")
    git(tmp_path, "init", "-q")
    put(tmp_path, {"engine/startup.py": "other\n"})
    commit(tmp_path)
    before = own_files(copy)
    assert len(update.update(copy, str(template), "v1.2.0")) == 2
    check_own_work_stays(copy, before)
    assert (copy / "engine/startup.py").read_bytes() == (template / "engine/startup.py").read_bytes()
    assert (tmp_path / "engine/startup.py").read_text() == "other\n"
    assert (copy / MERGED).read_text().endswith("NEW_CONSTANT = 1\n")


# ---- where the copy came from ------------------------------------------------------------------------------------------


def test_copy_of_a_copy_updates_from_both(delivered, template, tmp_path):
    """Of its parent it takes edits and updates; of the template what is new since the parent's last update."""
    first = git(template, "rev-parse", "v1.0.0").strip()
    child = tmp_path / "child"
    shutil.copytree(delivered, child, ignore=shutil.ignore_patterns(".git"))
    put(child, {update.RECORD: f"{commit(delivered)} {first}\n"})  # as fork writes it
    git(child, "init", "-q")
    commit(child)
    update.update(child, str(template), "v1.2.0")
    assert (child / update.RECORD).read_text() == git(template, "rev-parse", "v1.2.0")
    git(child, "reset", "-q", "--hard")

    update.update(delivered, str(template), "v1.2.0")
    put(delivered, {"engine/run/fresh.py": "PARENT = 1\n"})
    parent = commit(delivered)
    assert update.update(child, str(delivered)) == []
    assert (child / "engine/run/fresh.py").read_text() == "PARENT = 1\n"
    assert (child / update.RECORD).read_text() == f"{parent} {git(template, 'rev-parse', 'v1.2.0')}"
    commit(child)
    assert update.update(child, str(template)) == []
    assert (child / "engine/run/fresh.py").read_text() == "PARENT = 1\n"


@pytest.mark.parametrize("is_old", [True, False])
def test_copy_without_a_record_is_compared_with_all_commits(copy, template, tmp_path, capsys, is_old):
    """Of a version before, with its MANIFEST; or of a commit that FROM does not have."""
    before = own_files(copy)
    put(copy, {update.RECORD: None, update.MANIFEST: "x\n"} if is_old else {update.RECORD: f"{'1' * 40}\n"})
    commit(copy)
    newer = tmp_path / "newer"
    git(tmp_path, "clone", "-q", str(template), str(newer))
    put(newer, {"README.md": "no file of the engine\n"})
    commit(newer)
    assert len(update.update(copy, str(newer), "v1.2.0")) == 2
    assert f"as if by SINCE={git(template, 'rev-parse', 'v1.0.0').strip()}" in capsys.readouterr().out
    check_own_work_stays(copy, before)
    assert not (copy / update.MANIFEST).exists()
    commit(copy)
    assert update.update(copy, str(newer)) == []


def test_copy_without_a_record_that_is_like_no_commit_needs_since(copy, template):
    before = own_files(copy)
    put(copy, {update.RECORD: None})
    for path in [*copy.glob("engine/**/*.py")]:
        path.write_text(f"# mine\n{path.read_text()}")
    commit(copy)
    check_refused(copy, "SINCE=commit", str(template), "v1.2.0")
    assert update.update(copy, f"file://{template}", "main", "v1.0.0")
    assert {**own_files(copy), "engine/mine.py": b"MINE = 1\n", EDITED_AND_GONE: b'"""Mine."""\n'} == before


# ---- refused -----------------------------------------------------------------------------------------------------------


def test_uncommitted_work_and_wrong_sources_are_refused(copy, template, tmp_path):
    git(tmp_path, "init", "-q", "stranger")
    put(tmp_path / "stranger", {"engine/VERSION": "9\n"})
    commit(tmp_path / "stranger")
    check_refused(copy, "no tag, branch or commit v9.*tags: v1.2.0, v1.0.0", str(template), "v9")
    check_refused(copy, "no tag, branch or commit main9", str(template), "v1.2.0", "main9")
    check_refused(copy, "git cannot fetch .*nowhere", str(tmp_path / "nowhere"))
    check_refused(copy, "FROM: .* is this copy", str(copy))
    check_refused(copy, "SINCE=commit", str(tmp_path / "stranger"))
    put(copy, {"new.txt": ""})
    check_refused(copy, r"uncommitted changes or new files \(new\.txt\)", str(template))
    put(copy, {"new.txt": None, "train.py": "mine\n"})
    check_refused(copy, r"uncommitted changes or new files \(train\.py\)", str(template))
    shutil.rmtree(copy / ".git")
    with pytest.raises(UsageError, match="git does not track"):
        update.update(copy, str(template))


def test_older_version_is_refused(delivered, template):
    update.update(delivered, str(template), "v1.2.0")
    commit(delivered)
    check_refused(delivered, "does not come after it", str(template), "v1.0.0")


def test_what_git_cannot_apply_is_taken_back(copy, template):
    """A folder of the copy where FROM has a file: git has written others by then."""
    put(copy, {"engine/run/fresh.py/mine.txt": "mine\n"})
    commit(copy)
    before = git(copy, "ls-files", "--stage")
    check_refused(copy, "all files are as they were", str(template))
    assert git(copy, "ls-files", "--stage") == before


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


def test_failing_schema_is_named_and_what_is_left_to_do_ends_with_1(copy, template):
    """By the program of the template itself, for a copy whose own one is older."""
    (copy / "train.py").write_text("raise ValueError('my words')\n")
    commit(copy)
    done = make_update(kit.REPOSITORY, str(template), "--copy", str(copy))
    assert done.returncode == 1, done.stderr
    assert "TO DO configs/schema.json: it is as it was, because train.py --schema fails" in done.stdout
    assert "my words" in done.stdout
    assert "Nothing is committed" in done.stdout.splitlines()[-1]
    assert make_update(copy, str(template)).returncode == 2  # not committed
