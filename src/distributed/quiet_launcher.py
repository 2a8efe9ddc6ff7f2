"""`accelerate launch` without its warnings and tracebacks.

Started by src/distributed/run_launcher.py. Tests: tests/distributed/test_run_launcher.py.
"""

import logging
import os
import sys
from signal import Signals
from subprocess import CalledProcessError

import psutil
from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from src.config.errors import UsageError
from src.config.yaml_files import read_yaml


def threads(args) -> int:
    """Return the threads of each process: its share of the cores on a CPU, one beside a GPU, as accelerate has it."""
    where = read_yaml(args.config_file) if args.config_file else {}
    if not (args.cpu or where.get("use_cpu")):
        return 1
    processes, machines = (getattr(args, name) or where.get(name) or 1 for name in ("num_processes", "num_machines"))
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    return max(1, cores * machines // processes)


def main(argv: list[str]) -> int:
    """Launch, and return the exit code of the rank that failed first; it has said why, unless a signal ended it."""
    args = launch_command_parser().parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads(args)))
    for name in ("multiprocessing.api", "agent.server.api"):  # torchrun's words about processes that ended
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    try:
        launch_command(args)
    except CalledProcessError as error:
        return failed({0: error.returncode}, 0)
    except ChildFailedError as error:
        return failed(
            {rank: failure.exitcode for rank, failure in error.failures.items()}, error.get_first_failure()[0]
        )
    return 0


def failed(codes: dict[int, int], first: int) -> int:
    """Name the ranks that a signal ended, and return the exit code of the first rank that failed."""
    for rank, code in sorted(codes.items()):
        if code < 0:
            name = Signals(-code).name
            reason = ", as the kernel does when memory runs out" if name == "SIGKILL" else ""
            print(f"error: rank {rank} was ended by {name}{reason}", file=sys.stderr)
    return codes[first] if codes[first] > 0 else 128 - codes[first]


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (UsageError, ValueError, ConnectionError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
