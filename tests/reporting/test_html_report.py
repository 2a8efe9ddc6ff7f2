"""report.html says what the run says, in one file, whatever state the run was left in."""

import json
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from src.config.errors import UsageError
from src.reporting import html_report
from tests.helpers import kit

TITLES = ["Loss", "Learning rate", "Gradient norm", "Throughput", "Padding"]


def titles(page: str) -> list[str]:
    """Return the titles of the figures, each of which must be well-formed by itself."""
    drawings = re.findall(r"<figure>(.*?)</figure>", page, re.DOTALL)
    texts = ["".join(ElementTree.fromstring(drawing).itertext()) for drawing in drawings]
    return [title for text in texts for title in TITLES if title in text]


def folder_with(path, *lines) -> object:
    path.mkdir()
    (path / "metrics.jsonl").write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return path


def test_a_real_run_becomes_one_page_that_needs_nothing_else(files, tmp_path):
    values = {
        "model_config": files / "llama.yaml",
        "train_file": files / "train.jsonl",
        "max_steps": 6,
        "eval_steps": 3,
    }
    values |= {"validation_file": files / "validation.jsonl", "logging_steps": 1}
    run = kit.run_training(1, tmp_path / "run", *[word for name, v in values.items() for word in (f"--{name}", v)])
    page = html_report.write(run.folder).read_text()
    assert titles(page) == TITLES
    assert not re.search(r"<(script|link|img|iframe)|@import|url\(\s*['\"]?http|(src|href)=\"(?!#)", page)
    for kind in ("train", "eval"):
        assert f"<td>{run.kind(kind)[-1]['loss']}" in page
    environment = json.loads((run.folder / "environment.json").read_text())
    assert environment["versions"]["torch"] in page
    assert environment["global_batch"] in page
    assert "per_device_batch_size: 8" in page
    assert page.count('<g id="legend') == 1  # train and eval share the figure of the loss, and only that one


def test_a_run_without_evaluation_nulls_and_half_a_line(tmp_path):
    lines = [
        {"kind": "train", "step": 1, "loss": 2.5, "learning_rate": None, "grad_norm": None, "padding": 0.1},
        {"kind": "train", "step": 2, "loss": None, "learning_rate": None, "grad_norm": None, "padding": 0.2},
        {"kind": "train", "step": 3, "loss": 2.0, "learning_rate": None, "grad_norm": 1.0, "padding": 0.2},
        '{"kind": "train", "step": 4, "lo',
    ]
    page = html_report.write(folder_with(tmp_path / "run", *lines)).read_text()
    assert titles(page) == ["Loss", "Gradient norm", "Padding"]  # no figure without a number
    assert "1 unreadable line" in page
    assert "Last train line" in page
    assert "Last eval line" not in page
    assert "config.yaml is missing" in page
    with pytest.raises(json.JSONDecodeError):  # the naive reader, which this run would end
        list(map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()))


def test_what_a_run_says_is_text_and_not_markup(tmp_path):
    folder = folder_with(tmp_path / "<b>run", {"kind": "eval", "step": 1, "loss": 1.0, "note": "<script>"})
    (folder / "config.yaml").write_text("task: <i>")
    page = html_report.write(folder).read_text()
    assert not re.search("<script>|<b>run|<i>", page)


def test_what_is_no_run_is_refused_in_one_sentence(tmp_path):
    for path in (
        tmp_path / "none",
        folder_with(tmp_path / "empty"),
        folder_with(tmp_path / "odd", "[1]", '{"step": "x"}'),
    ):
        with pytest.raises(UsageError, match=path.name):
            html_report.write(path)
    command = [sys.executable, "-m", "src.reporting.html_report", str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=kit.REPOSITORY, check=False)
    assert done.returncode == 2
    assert "give the folder of a run" in done.stderr
    assert "Traceback" not in done.stderr


def test_report_is_redacted_and_follows_no_symlink(tmp_path):
    folder = folder_with(tmp_path / "run", {"kind": "eval", "step": 1, "loss": 1.0})
    (folder / "config.yaml").write_text("train_file: [http://user:secret@host/x.jsonl?sig=secret]")
    (folder / "environment.json").write_text('{"command": ["http://user:secret@host/x.jsonl?sig=secret"]}')
    (folder / "report.html").symlink_to(tmp_path / "outside")
    assert "secret" not in html_report.write(folder).read_text()
    assert not (tmp_path / "outside").exists()
