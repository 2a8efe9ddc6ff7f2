"""`make find-lr`: the suggestion for known curvature, the same on any number of processes, and nothing left behind."""

import gc
import json
import math
from functools import partial
from pathlib import Path

import matplotlib.figure  # noqa: F401 (before ranks are forked: it takes a second)
import numpy as np
import pytest
from torch.nn.parallel import DistributedDataParallel

import train
from addons.schedules.range_test import factor
from addons.tools import find_lr
from addons.tools.find_lr import RangeTest, Result, result
from engine.process import run_lock
from tests.helpers import kit, technique_runs

# ---- what losses suggest -----------------------------------------------------------------------------------------------


def rate(test: RangeTest, update: int) -> float:
    """Return the rate of an update as the schedule of the run gives it."""
    return test.end_lr * factor(update / test.updates, test.start_lr / test.end_lr)


UPDATES = 190  # none of the rates is 1 / curvature, which would solve the problem in one update


def descend(test: RangeTest, curvatures=(1.0, 10.0), noise: float = 0.0) -> Result:
    """Minimize sum(h·w²)/2 by gradient descent with the rates of the test; it diverges above 2 / max(h)."""
    h, w, generator = np.array(curvatures), np.ones(len(curvatures)), np.random.default_rng(0)
    rates, losses = [], []
    for update in range(test.updates):
        losses.append(float((h * w * w).sum() / 2) + noise * generator.standard_normal())
        rates.append(rate(test, update))
        w = w - rates[-1] * h * w
        if losses[-1] > 1e3:
            break
    return result(test, rates, losses)


@pytest.mark.parametrize("largest", [0.1, 1.0, 100.0])
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_suggestion_is_below_the_divergence_of_a_quadratic(largest, noise):
    found = descend(RangeTest(updates=UPDATES), (largest / 10, largest), noise * largest)
    assert found.suggestion is not None
    assert 0.01 * 2 / largest < found.suggestion < 2 / largest


def test_mutant_rate_of_the_lowest_loss_diverges():
    """Gradient descent with the suggestion converges; ten times as much, where the loss of the test was lowest, does not."""
    for largest in (1.0, 10.0, 100.0):
        suggestion = descend(RangeTest(updates=UPDATES), (largest / 10, largest)).suggestion or math.nan
        assert abs(1 - suggestion * largest) < 1
        assert abs(1 - 10 * suggestion * largest) > 1


def losses_of(kind: str, count: int = 100) -> list[float]:
    generator = np.random.default_rng(1)
    noisy = (5 + 0.1 * generator.standard_normal(count)).tolist()
    return {
        "noise": noisy,
        "diverges at once": [5.0, 9.0, 40.0, math.inf],
        "not finite": [math.nan],
        "diverges without a fall": [*noisy[:50], 30.0, 90.0, 500.0],
        "rises": np.linspace(5, 6, count).tolist(),
    }[kind]


@pytest.mark.parametrize("kind", ["noise", "diverges at once", "not finite", "diverges without a fall", "rises"])
def test_no_suggestion_if_the_loss_never_fell(kind):
    test, losses = RangeTest(), losses_of(kind)
    found = result(test, [rate(test, i) for i in range(len(losses))], losses)
    assert found.suggestion is None, found.reason
    assert "never fell" in found.reason
    assert ("it diverged" in found.reason) == (kind not in ("noise", "rises"))


# ---- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def fields(tmp_path) -> dict:
    fields = technique_runs.with_dropout(tmp_path, technique_runs.files(tmp_path))
    own = {"per_device_batch_size": 4, "updates": 20, "start_lr": 1e-4, "output_dir": tmp_path / "run"}
    return fields | own | {"techniques": json.dumps({"clip_by_value": {"limit": 0.01}})}


def tmp_of(fields: dict) -> Path:
    """Return the folder where the run folder would be."""
    return Path(fields["output_dir"]).parent


def find(folder, fields: dict, world: int = 1, env=None) -> dict:
    """Return the numbers of the curve."""
    curve = folder / "curve.json"
    folder.mkdir()
    codes, texts = kit.run_command(
        "addons/tools/find_lr.py", *kit.flags(**fields, curve=curve), folder=folder / "here", world=world, env=env
    )
    assert codes == [0] * world, texts
    assert not list(folder.rglob("*.safetensors"))
    assert sorted(path.name for path in tmp_of(fields).iterdir() if "find_lr" in path.name) == []
    numbers = json.loads(curve.read_text())
    assert f"suggestion: --learning_rate {numbers['suggestion']:g} (a tenth of" in texts[0]
    assert numbers["reason"] in texts[0]
    return numbers


def test_same_suggestion_on_any_number_of_processes(tmp_path, fields):
    one = find(tmp_path / "one", fields)
    assert 1e-4 < one["suggestion"] < 1
    for world in (2, 3):
        found = find(tmp_path / str(world), fields, world)
        assert (found["suggestion"], found["reason"]) == (one["suggestion"], one["reason"])
        assert np.allclose(found["loss"], one["loss"], rtol=1e-9, atol=0)


@pytest.mark.cluster
def test_same_suggestion_of_shards_and_first_losses_of_the_run(tmp_path, fields):
    """The first losses are those of train.py with the same data, because the first rates change nothing yet."""
    fields |= {"dtype": "float32", "start_lr": 1e-9, "end_lr": 1.0}
    one = find(tmp_path / "one", fields)
    shards = find(tmp_path / "two", fields, 2, kit.where("fsdp2", 2, mixed_precision="no"))
    assert shards["suggestion"] == one["suggestion"]
    del fields["updates"], fields["start_lr"], fields["end_lr"], fields["output_dir"]
    run = kit.run_training(1, tmp_path / "run", *kit.flags(**fields | {"learning_rate": 1e-9, "max_steps": 3}))
    assert np.allclose(run.losses(), one["loss"][:3], rtol=1e-5)


def test_test_ends_where_the_loss_diverges_and_saves_nothing(tmp_path, fields):
    """The rates of the last updates would be far too high."""
    fields |= {"updates": 40, "end_lr": 1e6, "techniques": "none"}
    curve = find(tmp_path / "one", fields)
    assert len(curve["loss"]) < 40
    assert "it diverged at" in curve["reason"]
    assert find(tmp_path / "two", fields, 2)["learning_rate"] == curve["learning_rate"]


def test_stopped_test_leaves_nothing_behind(tmp_path, fields, monkeypatch):
    """On one of two processes, by the file `stop`; the lowest rates do not diverge before. A second test is refused, and
    leaves the folder of the first one alone."""
    fields |= {"updates": 5000, "start_lr": 1e-9, "end_lr": 1e-8}
    folder = Path(f"{fields['output_dir']}_find_lr")
    ranks = kit.Ranks("addons/tools/find_lr.py", *kit.flags(**fields), folder=tmp_path / "here", world=2)
    kit.until(lambda: kit.last_step(folder) > 3)
    monkeypatch.setattr(run_lock, "lock_run_folder", partial(run_lock.lock_run_folder, patience=0.5))
    second = kit.Ranks("addons/tools/find_lr.py", *kit.flags(**fields), folder=tmp_path / "second")
    assert second.wait() == [2], second.text()
    assert "another process trains in" in second.text()
    (folder / "stop").touch()
    assert ranks.wait() == [75, 75], ranks.text()
    assert "the range test has no result" in ranks.text()
    assert not folder.exists()


def test_curve_has_the_losses_of_updates_with_a_target(tmp_path):
    lines = [{"kind": "train", "step": 1, "loss": 2.0, "weight": 5.0, "learning_rate": 0.1}]
    lines += [{"kind": "train", "step": 2, "loss": None, "weight": 0.0, "learning_rate": 0.1}]
    lines += [{"kind": "train", "step": 3, "loss": None, "weight": 5.0, "learning_rate": 0.2}]
    kit.write_jsonl(tmp_path / "metrics.jsonl", lines)
    rates, losses = find_lr.read(tmp_path)
    assert rates == [0.1, 0.2]
    assert losses[0] == 2.0
    assert math.isnan(losses[1])


def _wrappers_at_shutdown(module, argv) -> int:
    found, shutdown = [], module.shutdown

    def counting(accelerator):
        accelerator.free_memory()
        gc.collect()
        found.append(sum(isinstance(value, DistributedDataParallel) for value in gc.get_objects()))
        shutdown(accelerator)

    module.shutdown = counting
    module.main([str(word) for word in argv])
    return found[0]


@pytest.mark.parametrize("module", [find_lr, train], ids=["find_lr", "train"])
def test_nothing_holds_the_wrapper_at_the_end(tmp_path, fields, module):
    """Otherwise DDP is freed after its process group, and may wait forever."""
    fields["techniques"] = json.dumps(dict.fromkeys(("sam", "neftune", "spike_watch", "ema", "gradient_statistics")))
    if module is train:
        del fields["updates"], fields["start_lr"]
    argv = kit.flags(**fields)
    assert kit.spawn(2, _wrappers_at_shutdown, module, argv, out=tmp_path / "out") == [0, 0]
