"""cluster/ray_train.py on a real Ray of two nodes: it continues on the worker that is left."""

import json
import os
import subprocess
import sys

import psutil
import pytest

from engine.process import run_status
from tests.helpers import kit
from tests.helpers.stopping import endless_run_file

STEPS = 500


def processes_of_rank(rank: int, command: str) -> list[psutil.Process]:
    """Return the processes of a rank that train here, without its loaders."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cmdline()[1:2] == ["train.py"] and command in process.cmdline():
                found += [process] if process.environ().get("RANK") == str(rank) else []
        except psutil.Error:
            continue
    return found


@pytest.mark.cluster
def test_lost_worker_and_lost_node_give_the_weights_of_an_undisturbed_run(tmp_path, monkeypatch):
    pytest.importorskip("ray.train")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")  # it holds sockets, whose paths must be short
    run, config = tmp_path / "run", endless_run_file(tmp_path, max_steps=STEPS, save_steps=50, exact_sums=True)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    command = [sys.executable, "cluster/ray_train.py", str(config), "--output_dir", str(run), "--workers", "2"]
    env = kit.PLAIN_ENVIRONMENT | {
        name: os.environ[name] for name in ("RAY_AUTH_MODE", "PYTHONPATH") if name in os.environ
    }
    try:
        node = cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        job = subprocess.Popen(command, cwd=kit.REPOSITORY, env=env | {"RAY_ADDRESS": cluster.address})
        kit.until(lambda: kit.last_step(run) > 3)
        launcher = processes_of_rank(1, str(run))[0].parent()
        launcher.parent().kill()  # Ray's worker: both ranks save
        kit.until(lambda: run_status.read_status(run).get("exit_code") == 75)
        saved = run_status.read_status(run)["step"]
        assert (run / "checkpoints" / f"step_{saved:08d}").exists()
        kit.until(lambda: kit.last_step(run) > saved)
        assert json.loads((run / "environment.json").read_text())["world_size"] == 2
        for process in processes_of_rank(1, str(run)):
            process.kill()
        cluster.remove_node(node, allow_graceful=False)
        assert job.wait(300) == 0
    finally:
        cluster.shutdown()
    assert json.loads((run / "environment.json").read_text())["world_size"] == 1
    assert run_status.read_status(run)["step"] == STEPS
    plain = kit.run_training(1, tmp_path / "plain", "--config", str(config))
    assert run_status.read_status(run)["weights_sha256"] == run_status.read_status(plain.folder)["weights_sha256"]
