"""The task that docs/forking.md writes, as it stands there, with its recipe."""

import re
import sys
import types

import numpy as np
import pytest

from src.config import parsing
from src.config.errors import UsageError
from src.data.dataset import prepare_datasets
from src.tasks import OPTIONS, make_task
from tests.conformance import checks
from tests.conformance.test_task import make_flags
from tests.helpers import kit, plain_task

PAGE = (kit.REPOSITORY / "docs" / "forking.md").read_text()
EXAMPLE, RECIPE = re.findall(r"```python\n(.*?)```", PAGE.partition("## A model of your own")[2], re.S)[:2]


@pytest.fixture
def flags(tmp_path, monkeypatch):
    module = types.ModuleType("src.tasks.forecasting")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look it up
    (tmp_path / "forecasting.py").write_text(EXAMPLE)
    module.__file__ = str(tmp_path / "forecasting.py")
    exec(compile(EXAMPLE, module.__file__, "exec"), vars(module))
    exec(RECIPE, names := {"np": np, "kit": kit})
    with plain_task.registered(module, "forecasting"):
        yield make_flags(names["forecasting"], tmp_path)


def test_task_of_the_documentation(flags, tmp_path):
    """It passes the checks of the suite, and does not depend on the split."""
    assert len(EXAMPLE.splitlines()) <= 75
    cfg, options = parsing.parse(flags, OPTIONS)
    task = make_task(cfg, options)
    rows = prepare_datasets(cfg, task)["train"].rows(np.arange(checks.ROWS))
    checks.check_evaluation_is_not_random(task, rows)
    checks.check_rows_are_independent(task, task.build(), rows, training=False)
    with pytest.raises(UsageError, match="here: 3 values"):
        task.encode({"values": [[1.0, 2.0, 3.0]]}, ["here"])
    one = kit.run_training(1, tmp_path / "one", *flags)
    log = (one.folder / "logs" / "rank_0.log").read_text()
    assert " rows/s ETA" in log
    assert "203 rows, 1,218 targets" in log
    two = kit.run_training(2, tmp_path / "two", *flags, "--per_device_batch_size", 5)
    assert kit.distance(one.weights, two.weights) <= 1e-10
    assert two.kind("eval")[-1]["mae"] == pytest.approx(one.kind("eval")[-1]["mae"], rel=1e-12)
    assert kit.run_evaluation(1, tmp_path / "eval", "--checkpoint", one.folder) == one.kind("eval")[-1]
