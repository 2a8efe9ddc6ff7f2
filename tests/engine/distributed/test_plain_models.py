"""Plain torch modules under FSDP2: the numbers of one process, resumed, evaluated, whole in final/."""

import pytest

from tests.helpers import kit
from tests.helpers.backend_runs import where
from tests.helpers.plain_task import flags

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("fields", [{}, {"tied": True}, {"teacher": True}], ids=str)
def test_fsdp2_trains_resumes_and_evaluates_a_plain_module(plain, tmp_path, fields):
    """Two processes; killed after step 16 and resumed bitwise. The two tied layers are not units of their own."""
    argv, env, units = flags(plain, **fields), where("fsdp2", 2), 1 if "tied" in fields else 5
    one = kit.run_training(1, tmp_path / "one", *argv)
    two = kit.run_training(2, tmp_path / "two", *argv, env=env, units=units)
    assert kit.distance(one.weights, two.weights) <= 1e-10
    assert two.losses() == pytest.approx(one.losses(), rel=1e-10)
    assert {path.name for path in (two.folder / "final").glob("*.safetensors")} == {
        f"model-0000{rank}-of-00002.safetensors" for rank in (1, 2)
    }
    folder = kit.rewind(two.folder, 16, tmp_path / "run")
    run = kit.run_training(2, folder, *argv, env=env, units=units)
    assert kit.same(run.weights, two.weights)
    line = kit.run_evaluation(2, tmp_path / "eval", "--checkpoint", folder, env=env)
    assert line == two.kind("eval")[-1] == run.kind("eval")[-1]
    line = kit.run_evaluation(1, tmp_path / "alone", "--checkpoint", folder)  # from the files of two ranks
    assert line == pytest.approx(two.kind("eval")[-1])
