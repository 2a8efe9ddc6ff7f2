"""`accelerate launch` without its warnings and tracebacks.

Started by src/distributed/run_launcher.py. Tests: tests/distributed/test_run_launcher.py.
"""

import logging
import os
import sys
from argparse import Namespace
from signal import SIGTERM, Signals
from subprocess import CalledProcessError

import psutil
from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from src.config.errors import UsageError
from src.config.yaml_files import read_yaml


def threads_per_process(args: Namespace) -> int:
    """Return OMP_NUM_THREADS: a process's share of the cores for CPU training, 1 for a GPU (accelerate's default)."""
    config = read_yaml(args.config_file) if args.config_file else {}
    if not (args.cpu or config.get("use_cpu")):
        return 1
    processes = args.num_processes or config.get("num_processes") or 1
    machines = args.num_machines or config.get("num_machines") or 1
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    return max(1, cores * machines // processes)


def main(argv: list[str]) -> int:
    """Launch; return 0 or the exit code of the rank that failed first, which has printed why, unless it was killed."""
    args = launch_command_parser().parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_process(args)))
    for name in ("multiprocessing.api", "agent.server.api"):  # torchrun's messages about processes that ended
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    try:
        launch_command(args)
    except CalledProcessError as error:
        return report_killed({0: error.returncode}, 0)
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        return report_killed(codes, error.get_first_failure()[0])
    return 0


def report_killed(codes: dict[int, int], first: int) -> int:
    """Print the ranks that a signal killed; return the exit code of rank `first`, the first to fail.

    torchrun then ends the other ranks by SIGTERM. They are not printed."""
    for rank, code in sorted(codes.items()):
        if code < 0 and (rank == first or code != -SIGTERM):
            name = Signals(-code).name
            reason = " (usually by the kernel because host memory ran out)" if name == "SIGKILL" else ""
            print(f"error: rank {rank} was ended by {name}{reason}", file=sys.stderr)
    return codes[first] if codes[first] > 0 else 128 - codes[first]


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (UsageError, ValueError, ConnectionError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
