"""environment.json: versions, git commit and diff, topology, batch arithmetic.

Record more about a run here. Tests: tests/reporting/test_environment.py.
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
from src.distributed.init_accelerator import num_nodes
from src.distributed.strategies import Strategy
from src.storage import atomic_folder, hub

MAX_DIFF = 5_000_000  # characters of code.diff
PACKAGES = ("torch", "accelerate", "transformers", "datasets", "evaluate", "tokenizers", "safetensors", "numpy")


def environment(strategy: Strategy, cfg: RunConfig) -> dict:
    """Return versions, git commit, topology and batch arithmetic of this run."""
    diff = uncommitted()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: metadata.version(name) for name in PACKAGES},
        "git_commit": git_commit(),
        "git_dirty": None if diff is None else bool(diff),
        "command": redact_all(sys.argv),
        "fetched": redact_all(hub.records),
        **topology(strategy, cfg),
    }


def _git(*words: str) -> str | None:
    """Return the output of a git command in this repository, or None if it fails.

    The options keep git from running programs that are named in the repository's git configuration."""
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-c", "core.quotePath=false", *words]
    try:
        done = subprocess.run(command, capture_output=True, cwd=REPOSITORY, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout.decode(errors="replace")


def git_commit() -> str | None:
    """Return the git commit of this code, or None if git does not track train.py."""
    if not _git("ls-files", "--error-unmatch", "train.py"):  # git may have found another repository in a parent folder
        return None
    commit = _git("rev-parse", "HEAD")
    return commit and commit.strip()


def uncommitted() -> str | None:
    """Return the diff to HEAD and the names of untracked Python and YAML files; None if there is no commit."""
    if git_commit() is None:
        return None
    diff = _git("diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD", "--", ".")
    new = _git("ls-files", "--others", "--exclude-standard", "--", "*.py", "*.yaml", "*.yml")
    return (diff or "") + "".join(f"# not in git: {name}\n" for name in (new or "").splitlines())


def save_diff(folder: Path) -> None:
    """Write code.diff to the run folder if the code differs from its commit; otherwise delete it."""
    file = folder / "code.diff"
    diff = redact(uncommitted() or "")
    if not diff:
        file.unlink(missing_ok=True)
        return
    if len(diff) > MAX_DIFF:
        diff = f"{diff[:MAX_DIFF]}\n# truncated here: {len(diff):,} characters\n"
    atomic_folder.rewrite(file, diff)


def topology(strategy: Strategy, cfg: RunConfig, training: bool = True) -> dict:
    """Return device, precision, strategy, world size and nodes; for training also the global batch."""
    accelerator, device = strategy.accelerator, strategy.accelerator.device
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = platform.processor() or platform.machine()
    if device.type == "cpu":
        name += f", {_plural(torch.get_num_threads(), 'thread')} per rank"
    compute_dtype = cfg.dtype if accelerator.mixed_precision == "no" else accelerator.mixed_precision
    found = {
        "device": f"{device.type} ({name})",
        "precision": f"weights {cfg.dtype}, computing in {compute_dtype}",
        "strategy": strategy.name,
        "world_size": accelerator.num_processes,
        "nodes": num_nodes(),
    }
    if training:
        found["global_batch"] = arithmetic(cfg, strategy.data_world_size)
    return found


def arithmetic(cfg: RunConfig, world_size: int) -> str:
    """Format the global batch as examples = micro-batches = ranks × accumulation steps."""
    batch = cfg.global_batch_size
    ranks = _plural(world_size, "rank")
    if cfg.per_device_batch_tokens:
        tokens = f"{cfg.per_device_batch_tokens:,}"
        return f"{batch} examples = micro-batches of up to {tokens} tokens on {ranks}, exact sum"
    micro_batch = int(cfg.per_device_batch_size)  # `auto` is resolved by now
    micro_batches = -(-batch // micro_batch)
    accumulated = -(-micro_batches // world_size)
    even = micro_batches % world_size == 0 and batch % micro_batch == 0
    size = micro_batch if even else f"up to {micro_batch}"
    text = f"{batch} examples = {micro_batches} micro-batches of {size} = {ranks} × {accumulated} accumulated"
    return text if even else f"{text} (fewer on some ranks), exact sum"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
