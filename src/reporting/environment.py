"""environment.json: versions, git commit and diff, topology, batch arithmetic.

A fork adds what its runs should remember. Tests: tests/reporting/test_metrics.py.
"""

import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

from src.config.paths import REPOSITORY
from src.config.redact import redact, redact_all
from src.config.schema import RunConfig
from src.distributed import strategies
from src.distributed.init_accelerator import num_nodes
from src.distributed.tensor_parallel import data_parallel_rank_and_size
from src.download import http_files
from src.storage import atomic_folder

LARGEST_DIFF = 5_000_000  # characters


def environment(accelerator, cfg: RunConfig) -> dict:
    """Return versions, git commit, topology and batch arithmetic of this process group."""
    packages = ("torch", "accelerate", "transformers", "datasets", "evaluate", "tokenizers", "safetensors", "numpy")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: metadata.version(name) for name in packages},
        "git_commit": git_commit(),
        "git_dirty": None if (diff := uncommitted()) is None else bool(diff),
        "command": redact_all(sys.argv),
        "fetched": redact_all(http_files.fetched),
        **topology(accelerator, cfg),
    }


def _git(*words: str) -> str | None:
    """Return what git prints about this repository, without running what its configuration names; None where that fails."""
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-c", "core.quotePath=false", *words]
    try:
        done = subprocess.run(command, capture_output=True, cwd=REPOSITORY, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout.decode(errors="replace")


def git_commit() -> str | None:
    """Return the commit of this code; None where git does not know it, though a folder above may be a repository."""
    commit = _git("rev-parse", "HEAD") if _git("ls-files", "--error-unmatch", "train.py") else None
    return commit and commit.strip()


def uncommitted() -> str | None:
    """Return what differs from the commit: a diff, and the names of new files of code or configuration; None without one."""
    if git_commit() is None:
        return None
    diff = _git("diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD", "--", ".")
    new = _git("ls-files", "--others", "--exclude-standard", "--", "*.py", "*.yaml", "*.yml")
    return (diff or "") + "".join(f"# not in git: {name}\n" for name in (new or "").splitlines())


def save_diff(folder: Path) -> None:
    """Leave code.diff in the run folder if the code differs from its commit."""
    file, diff = folder / "code.diff", redact(uncommitted() or "")
    if diff:
        cut = f"\n# cut off here: {len(diff):,} characters\n" if len(diff) > LARGEST_DIFF else ""
        atomic_folder.rewrite(file, diff[:LARGEST_DIFF] + cut)
    else:
        file.unlink(missing_ok=True)


def topology(accelerator, cfg: RunConfig, training: bool = True) -> dict:
    """Return where the run is computed, and, for training, how its global batch is made up there."""
    device = accelerator.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    threads = torch.get_num_threads()
    threads = f", {threads} thread{'s' * (threads > 1)} a rank" if device.type == "cpu" else ""
    computing = cfg.dtype if accelerator.mixed_precision == "no" else accelerator.mixed_precision
    where = {
        "device": f"{device.type} ({name}{threads})",
        "precision": f"weights {cfg.dtype}, computing in {computing}",
        "strategy": strategies.strategy_name(accelerator),
        "world_size": accelerator.num_processes,
        "nodes": num_nodes(),
    }
    return where | ({"global_batch": arithmetic(cfg, data_parallel_rank_and_size(accelerator)[1])} if training else {})


def arithmetic(cfg: RunConfig, world: int) -> str:
    """Return how the global batch is made up, as a sum that can be checked."""
    if cfg.per_device_batch_tokens:
        return (
            f"{cfg.global_batch_size} examples = micro-batches of up to {cfg.per_device_batch_tokens:,} tokens, shared among "
            f"{world} rank{'s' * (world > 1)}: the sum stays exact"
        )
    micro = -(-cfg.global_batch_size // cfg.per_device_batch_size)
    each = -(-micro // world)
    even = micro % world == 0 and cfg.global_batch_size % cfg.per_device_batch_size == 0
    rows = f"{cfg.global_batch_size} examples = {micro} micro-batches of {'' if even else 'up to '}{cfg.per_device_batch_size}"
    share = f"{world} rank{'s' * (world > 1)} × {each} accumulated" + (
        "" if even else ", some fewer: the sum stays exact"
    )
    return f"{rows} = {share}"
