"""Upload of final/ to the Hub.

Tests: tests/download/test_hub_downloads.py.
"""

from pathlib import Path

from src.config.errors import one_line, warn
from src.config.schema import RunConfig

SILENCE = 120  # seconds to wait for the next byte from the Hub


def push_to_hub(cfg: RunConfig, main: bool) -> str:
    """Upload RUN/final to `hub_model_id`, creating a private repository if needed; return a message for the user.

    A failure is only a warning with the command that repeats the upload, because the model is on the disk."""
    if not main:
        return ""
    from huggingface_hub import HfApi, get_session

    get_session().timeout = SILENCE  # the default is to wait forever
    folder = Path(cfg.output_dir, "final")
    name = cfg.hub_model_id or folder.resolve().parent.name
    try:
        address = HfApi().create_repo(name, private=True, exist_ok=True)
        HfApi().upload_folder(
            repo_id=address.repo_id,
            folder_path=folder,
            commit_message=f"{cfg.task} of {Path(cfg.output_dir).name}",
        )
        return f"pushed to {address}"
    except Exception as error:
        fix = f"The model is in {folder}; to upload it, run: hf upload {name} {folder}"
        warn(f"push_to_hub failed ({one_line(error)}). {fix}")
        return "not pushed to the Hub"
