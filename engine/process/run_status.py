"""RUN/status.json: the state and exit code of a run.

    python -m engine.process.run_status RUN [CODE]           print the exit code of the run; CODE, the launcher's, if it has none
    python -m engine.process.run_status --newest             print the folder in runs/ that a run wrote to last

engine/process/exit_codes.py lists the exit codes. Tests: tests/engine/process/test_run_status.py.
"""

import json
import os
import sys
import time
from pathlib import Path

from engine.config.redact import redact_all
from engine.storage import atomic_folder, jsonl

EXIT_STOPPED = 75


def write_status(
    folder: Path, status: str, step: int | None = None, code: int | None = None, reason: str = "", **more
) -> None:
    """Write status.json. `status` is running, complete, stopped or failed; `more` holds further keys."""
    value = {"status": status, "step": step, "exit_code": code, "reason": redact_all(reason), "launcher": os.getppid()}
    atomic_folder.rewrite(folder / "status.json", json.dumps(value | more | {"time": round(time.time(), 3)}) + "\n")


def read_status(folder: Path) -> dict:
    """Return the contents of status.json, or {} if the file is missing or unreadable."""
    return jsonl.read_json(folder / "status.json")


def newest_run(parent: Path) -> Path | None:
    """Return the run in `parent` that was active last, or None."""
    files = [*parent.glob("*/status.json"), *parent.glob("*/metrics.jsonl")]
    return max(files, key=lambda file: file.stat().st_mtime).parent if files else None


# ---- the command -------------------------------------------------------------------------------------------------------


def main(argv: list[str]) -> None:
    """Print the status of a run to stderr and its exit code to stdout; with --newest, print the newest run folder."""
    if argv == ["--newest"]:
        print(newest_run(Path("runs")) or "")
        return
    status = read_status(Path(argv[0]))
    if status:
        print("{}: {status}, step {step}. {reason}".format(argv[0], **status), file=sys.stderr)
    code = status.get("exit_code")  # a shell may evaluate it
    print(code if isinstance(code, int) else (argv[1:] or [1])[0])


if __name__ == "__main__":
    main(sys.argv[1:])
