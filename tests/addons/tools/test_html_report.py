"""report.html: one self-contained page, whatever state the run is in."""

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from addons.tools import html_report
from src.config.errors import UsageError
from tests.config.test_redact import assert_no_secrets, guarded  # noqa: F401 (a fixture)
from tests.helpers import kit

TITLES = [title for title, *_ in html_report.FIGURES]


def titles(page: str) -> list[str]:
    """Return the titles of the figures; each figure must be well-formed XML."""
    drawings = re.findall(r"<figure>(.*?)</figure>", page, re.DOTALL)
    texts = ["".join(ElementTree.fromstring(drawing).itertext()) for drawing in drawings]
    return [title for text in texts for title in TITLES if title in text]


def run_folder(path, *lines):
    path.mkdir()
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (path / "metrics.jsonl").write_text("\n".join(texts))
    return path


def test_report_of_a_real_run(files, tmp_path):
    argv = kit.flags(
        model_config=files / "llama.yaml",
        train_file=files / "train.jsonl",
        validation_file=files / "validation.jsonl",
        max_steps=6,
        eval_steps=3,
        logging_steps=1,
    )
    run = kit.run_training(1, tmp_path / "run", *argv)
    python = f"VENV={Path(sys.executable).parent}"
    subprocess.run(["make", "-o", ".venv/done", "report", python, f"RUN={run.folder}"], cwd=kit.REPOSITORY, check=True)
    page = (run.folder / "report.html").read_text()
    assert titles(page) == TITLES
    assert not re.search(r"<(script|link|img|iframe)|@import|url\(\s*['\"]?http|(src|href)=\"(?!#)", page)
    assert len(page) < 10**6
    for kind in ("train", "eval"):
        assert f"<td>{run.kind(kind)[-1]['loss']}" in page
    environment = json.loads((run.folder / "environment.json").read_text())
    assert environment["versions"]["torch"] in page
    assert environment["global_batch"] in page
    assert "<td>per_device_batch_size<td>8<" in page

    other = kit.run_training(1, tmp_path / "other", *argv, "--seed", "1")
    command = ["make", "-s", "-o", ".venv/done", "report", python, f"RUNS={run.folder} {other.folder}"]
    printed = subprocess.run(command, cwd=kit.REPOSITORY, check=True, capture_output=True, text=True).stdout.strip()
    assert printed == str(tmp_path / "report_run_other.html")
    both = Path(printed).read_text()
    assert titles(both) == TITLES
    assert both.count('<g id="legend') == len(TITLES)
    assert "<tr><td><td>run<td>other<tr>" in both
    assert "<tr><td>seed<td>42<td>1<" in both
    assert "<td>per_device_batch_size<" not in both  # equal
    assert not re.search(r"<(script|link|img|iframe)", both)
    assert re.search(r"<td>step 0, world size 1, time \d{4}-\d\d-\d\d \d\d:\d\d:\d\d<", page)
    assert page.count('<g id="legend') == 1  # the loss: train and eval in one figure


def test_values_are_escaped_and_symlinks_replaced(tmp_path):
    line = {"kind": "eval", "step": 1, "loss": 1.0, "note": "<script>"}
    folder = run_folder(tmp_path / "<b>run$_$", line)
    (folder / "config.yaml").write_text("task: <i>")
    (folder / "environment.json").write_text('{"command": ["<u>"]}')
    (folder / "report.html").symlink_to(tmp_path / "outside")
    page = html_report.write(folder).read_text()
    assert not re.search("<script>|<b>run|<i>|<u>", page)
    assert not (tmp_path / "outside").exists()
    html_report.write(folder, run_folder(tmp_path / "x$_$", line))  # the legend names both, and holds no formulas


def test_query_strings_are_not_in_the_report(guarded, tmp_path):  # noqa: F811
    codes, texts = kit.run_command("train.py", *kit.flags(**guarded), folder=tmp_path / "served")
    assert codes == [0], texts
    html_report.write(guarded["output_dir"])
    assert_no_secrets(tmp_path, [])


def test_folder_without_a_run_is_refused(tmp_path):
    folders = [tmp_path / "none", run_folder(tmp_path / "empty")]
    folders.append(run_folder(tmp_path / "odd", "[1]", '{"step": "x"}'))
    for folder in folders:
        with pytest.raises(UsageError, match=folder.name):
            html_report.write(folder)
    command = [sys.executable, "-m", "addons.tools.html_report", str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=kit.REPOSITORY, check=False)
    assert done.returncode == 2
    assert f"error: {tmp_path / 'none'}" in done.stderr
    assert "Traceback" not in done.stderr
