"""cluster/: the script of a node stops, saves, resumes; the files of schedulers start it and know its exit codes."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest
import yaml

from engine.process import run_status
from engine.process.run_status import EXIT_STOPPED
from tests.helpers import kit
from tests.helpers.stopping import endless_run_file

CLUSTER = kit.REPOSITORY / "cluster"
RUN_FILE = "configs/stdlib_lm.yaml"


ONE_PROCESS = {"LOCAL_RANK": "0", "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "7000"}
# What a scheduler sets on the second of two nodes with three processes each → what node.sh makes of it.
SCHEDULERS = {
    "SkyPilot": (
        {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "a\nb"}
        | {"SKYPILOT_NUM_GPUS_PER_NODE": "3"},
        "29500",
    ),
    "dstack": (
        {"DSTACK_NODES_NUM": "2", "DSTACK_NODE_RANK": "1", "DSTACK_MASTER_NODE_IP": "a", "DSTACK_GPUS_PER_NODE": "3"},
        "29500",
    ),
    "Kubeflow": (
        {
            "PET_NNODES": "2",
            "PET_NODE_RANK": "1",
            "PET_MASTER_ADDR": "a",
            "PET_MASTER_PORT": "7",
            "JOB_COMPLETION_INDEX": "1",
        }
        | {"PET_NPROC_PER_NODE": "3"},
        "7",
    ),
    "SageMaker": (
        {"SM_HOST_COUNT": "2", "SM_CURRENT_HOST_RANK": "1", "SM_MASTER_ADDR": "a", "SM_MASTER_PORT": "7777"}
        | {"SM_NUM_GPUS": "3"},
        "7777",
    ),
    "Vertex": (
        {
            "CLUSTER_SPEC": '{"cluster": {"workerpool0": ["a:2222"], "workerpool1": ["b:2222"]},'
            ' "task": {"type": "workerpool1", "index": 0}}',
            "NPROC_PER_NODE": "3",
        },
        "2222",
    ),
    "Kubernetes": (
        {"JOB_COMPLETION_INDEX": "1", "NODES": "2", "MAIN_ADDRESS": "a", "NPROC_PER_NODE": "3"},
        "29500",
    ),
    "no scheduler": (
        {"NODES": "2", "NODE_RANK": "1", "MAIN_ADDRESS": "a", "MAIN_PORT": "8", "NPROC_PER_NODE": "3"},
        "8",
    ),
    "torchrun": (ONE_PROCESS | {"TORCHELASTIC_RUN_ID": "x"}, "7000"),
    "Ray": (ONE_PROCESS, "7001"),  # Ray's own process group is at 7000
}


def node(*arguments: str, **environment: str) -> tuple[int, str, str]:
    command, env = [str(CLUSTER / "node.sh"), *arguments], kit.PLAIN_ENVIRONMENT | environment
    done = subprocess.run(command, cwd=kit.REPOSITORY, env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_node_knows_the_variables_of_schedulers(scheduler):
    environment, port = SCHEDULERS[scheduler]
    code, command, log = node("--print", RUN_FILE, "--seed", "1", OUT="x", **environment)
    assert (code, f"node.sh: {scheduler}: node 1 of 0 to 1" in log, "node 0 is a\n" in log) == (0, True, True), log
    flags = f"train.py --config {RUN_FILE} --output_dir x --seed 1\n"
    if "LOCAL_RANK" in environment:  # its rank and world are in its environment already
        assert command == f"env MASTER_PORT={port} python {flags}"
    else:
        machines = (
            f"--num_processes 6 --num_machines 2 --machine_rank 1 --main_process_ip a --main_process_port {port} "
        )
        assert command.endswith(machines + flags)
    if scheduler == "Kubeflow":  # the user's variables win
        assert "--machine_rank 0 " in node("--print", RUN_FILE, OUT="x", **environment, NODE_RANK="0")[1]


@pytest.mark.parametrize(
    "environment, words",
    [
        ({}, "set OUT"),
        ({"OUT": "x", "NODES": "2"}, "set MAIN_ADDRESS"),
        ({"OUT": "x", "JOB_COMPLETION_INDEX": "1"}, "node 1 (from 0) of 1: set NODES"),
        ({"OUT": "x", "CLUSTER_SPEC": "{"}, "Vertex cannot be read"),
    ],
)
def test_node_refuses_what_would_train_elsewhere_than_meant(environment, words):
    code, _, log = node(RUN_FILE, **environment)
    assert code == 2
    assert words in log


def start_nodes(folder: Path, *flags: str) -> list[subprocess.Popen]:
    """Start two nodes as Kubeflow does, here on one machine."""
    environment = kit.PLAIN_ENVIRONMENT | {"OUT": str(folder / "run"), "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1"}
    environment |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(kit.free_port())}
    command = [str(CLUSTER / "node.sh"), str(endless_run_file(folder)), *flags]
    nodes = []
    for rank in ("0", "1"):
        env = environment | {"PET_NODE_RANK": rank}
        with (folder / f"node_{rank}.txt").open("w") as file:
            nodes.append(subprocess.Popen(command, cwd=kit.REPOSITORY, env=env, stderr=file))
    return nodes


@pytest.mark.cluster
def test_nodes_that_are_taken_away_save_and_the_same_command_resumes(tmp_path):
    run = tmp_path / "run"
    nodes = start_nodes(tmp_path)
    try:
        kit.until(lambda: kit.last_step(run) > 3)
        launchers = psutil.Process(nodes[1].pid).children()
        for process in [
            nodes[1],
            *launchers,
        ]:  # as Slurm does: to all of one node. Others get it at the node's script only
            process.send_signal(signal.SIGTERM)
        assert [node.wait(300) for node in nodes] == [EXIT_STOPPED] * 2
        assert "If it is killed before it has, it resumes from its beginning" in (tmp_path / "node_1.txt").read_text()
        saved = run_status.read_status(run)["step"]
        assert saved > 3
        (run / "stop").touch()  # too late for this attempt, as if it had been killed within a step
        nodes = start_nodes(tmp_path, "--max_steps", str(saved + 5))
        assert [node.wait(300) for node in nodes] == [0, 0]
        nodes = start_nodes(tmp_path, "--no_such_field", "1")
        assert 0 not in [node.wait(300) for node in nodes]  # the status of the run before does not count
    finally:
        for node in nodes:
            (run / "stop").touch()
            node.wait(300)
    steps = [line["step"] for line in kit.Run(run).kind("train")]
    assert steps == list(range(1, saved + 6))  # nothing trained twice, nothing lost
    environment = json.loads((run / "environment.json").read_text())
    assert (environment["world_size"], environment["nodes"]) == (2, 2)


@pytest.mark.parametrize("name", ["skypilot.yaml", "dstack.yml", "kubernetes.yaml", "kubeflow.yaml"])
def test_files_of_schedulers_start_the_script_with_its_variables(name):
    text = (CLUSTER / name).read_text()
    assert list(yaml.safe_load_all(text))
    assert "cluster/node.sh" in text
    assert "OUT" in text
    assert "NODE_RANK" not in text  # the script knows it
    if name != "dstack.yml":  # it knows no exit codes
        assert f"[{EXIT_STOPPED}]" in text


class Jobs(BaseHTTPRequestHandler):
    """The part of the Hub that starts jobs; keeps what was sent to it in `server.sent`."""

    def do_POST(self):
        self.server.sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status = {"stage": "RUNNING", "message": None}
        self.answer({"id": "1", "owner": {"id": "1", "name": "ME", "type": "user"}, "status": status, "secrets": {}})

    def do_GET(self):
        self.answer({})

    def answer(self, value):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"createdAt": "2026-01-01T00:00:00.000Z", "environment": {}} | value).encode())


def test_command_of_hugging_face_jobs_sends_what_its_page_says():
    command = re.search(r"```bash\n(.*?)```", (CLUSTER / "hf_jobs.md").read_text(), re.S)[1]
    with HTTPServer(("127.0.0.1", 0), Jobs) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environment = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": "0"}
        environment |= {"HF_TOKEN": "secret", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        done = subprocess.run(["bash", "-c", command], env=kit.PLAIN_ENVIRONMENT | environment, check=False)
        server.shutdown()
    sent = server.sent
    assert done.returncode == 0
    assert sent["volumes"] == [{"type": "bucket", "source": "ME/runs", "mountPath": "/runs"}]
    assert (sent["timeoutSeconds"], sent["attempts"], sent["secrets"]) == (12 * 3600, 5, {"HF_TOKEN": "secret"})
    script, run_file = re.search(r"OUT=/runs/\w+ exec (\S+) (\S+) --time_limit", sent["command"][-1]).groups()
    assert all((kit.REPOSITORY / path).exists() for path in (script, run_file))
