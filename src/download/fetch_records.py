"""Records of the fetched versions (commit, or size and ETag), which environment.json lists.

Each version is looked up once per launch and machine (or shared disk).
Tests: tests/download/test_http_files.py and tests/download/test_hub_downloads.py.
"""

from collections.abc import Callable

from src.storage.shared_work import SharedWork

records: dict[str, dict] = {}  # name or URL -> commit, or size and ETag


def fetch_once(key: str, fetch: Callable[[], dict], work: SharedWork, what: str) -> dict:
    """Return the record of `fetch()`. One process of the launch calls it, so all ranks use the same version."""
    if key not in records:
        records[key] = work.compute_once(key, fetch, what)
    return records[key]


def is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)
