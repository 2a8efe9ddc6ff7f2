"""Cache folder for downloads and prepared data, and the sample datasets made in it: one for each file of samples/.

Tests: tests/samples/.
"""

import shutil
import socket
from importlib import import_module
from pathlib import Path

from filelock import FileLock

from src.config.paths import REPOSITORY
from src.config.schema import RunConfig


def cache_root(cfg: RunConfig) -> Path:
    """Return the cache folder for downloads and prepared data: one per host if `cache_per_node` is set."""
    import datasets

    root = Path(cfg.cache_dir) if cfg.cache_dir else Path(datasets.config.HF_DATASETS_CACHE)
    return root / f"node_{socket.gethostname()}" if cfg.cache_per_node else root


def sample_names() -> list[str]:
    """Return the names of the files of samples/."""
    return sorted(path.stem for path in (REPOSITORY / "samples").glob("[a-z]*.py"))


def sample_folder(name: str, cache: Path) -> str | None:
    """Return the folder of the sample `name` in `cache`, made on first use; None if there is no such sample.

    One process makes it while the others wait for a file lock. The DONE marker is written last. The folder name holds
    the version, so two checkouts that share a cache do not delete each other's rows.
    """
    if name not in sample_names():
        return None
    sample = import_module(f"samples.{name}")
    target = cache.absolute() / "samples" / f"{name}-{sample.VERSION}"
    marker = target / "DONE"
    if not marker.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):
            if not marker.exists():
                shutil.rmtree(target, ignore_errors=True)
                target.mkdir()
                print(f"building the sample dataset {name} in {target}", flush=True)
                sample.make(target)
                marker.touch()
    return str(target)


def sample_tokenizer(name: str, cache: Path) -> str | None:
    """Return the folder of the tokenizer of the sample `name`; None if there is no such sample, or it has none."""
    folder = sample_folder(name, cache)
    return f"{folder}/tokenizer" if folder and Path(folder, "tokenizer").exists() else None
