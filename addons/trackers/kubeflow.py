"""`report_to: kubeflow`: percentage, remaining time and metrics of a run in the status of its TrainJob (Kubeflow Trainer).

Posted as by the KubeflowCallback of transformers 5.24, to the address that Kubeflow gives the pod if its feature gate
TrainJobRuntimeStatus is on. Tests: tests/addons/trackers/test_kubeflow.py.
"""

import json
import os
import ssl
import time
import urllib.request
from datetime import UTC, datetime
from pathlib import Path

from accelerate.tracking import GeneralTracker

SECONDS = 5.0  # at least between two posts; at most for an answer
MOST_METRICS = 256  # that Kubeflow takes
LONGEST = 64  # name or value of a metric


class Tracker(GeneralTracker):
    """Calls come in order from one thread of the main process, which engine/run/trackers.py starts, and may raise."""

    name = "kubeflow"
    requires_logging_directory = False
    tracker = None

    def __init__(self, run_name: str):
        super().__init__()
        self.total = 0
        self.step = 0
        self.values: dict[str, float] = {}
        self.first: tuple[float, int] | None = None  # time and step of the first line
        self.posted = -SECONDS

    def start(self) -> None:
        if "KUBEFLOW_TRAINER_SERVER_URL" not in os.environ:
            raise RuntimeError("KUBEFLOW_TRAINER_SERVER_URL is not set, as Kubeflow does with TrainJobRuntimeStatus")

    def store_init_configuration(self, values: dict) -> None:
        self.total = values["total_steps"]

    def log(self, values: dict, step: int | None = None, **_) -> None:
        now = time.monotonic()
        self.step = step or 0
        self.first = self.first or (now, self.step)
        self.values |= values
        if now - self.posted >= SECONDS:
            self.post(min(99, 100 * self.step // self.total))

    def finish(self) -> None:
        self.post(100 * self.step // self.total)

    def post(self, percentage: int) -> None:
        """Send the newest values; a run that is stopped keeps its percentage."""
        status = {"lastUpdatedTime": datetime.now(UTC).isoformat(), "progressPercentage": percentage}
        began, first = self.first or (0.0, self.step)
        if self.step > first:
            seconds = (time.monotonic() - began) / (self.step - first)
            status["estimatedRemainingSeconds"] = int(seconds * (self.total - self.step))
        values = {"current_step": self.step, "total_steps": self.total} | self.values
        metrics = [{"name": name, "value": str(value)} for name, value in values.items() if len(name) <= LONGEST]
        headers = {"Content-Type": "application/json"}
        if "KUBEFLOW_TRAINER_SERVER_TOKEN" in os.environ:  # a file, which Kubernetes replaces
            headers["Authorization"] = f"Bearer {Path(os.environ['KUBEFLOW_TRAINER_SERVER_TOKEN']).read_text().strip()}"
        body = json.dumps({"trainerStatus": status | {"metrics": metrics[:MOST_METRICS]}}).encode()
        request = urllib.request.Request(os.environ["KUBEFLOW_TRAINER_SERVER_URL"], body, headers)
        context = None
        if "KUBEFLOW_TRAINER_SERVER_CA_CERT" in os.environ:
            context = ssl.create_default_context(cafile=os.environ["KUBEFLOW_TRAINER_SERVER_CA_CERT"])
        try:
            urllib.request.urlopen(request, timeout=SECONDS, context=context).close()
        finally:
            self.posted = time.monotonic()
