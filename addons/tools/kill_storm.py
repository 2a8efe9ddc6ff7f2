"""Kill storm: kill and resume a run at random moments, again and again, and compare it with an undisturbed run.

    make storm CONFIG=configs/stdlib_lm.yaml [KILLS=20] [NPROC=2] [ARGS='--minutes 10 --flag value …']

A fork runs it on its own task; tests/helpers/kill_storm.py says what is killed when, and what is compared.
Tests: tests/addons/tools/test_kill_storm.py.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from tests.helpers.kill_storm import storm


def main() -> int:
    parser = argparse.ArgumentParser(prog="make storm", description=__doc__.split("\n")[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=None)
    options, flags = parser.parse_known_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="storm-") as folder:
        argv = ["--config", options.config, "--logging_steps", "1", "--save_steps", "2", *flags]
        result = storm(argv, Path(folder), options.nproc, options.kills, options.minutes, options.seed)
    for text in result["differences"]:
        print(text)
    verdict = "DIFFERENT" if result["differences"] else "bitwise equal, every line once"
    print(f"{result['kills']} kills on {options.nproc} process(es) in {result['seconds']:.0f} s: {verdict}")
    return 1 if result["differences"] else 0


if __name__ == "__main__":
    sys.exit(main())
