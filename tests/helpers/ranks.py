"""Processes over gloo: forked ranks, their environment by accelerate's own code, waiting with an end."""

import contextlib
import faulthandler
import functools
import gc
import os
import random
import socket
import sys
import tempfile
import time
import traceback
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.multiprocessing
import yaml

from engine import startup
from engine.process import private_apis

REPOSITORY = Path(__file__).resolve().parents[2]
PLAIN_ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
USED_PORTS: set[int] = set()  # by free_port
STARTED: list = []  # the processes of `fork`


def free_port() -> int:
    """Return a port that nothing listens on, below the range from which the system takes ports of outgoing connections.

    A port of that range could be taken between this call and the process that listens on it. None is returned twice:
    it names a launch, and ranks would find the error reports of an earlier launch with the same name."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        if port in USED_PORTS:
            continue
        USED_PORTS.add(port)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def until(true, timeout: float = 300):
    """Wait until `true()` is true; return its value."""
    end = time.monotonic() + timeout
    while not (found := true()):
        assert time.monotonic() < end, "this never came true"
        time.sleep(0.005)
    return found


class RankFailed(AssertionError):
    """A rank failed; has the exit code (None: killed after the timeout) and the output of every rank."""

    def __init__(self, codes: list[int | None], texts: list[str]):
        super().__init__(f"exit codes {codes}\n" + "\n".join(texts))
        self.codes, self.texts = codes, texts


def where(name: str, world: int, **keys) -> dict[str, str]:
    """Return the variables that `accelerate launch --config_file accelerate_configs/NAME.yaml` sets for `world` processes.

    accelerate's own code makes them; `keys` replace keys of the file, also those of its fsdp, DeepSpeed and parallelism parts."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    file = REPOSITORY / "accelerate_configs" / f"{name}.yaml"
    if not file.exists():
        pytest.skip(f"this copy has no accelerate_configs/{name}.yaml")
    values = yaml.safe_load(file.read_text())
    for key, value in keys.items():
        inside = [part for part in values.values() if isinstance(part, dict) and key in part]
        (inside[0] if inside else values)[key] = value
    before = dict(os.environ)
    try:
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            yaml.safe_dump(values, file)
            file.flush()
            words = ["--config_file", file.name, "--num_processes", str(world), "train.py"]
            args, *_ = _validate_launch_command(launch_command_parser().parse_args(words))
        deepspeed = values["distributed_type"] == "DEEPSPEED"
        args.deepspeed_fields_from_accelerate_config = ",".join(
            [*values.get("deepspeed_config", {}), "mixed_precision"]
        )
        made = prepare_deepspeed_cmd_env(args)[1] if deepspeed else prepare_multi_gpu_env(args)
    finally:
        os.environ.clear()
        os.environ.update(before)
    found = {key: value for key, value in made.items() if before.get(key) != value}
    return {key: value for key, value in found.items() if not key.startswith(("MASTER_", "OMP_"))}


def _enter(rank, world, port, out, target, args, env):
    gc.freeze()  # a collection that walks over everything the parent has imported takes 0.3 s, twice a run
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    } | (env or {})
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # an earlier test of this pytest process may have made one
    if {"ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"} & set(env or {}):
        private_apis.shard_over_gloo()
    startup.LAUNCHER_PID = os.getppid()  # normally set when the process imports engine/startup.py
    stream = open(f"{out}/rank{rank}.txt", "w", buffering=1)  # noqa: SIM115 (open until the process ends)
    os.dup2(stream.fileno(), 1)
    os.dup2(stream.fileno(), 2)
    sys.stdout = sys.stderr = stream
    faulthandler.enable(stream)
    torch.set_num_threads(1)
    try:
        result = target(*args)
        torch.save(result, f"{out}/rank{rank}.pt")
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    stream.flush()
    os._exit(code)


# Imported before the fork, which saves seconds in every child.
ONCE = ["train", "eval", "datasets", "accelerate.tracking", "torch._dynamo", "transformers.hf_argparser"]
ONCE += ["transformers.optimization", "transformers.convert_slow_tokenizer", "src.tasks.causal_lm"]
ONCE += [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "gpt2", "bert")]
ONCE += ["transformers.models.auto.tokenization_auto", "transformers.models.encoder_decoder"]
ONCE += ["torch.distributed.algorithms.ddp_comm_hooks"]
ONCE_SHARDED = ["torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "accelerate.utils.fsdp_utils"]


@functools.cache
def _compile_deepspeed() -> None:
    """Let DeepSpeed compile its communication, which can take minutes, before a launch with a timeout waits for it.

    A compilation that is killed leaves a lock on which all later ones wait without end."""
    build = torch.multiprocessing.get_context("fork").Process(target=_build_communication)
    build.start()
    build.join()


def _build_communication() -> None:
    from deepspeed.comm.torch import build_shm_op

    build_shm_op()


def fork(world: int, target, *args, out, env=None) -> list:
    """Start `target(*args)` in `world` forked processes, the ranks of one group; return the processes.

    Takes half a second (a launcher: fifteen), because imports are done once."""
    for name in ONCE + (ONCE_SHARDED if "ACCELERATE_USE_FSDP" in (env or {}) else []):
        import_module(name)
    if "ACCELERATE_USE_DEEPSPEED" in (env or {}) and find_spec("deepspeed"):
        _compile_deepspeed()
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    context = torch.multiprocessing.get_context("fork")
    port = free_port()
    ranks = [
        context.Process(target=_enter, args=(rank, world, port, str(out), target, args, env)) for rank in range(world)
    ]
    for process in ranks:
        process.start()
    STARTED.extend(ranks)
    return ranks


def kill_all() -> None:
    """Kill the ranks that a failed test leaves: pytest would wait for them at its end."""
    while STARTED:
        if (process := STARTED.pop()).is_alive():
            process.kill()


def spawn(world: int, target, *args, out, env=None, timeout: float = 300) -> list:
    """Return the results of `target(*args)` on `world` forked ranks.

    Raise RankFailed with the output of all ranks if one fails or does not end in time."""
    ranks, out = fork(world, target, *args, out=out, env=env), Path(out)
    end = time.monotonic() + timeout  # one for all: a rank that hangs keeps the others waiting, too
    for process in ranks:
        process.join(max(0.0, end - time.monotonic()))
    late = [process for process in ranks if process.is_alive()]
    codes = [process.exitcode for process in ranks]
    for process in late:
        process.kill()
    texts = [(out / f"rank{rank}.txt").read_text() for rank in range(world)]
    if any(codes) or None in codes:
        raise RankFailed(codes, texts)
    return [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in range(world)]
