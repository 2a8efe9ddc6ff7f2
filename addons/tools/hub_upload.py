"""Upload of final/ to the Hub: the fields `push_to_hub` and `hub_model_id`.

Tests: tests/addons/tools/test_hub_upload.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config.add_on import AddOn
from engine.config.errors import one_line, warn
from engine.config.option import option
from engine.storage.verify_hashes import MANIFEST, read_manifest

SILENCE = 120  # seconds to wait for the next byte from the Hub


@dataclass(frozen=True)
class HubUpload(AddOn):
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
        from huggingface_hub import HfApi, get_session

        get_session().timeout = SILENCE  # the default is to wait forever
        folder = Path(cfg.output_dir, "final")
        name = self.hub_model_id or folder.resolve().parent.name
        try:
            files = [MANIFEST, *read_manifest(folder)["files"]]  # a file beside them could be a link to any file
            address = HfApi().create_repo(name, private=True, exist_ok=True)
            HfApi().upload_folder(
                repo_id=address.repo_id,
                folder_path=folder,
                allow_patterns=files,
                commit_message=f"{cfg.task} of {Path(cfg.output_dir).name}",
            )
            return f"pushed to {address}"
        except Exception as error:
            fix = f"The model is in {folder}; to upload it, run: hf upload {name} {folder}"
            warn(f"push_to_hub failed ({one_line(error)}). {fix}")
            return "not pushed to the Hub"
