"""cluster/: the script of a node stops, saves, resumes; the files of schedulers start it and know its exit codes."""

import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from engine.process import run_status
from engine.process.run_status import EXIT_STOPPED
from tests.helpers import kit
from tests.helpers.stopping import endless_run_file

CLUSTER = kit.REPOSITORY / "cluster"


def start_node(folder: Path, *flags: str) -> subprocess.Popen:
    environment = kit.PLAIN_ENVIRONMENT | {"OUT": str(folder / "run"), "NPROC_PER_NODE": "2"}
    command = [str(CLUSTER / "node.sh"), str(endless_run_file(folder)), *flags]
    return subprocess.Popen(command, cwd=kit.REPOSITORY, env=environment)


@pytest.mark.cluster
def test_node_that_is_taken_away_saves_and_the_same_command_resumes(tmp_path):
    run = tmp_path / "run"
    node = start_node(tmp_path)
    try:
        kit.until(lambda: kit.last_step(run) > 3)
        node.send_signal(signal.SIGTERM)  # as a scheduler does: to this process only
        assert node.wait(300) == EXIT_STOPPED
        saved = run_status.read_status(run)["step"]
        assert saved > 3
        (run / "stop").touch()  # too late for this attempt, as if it had been killed within a step
        node = start_node(tmp_path, "--max_steps", str(saved + 5))
        assert node.wait(300) == 0
        node = start_node(tmp_path, "--no_such_field", "1")
        assert node.wait(300) != 0  # the status of the run before does not count
    finally:
        (run / "stop").touch()
        node.wait(300)
    steps = [line["step"] for line in kit.Run(run).kind("train")]
    assert steps == list(range(1, saved + 6))  # nothing trained twice, nothing lost
    assert '"world_size": 2' in (run / "environment.json").read_text()


@pytest.mark.parametrize("environment, words", [({}, "set OUT"), ({"OUT": "x", "NODES": "2"}, "set MAIN_ADDRESS")])
def test_node_refuses_what_would_train_elsewhere_than_meant(environment, words):
    command, env = [CLUSTER / "node.sh", "configs/stdlib_lm.yaml"], kit.PLAIN_ENVIRONMENT | environment
    done = subprocess.run(command, cwd=kit.REPOSITORY, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert words in done.stderr


@pytest.mark.parametrize("name", ["skypilot.yaml", "dstack.yml", "kubernetes.yaml", "kubeflow.yaml"])
def test_files_of_schedulers_start_the_script_with_its_variables(name):
    text = (CLUSTER / name).read_text()
    assert list(yaml.safe_load_all(text))
    assert "cluster/node.sh" in text
    for variable in ("OUT", "NODES", "NODE_RANK", "MAIN_ADDRESS"):
        assert variable in text
    if name != "dstack.yml":  # it knows no exit codes
        assert f"[{EXIT_STOPPED}]" in text
