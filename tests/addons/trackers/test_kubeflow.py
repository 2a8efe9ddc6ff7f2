"""`report_to: kubeflow` against a server that answers, is silent, refuses, or dies: the run ends well each time."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from addons.trackers import kubeflow
from engine.run import trackers
from tests.helpers import kit
from tests.helpers.stopping import recipe


class Server(ThreadingHTTPServer):
    """Keeps what is posted."""

    def __init__(self, answer: str):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.posts, self.ended = answer, [], threading.Event()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.posts.append((self.headers["Authorization"], body["trainerStatus"]))
        if self.server.answer == "silence":
            self.server.ended.wait()
        if self.server.answer == "death":  # nobody listens any more
            self.server.socket.close()
        self.send_response(403 if self.server.answer == "refusal" else 200)
        self.end_headers()


@pytest.mark.parametrize("answer", ["success", "silence", "refusal", "death"])
def test_progress_reaches_the_server_and_no_server_ends_a_run(tiny, tmp_path, monkeypatch, answer):
    monkeypatch.setattr(kubeflow, "SECONDS", 0.3)
    monkeypatch.setattr(trackers, "TIMEOUT", 60.0)  # a test may run beside others
    token = tmp_path / "token"
    token.write_text("secret\n")
    with Server(answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        env = {"KUBEFLOW_TRAINER_SERVER_URL": f"http://127.0.0.1:{server.server_port}/status"}
        env["KUBEFLOW_TRAINER_SERVER_TOKEN"] = str(token)
        flags = recipe(tiny, max_steps=40, eval_steps=20, report_to="kubeflow")
        ranks = kit.Ranks("train.py", *flags, folder=tmp_path / "folder", env=env)
        codes, text = ranks.wait(), ranks.text()
        server.ended.set()
        server.shutdown()
    assert codes == [0], text
    assert ("warning: report_to: kubeflow failed" in text) == (answer != "success")
    assert "has not closed in time" not in text
    if answer != "success":
        return
    assert {authorization for authorization, _ in server.posts} == {"Bearer secret"}
    percentages = [status["progressPercentage"] for _, status in server.posts]
    assert percentages == sorted(percentages)
    assert percentages[-1] == 100
    first, last = server.posts[0][1], server.posts[-1][1]
    assert first["progressPercentage"] < 100
    assert last["estimatedRemainingSeconds"] == 0
    metrics = {metric["name"]: metric["value"] for metric in last["metrics"]}
    line = kit.Run(tmp_path / "folder" / "run").kind("eval")[-1]
    assert (metrics["current_step"], metrics["total_steps"]) == ("40", "40")
    assert metrics["eval/loss"] == str(line["loss"])


def test_outside_kubeflow_it_is_a_warning(tiny, tmp_path):
    ranks = kit.Ranks("train.py", *recipe(tiny, max_steps=2, report_to="kubeflow"), folder=tmp_path)
    assert ranks.wait() == [0]
    assert "KUBEFLOW_TRAINER_SERVER_URL is not set" in ranks.text()
