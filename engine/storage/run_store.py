"""The store of a run: for a local folder there is nothing to do; an add-on mirrors it if output_dir is an address.

Tests: tests/addons/stores/.
"""

import dataclasses
from pathlib import Path
from typing import Any

from engine.config.addresses import on_this_node, store_addon
from engine.storage import jsonl


class RunStore:
    """What a run does with its store beside its local folder; without a store, what it does with the folder."""

    token = ""  # of this start, the same on all ranks; empty without a store

    def agree(self, token: str) -> None:
        """Take the start that the main process names by its token for this one's."""

    def check(self) -> None:
        """Raise Failure if this run may not write to its store any more."""

    def fetch(self, folder: Path) -> None:
        """Download the files of a checkpoint or final/ that only the store has."""

    def fetch_again(self, folder: Path) -> bool:
        """Download a checkpoint of the run whose files are damaged here; return False if there is no store of it."""
        return False

    def here(self, path: Path | None) -> Path | None:
        """Return a checkpoint that the main process names as it is on this node, with its files."""
        return on_this_node(path)

    def publish(self, folder: Path) -> str | Path:
        """Bring a complete checkpoint or final/ to the store; return its name there. Raise OSError if that fails."""
        return folder

    def send_shard(self, shard: Path) -> None:
        """Upload the folder of a rank that the main process does not see; it is complete."""

    def send_outcome(self, outcome: Path) -> None:
        """Tell the main process what a rank has written, if it does not see this file."""

    def read_outcome(self, outcome: Path) -> dict[str, Any] | None:
        """Return what a rank has told the main process, None if it has not done so yet."""
        return jsonl.read_json(outcome) or None

    def prune(self) -> None:
        """Delete from the store the checkpoints that were deleted here."""

    def rename(self, path: Path, target: Path) -> None:
        """Rename a file or folder of the run."""
        path.rename(target)


current = RunStore()  # of this process


def open_run(cfg: Any) -> Any:
    """Return `cfg` with a local folder as output_dir; if that is an address, an add-on fills the folder from there."""
    global current
    if "://" not in cfg.output_dir:
        return cfg
    current = store_addon(f"output_dir: {cfg.output_dir}").open_run(cfg)
    return dataclasses.replace(cfg, output_dir=str(current.folder))
