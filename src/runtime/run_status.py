"""RUN/status.json: state and exit code of a run. Also: find the newest run, and report which rank failed first.

    python -m src.runtime.run_status RUN [CODE]           print the exit code of the run; CODE, the launcher's, if it has none
    python -m src.runtime.run_status --newest             print the folder in runs/ that a run wrote to last

Tests: tests/runtime/test_run_status.py. Exit codes: 0 complete · 1 failed · 2 the user can fix the error · 75 stopped
and saved, run the same command again (EX_TEMPFAIL of sysexits.h) · 128 + N ended at once by a second signal N.
"""

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from src.config.redact import redact
from src.storage import atomic_folder

EXIT_STOPPED = 75
ACTIVE = ("status.json", "metrics.jsonl", "config.yaml")  # their modification times show when a run was last active
FAILED = "logs/failed.json"
launch = ""  # identifier of this launch on all ranks: reports of another one are ignored: its ranks may still live


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


def report_failure(folder: Path, rank: int, message: str, code: int = 1) -> bool:
    """Return True if this rank is the first of its run to fail, after writing logs/failed.json: message and exit code."""
    file = folder / FAILED
    temporary = file.with_name(f".failed_{rank}.tmp")
    report = {"rank": rank, "code": code, "launch": launch, "message": redact(message)}
    try:
        if file.exists() and not _failure(folder):
            clear_failure(folder)
        temporary.write_text(json.dumps(report | {"time": time.time()}))
        os.link(temporary, file)  # fails if the file exists; no reader sees it half-written
    except FileExistsError:
        return False
    except OSError:
        return True  # if the folder is not writable, every rank prints its error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    return True


def failed_rank(folder: Path, rank: int) -> str | None:
    """Return the rank that failed first, or None if no rank failed or this rank (`rank`) was first."""
    first = _failure(folder).get("rank", rank)
    return str(first) if first != rank else None


def failed_code(folder: Path) -> int:
    """Return the exit code of the rank that failed first, with which the other ranks end, too."""
    return _failure(folder).get("code", 1)


def _failure(folder: Path) -> dict:
    """Return the report of the rank of this launch that failed first, or {}."""
    report = atomic_folder.read_json(folder / FAILED)
    return report if report.get("launch") == launch else {}


def clear_failure(folder: Path) -> None:
    """Remove the report of a failed rank that an earlier launch has left."""
    (folder / FAILED).unlink(missing_ok=True)


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
