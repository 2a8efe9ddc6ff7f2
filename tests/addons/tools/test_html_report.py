"""report.html: one self-contained page, whatever state the run is in."""

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from addons.tools import html_report
from engine.config.errors import UsageError
from tests.engine.config.test_redact import files_with_secrets, guarded  # noqa: F401 (a fixture)
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
        loss = run.kind(kind)[-1]["loss"]
        assert f"<td>{loss:.5g}<" in page
        assert str(loss) not in page  # metrics.jsonl has all digits
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


def cells(page: str, title: str) -> list[list[str]]:
    """Return the rows of the table under a heading."""
    [table] = re.findall(rf"<h2>{title}[^<]*</h2><table>(.*?)</table>", page)
    return [re.split("<td>", row)[1:] for row in table.split("<tr>")[1:]]


def evaluations(path, values, **fields):
    run_folder(path, *({"kind": "eval", "step": 10 * (n + 1), **value} for n, value in enumerate(values)))
    kit.write_yaml(path / "config.yaml", fields)
    return path


def test_runs_are_sorted_by_their_best_value(tmp_path):
    folders = [
        evaluations(tmp_path / "a", [{"loss": 2.0}, {"loss": 1.23456789}, {"loss": 3.0}]),
        evaluations(tmp_path / "b", [{"loss": 1.5}, {"loss": None}, {"loss": float("inf")}]),
        evaluations(tmp_path / "none", [{"accuracy": 0.5}]),
        evaluations(tmp_path / "c", [{"loss": 1.2345671}]),  # better than a in the seventh digit
    ]
    rows = cells(html_report.write(*folders).read_text(), "Best loss, lowest first")
    assert [row[:3] for row in rows[1:]] == [
        ["c", "<b>1.234567 ★</b>", "10"],
        ["a", "1.234568", "20"],
        ["b", "1.5", "10"],
        ["none", "none", "none"],
    ]
    fields = {"metric_for_best_model": "eval_accuracy"}
    values = [{"loss": 1.0, "accuracy": 0.25}, {"loss": 2.0, "accuracy": 0.75}]
    page = html_report.write(evaluations(tmp_path / "one", values, **fields)).read_text()
    assert cells(page, "Best accuracy")[1][:3] == ["one", "<b>0.75 ★</b>", "20"]


def test_best_point_is_marked_and_no_legend_covers_a_curve(tmp_path):
    """A legend within the axes, which covers curves, is inside of the group axes_1."""
    values = [{"loss": 2.0}, {"loss": 1.0}, {"loss": 3.0}]
    folders = [evaluations(tmp_path / name, values) for name in ("a", "b")]
    page = html_report.write(*folders).read_text()
    [drawing] = re.findall(r"<figure>(.*?)</figure>", page, re.DOTALL)
    groups = {group.get("id"): group for group in ElementTree.fromstring(drawing).iter("{http://www.w3.org/2000/svg}g")}
    inside = [group.get("id") or "" for group in groups["axes_1"].iter()]
    assert {"best a eval", "best b eval"} <= {*inside}
    assert not any(name.startswith("legend") for name in inside)
    assert "legend_1" in groups


@pytest.mark.parametrize(
    "value, text",
    [
        (1.23456789, "1.2346"),
        (22226.36875585465, "22,226"),
        (1234567.8, "1,234,568"),
        (0.00016666666666666666, "0.00016667"),
        (3.234999894630164e-06, "3.235e-06"),
        (float("nan"), "nan"),
        (-98765.4, "-98,765"),
        (1.0, "1"),
        (1_000_000, "1000000"),
        (None, "none"),
        ("1.23456789", "1.23456789"),
        (True, "True"),
    ],
)
def test_numbers_have_the_digits_that_matter(value, text):
    assert html_report.rounded(value) == text


def test_report_on_many_runs_has_a_name_that_fits(tmp_path):
    folders = [evaluations(tmp_path / f"{n}_{'long' * 20}", [{"loss": 1.0}]) for n in range(4)]
    assert html_report.write(*folders).name == "report_4_runs.html"


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
    assert files_with_secrets(tmp_path) == []


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


def test_report_shows_the_answers_of_the_last_evaluations(tmp_path):
    chat = [{"role": "user", "content": "Is a < b?"}]
    lines = [{"kind": "train", "step": 1, "loss": 1.0}]
    for step in range(1, 9):
        lines.append({"kind": "sample", "step": step, "prompt": "Once", "answer": f"upon time {step}"})
        lines.append({"kind": "sample", "step": step, "prompt": chat, "answer": f"<b>yes {step}</b>"})
    page = html_report.write(run_folder(tmp_path / "run", *lines)).read_text()
    assert "user: Is a &lt; b?" in page
    assert "&lt;b&gt;yes 8&lt;/b&gt;" in page
    assert page.index("upon time 8") < page.index("upon time 4")
    assert "upon time 3" not in page
    both = html_report.write(run_folder(tmp_path / "one", *lines), run_folder(tmp_path / "two", *lines)).read_text()
    assert "one: Once" in both
    assert "two: Once" in both
