"""Two nodes on one machine: two launchers that meet over loopback, each with two processes."""

import json
import subprocess
import sys

import pytest

from tests.helpers import kit
from tests.helpers.backend_runs import recipe

pytestmark = pytest.mark.cluster


def test_two_nodes_give_the_numbers_of_one_process(files, tmp_path):
    fields = {"dtype": "float64", "global_batch_size": 32, "max_steps": 8, "eval_steps": 4, "save_steps": 4}
    flags = recipe(files, "gpt2.yaml", **fields)
    one = kit.run_training(1, tmp_path / "one", *flags)
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--mixed_precision", "no", "--num_processes", "4"]
    launcher += ["--config_file", str(kit.REPOSITORY / "accelerate_configs" / "multi_node.yaml")]
    launcher += ["--main_process_ip", "127.0.0.1", "--main_process_port", str(kit.free_port())]
    script = [str(kit.REPOSITORY / "train.py"), *flags, "--output_dir", str(tmp_path / "run")]
    options = {"env": kit.PLAIN_ENVIRONMENT | {"ACCELERATE_USE_CPU": "true"}, "cwd": tmp_path}
    nodes = [subprocess.Popen([*launcher, "--machine_rank", str(rank), *script], **options) for rank in (0, 1)]
    try:
        assert [node.wait(300) for node in nodes] == [0, 0]
    finally:
        for node in nodes:
            node.terminate()  # a launcher ends its processes
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert (environment["world_size"], environment["nodes"], environment["strategy"]) == (4, 2, "DDP over gloo")
    run = kit.Run(tmp_path / "run")
    assert run.losses() == pytest.approx(one.losses(), rel=1e-10)
    eval_losses = [[line["loss"] for line in either.kind("eval")] for either in (run, one)]
    assert eval_losses[0] == pytest.approx(eval_losses[1], rel=1e-10)
    assert kit.distance(run.weights, one.weights) <= 1e-10
    assert kit.ledger_text(run.folder) == kit.ledger_text(one.folder)
    assert len(list((tmp_path / "run" / "logs").glob("rank_*.log"))) == 4
