"""The calls by which techniques hang on train.py, and their order."""

import train
from engine.run.techniques import Techniques
from tests.helpers import kit

HOOKS = {"change_model", "begin", "wrap_gradient", "change_gradient", "after_update", "evaluate"}


def _calls_of_a_run(argv) -> list[str]:
    calls = []

    class Spy(Techniques):
        def __getattribute__(self, name):
            calls.append(name)
            return super().__getattribute__(name)

    train.make_techniques = lambda cfg: Spy()
    train.main([str(word) for word in argv])
    return [name for name in calls if name in HOOKS]


def test_calls_of_a_run(tiny, tmp_path):
    argv = kit.flags(**tiny, global_batch_size=8, per_device_batch_size=2, max_steps=2, output_dir=tmp_path / "run")
    [calls] = kit.spawn(1, _calls_of_a_run, argv, out=tmp_path / "out")
    step = ["change_gradient", "after_update"]
    assert calls == ["change_model", "begin", "wrap_gradient", *step, *step, "evaluate"]
