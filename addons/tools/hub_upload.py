"""Upload of final/ to the Hub: the fields `push_to_hub` and `hub_model_id`.

Tests: tests/addons/tools/test_hub_upload.py.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from engine.config.addon import Addon
from engine.config.errors import one_line, warn
from engine.config.option import option
from engine.config.paths import locate
from engine.models.config_and_tokenizer import BASE_FILE
from engine.storage.verify_hashes import MANIFEST, manifest_text, read_manifest

SILENCE = 120  # seconds to wait for the next byte from the Hub
WITH_PATHS = ("config.json", "config.yaml", BASE_FILE)  # ends of names of files that may name folders of this machine


@dataclass(frozen=True)
class HubUpload(Addon):
    push_to_hub: bool = option(
        "upload the final model to the Hub; a new repository is private",
        False,
        group="checkpoints",
        may_change_on_resume=True,
        from_checkpoint=False,  # it publishes
        is_rare=True,
    )
    hub_model_id: str | None = option(
        "repository for push_to_hub (default: your account and the name of the run folder)",
        may_change_on_resume=True,
        is_rare=True,
    )

    def errors(self, cfg: Any, training: bool) -> Iterator[str]:
        """Yield an error for a missing token before the run, not after it."""
        if not training:
            return
        if not self.push_to_hub:
            if self.hub_model_id:
                yield "hub_model_id is given without push_to_hub: give both, or neither"
            return
        from huggingface_hub import constants, get_token

        if constants.HF_HUB_OFFLINE:
            yield "push_to_hub is true, but HF_HUB_OFFLINE is set: unset one of them"
        elif not get_token():
            yield "push_to_hub is true, but there is no token: set HF_TOKEN, or run `hf auth login`"

    def final_is_written(self, cfg: Any) -> str:
        """Upload RUN/final to `hub_model_id`, creating a private repository if needed; return a message for the user.

        A failure is only a warning with the command that repeats the upload, because the model is on the disk."""
        if not self.push_to_hub:
            return ""
        from huggingface_hub import CommitOperationAdd, HfApi, get_session

        get_session().timeout = SILENCE  # the default is to wait forever
        folder = Path(cfg.output_dir, "final")
        name = self.hub_model_id or folder.resolve().parent.name
        try:
            address = HfApi().create_repo(name, private=True, exist_ok=True)
            with TemporaryDirectory() as scratch:
                files = _published(folder, Path(scratch))
                operations = [CommitOperationAdd(file, str(path)) for file, path in files.items()]
                message = f"{cfg.task} of {Path(cfg.output_dir).name}"
                HfApi().create_commit(address.repo_id, operations, commit_message=message)
            return f"pushed to {address}"
        except Exception as error:
            fix = f"The model is in {folder}; to upload it, run: hf upload {name} {folder}"
            warn(f"push_to_hub failed ({one_line(error)}). {fix}")
            return "not pushed to the Hub"


def _published(folder: Path, scratch: Path) -> dict[str, Path]:
    """Return {name in the repository: file} of what final/ lists; a file beside that could be a link to any file.

    Files that name local paths are written to `scratch` with the last part of each, and a manifest that fits them."""
    manifest = read_manifest(folder)
    entries: dict[str, dict] = dict(manifest["files"])
    files = {name: folder / name for name in entries}
    for name in [name for name in files if name.endswith(WITH_PATHS)]:
        values = yaml.safe_load(files[name].read_text(encoding="utf-8"))  # of JSON, too
        public = _without_paths(values)
        if public != values:
            is_json = name.endswith(".json")
            text = json.dumps(public, indent=2) + "\n" if is_json else yaml.safe_dump(public, sort_keys=False)
            files[name] = scratch / name
            files[name].parent.mkdir(parents=True, exist_ok=True)
            files[name].write_text(text, encoding="utf-8")
            del entries[name]
    (scratch / MANIFEST).write_text(manifest_text(files, entries, manifest["about"]))
    return files | {MANIFEST: scratch / MANIFEST}


def _without_paths(value: Any) -> Any:
    """Return a copy of `value` with the last part alone of each local path, also in nested dicts and lists."""
    if isinstance(value, dict):
        return {key: _without_paths(inside) for key, inside in value.items()}
    if isinstance(value, list):
        return [_without_paths(inside) for inside in value]
    if not isinstance(value, str) or "/" not in value or "://" in value:
        return value
    is_path = Path(value).is_absolute() and value.count("/") > 1
    with suppress(OSError, ValueError):  # a long text
        is_path = is_path or Path(locate(value)).exists()
    return Path(value).name if is_path and "\n" not in value else value
