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
    own, flags = parser.parse_known_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="storm-") as folder:
        argv = ["--config", own.config, "--logging_steps", "1", "--save_steps", "2", *flags]
        found = storm(argv, Path(folder), own.nproc, own.kills, own.minutes, own.seed)
    for text in found["differences"]:
        print(text)
    verdict = "DIFFERENT" if found["differences"] else "bitwise equal, every line once"
    print(f"{found['kills']} kills on {own.nproc} process(es) in {found['seconds']:.0f} s: {verdict}")
    return 1 if found["differences"] else 0


if __name__ == "__main__":
    sys.exit(main())
