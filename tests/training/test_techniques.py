"""The calls by which techniques hang on train.py, and their order."""

import train
from src.training.techniques import Techniques
from tests.helpers import kit

CALLS = []


def noted(name: str):
    """Return a method of Techniques that notes its calls."""
    method = getattr(Techniques, name)

    def call(*args):
        CALLS.append(name)
        return method(*args)

    return call


def _calls_of_a_run(argv) -> list[str]:
    names = ("change_model", "begin", "compute_gradient", "change_gradient", "after_update", "evaluate")
    spy = type("Spy", (Techniques,), {name: noted(name) for name in names})
    train.make_techniques = lambda cfg: spy()
    train.main([str(word) for word in argv])
    return CALLS


def test_calls_of_a_run(tiny, tmp_path):
    argv = kit.flags(**tiny, global_batch_size=8, per_device_batch_size=2, max_steps=2, output_dir=tmp_path / "run")
    [calls] = kit.spawn(1, _calls_of_a_run, argv, out=tmp_path / "out")
    step = ["compute_gradient", "change_gradient", "after_update"]
    assert calls == ["change_model", "begin", *step, *step, "evaluate"]
