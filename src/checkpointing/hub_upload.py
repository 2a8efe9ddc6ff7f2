"""Upload final/ to the Hub."""

import os
from pathlib import Path

from src.config.errors import warn
from src.config.schema import RunConfig

SILENCE = 120  # seconds to wait for the Hub's next byte


def push_to_hub(cfg: RunConfig, main: bool) -> str:
    """Put RUN/final into the Hub repository of the run, made (private) if it is not there; return what came of it.

    Where that fails there is a warning with the way out, for the model is on the disk."""
    if not main:
        return ""
    from huggingface_hub import HfApi, get_session

    get_session().timeout = SILENCE  # by default there is none
    folder = Path(cfg.output_dir, "final")
    name = cfg.hub_model_id or folder.resolve().parent.name
    try:
        address = HfApi().create_repo(name, private=True, exist_ok=True)
        HfApi().upload_folder(
            repo_id=address.repo_id,
            folder_path=folder,
            commit_message=f"{cfg.task} of {os.path.basename(cfg.output_dir)}",
        )
        return f"pushed to {address}"
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        warn(f"push_to_hub failed ({reason}); the model is in {folder}: hf upload {name} {folder}")
        return "not pushed to the Hub"
