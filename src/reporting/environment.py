"""environment.json: versions, git commit and diff, topology, batch arithmetic.

Record more about a run here. Tests: tests/reporting/test_environment.py.
"""

import json
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import torch

from src.config.paths import REPOSITORY
from src.config.redact import redact, redact_all
from src.config.schema import RunConfig
from src.distributed.init_accelerator import num_nodes
from src.distributed.strategies import Strategy
from src.download import fetch_records
from src.storage import atomic_folder

MAX_DIFF = 5_000_000  # characters of code.diff
PACKAGES = ("torch", "accelerate", "transformers", "datasets", "evaluate", "tokenizers", "safetensors", "numpy")


def write_environment(folder: Path, strategy: Strategy, cfg: RunConfig, unit: str, step: int) -> None:
    """Write environment.json, with a list of all starts of this run, and code.diff if the code differs from its commit."""
    file, (commit, diff) = folder / "environment.json", code_version()
    starts = atomic_folder.read_json(file).get("starts", []) if step else []
    world_size = strategy.accelerator.num_processes
    values = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: metadata.version(name) for name in PACKAGES},
        "git_commit": commit,
        "git_dirty": bool(diff) if commit else None,
        "command": redact_all(sys.argv),
        "fetched": redact_all(fetch_records.records),
        **topology(strategy, cfg),
        "unit": unit,
        "starts": [*starts, {"step": step, "world_size": world_size, "time": time.time()}],
    }
    atomic_folder.rewrite(file, json.dumps(values, indent=1))
    (folder / "code.diff").unlink(missing_ok=True)
    if diff:
        atomic_folder.rewrite(folder / "code.diff", redact(diff[:MAX_DIFF]))


def code_version() -> tuple[str | None, str]:
    """Return (git commit of this code, diff to it with the names of untracked Python and YAML files).

    The commit is None if git does not track train.py, for git may have found another repository in a parent folder."""
    if not _git("ls-files", "--error-unmatch", "train.py"):
        return None, ""
    commit = _git("rev-parse", "HEAD").strip()
    diff = _git("diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD", "--", ".")
    new = _git("ls-files", "--others", "--exclude-standard", "--", "*.py", "*.yaml", "*.yml")
    return commit or None, diff + "".join(f"# not in git: {name}\n" for name in new.splitlines())


def _git(*words: str) -> str:
    """Return the output of a git command in this repository, or an empty text if it fails.

    The options keep git from running programs that are named in the repository's git configuration."""
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-c", "core.quotePath=false", *words]
    try:
        done = subprocess.run(command, capture_output=True, cwd=REPOSITORY, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="replace")


def topology(strategy: Strategy, cfg: RunConfig, training: bool = True) -> dict:
    """Return device, precision, strategy, world size and nodes; for training also the global batch."""
    accelerator, device = strategy.accelerator, strategy.accelerator.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    if device.type == "cpu":
        name += f", {_plural(torch.get_num_threads(), 'thread')} per rank"
    compute_dtype = cfg.dtype if accelerator.mixed_precision == "no" else accelerator.mixed_precision
    values = {
        "device": f"{device.type} ({name})",
        "precision": f"weights {cfg.dtype}, computing in {compute_dtype}",
        "strategy": strategy.name,
        "world_size": accelerator.num_processes,
        "nodes": num_nodes(),
    }
    return values | ({"global_batch": arithmetic(cfg, strategy.data_world_size)} if training else {})


def arithmetic(cfg: RunConfig, world_size: int) -> str:
    """Format the global batch as examples = micro-batches = ranks × accumulation steps."""
    batch, ranks = cfg.global_batch_size, _plural(world_size, "rank")
    if cfg.per_device_batch_tokens:
        return f"{batch} examples = micro-batches of up to {cfg.per_device_batch_tokens:,} tokens on {ranks}, exact sum"
    size = int(cfg.per_device_batch_size)  # `auto` is resolved by now
    micro_batches = -(-batch // size)
    accumulated = -(-micro_batches // world_size)
    even = micro_batches % world_size == 0 and batch % size == 0
    of = f"{'' if even else 'up to '}{size} = {ranks} × {accumulated} accumulated"
    return (
        f"{batch} examples = {micro_batches} micro-batches of {of}{'' if even else ' (fewer on some ranks), exact sum'}"
    )


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
