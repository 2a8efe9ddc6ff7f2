"""train.py and eval.py on forked ranks: as commands, as runs, and beside the test."""

import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path

import torch

from tests.helpers.ranks import RankFailed, fork, spawn
from tests.helpers.runs import Run


def _command(script, argv, folder, leads_group=False):
    from engine.process.exit_codes import run_main

    if leads_group:
        os.setpgrp()
    os.chdir(folder)
    sys.argv = [script, *(str(word) for word in argv)]
    run_main(import_module(script.removesuffix(".py").replace("/", ".")).main)


class Ranks:
    """A command in `world` forked ranks that run beside the test; each rank and its loaders are one process group."""

    def __init__(self, script: str, *argv, folder, world: int = 1, env=None):
        self.out = Path(folder).with_suffix(".out")
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.processes = fork(world, _command, script, argv, folder, True, out=self.out, env=env)

    def signal(self, number: int, *ranks: int, group: bool = False) -> None:
        """Send a signal to these ranks (default: all); with `group`, also to their loaders."""
        chosen = [self.processes[rank].pid for rank in ranks] or [process.pid for process in self.processes]
        for pid in chosen:
            (os.killpg if group else os.kill)(pid, number)

    def wait(self, timeout: float = 300) -> list[int | None]:
        """Wait for all ranks; return their exit codes, None for a rank that did not end in time."""
        end = time.monotonic() + timeout
        while time.monotonic() < end and any(process.exitcode is None for process in self.processes):
            time.sleep(0.01)  # `join` would wait for their loaders as well
        codes = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.kill()
            process.join()
        return codes

    def text(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.out.glob("rank*.txt")))


def run_command(script: str, *argv, folder, world: int = 1, env=None, timeout: float = 300) -> tuple[list, list[str]]:
    """Run train.py, eval.py or a tool of addons/ in `folder` like the command line; return exit codes and outputs by rank."""
    out = Path(folder).with_suffix(".out")
    Path(folder).mkdir(parents=True, exist_ok=True)
    try:
        spawn(world, _command, script, argv, folder, out=out, env=env, timeout=timeout)
    except RankFailed as failed:
        return failed.codes, failed.texts
    return [0] * world, [(out / f"rank{rank}.txt").read_text() for rank in range(world)]


def after_prepare(look) -> None:
    """Call `look(backend, module, optimizer)` in this process after train.py's backend has prepared them."""
    import train

    make = train.choose_backend.make_backend

    def made(accelerator, cfg):
        backend = make(accelerator, cfg)
        prepare = backend.prepare

        def prepared(*args):
            module, optimizer = prepare(*args)
            look(backend, module, optimizer)
            return module, optimizer

        backend.prepare = prepared
        return backend

    train.choose_backend.make_backend = made


def _train(argv):
    import train

    seen = {}

    def look(backend, module, optimizer):
        seen["world"] = backend.accelerator.num_processes
        mesh = getattr(next(module.parameters()), "device_mesh", None)
        seen["mesh"] = mesh and tuple(mesh.shape)
        seen["units"] = mesh and sum(isinstance(part, torch.distributed.fsdp.FSDPModule) for part in module.modules())

    after_prepare(look)
    train.main([str(word) for word in argv])
    return seen


def run_training(world: int, folder, *argv, env=None, timeout: float = 300, units: int = 2) -> "Run":
    """Train in `folder` on `world` processes through train.py's main; return the run.

    Assert that the group had that size and that FSDP2, if chosen, sharded at least so many units over its mesh."""
    argv = [*argv, "--output_dir", folder]
    seen = spawn(world, _train, argv, out=Path(folder).with_suffix(".out"), env=env, timeout=timeout)
    assert [s["world"] for s in seen] == [world] * world
    copies = int((env or {}).get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", 1))
    mesh = (copies, world // copies) if copies > 1 else (world,)
    for s in seen:
        assert s["mesh"] == (mesh if "ACCELERATE_USE_FSDP" in (env or {}) else None)
        assert s["mesh"] is None or s["units"] >= units
    return Run(folder)


def _evaluate(argv):
    import eval as evaluation

    evaluation.main([str(word) for word in argv])


def run_evaluation(world: int, folder, *argv, env=None) -> dict:
    """Evaluate through eval.py's main on `world` processes; return eval.json."""
    spawn(world, _evaluate, [*argv, "--output_dir", folder], out=Path(folder).with_suffix(".out"), env=env)
    return json.loads((Path(folder) / "eval.json").read_text())
