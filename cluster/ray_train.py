"""Train on a Ray cluster: each worker of Ray Train runs train.py as one process; a restart takes the workers that are there.

    ray job submit --working-dir . -- python cluster/ray_train.py configs/X.yaml --output_dir /shared/X --workers 4 [--flag value …]

A run that has lost a node continues with fewer workers, but at least --min_workers (1), and with the same numbers. Workers
have the packages of requirements.txt. No accelerate file is read: set its values in the environment of the job, as
ACCELERATE_MIXED_PRECISION=bf16. Tests: tests/engine/distributed/test_ray.py.
"""

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STARTS = 5  # without progress, after which a run ends


def main(words: list[str]) -> int:
    """Train, with restarts; return the exit code of the run."""
    parser = argparse.ArgumentParser(allow_abbrev=False, usage=__doc__.split("\n\n")[1].strip())
    parser.add_argument("config")
    parser.add_argument("--output_dir", required=True, help="on storage that all nodes see")
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--min_workers", type=int, default=1)
    args, flags = parser.parse_known_args(words)
    folder = Path(args.output_dir)
    if not folder.is_absolute() or not 1 <= args.min_workers <= args.workers:
        parser.error("--output_dir must be an absolute path, and --min_workers between 1 and --workers")
    sys.path.insert(0, str(ROOT))
    from ray.train.v2.api.exceptions import TrainingFailedError

    from engine.process import run_status

    command = [sys.executable, "train.py", "--config", args.config, "--output_dir", args.output_dir, *flags]
    steps: list[int | None] = []
    while True:
        try:
            start(command, folder, (args.min_workers, args.workers))
            return 0
        except TrainingFailedError as error:  # Ray has logged it
            codes = set(map(int, re.findall(r"train.py: exit code (\d+)", str(error))))
        steps.append(run_status.read_status(folder).get("step"))
        if 2 in codes or steps.count(steps[-1]) == STARTS:
            return 2 if 2 in codes else max(codes, default=1)
        print(f"ray_train.py: ended with {codes or 'a lost worker'} at step {steps[-1]}; starting it again", flush=True)


def start(command: list[str], folder: Path, workers: tuple[int, int]) -> None:
    """Run a command in as many workers as there is room for; raise TrainingFailedError when one of them fails."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.backend import Backend, BackendConfig
    from ray.train.v2.api.data_parallel_trainer import (
        DataParallelTrainer,
    )  # TorchTrainer would make a process group, too

    class Devices(Backend):
        share_cuda_visible_devices = True  # of the workers of a node: train.py takes the GPU of its LOCAL_RANK

    class Config(BackendConfig):
        backend_cls = Devices

    ray.init(ignore_reinit_error=True)
    has_gpus = ray.cluster_resources().get("GPU", 0) > 0
    DataParallelTrainer(
        run_train,
        train_loop_config={"command": command, "root": str(ROOT), "output_dir": str(folder)},
        backend_config=Config(),
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=has_gpus),
        run_config=RunConfig(storage_path=str(folder / "ray")),
    ).fit()


def run_train(config: dict) -> None:
    """Run train.py as the rank of this worker; raise unless it is complete."""
    import filelock
    from ray.train import get_context
    from ray.train.collective import broadcast_from_rank_zero
    from ray.util import get_node_ip_address

    # A run that has lost a worker may still save, and train.py refuses to train beside it.
    lock = Path(config["output_dir"], "logs", "run.lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with suppress(OSError), filelock.FileLock(lock, timeout=600, fallback_to_soft=False):
        pass
    with socket.socket() as server:
        server.bind(("", 0))
        address, port = broadcast_from_rank_zero((get_node_ip_address(), server.getsockname()[1]))
    context = get_context()
    ranks = {
        "RANK": context.get_world_rank(),
        "WORLD_SIZE": context.get_world_size(),
        "LOCAL_RANK": context.get_local_rank(),
        "LOCAL_WORLD_SIZE": context.get_local_world_size(),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "ray",  # train.py saves and stops when its launcher ends
    }
    env = os.environ | {name: str(value) for name, value in ranks.items()}
    launcher = [sys.executable, "cluster/ray_train.py", "--launch", *config["command"]]
    with subprocess.Popen(
        launcher, cwd=config["root"], env=env, stdin=subprocess.PIPE, start_new_session=True
    ) as process:
        code = process.wait()
    if code:
        raise RuntimeError(f"train.py: exit code {code}")


def launch(command: list[str]) -> int:
    """Run a command, pass signals on, and send it TERM when the worker has ended, which holds this standard input.

    A process between them, because Ray kills the children of a worker that ends."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: process.send_signal(number))
    threading.Thread(target=lambda: os.read(0, 1) or process.terminate(), daemon=True).start()
    code = process.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(launch(sys.argv[2:]) if sys.argv[1:2] == ["--launch"] else main(sys.argv[1:]))
