"""RUN/status.json: state and exit code of a run. Also: find the newest run.

    python -m src.runtime.run_status RUN [CODE]           print the exit code of the run; CODE, the launcher's, if it has none
    python -m src.runtime.run_status --newest             print the folder in runs/ that a run wrote to last

Tests: tests/runtime/test_run_status.py. Exit codes: 0 complete · 1 failed · 2 the user can fix the error · 75 stopped
and saved, run the same command again (EX_TEMPFAIL of sysexits.h) · 128 + N ended at once by a second signal N.
"""

import json
import os
import sys
import time
from pathlib import Path

from src.config.redact import redact
from src.storage import atomic_folder

EXIT_STOPPED = 75
ACTIVE = ("status.json", "metrics.jsonl", "config.yaml")  # their modification times show when a run was last active


def write_status(
    folder: Path, status: str, step: int | None = None, code: int | None = None, reason: str = "", **more
) -> None:
    """Write status.json. `status` is running, complete, stopped or failed; `more` holds further keys."""
    value = {
        "status": status,
        "step": step,
        "exit_code": code,
        "reason": redact(reason),
        "launcher": os.getppid(),
    } | more
    atomic_folder.rewrite(folder / "status.json", json.dumps(value | {"time": round(time.time(), 3)}) + "\n")


def read_status(folder: Path) -> dict:
    """Return the contents of status.json, or {} if the file is missing or unreadable."""
    return atomic_folder.read_json(folder / "status.json")


def newest_run(parent: Path, weights: bool = True) -> Path | None:
    """Return the run in `parent` that was active last, or None. With `weights`, skip runs without saved weights."""
    times: dict[Path, float] = {}
    for folder in parent.iterdir() if parent.is_dir() else []:
        has_weights = (folder / "final").is_dir() or any((folder / "checkpoints").glob("step_*"))
        files = [folder / name for name in ACTIVE if (folder / name).exists()]
        if files and (has_weights or not weights):
            times[folder] = max(file.stat().st_mtime for file in files)
    return max(times, key=lambda folder: times[folder], default=None)


def main(argv: list[str]) -> int:
    """Print the status of a run to stderr and its exit code to stdout; with --newest, print the newest run folder."""
    if argv == ["--newest"]:
        print(newest_run(Path("runs"), weights=False) or "")
        return 0
    if not argv or argv[0].startswith("-"):
        print("error: give a run folder: python -m src.runtime.run_status RUN [CODE]", file=sys.stderr)
        return 2
    status = read_status(Path(argv[0]))
    code = status.get("exit_code")
    if status:
        print(f"{argv[0]}: {status['status']}, step {status['step']}. {status['reason']}", file=sys.stderr)
    if code is None:
        code = argv[1] if len(argv) > 1 else 1
    print(code)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
