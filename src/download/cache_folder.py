"""Cache folder for downloads and prepared data."""

import socket
from pathlib import Path

from src.config.schema import RunConfig


def cache_root(cfg: RunConfig) -> Path:
    """Return the cache folder for downloads and prepared data: one per host if `cache_per_node` is set."""
    import datasets

    root = Path(cfg.cache_dir) if cfg.cache_dir else Path(datasets.config.HF_DATASETS_CACHE)
    return root / f"node_{socket.gethostname()}" if cfg.cache_per_node else root
