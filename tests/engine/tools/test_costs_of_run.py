"""`make smoke` prints what the whole run costs: counts by the run file, sizes by the files, times by the lines."""

import re

from engine.config.run_config import RunConfig
from engine.run.run_size import format_size
from engine.storage import jsonl
from engine.tools import costs_of_run as costs
from tests.helpers import kit


def test_costs_are_counted_from_the_steps_of_a_smoke_test(tiny, tmp_path):
    """Of a run of 20 steps that was stopped after 3, with an evaluation of a part of the rows."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "stop").write_text("3")
    fields = {"max_steps": 20, "save_steps": 2, "eval_steps": 3, "logging_steps": 1, "max_eval_examples": 4}
    fields |= {"global_batch_size": 8, "per_device_batch_size": 4, "output_dir": "run"}
    codes, [text] = kit.run_command("train.py", *kit.flags(**tiny | fields), folder=tmp_path)
    assert codes == [75], text
    checkpoint = run / "checkpoints" / "step_00000003"
    text = costs.describe_costs(RunConfig(save_steps=7, eval_steps=3), run, checkpoint)
    seconds = [line["seconds"] for line in jsonl.read_lines(run / "metrics.jsonl") if "seconds" in line][1:]
    assert f"20 steps of {sum(seconds) / 2:.3g} s + 3 saves of " in text  # at steps 7, 14 and 20
    took = costs.seconds_to_evaluate((run / "logs" / "rank_0.log").read_text())
    assert took > 0
    assert f"+ 7 evaluations of {took * 21 / 4:.3g} s" in text  # at 3, 6, …, 18 and 20, each of 21 rows
    size = sum(file.stat().st_size for file in checkpoint.iterdir())
    model = (checkpoint / "model.safetensors").stat().st_size
    assert f"disk    {format_size(3 * size + model)} at most; {format_size(3 * size + model)} written" in text
    assert re.search(r"memory  [1-9][\d.]* \w+ of [\d.]+ GiB on the host", text)
