"""Benchmark of the training pause of a save to S3, against one to the disk: python benchmarks/saving_to_store.py.

Two runs train at the same time, alternating in nothing but their folder, so that both see the same noise. The S3 is moto on
this machine, which takes its time from the same processors. Needs s3fs and moto[server].
"""

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import yaml

from benchmarks.saving import MODEL, SAVED
from engine.config.paths import REPOSITORY

PORT = 15999
SERVER = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{PORT}", "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}


def make_bucket() -> None:
    """Wait for the server; make the bucket `bucket`."""
    while True:
        try:
            client = http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)
            client.request("PUT", "/bucket")
            client.getresponse()
            return
        except OSError:
            time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--saves", type=int, default=12)
    parser.add_argument("--save_steps", type=int, default=20)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="saving-") as name:
        folder = Path(name)
        rows = np.random.default_rng(0).integers(0, 2000, (200, 32)).tolist()
        (folder / "rows.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
        (folder / "model.yaml").write_text(yaml.safe_dump(MODEL | {"vocab_size": 2000, "num_hidden_layers": 3}))
        argv = ["--model_config", folder / "model.yaml", "--train_file", folder / "rows.jsonl"]
        argv += ["--max_steps", given.saves * given.save_steps, "--save_steps", given.save_steps]
        argv += ["--global_batch_size", 8, "--per_device_batch_size", 8, "--cache_dir", folder / "cache"]
        environment = (
            os.environ | SERVER | {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        )
        server = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", str(PORT)], stderr=subprocess.DEVNULL)
        try:
            make_bucket()
            runs = {}
            for where in (str(folder / "run"), "s3://bucket/run"):
                words = [sys.executable, str(REPOSITORY / "train.py"), *map(str, argv), "--output_dir", where]
                runs[where] = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
            pauses = {}
            for where, run in runs.items():
                saved = SAVED.findall(run.communicate()[0])
                pauses[where] = [float(pause) for pause, _ in saved[1:]]  # the first allocates memory
                print(f"{where}: {len(saved)} saves, training paused, s: {', '.join(map(str, pauses[where]))}")
        finally:
            server.terminate()
    disk, store = (statistics.median(each) for each in pauses.values())
    print(f"ratio of the medians: {store / disk:.3f}  (bar: 1.1)")


if __name__ == "__main__":
    main()
