"""docs/techniques.md: a row for each technique, and the example of one's own, as it stands there."""

import json
import re
from importlib import import_module

import pytest

from engine.config.option import declared_options
from tests.helpers import kit, technique_runs

TECHNIQUES = pytest.importorskip("addons.techniques", exc_type=ModuleNotFoundError).TECHNIQUES
PAGE = (kit.REPOSITORY / "docs" / "techniques.md").read_text()


@pytest.mark.parametrize("name", TECHNIQUES)
def test_every_technique_has_a_row_that_names_its_options_and_test(name):
    rows = re.findall(rf"^\| `{name}` \|.*\|$", PAGE, re.M)
    assert len(rows) == 1
    [section] = [part for part in PAGE.split("\n## ") if rows[0] in part]
    kind = TECHNIQUES[name]()
    for option_name in declared_options(kind):
        assert re.search(rf"`{option_name}\b", section), option_name
    tests = re.findall(r"`(tests/addons/techniques/test_\w+\.py)", rows[0])
    assert tests
    for file in tests:
        assert (kit.REPOSITORY / file).exists(), file
    assert (kind.__doc__ or "").strip()


def test_the_page_shows_all_defaults():
    from addons.techniques._options import options_of

    rows = []
    for name, kind in TECHNIQUES.items():
        options = [f"`{option}: {json.dumps(value)}`" for option, value in options_of(kind()()).items()]
        rows.append(f"* `{name}`: {', '.join(options) or 'no options'}")
    assert "\n".join(rows) + "\n\n" in PAGE


# ---- a technique of one's own ------------------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path, monkeypatch):
    """The example of docs/techniques.md, in a file of its own."""
    [example] = re.findall(r"```python\n(.*?)```", PAGE.partition("## Write your own")[2], re.S)
    (tmp_path / "l2sp.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(TECHNIQUES, "l2sp", lambda: import_module("l2sp").L2SP)
    return len(example.splitlines())


def l2sp_fields(folder) -> dict:
    # With this epsilon, gradients that are zero except for rounding do not become whole steps.
    return technique_runs.files(folder) | {"techniques": '{"l2sp": {"alpha": 0.5}}', "adam_epsilon": 1e-3}


def test_the_example_of_the_documentation(tmp_path, written):
    """It is short, and exact for any split."""
    assert written <= 30
    values = l2sp_fields(tmp_path)
    plain = technique_runs.Plain(values)
    start = {name: p.detach().clone() for name, p in plain.model.named_parameters()}
    optimizer = plain.optimizer(eps=1e-3)

    def update(step: int) -> None:
        optimizer.zero_grad()
        (plain.loss() + sum(0.25 * ((p - start[n]) ** 2).sum() for n, p in plain.model.named_parameters())).backward()
        optimizer.step()

    expected = plain.train(update)
    for world, micro in ((1, 16), (2, 2)):
        run = technique_runs.train(tmp_path / str(world), values, world, micro)
        assert kit.distance(run.weights, {name: expected[name] for name in run.weights}) <= 1e-10


@pytest.mark.cluster
def test_the_example_of_the_documentation_under_fsdp2(tmp_path, written):
    technique_runs.check_fsdp2(tmp_path, l2sp_fields(tmp_path))  # and resumes
